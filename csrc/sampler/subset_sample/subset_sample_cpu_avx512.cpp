// subset_sample compiled for AVX-512.
#include "sampler/subset_sample/subset_sample_cpu_rows.h"

namespace samplex::cpu {

void subset_sample_rows_avx512(const SubsetSampleParams& params, int64_t begin, int64_t end,
                               unsigned long long* table) {
  subset_sample_rows::subset_rows(params, begin, end, table);
}

}  // namespace samplex::cpu
