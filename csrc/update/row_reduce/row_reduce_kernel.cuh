// Row reduction on the GPU, around torch's stable sort and cumsum: keys -> (sort) -> heads -> (cumsum) -> rows.
//
// One warp sums one row: it walks the row's entries in sorted, that is in entry order, with every lane on its own
// columns. No atomics: the same bits every time. Nothing is read back to the host: the grid covers all entries, and a
// warp whose place is not the first of a row has nothing to do.
#pragma once

#include "common/warp.cuh"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kReduceWarps = 4;
constexpr int kReduceThreads = kReduceWarps * kWarpSize;

template <typename A>
__global__ void __launch_bounds__(kReduceThreads) row_reduce_keys_kernel(RowReduceParams p) {
  const int64_t entries = p.source[0].entries + p.source[1].entries;
  const int64_t entry = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (entry < p.capacity) p.row_ids[entry] = -1;
  if (entry >= entries) return;
  const bool first = entry < p.source[0].entries;
  const RowReduceSource& source = p.source[first ? 0 : 1];
  const int64_t at = first ? entry : entry - p.source[0].entries;
  const int64_t id = source.ids[at];
  const bool left_out = id < 0 || (source.coef != nullptr && static_cast<const A*>(source.coef)[at] == A(0));
  p.keys[entry] = left_out ? p.num_rows : id;
}

template <typename A>
__global__ void __launch_bounds__(kReduceThreads) row_reduce_heads_kernel(RowReduceParams p) {
  const int64_t entries = p.source[0].entries + p.source[1].entries;
  const int64_t place = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (place >= entries) return;
  const int64_t id = p.sorted[place];
  p.heads[place] = id < p.num_rows && (place == 0 || p.sorted[place - 1] != id) ? 1 : 0;
}

template <typename A, typename T>
SX_DEVICE inline A row_value(const void* rows, int64_t i) {
  return A(to_acc(static_cast<const T*>(rows)[i]));
}

template <typename A>
__global__ void __launch_bounds__(kReduceThreads, 4) row_reduce_rows_kernel(RowReduceParams p) {
  const int64_t entries = p.source[0].entries + p.source[1].entries;
  const int64_t place = int64_t(blockIdx.x) * kReduceWarps + warp_id();
  if (place == 0 && lane_id() == 0) p.count[0] = p.ranks[entries - 1];
  if (place >= entries || p.heads[place] == 0) return;  // no collectives below
  const int64_t id = p.sorted[place];
  const int64_t row = p.ranks[place] - 1;
  A* out = static_cast<A*>(p.row_grads) + row * p.dim;
  for (int64_t column = 0; column < p.dim || column == 0; column += kWarpSize) {
    const int64_t c = column + lane_id();
    A sum = 0, bias = 0;
    for (int64_t i = place; i < entries && p.sorted[i] == id; ++i) {
      const int64_t entry = p.order[i];
      const bool first = entry < p.source[0].entries;
      const RowReduceSource& source = p.source[first ? 0 : 1];
      const int64_t at = first ? entry : entry - p.source[0].entries;
      const A coef = source.coef != nullptr ? static_cast<const A*>(source.coef)[at] : A(1);
      bias += source.bias != nullptr ? static_cast<const A*>(source.bias)[at] : coef;
      if (c >= p.dim) continue;
      const int64_t from = at / source.entries_per_row * p.dim + c;
      switch (source.dtype) {
        case DType::kFloat32:
          sum += coef * row_value<A, float>(source.rows, from);
          break;
        case DType::kFloat64:
          sum += coef * row_value<A, double>(source.rows, from);
          break;
        case DType::kFloat16:
          sum += coef * row_value<A, Half>(source.rows, from);
          break;
        default:
          sum += coef * row_value<A, BFloat16>(source.rows, from);
      }
    }
    if (c < p.dim) out[c] = sum;
    if (c == 0) {
      p.row_ids[row] = id;
      if (p.row_bias != nullptr) static_cast<A*>(p.row_bias)[row] = bias;
    }
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
