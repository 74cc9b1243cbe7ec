// Launchers of the row reduction: a thread per entry for keys and heads, a warp per entry for rows.
#include "update/row_reduce/row_reduce_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

int64_t entries_of(const RowReduceParams& params) { return params.source[0].entries + params.source[1].entries; }

unsigned blocks(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

}  // namespace

void launch_row_reduce_keys(const RowReduceParams& params, void* stream) {
  const unsigned grid = blocks(entries_of(params), kReduceThreads);
  if (params.double_acc)
    SX_LAUNCH("row_reduce", (row_reduce_keys_kernel<double>), grid, kReduceThreads, 0, stream, params);
  else
    SX_LAUNCH("row_reduce", (row_reduce_keys_kernel<float>), grid, kReduceThreads, 0, stream, params);
}

void launch_row_reduce_heads(const RowReduceParams& params, void* stream) {
  SX_LAUNCH("row_reduce", (row_reduce_heads_kernel<float>), blocks(entries_of(params), kReduceThreads), kReduceThreads,
            0, stream, params);
}

void launch_row_reduce_rows(const RowReduceParams& params, void* stream) {
  const unsigned grid = blocks(entries_of(params), kReduceWarps);
  if (params.double_acc)
    SX_LAUNCH("row_reduce", (row_reduce_rows_kernel<double>), grid, kReduceThreads, 0, stream, params);
  else
    SX_LAUNCH("row_reduce", (row_reduce_rows_kernel<float>), grid, kReduceThreads, 0, stream, params);
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
