// Launchers of the row updates: a group of lanes per row or entry, as wide as the row asks for.
#include "update/row_rules/row_rules_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

// body(WidthTag<Width>{}) for the most numbers of a row that can be read at a time: 16 bytes of the weight; 4 of a
// 16-bit type where 8 do not divide the row; 1.
template <int Width>
struct WidthTag {
  static constexpr int width = Width;
};
template <typename T, typename F>
void with_width(const RowRulesParams& p, bool gradients_aligned, const F& body) {
  constexpr int kMost = 16 / int(sizeof(T));
  const bool all =
      gradients_aligned && aligned(p.weight.values) && aligned(p.weight.state0) && aligned(p.weight.state1);
  if (all && p.dim % kMost == 0) return body(WidthTag<kMost>{});
  if constexpr (kMost > 4) {
    if (all && p.dim % 4 == 0) return body(WidthTag<4>{});
  }
  body(WidthTag<1>{});
}

}  // namespace

void launch_row_rules_live(const RowRulesParams& params, void* stream) {
  SX_LAUNCH("row update", row_rules_live_kernel, 1, kWarpSize, 0, stream, params);
}

void launch_row_rules_rows(const RowRulesParams& params, void* stream) {
  dispatch_dtype("row update", params.weight.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_width<T>(params, aligned(params.rows), [&](auto tag) {
      constexpr int kWidth = decltype(tag)::width;
      const int group = log_group_of(params.dim, kWidth, 1);
      SX_LAUNCH("row update", (row_rules_rows_kernel<T, kWidth>), group_blocks(params.n, group), kUpdateThreads, 0,
                stream, params, group);
    });
  });
}

void launch_row_rules_entries(const RowRulesParams& given, void* stream) {
  RowRulesParams params = given;
  set_inverses(params.entries);
  const RowReduceSource* const source = params.entries.source;
  const int64_t entries = source[0].entries + source[1].entries;
  dispatch_dtype("row update", params.weight.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_width<T>(params, aligned(source[0].rows) && aligned(source[1].rows), [&](auto tag) {
      constexpr int kWidth = decltype(tag)::width;
      const int group = log_group_of(params.dim, kWidth, kLeastWalkers);
      const int columns = int(column_blocks(params.dim, kWidth));
      const bool by_row = params.weight.rule.kind == RowRuleKind::kRowAdagrad || params.project;
      const dim3 grid(group_blocks(entries, group), unsigned(by_row ? 1 : columns));
      SX_LAUNCH("row update", (row_rules_entries_kernel<T, kWidth>), grid, kUpdateThreads, 0, stream, params, group,
                by_row ? columns : 1);
    });
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
