// Products with the rows of a shard.
//
// A block has a row of the batch, and its warps share the entries; a warp leaves foreign ones at once.
//
//   shard_logits_kernel   a dot product of a warp each
//   shard_hidden_kernel   the sums of the warps are added in their order
#pragma once

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/shard_rows/shard_rows_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kShardThreads = 256, kShardWarps = kShardThreads / kWarpSize;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kShardThreads) shard_logits_kernel(ShardLogitsParams p) {
  using A = acc_t<T>;
  const int64_t b = blockIdx.x;
  const int targets = int(p.num_targets), entries = targets + int(p.num_ids);
  const T* h = static_cast<const T*>(p.hidden) + b * p.dim;
  for (int j = warp_id(); j < entries; j += kShardWarps) {
    const bool of_target = j < targets;
    const int64_t place = of_target ? b * p.num_targets + j : b * p.num_ids + j - targets;
    const int64_t row = shard_row(p, of_target ? p.target[place] : p.ids[place]);
    // A loop without a turn, and not a branch around it: ptxas spilled the barrier at which the branch joins again.
    const bool local = row >= 0;
    const T* w = static_cast<const T*>(p.weight) + (local ? row : 0) * p.dim;
    const int64_t columns = local ? p.dim : 0;
    A dot = 0;
    for (int64_t c = lane_id() * kWidth; c < columns; c += kWarpSize * kWidth) {
      A x[kWidth], y[kWidth];
      load_columns<kWidth>(h + c, x);
      load_columns<kWidth>(w + c, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot += x[i] * y[i];
    }
    dot = group_sum<kWarpSize>(dot);
    if (lane_id() == 0) {
      static_cast<A*>(p.logits)[b * entries + j] = local ? dot + shard_bias<A>(p, row) : A(0);
      (of_target ? p.target_rows : p.id_rows)[place] = row;
    }
  }
}

constexpr int kHiddenResident = 4;  // blocks of a multiprocessor; left to itself, ptxas spills for a sixth on sm_120

// Class rows that a warp has in flight: 64 bytes of a thread with 16-byte loads.
template <int kWidth>
constexpr int kShardRows = kWidth == 1 ? 8 : 4;

// Adds coef * row at column c < p.dim, for this warp's share of n entries, in their order. Each lane looks at one
// entry; those that count are taken several at a time, so that no warp waits for a row before it asks for the next.
template <typename T, int kWidth>
SX_DEVICE inline void shard_hidden_of(const ShardHiddenParams& p, const int64_t* rows, const acc_t<T>* coefs, int n,
                                      int64_t c, acc_t<T> (&acc)[kWidth]) {
  using A = acc_t<T>;
  constexpr int kRows = kShardRows<kWidth>;
  const T* const column = static_cast<const T*>(p.weight) + c;
  for (int stage = warp_id(); stage < n; stage += kShardWarps * kWarpSize) {
    const int j = stage + lane_id() * kShardWarps;
    const int64_t row = j < n ? rows[j] : -1;
    const A coef = j < n ? coefs[j] : A(0);
    unsigned left = warp_ballot(uint64_t(row) < uint64_t(p.rows) && coef != A(0));
    while (left != 0) {  // the whole warp
      const T* from[kRows];
      A factor[kRows], w[kRows][kWidth];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool there = left != 0;
        const int lane = there ? __ffs(int(left)) - 1 : 0;
        left &= left - 1;  // 0 stays 0
        const int64_t own = shuffle_from(row, lane);
        const A of_lane = shuffle_from(coef, lane);
        factor[r] = there ? of_lane : A(0);
        from[r] = there ? column + own * p.dim : from[0];  // of none left: a row that is asked for anyway
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) load_columns<kWidth>(from[r], w[r]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) acc[i] += factor[r] == A(0) ? A(0) : factor[r] * w[r][i];
      }
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kShardThreads, kHiddenResident) shard_hidden_kernel(ShardHiddenParams p) {
  using A = acc_t<T>;
  __shared__ A sums[kShardWarps][kWarpSize * kWidth];
  const int64_t b = blockIdx.x;
  const A* target_coef = static_cast<const A*>(p.target_coef) + b * p.num_targets;
  const A* id_coef = static_cast<const A*>(p.id_coef) + b * p.num_ids;
  for (int64_t first = 0; first < p.dim; first += kWarpSize * kWidth) {
    // Lanes behind the last column read the first one; their sums go nowhere.
    const int64_t own = first + lane_id() * kWidth, c = own < p.dim ? own : 0;
    A acc[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) acc[i] = 0;
    shard_hidden_of<T, kWidth>(p, p.target_rows + b * p.num_targets, target_coef, int(p.num_targets), c, acc);
    shard_hidden_of<T, kWidth>(p, p.id_rows + b * p.num_ids, id_coef, int(p.num_ids), c, acc);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[warp_id()][lane_id() * kWidth + i] = acc[i];
    __syncthreads();
    for (int i = int(threadIdx.x); i < kWarpSize * kWidth; i += kShardThreads) {
      if (first + i < p.dim) {
        A total = sums[0][i];
        for (int w = 1; w < kShardWarps; ++w) total += sums[w][i];
        static_cast<A*>(p.hidden)[b * p.dim + first + i] = total;
      }
    }
    __syncthreads();
  }
}

}  // namespace samplex::SX_BACKEND_NS
