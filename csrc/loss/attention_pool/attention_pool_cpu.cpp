// CPU launchers of attention pooling: scalar bodies, SIMD dispatch once per range.
#include <algorithm>

#include "common/parallel.h"
#include "common/simd.h"
#include "loss/attention_pool/attention_pool_cpu_rows.h"

namespace samplex::cpu {

namespace {

void attention_pool_range_scalar(const AttentionPoolParams& params, int64_t begin, int64_t end) {
  dispatch_dtype("attention_pool", params.dtype,
                 [&](auto tag) { attention_pool_range<typename decltype(tag)::type>(params, begin, end); });
}

void attention_pool_rows_scalar(const AttentionPoolRowsParams& params, int64_t begin, int64_t end) {
  params.double_acc ? attention_pool_rows<double>(params, begin, end) : attention_pool_rows<float>(params, begin, end);
}

}  // namespace

void launch_attention_pool(const AttentionPoolParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), attention_pool_range);
  const int64_t work = params.length * params.dim;
  parallel_for_shared(params.batch, 1 + (1 << 16) / (work + 1),
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

void launch_attention_pool_rows(const AttentionPoolRowsParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.double_acc), attention_pool_rows);
  parallel_for_shared(params.count[0], 1 + (1 << 15) / (params.dim + 1),
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

namespace {

template <typename A>
void scale_range(const AttentionPoolScaleParams& p, int64_t begin, int64_t end) {
  const int64_t width = 2 * p.length;
  for (int64_t b = begin; b < end; ++b) {
    const A grad = static_cast<const A*>(p.grad)[b];
    const A* from = static_cast<const A*>(p.coefs) + b * width;
    A* to = static_cast<A*>(p.scaled) + b * width;
    if (grad == 0) {
      std::fill(to, to + width, A(0));
    } else {
      for (int64_t i = 0; i < width; ++i) to[i] = grad * from[i];
    }
  }
}

constexpr int64_t kColumns = 64;  // that are summed over the batch at a time

template <typename A>
void sum_columns(const AttentionPoolVectorsParams& p, int64_t begin, int64_t end) {
  const int64_t width = 2 * p.dim;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kColumns, n = std::min(kColumns, width - first);
    double total[kColumns] = {};
    for (int64_t b = 0; b < p.batch; ++b) {
      const double grad = static_cast<const A*>(p.grad)[b];
      const A* from = static_cast<const A*>(p.sums) + b * width + first;
      if (grad == 0) continue;
      for (int64_t c = 0; c < n; ++c) total[c] += grad * double(from[c]);
    }
    for (int64_t c = 0; c < n; ++c) {
      const int64_t at = first + c;
      (at < p.dim ? static_cast<A*>(p.d_value)[at] : static_cast<A*>(p.d_query)[at - p.dim]) = A(total[c]);
    }
  }
}

}  // namespace

void launch_attention_pool_scale(const AttentionPoolScaleParams& params) {
  parallel_for(params.batch, 1 + (1 << 16) / (params.length + 1), [&](int64_t begin, int64_t end) {
    params.double_acc ? scale_range<double>(params, begin, end) : scale_range<float>(params, begin, end);
  });
}

void launch_attention_pool_vectors(const AttentionPoolVectorsParams& params) {
  const int64_t blocks = (2 * params.dim + kColumns - 1) / kColumns;
  parallel_for(blocks, 1 + (1 << 15) / (params.batch * kColumns + 1), [&](int64_t begin, int64_t end) {
    params.double_acc ? sum_columns<double>(params, begin, end) : sum_columns<float>(params, begin, end);
  });
}

}  // namespace samplex::cpu
