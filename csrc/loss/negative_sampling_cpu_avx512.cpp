// The forward compiled for AVX512; double storage stays with the scalar unit.
#include "loss/negative_sampling_cpu_rows.h"

namespace samplex::cpu {

void negative_sampling_rows_avx512(const NegativeSamplingParams& params, int64_t begin, int64_t end) {
  switch (params.dtype) {
    case DType::kFloat16:
      return negative_sampling_rows<Half>(params, begin, end);
    case DType::kBFloat16:
      return negative_sampling_rows<BFloat16>(params, begin, end);
    default:
      return negative_sampling_rows<float>(params, begin, end);
  }
}

}  // namespace samplex::cpu
