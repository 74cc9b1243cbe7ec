// The row updates compiled for AVX512.
#include "update/row_rules/row_rules_cpu_rows.h"

namespace samplex::cpu {

void optim_range_avx512(const OptimParams& params, const RowReduceRange& range, void* buffer) {
  optim_range_by_type(params, range, buffer);
}

void optim_rows_avx512(const OptimParams& params, int64_t begin, int64_t end, void* buffer) {
  optim_rows_by_type(params, begin, end, buffer);
}

}  // namespace samplex::cpu
