// CPU launchers of the row updates: given rows in chunks that the threads share, and the sorted ranges of row_reduce.
#include <cstddef>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "update/row_rules/row_rules_cpu_rows.h"

namespace samplex::cpu {
namespace {

// Rows of a thread: gradients that are summed, and a widened weight row.
void* buffer_of(const OptimParams& params) {
  static thread_local std::vector<std::max_align_t> memory;
  const size_t numbers = size_t(kUpdateBuffer * params.dim),
               wanted = numbers * sizeof(double) / sizeof(std::max_align_t) + 1;
  if (memory.size() < wanted) memory.resize(wanted);
  return memory.data();
}

void run_range(const RowReduceRange& range, void* context) {
  const OptimParams& params = *static_cast<const OptimParams*>(context);
  void* const buffer = buffer_of(params);
#ifdef SAMPLEX_X86_SIMD
  if (simd_level() == SimdLevel::kAvx512) return optim_range_avx512(params, range, buffer);
  if (simd_level() == SimdLevel::kAvx2) return optim_range_avx2(params, range, buffer);
#endif
  optim_range_by_type(params, range, buffer);
}

}  // namespace

void launch_optim_rows(const OptimParams& params) {
  const int64_t n = params.count == nullptr || params.count[0] > params.n ? params.n : params.count[0];
  const int64_t chunk = 1 + (1 << 15) / (params.dim + 1);
  parallel_for_shared(n, chunk, [&](int64_t begin, int64_t end) {
    void* const buffer = buffer_of(params);
#ifdef SAMPLEX_X86_SIMD
    if (simd_level() == SimdLevel::kAvx512) return optim_rows_avx512(params, begin, end, buffer);
    if (simd_level() == SimdLevel::kAvx2) return optim_rows_avx2(params, begin, end, buffer);
#endif
    optim_rows_by_type(params, begin, end, buffer);
  });
}

void launch_optim_entries(const OptimParams& params) {
  for_sorted_ranges(params.entries, run_range, const_cast<OptimParams*>(&params));
}

}  // namespace samplex::cpu
