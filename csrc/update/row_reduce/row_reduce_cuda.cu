// Launchers of the row reduction: a thread per entry for keys and heads, a group of lanes per entry for rows.
#include <algorithm>

#include "update/row_reduce/row_reduce_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

int64_t entries_of(const RowReduceParams& params) { return params.source[0].entries + params.source[1].entries; }

template <typename A, int Width>
void launch_rows(RowReduceParams params, void* stream) {
  set_inverses(params);
  const int log_group = log_group_of(params.dim, Width, kLeastWalkers);
  const dim3 grid(group_blocks(entries_of(params), log_group), unsigned(column_blocks(params.dim, Width)));
  SX_LAUNCH("row_reduce", (row_reduce_rows_kernel<A, Width>), grid, kUpdateThreads, 0, stream, params, log_group);
}

// Whether all rows can be read `width` numbers at a time.
bool fits(const RowReduceParams& params, int width) {
  bool ok = params.dim % width == 0 && aligned(params.row_grads);
  for (const RowReduceSource& x : params.source) ok = ok && (x.entries == 0 || aligned(x.rows));
  return ok;
}

}  // namespace

void launch_row_reduce_keys(const RowReduceParams& params, void* stream) {
  const unsigned grid = group_blocks(std::max(entries_of(params), params.keys.num_counters), 0);
  if (params.double_acc)
    SX_LAUNCH("row_reduce", (row_reduce_keys_kernel<double>), grid, kUpdateThreads, 0, stream, params);
  else
    SX_LAUNCH("row_reduce", (row_reduce_keys_kernel<float>), grid, kUpdateThreads, 0, stream, params);
}

void launch_row_reduce_heads(const RowReduceParams& params, void* stream) {
  const unsigned grid = group_blocks(entries_of(params), 0);
  if (params.keys.wide)
    SX_LAUNCH("row_reduce", (row_reduce_heads_kernel<int64_t>), grid, kUpdateThreads, 0, stream, params);
  else
    SX_LAUNCH("row_reduce", (row_reduce_heads_kernel<int32_t>), grid, kUpdateThreads, 0, stream, params);
}

void launch_row_reduce_rows(const RowReduceParams& params, void* stream) {
  bool doubles = true, no_doubles = true, narrow = false;
  for (const RowReduceSource& x : params.source) {
    if (x.entries == 0) continue;
    (x.dtype == DType::kFloat64 ? no_doubles : doubles) = false;
    narrow = narrow || x.dtype == DType::kFloat16 || x.dtype == DType::kBFloat16;
  }
  if (params.double_acc && doubles && fits(params, 2))
    launch_rows<double, 2>(params, stream);
  else if (params.double_acc)
    launch_rows<double, 1>(params, stream);
  else if (no_doubles && narrow && fits(params, 8))
    launch_rows<float, 8>(params, stream);
  else if (no_doubles && fits(params, 4))
    launch_rows<float, 4>(params, stream);
  else
    launch_rows<float, 1>(params, stream);
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
