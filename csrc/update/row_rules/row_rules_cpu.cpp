// CPU launchers of the row updates: given rows in chunks that the threads share, and the sorted ranges of row_reduce.
#include <cstddef>
#include <vector>

#include "common/parallel.h"
#include "common/pool.h"
#include "common/simd.h"
#include "update/row_rules/row_rules_cpu_rows.h"

namespace samplex::cpu {
namespace {

// Rows of a thread: gradients that are summed, and scratch.
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

void widen_scalar(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
  widen_by_type(dtype, from, to, begin, end);
}

void run_range(const RowReduceRange& range, void* context) {
  const RowRulesParams& params = *static_cast<const RowRulesParams*>(context);
  SX_SIMD_BODY(simd_level(), row_rules_range)(params, range, buffer_of(params));
}

// Source rows of 16 bits in fp32, once and not for each of their entries: a gradient coef * row is then never stored.
class WideRows {
 public:
  explicit WideRows(RowReduceParams& p) {
    const void* from[2] = {p.source[0].rows, p.source[1].rows};
    int64_t rows[2];
    for (const int which : {0, 1}) {
      RowReduceSource& source = p.source[which];
      rows[which] = source.entries / source.entries_per_row;
      if (source.dtype != DType::kFloat16 && source.dtype != DType::kBFloat16) continue;
      // Targets and draws of a loss have the same h.
      const bool same = which == 1 && memory_[0] != nullptr && from[0] == from[1] && rows[0] == rows[1];
      source.rows = same ? memory_[0] : widened(which, source, rows[which] * p.dim);
      source.dtype = DType::kFloat32;
    }
  }
  ~WideRows() {
    for (void* memory : memory_) {
      if (memory != nullptr) pool_give(memory);
    }
  }
  WideRows(const WideRows&) = delete;
  WideRows& operator=(const WideRows&) = delete;

 private:
  const void* widened(int which, const RowReduceSource& source, int64_t numbers) {
    if (numbers == 0) return nullptr;
    memory_[which] = pool_take(size_t(numbers) * sizeof(float));
    float* const to = static_cast<float*>(memory_[which]);
    const auto body = SX_SIMD_BODY(simd_level(), widen);
    parallel_for(numbers, 1 << 17,
                 [&](int64_t begin, int64_t end) { body(source.dtype, source.rows, to, begin, end); });
    return to;
  }

  void* memory_[2] = {nullptr, nullptr};
};

}  // namespace

void launch_row_rules_live(const RowRulesParams& params) {
  for (const RowTable* table : {&params.weight, &params.bias}) {
    if (table->live.rule != nullptr) *table->live.rule = live_rule(*table);
  }
}

void launch_row_rules_rows(const RowRulesParams& params) {
  if (is_skipped(params.weight)) return;
  const int64_t n = params.count == nullptr || params.count[0] > params.n ? params.n : params.count[0];
  const int64_t chunk = 1 + (1 << 15) / (params.dim + 1);
  const auto body = SX_SIMD_BODY(simd_level(), row_rules_rows);
  parallel_for_shared(n, chunk, [&](int64_t begin, int64_t end) { body(params, begin, end, buffer_of(params)); });
}

void launch_row_rules_entries(const RowRulesParams& params) {
  if (is_skipped(params.weight)) return;
  RowRulesParams wide = params;
  const WideRows rows(wide.entries);
  for_sorted_ranges(wide.entries, run_range, &wide);
}

}  // namespace samplex::cpu
