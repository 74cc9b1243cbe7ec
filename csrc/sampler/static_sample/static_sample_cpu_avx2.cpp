// static_sample compiled for AVX2.
#include "sampler/static_sample/static_sample_cpu_rows.h"

namespace samplex::cpu {

void static_sample_range_avx2(const StaticSampleParams& params, int64_t begin, int64_t end) {
  static_sample_rows::sample_range(params, begin, end);
}

}  // namespace samplex::cpu
