// Launchers of the row updates: a group of lanes per row, as wide as the row asks for.
#include "update/row_rules/row_rules_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

// Lanes that share a row: the least power of two that covers it in one go, at most a warp. Its logarithm.
int log_group_of(int64_t dim, int width) {
  int log = 0;
  while ((1 << log) < kWarpSize && (int64_t(width) << log) < dim) ++log;
  return log;
}

unsigned blocks(int64_t rows, int log_group) {
  return unsigned(((rows << log_group) + kOptimThreads - 1) / kOptimThreads);
}

uint64_t inverse_of(int64_t divisor) { return divisor == 1 ? 0 : ~uint64_t(0) / uint64_t(divisor) + 1; }

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether rows can be read four numbers at a time.
bool wide(const RowRulesParams& p, const void* gradients) {
  return p.weight.dtype != DType::kFloat64 && p.dim % 4 == 0 && aligned(p.weight.values) && aligned(p.weight.state0) &&
         aligned(p.weight.state1) && aligned(gradients);
}

}  // namespace

void launch_row_rules_live(const RowRulesParams& params, void* stream) {
  SX_LAUNCH("row update", row_rules_live_kernel, 1, kWarpSize, 0, stream, params);
}

void launch_row_rules_rows(const RowRulesParams& params, void* stream) {
  dispatch_dtype("row update", params.weight.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = kOptimWidth<T>;
    const int width = wide(params, params.rows) ? kWidth : 1, group = log_group_of(params.dim, width);
    const unsigned grid = blocks(params.n, group);
    if (kWidth > 1 && width > 1)
      SX_LAUNCH("row update", (row_rules_rows_kernel<T, kWidth>), grid, kOptimThreads, 0, stream, params, group);
    else
      SX_LAUNCH("row update", (row_rules_rows_kernel<T, 1>), grid, kOptimThreads, 0, stream, params, group);
  });
}

void launch_row_rules_entries(const RowRulesParams& given, void* stream) {
  RowRulesParams params = given;
  for (int i = 0; i < 2; ++i) params.inverse[i] = inverse_of(params.entries.source[i].entries_per_row);
  dispatch_dtype("row update", params.weight.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWidth = kOptimWidth<T>;
    const RowReduceSource* source = params.entries.source;
    const bool all = wide(params, source[0].rows) && wide(params, source[1].rows);
    const int width = all ? kWidth : 1, group = log_group_of(params.dim, width);
    const unsigned grid = blocks(source[0].entries + source[1].entries, group);
    if (kWidth > 1 && width > 1)
      SX_LAUNCH("row update", (row_rules_entries_kernel<T, kWidth>), grid, kOptimThreads, 0, stream, params, group);
    else
      SX_LAUNCH("row update", (row_rules_entries_kernel<T, 1>), grid, kOptimThreads, 0, stream, params, group);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
