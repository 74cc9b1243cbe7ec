// What the ops with excluded ids in the form of static_sample share: checks and pointers.
#pragma once

#include "common/glue.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {

using MaybeTensor = std::optional<glue::Tensor>;

// CPU tensors only: on CUDA this would be a host sync, and the kernels define what bad ids do.
inline void check_exclude_values(const char* op, const StaticSampleParams& p) {
  if (p.exclude_offsets != nullptr) {
    glue::check_value(p.exclude_offsets[0] == 0 && p.exclude_offsets[p.batch] == p.exclude_size, op,
                      ": exclude_offsets must go from 0 to ", p.exclude_size, ", got ", p.exclude_offsets[0], " and ",
                      p.exclude_offsets[p.batch]);
    for (int64_t b = 0; b < p.batch; ++b) {
      glue::check_value(p.exclude_offsets[b] <= p.exclude_offsets[b + 1], op,
                        ": exclude_offsets must not decrease, got ", p.exclude_offsets[b], " then ",
                        p.exclude_offsets[b + 1], " at row ", b);
    }
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.exclude_offsets != nullptr ? p.exclude_offsets[b] : b * p.exclude_width;
    const int64_t end = p.exclude_offsets != nullptr ? p.exclude_offsets[b + 1] : begin + p.exclude_width;
    for (int64_t i = begin; i < end; ++i) {
      glue::check_index(p.exclude[i] >= -1 && p.exclude[i] < p.num_classes, op, ": exclude must be -1 or in [0, ",
                        p.num_classes, "), got ", p.exclude[i], " in row ", b);
      glue::check_value(i == begin || p.exclude[i - 1] <= p.exclude[i], op, ": exclude must ascend in each row, got ",
                        p.exclude[i > 0 ? i - 1 : 0], " before ", p.exclude[i], " in row ", b);
    }
  }
}

// Shapes, and the sizes that follow from them; p.batch is known. `ref` is the tensor whose device the others must
// share.
inline void check_exclude(const char* op, StaticSampleParams& p, const MaybeTensor& exclude,
                          const MaybeTensor& exclude_offsets, const glue::Tensor& ref) {
  using glue::ScalarType;
  glue::check_value(exclude.has_value() || !exclude_offsets.has_value(), op,
                    ": exclude_offsets needs exclude, got None");
  if (exclude.has_value()) {
    if (exclude_offsets.has_value()) {
      glue::check_tensor(op, "exclude", *exclude, {-1}, "[nnz]", ScalarType::Long, ref);
      glue::check_tensor(op, "exclude_offsets", *exclude_offsets, {p.batch + 1}, "[B + 1]", ScalarType::Long, ref);
    } else {
      glue::check_tensor(op, "exclude", *exclude, {p.batch, -1}, "[B, P]", ScalarType::Long, ref);
      p.exclude_width = exclude->size(1);
    }
    p.exclude_size = exclude->numel();
  }
}

// An empty list excludes nothing; its data pointer may be null.
inline void take_exclude(StaticSampleParams& p, const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  if (exclude.has_value() && p.exclude_size > 0) {
    p.exclude = glue::in<int64_t>(*exclude);
    p.exclude_offsets = glue::in<int64_t>(exclude_offsets);
  }
}

}  // namespace samplex
