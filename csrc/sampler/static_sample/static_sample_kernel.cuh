// static_sample on the device: one thread a draw, no shared memory, no collectives. The distributions, and with them
// every bit of the result, are those of static_sample_math.h.
#pragma once

#include "common/gather_rows.cuh"
#include "sampler/static_sample/static_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kStaticBlock = 256;
constexpr int kStaticWarps = kStaticBlock / kWarpSize;

// rows [B]: what the excluded ids leave of the distribution. One thread a row.
__global__ void __launch_bounds__(kStaticBlock) static_rows_kernel(StaticSampleParams p) {
  const int64_t stride = int64_t(gridDim.x) * kStaticBlock;
  for (int64_t b = int64_t(blockIdx.x) * kStaticBlock + threadIdx.x; b < p.batch; b += stride) {
    p.rows[b] = excluded_row(p, b);
  }
}

// Draw `draw` of row b, number i of all.
SX_DEVICE inline void store_draw(const StaticSampleParams& p, const StaticRow& row, PhiloxKey key, int64_t i, int64_t b,
                                 int64_t draw) {
  if (row.left == 0) {
    p.ids[i] = stand_in(p, row);
    p.log_q[i] = 0.0f;
    return;
  }
  const StaticDraw drawn =
      p.exclude != nullptr ? draw_excluding(p, row, key, b, draw, 0) : draw_at(p, row, key, b, draw, 0);
  p.ids[i] = class_of(drawn);
  p.log_q[i] = float(drawn.log_weight - row.log_mass);
}

// Log-probability of scored id i.
SX_DEVICE inline void score_id(const StaticSampleParams& p, const StaticRow& whole, int64_t i) {
  p.scored_log_q[i] = log_q_of(p, whole, p.scored[i]);
}

// ids, log_q [B, m], or log_q alone for given ids; behind them the scored ids.
__global__ void __launch_bounds__(kStaticBlock, 2) static_sample_kernel(StaticSampleParams p) {
  const PhiloxKey key = philox_key(p.key, p.key_row);
  const StaticRow whole = whole_row_in_kernel(p);
  const int64_t count = p.batch * p.num_samples, stride = int64_t(gridDim.x) * kStaticBlock;
  for (int64_t i = int64_t(blockIdx.x) * kStaticBlock + threadIdx.x; i < count + p.num_scored; i += stride) {
    if (i >= count) {
      score_id(p, whole, i - count);
      continue;
    }
    const int64_t b = i / p.num_samples, draw = i - b * p.num_samples;
    const StaticRow row = p.exclude != nullptr ? p.rows[b] : whole;
    if (p.given != nullptr)
      p.log_q[i] = log_q_of(p, row, p.given[i]);
    else
      store_draw(p, row, key, i, b, draw);
  }
}

// One row of draws that excludes nothing, and what it reads of a table: as many draws per block as it has warps. A
// thread makes a draw, then a warp copies its row. The first `score_blocks` blocks take a scored id per thread.
template <typename Word>
__global__ void __launch_bounds__(kStaticBlock, 2)
    static_gather_kernel(StaticSampleParams p, int64_t words, int score_blocks) {
  if (int(blockIdx.x) < score_blocks) {  // the whole block
    const int64_t i = int64_t(blockIdx.x) * kStaticBlock + threadIdx.x;
    if (i < p.num_scored) score_id(p, whole_row_in_kernel(p), i);
    return;
  }
  const int64_t first = (int64_t(blockIdx.x) - score_blocks) * kStaticWarps;
  if (threadIdx.x < kStaticWarps && first + threadIdx.x < p.num_samples) {
    const int64_t draw = first + threadIdx.x;
    store_draw(p, whole_row_in_kernel(p), philox_key(p.key, p.key_row), draw, 0, draw);
  }
  __syncthreads();
  const int64_t at = first + warp_id();
  if (at < p.gather.width) gather_row<Word>(p.gather, words, at, at < p.num_samples ? p.ids[at] : 0);  // the whole warp
}

}  // namespace samplex::SX_BACKEND_NS
