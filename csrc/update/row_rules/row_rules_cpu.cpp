// CPU launchers of the row updates: given rows in chunks that the threads share, and the sorted ranges of row_reduce.
#include <cstddef>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "update/row_rules/row_rules_cpu_rows.h"

namespace samplex::cpu {
namespace {

// Rows of a thread: gradients that are summed, and a widened weight row.
void* buffer_of(const RowRulesParams& params) {
  static thread_local std::vector<std::max_align_t> memory;
  const size_t numbers = size_t(kUpdateBuffer * params.dim),
               wanted = numbers * sizeof(double) / sizeof(std::max_align_t) + 1;
  if (memory.size() < wanted) memory.resize(wanted);
  return memory.data();
}

void row_rules_range_scalar(const RowRulesParams& params, const RowReduceRange& range, void* buffer) {
  row_rules_range_by_type(params, range, buffer);
}

void row_rules_rows_scalar(const RowRulesParams& params, int64_t begin, int64_t end, void* buffer) {
  row_rules_rows_by_type(params, begin, end, buffer);
}

void run_range(const RowReduceRange& range, void* context) {
  const RowRulesParams& params = *static_cast<const RowRulesParams*>(context);
  SX_SIMD_BODY(simd_level(), row_rules_range)(params, range, buffer_of(params));
}

}  // namespace

void launch_row_rules_rows(const RowRulesParams& params) {
  const int64_t n = params.count == nullptr || params.count[0] > params.n ? params.n : params.count[0];
  const int64_t chunk = 1 + (1 << 15) / (params.dim + 1);
  const auto body = SX_SIMD_BODY(simd_level(), row_rules_rows);
  parallel_for_shared(n, chunk, [&](int64_t begin, int64_t end) { body(params, begin, end, buffer_of(params)); });
}

void launch_row_rules_entries(const RowRulesParams& params) {
  for_sorted_ranges(params.entries, run_range, const_cast<RowRulesParams*>(&params));
}

}  // namespace samplex::cpu
