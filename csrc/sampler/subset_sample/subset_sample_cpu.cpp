// subset_sample on the CPU: the choice of the SIMD level, and the baseline body.
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/subset_sample/subset_sample_cpu_rows.h"

namespace samplex {

#ifdef SAMPLEX_X86_SIMD
namespace subset_sample_avx2 {
void subset_rows(const SubsetSampleParams& p, int64_t begin, int64_t end, unsigned long long* table);
}
namespace subset_sample_avx512 {
void subset_rows(const SubsetSampleParams& p, int64_t begin, int64_t end, unsigned long long* table);
}
#endif

namespace cpu {

void launch_subset_sample(const SubsetSampleParams& p) {
  auto body = &subset_sample_baseline::subset_rows;
#ifdef SAMPLEX_X86_SIMD
  if (simd_level() == SimdLevel::kAvx2) body = &subset_sample_avx2::subset_rows;
  if (simd_level() == SimdLevel::kAvx512) body = &subset_sample_avx512::subset_rows;
#endif
  parallel_for(p.batch, 1 + 4096 / (p.num_samples + 1), [&](int64_t begin, int64_t end) {
    std::vector<unsigned long long> table(static_cast<size_t>(p.slots));
    body(p, begin, end, table.data());
  });
}

}  // namespace cpu
}  // namespace samplex
