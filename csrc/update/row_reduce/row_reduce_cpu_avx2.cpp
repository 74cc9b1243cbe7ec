// The segment sums compiled for AVX2, float accumulation.
#include "update/row_reduce/row_reduce_cpu_rows.h"

namespace samplex::cpu {

void row_reduce_range_avx2(const RowReduceParams& params, const RowReduceRange& range) {
  row_reduce_range<float>(params, range);
}

}  // namespace samplex::cpu
