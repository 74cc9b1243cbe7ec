// subset_sample on the CPU: the choice of the SIMD level, and the baseline body.
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/subset_sample/subset_sample_cpu_rows.h"

namespace samplex::cpu {
namespace {

void subset_sample_rows_scalar(const SubsetSampleParams& p, int64_t begin, int64_t end, unsigned long long* table) {
  subset_sample_rows::subset_rows(p, begin, end, table);
}

}  // namespace

void launch_subset_sample(const SubsetSampleParams& p) {
  const auto body = SX_SIMD_BODY(simd_level(), subset_sample_rows);
  parallel_for(p.batch, 1 + 4096 / (p.num_samples + 1), [&](int64_t begin, int64_t end) {
    std::vector<unsigned long long> table(static_cast<size_t>(p.slots));
    body(p, begin, end, table.data());
  });
}

}  // namespace samplex::cpu
