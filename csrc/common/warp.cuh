// Warp and block collectives: the only users of __shfl_*_sync, __ballot_sync and block reductions.
// Every collective takes the full mask, so all 32 lanes must arrive: guard the work, never return before one.
#pragma once

#include "common/macros.h"
#include "common/numeric.h"

namespace samplex {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xFFFFFFFFu;

SX_DEVICE inline int lane_id() { return int(threadIdx.x) % kWarpSize; }
SX_DEVICE inline int warp_id() { return int(threadIdx.x) / kWarpSize; }

template <typename T>
SX_DEVICE inline T shuffle_xor(T x, int lane_mask) {
  return __shfl_xor_sync(kFullMask, x, lane_mask);
}
template <typename T>
SX_DEVICE inline T shuffle_from(T x, int source_lane) {
  return __shfl_sync(kFullMask, x, source_lane);
}
// Orders this warp's shared-memory accesses before and after it.
SX_DEVICE inline void warp_sync() { __syncwarp(kFullMask); }
SX_DEVICE inline unsigned warp_ballot(bool predicate) { return __ballot_sync(kFullMask, predicate); }
SX_DEVICE inline bool warp_any(bool predicate) { return __any_sync(kFullMask, predicate) != 0; }

// Sum over aligned groups of `Width` lanes; every lane of the group gets the same bits.
template <int Width, typename T>
SX_DEVICE inline T group_sum(T x) {
  for (int step = Width / 2; step > 0; step /= 2) x += shuffle_xor(x, step);
  return x;
}
template <int Width, typename T>
SX_DEVICE inline T group_max(T x) {
  for (int step = Width / 2; step > 0; step /= 2) x = max_nan(x, shuffle_xor(x, step));
  return x;
}

// Counts this warp at `counter`, which begins at 0. Whether it is the last of `expected` warps; that one sees what the
// others wrote before they came here. Which warp that is depends on the schedule: nothing it computes may.
SX_DEVICE inline bool warp_arrives_last(int* counter, int expected) {
  __threadfence();
  warp_sync();
  int before = 0;
  if (lane_id() == 0) before = atomicAdd(counter, 1);
  const bool last = shuffle_from(before, 0) + 1 == expected;
  __threadfence();
  warp_sync();
  return last;
}

// Sum over the block of `Warps` warps, the same bits in every thread. `scratch` holds Warps values and is free again
// after the call. Two barriers.
template <int Warps, typename T>
SX_DEVICE inline T block_sum(T x, T* scratch) {
  x = group_sum<kWarpSize>(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  T total = scratch[0];
  for (int w = 1; w < Warps; ++w) total += scratch[w];
  __syncthreads();
  return total;
}

template <int Warps, typename T>
SX_DEVICE inline T block_max(T x, T* scratch) {
  x = group_max<kWarpSize>(x);
  if (lane_id() == 0) scratch[warp_id()] = x;
  __syncthreads();
  T total = scratch[0];
  for (int w = 1; w < Warps; ++w) total = max_nan(total, scratch[w]);
  __syncthreads();
  return total;
}

// Counts this block at `counter`, which begins at 0. Whether it is the last of `expected` blocks; that one sees what
// the others wrote before they came here. As warp_arrives_last: nothing that the block computes may depend on which it
// is.
SX_DEVICE inline bool block_arrives_last(int* counter, int expected) {
  __shared__ int before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(counter, 1);
  __syncthreads();
  const bool last = before + 1 == expected;
  __threadfence();
  return last;
}

// Whether the predicate holds in any thread of the block. One barrier.
SX_DEVICE inline bool block_any(bool predicate) { return __syncthreads_or(predicate) != 0; }

}  // namespace samplex
