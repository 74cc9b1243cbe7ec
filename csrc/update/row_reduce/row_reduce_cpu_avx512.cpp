// The segment sums compiled for AVX512, float accumulation.
#include "update/row_reduce/row_reduce_cpu_rows.h"

namespace samplex::cpu {

void row_reduce_range_avx512(const RowReduceParams& params, const RowReduceRange& range) {
  row_reduce_range<float>(params, range);
}

}  // namespace samplex::cpu
