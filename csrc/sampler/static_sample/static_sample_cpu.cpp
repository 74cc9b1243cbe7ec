// static_sample on the CPU: the choice of the SIMD level, and the baseline body.
#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/static_sample/static_sample_cpu_rows.h"

namespace samplex {

#ifdef SAMPLEX_X86_SIMD
namespace static_sample_avx2 {
void sample_range(const StaticSampleParams& p, int64_t begin, int64_t end);
}
namespace static_sample_avx512 {
void sample_range(const StaticSampleParams& p, int64_t begin, int64_t end);
}
#endif

namespace cpu {

void launch_static_sample(const StaticSampleParams& p) {
  if (p.exclude != nullptr) {
    parallel_for(p.batch, 256, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) p.rows[b] = excluded_row(p, b);
    });
  }
  auto body = &static_sample_baseline::sample_range;
#ifdef SAMPLEX_X86_SIMD
  if (simd_level() == SimdLevel::kAvx2) body = &static_sample_avx2::sample_range;
  if (simd_level() == SimdLevel::kAvx512) body = &static_sample_avx512::sample_range;
#endif
  parallel_for(p.batch * p.num_samples, 4096, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

}  // namespace cpu
}  // namespace samplex
