// Attention pooling compiled for AVX2; double storage stays with the scalar unit.
#include "loss/attention_pool/attention_pool_cpu_rows.h"

namespace samplex::cpu {

void attention_pool_range_avx2(const AttentionPoolParams& params, int64_t begin, int64_t end) {
  switch (params.dtype) {
    case DType::kFloat16:
      return attention_pool_range<Half>(params, begin, end);
    case DType::kBFloat16:
      return attention_pool_range<BFloat16>(params, begin, end);
    default:
      return attention_pool_range<float>(params, begin, end);
  }
}

void attention_pool_rows_avx2(const AttentionPoolRowsParams& params, int64_t begin, int64_t end) {
  attention_pool_rows<float>(params, begin, end);
}

}  // namespace samplex::cpu
