// Which row of a shard has a class, and biases of any storage type: shared by the backends.
#pragma once

#include "common/macros.h"
#include "common/numeric.h"
#include "loss/shard_rows/shard_rows_params.h"

namespace samplex {

// The local row of a class, or -1. With step > 1 there are at most 2^31 classes, so that the product fits; the quotient
// is then below 2^31, and a double finds it up to one: no 64-bit division, which takes longer than the product of two
// short rows.
SX_HOST_DEVICE inline int64_t shard_row(const ShardLogitsParams& p, int64_t id) {
  if (uint64_t(id) >= uint64_t(p.num_classes)) return -1;
  int64_t slot = id;
  if (p.step != 1) {
    const int64_t product = id * p.step;
    slot = product - int64_t(double(product) * p.inverse) * p.num_classes;
    if (slot < 0) slot += p.num_classes;
    if (slot >= p.num_classes) slot -= p.num_classes;
  }
  const int64_t row = slot - p.start;
  return uint64_t(row) < uint64_t(p.rows) ? row : -1;
}

template <typename A>
SX_HOST_DEVICE inline A shard_bias(const ShardLogitsParams& p, int64_t row) {
  if (p.bias == nullptr) return A(0);
  switch (p.bias_dtype) {
    case DType::kFloat32:
      return A(static_cast<const float*>(p.bias)[row]);
    case DType::kFloat64:
      return A(static_cast<const double*>(p.bias)[row]);
    case DType::kFloat16:
      return A(to_acc(static_cast<const Half*>(p.bias)[row]));
    case DType::kBFloat16:
      return A(to_acc(static_cast<const BFloat16*>(p.bias)[row]));
  }
  return A(0);
}

}  // namespace samplex
