// The row updates compiled for AVX512.
#include "update/optim_cpu_rows.h"

namespace samplex::cpu {

void optim_range_avx512(const OptimParams& params, const RowReduceRange& range, void* buffer) {
  optim_range_by_type(params, range, buffer);
}

void optim_rows_avx512(const OptimParams& params, int64_t begin, int64_t end, void* buffer) {
  optim_rows_by_type(params, begin, end, buffer);
}

void widen_avx512(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
  widen_by_type(dtype, from, to, begin, end);
}

}  // namespace samplex::cpu
