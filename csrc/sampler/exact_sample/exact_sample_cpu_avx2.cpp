// exact_mass and exact_draw compiled for AVX2; double stays with the scalar unit.
#include "sampler/exact_sample/exact_sample_cpu_rows.h"

namespace samplex::cpu {

void exact_mass_rows_avx2(const ExactMassParams& params, int64_t begin, int64_t end) {
  exact_mass_rows<float>(params, begin, end);
}

void exact_draw_range_avx2(const ExactDrawParams& params, int64_t begin, int64_t end) {
  if (params.table.dtype == DType::kFloat16)
    exact_draw_range<Half, float>(params, begin, end);
  else if (params.table.dtype == DType::kBFloat16)
    exact_draw_range<BFloat16, float>(params, begin, end);
  else
    exact_draw_range<float, float>(params, begin, end);
}

}  // namespace samplex::cpu
