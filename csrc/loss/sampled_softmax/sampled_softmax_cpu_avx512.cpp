// The forward compiled for AVX512; double storage stays with the scalar unit.
#include "loss/sampled_softmax/sampled_softmax_cpu_rows.h"

namespace samplex::cpu {

void sampled_softmax_rows_avx512(const SampledSoftmaxParams& params, int64_t begin, int64_t end) {
  switch (params.dtype) {
    case DType::kFloat16:
      return sampled_softmax_rows<Half>(params, begin, end);
    case DType::kBFloat16:
      return sampled_softmax_rows<BFloat16>(params, begin, end);
    default:
      return sampled_softmax_rows<float>(params, begin, end);
  }
}

}  // namespace samplex::cpu
