// Row reduction on the GPU, around torch's stable sort and cumsum: keys -> (sort) -> heads -> (cumsum) -> rows.
//
// Rows are summed as row_reduce_device.cuh says. No float atomics: the same bits every time. Nothing is read back to
// the host: the grid covers all entries, and a warp whose place begins no row and no piece of one has nothing to do.
#pragma once

#include "update/row_reduce/row_reduce_device.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

template <typename A>
__global__ void __launch_bounds__(kUpdateThreads) row_reduce_keys_kernel(RowReduceParams p) {
  const int64_t entries = p.source[0].entries + p.source[1].entries;
  const int64_t entry = int64_t(blockIdx.x) * kUpdateThreads + threadIdx.x;
  if (entry < p.capacity) p.row_ids[entry] = -1;
  if (entry < p.keys.num_counters) p.keys.counters[entry] = 0;
  if (entry >= entries) return;
  const bool first = entry < p.source[0].entries;
  const RowReduceSource& source = p.source[first ? 0 : 1];
  const int64_t at = first ? entry : entry - p.source[0].entries;
  const bool zero = source.coef != nullptr && static_cast<const A*>(source.coef)[at] == A(0);
  store_row_key(p.keys, entry, source.ids[at], zero);
}

template <typename Key>
__global__ void __launch_bounds__(kUpdateThreads) row_reduce_heads_kernel(RowReduceParams p) {
  const int64_t entries = p.source[0].entries + p.source[1].entries;
  const int64_t place = int64_t(blockIdx.x) * kUpdateThreads + threadIdx.x;
  if (place >= entries) return;
  const Key* const sorted = static_cast<const Key*>(p.sorted);
  const Key id = sorted[place];
  p.heads[place] = int64_t(id) < p.num_rows && (place == 0 || sorted[place - 1] != id) ? 1 : 0;
}

// A warp, or each group of its lanes, on a place of the entries; blocks of columns along the grid's second dimension.
template <typename A, int Width>
__global__ void __launch_bounds__(kUpdateThreads, 6) row_reduce_rows_kernel(RowReduceParams p, int log_group) {
  const EntryWalk<AnyType, A, Width> walk(p, log_group);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.count[0] = p.ranks[walk.entries - 1];
  const bool with_bias = p.row_bias != nullptr && blockIdx.y == 0;
  walk.for_parts(p.chunks.arrived + blockIdx.y * p.chunks.slots, [&](const auto& part) {
    const int c = (int(blockIdx.y) * kWarpSize + part.lane) * Width;
    const bool inside = part.here && c < p.dim;
    A sums[Width], bias;
    walk.add(part, c, inside, sums, with_bias, bias);
    if (!part.here) return;
    if (!part.complete) {
      if (inside) walk.store(part, c, sums);
      if (with_bias && part.lane == 0) walk.store_bias(part, bias);
      return;
    }
    const int64_t row = p.ranks[part.place] - 1;
    if (inside) store_sums<Width>(static_cast<A*>(p.row_grads) + row * p.dim + c, sums);
    if (blockIdx.y == 0 && part.lane == 0) {
      p.row_ids[row] = part.id;
      if (with_bias) static_cast<A*>(p.row_bias)[row] = bias;
    }
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
