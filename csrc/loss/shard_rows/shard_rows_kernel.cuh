// Products with the rows of a shard.
//
//   shard_logits_kernel   a warp has an entry at a time, and leaves foreign ones at once
//   shard_hidden_kernel   a block has a row of the batch; its warps share the entries, and their sums are added in order
#pragma once

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/shard_rows/shard_rows_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kShardThreads = 256, kShardWarps = kShardThreads / kWarpSize;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kShardThreads) shard_logits_kernel(ShardLogitsParams p) {
  using A = acc_t<T>;
  const int64_t entries = p.num_targets + p.num_ids, count = p.batch * entries;
  const int64_t stride = int64_t(gridDim.x) * kShardWarps;
  for (int64_t at = int64_t(blockIdx.x) * kShardWarps + warp_id(); at < count; at += stride) {
    const int64_t b = at / entries, j = at - b * entries;
    const bool of_target = j < p.num_targets;
    const int64_t place = of_target ? b * p.num_targets + j : b * p.num_ids + j - p.num_targets;
    const int64_t row = shard_row(p, of_target ? p.target[place] : p.ids[place]);
    A dot = 0;
    if (row >= 0) {
      const T* h = static_cast<const T*>(p.hidden) + b * p.dim;
      const T* w = static_cast<const T*>(p.weight) + row * p.dim;
      for (int64_t c = lane_id() * kWidth; c < p.dim; c += kWarpSize * kWidth) {
        A x[kWidth], y[kWidth];
        load_columns<kWidth>(h + c, x);
        load_columns<kWidth>(w + c, y);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dot += x[i] * y[i];
      }
    }
    dot = group_sum<kWarpSize>(dot);
    if (lane_id() == 0) {
      static_cast<A*>(p.logits)[at] = row >= 0 ? dot + shard_bias<A>(p, row) : A(0);
      (of_target ? p.target_rows : p.id_rows)[place] = row;
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kShardThreads) shard_hidden_kernel(ShardHiddenParams p) {
  using A = acc_t<T>;
  __shared__ A sums[kShardWarps][kWarpSize * kWidth];
  const int64_t b = blockIdx.x, entries = p.num_targets + p.num_ids;
  for (int64_t first = 0; first < p.dim; first += kWarpSize * kWidth) {
    const int64_t c = first + lane_id() * kWidth;
    A acc[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) acc[i] = 0;
    for (int64_t j = warp_id(); j < entries; j += kShardWarps) {
      const bool of_target = j < p.num_targets;
      const int64_t place = of_target ? b * p.num_targets + j : b * p.num_ids + j - p.num_targets;
      const int64_t row = (of_target ? p.target_rows : p.id_rows)[place];
      if (uint64_t(row) >= uint64_t(p.rows)) continue;
      const A coef = static_cast<const A*>(of_target ? p.target_coef : p.id_coef)[place];
      if (coef == A(0) || c >= p.dim) continue;
      A w[kWidth];
      load_columns<kWidth>(static_cast<const T*>(p.weight) + row * p.dim + c, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) acc[i] += coef * w[i];
    }
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
