// The row updates compiled for AVX2.
#include "update/row_rules/row_rules_cpu_rows.h"

namespace samplex::cpu {

void row_rules_range_avx2(const RowRulesParams& params, const RowReduceRange& range, void* buffer) {
  row_rules_range_by_type(params, range, buffer);
}

void row_rules_rows_avx2(const RowRulesParams& params, int64_t begin, int64_t end, void* buffer) {
  row_rules_rows_by_type(params, begin, end, buffer);
}

void widen_avx2(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
  widen_by_type(dtype, from, to, begin, end);
}

}  // namespace samplex::cpu
