// What fused losses share on the GPU. Formulas in fused_loss_params.h.
//
//   gather_rows_kernel class rows of shared draws, in the accumulation type: one warp per row
//   loss_mean_kernel   the loss over the batch: one block
//   loss_bwd_kernel    coefficients and d_hidden from what the forward saved: one block per batch row
//   across_warps       product of a class row that the warps of a block share
//   class_or_unknown   ids of a device come unchecked: one compare before a table is read
//   check_loss_id      for the losses' own check kernels (SAMPLEX_DEBUG=1)
#pragma once

#include <cstdio>

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/fused/fused_loss_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kGatherWarps = 4;
constexpr int kGatherThreads = kGatherWarps * kWarpSize;
constexpr int kBwdThreads = 128;
constexpr int kMeanThreads = 256;  // of the one block that sums over the batch

// ------------------------------------------------------------------------------------------------ ids out of range
// An id out of range takes part in its row as class `num_classes`. No table is read for it: each number that would come
// from one is nan, and so is the row's loss.
SX_DEVICE inline int64_t class_or_unknown(int64_t id, int64_t num_classes) {
  return uint64_t(id) < uint64_t(num_classes) ? id : num_classes;
}

template <typename A>
SX_DEVICE inline A class_scalar(const ScalarTable& table, int64_t id, int64_t num_classes, A absent) {
  return id < num_classes ? load_scalar<A>(table, id, absent) : quiet_nan<A>();
}

// Whether a class is one of the row's known positives. Offsets are clamped: those of a device come unchecked, too.
SX_DEVICE inline bool is_known_positive(const int64_t* offsets, const int64_t* ids, int64_t size, int64_t b,
                                        int64_t id) {
  if (offsets == nullptr) return false;
  const int64_t begin = offsets[b] < 0 ? 0 : offsets[b], end = offsets[b + 1] < size ? offsets[b + 1] : size;
  for (int64_t k = begin; k < end; ++k) {
    if (ids[k] == id) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------------------------ wide rows
// Where the warps of a block share a class row: product `x` of row `row` over one warp's columns -> over all of them,
// in the order of the warps, the same bits in each. `writes`: one lane a warp and row. One barrier, for all threads:
// who writes the same half of `parts` again, two calls later, has passed the barrier of the call between, to which
// everybody comes after reading.
template <int kWarps, int kRows>
SX_DEVICE inline float across_warps(float (&parts)[2][kWarps][kRows], int& turn, float x, int row, bool writes) {
  if (writes) parts[turn][warp_id()][row] = x;
  __syncthreads();
  x = parts[turn][0][row];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x += parts[turn][w][row];
  turn ^= 1;
  return x;
}

// ------------------------------------------------------------------------------------------------ shared draws
template <typename T, int kWidth>
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(GatherRowsParams p) {
  using A = acc_t<T>;
  const int64_t i = int64_t(blockIdx.x) * kGatherWarps + warp_id();
  if (i >= p.count) return;  // no collectives below
  const int64_t id = class_or_unknown(p.ids[i], p.num_classes);
  A* to = static_cast<A*>(p.rows) + i * p.dim;
  A x[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) x[k] = quiet_nan<A>();
  for (int64_t c = int64_t(lane_id()) * kWidth; c < p.dim; c += int64_t(kWarpSize) * kWidth) {
    if (id < p.num_classes) load_columns<kWidth>(static_cast<const T*>(p.weight) + id * p.dim + c, x);
    store_columns<kWidth>(to + c, x);
  }
}

// ------------------------------------------------------------------------------------------------ over the batch
// One block: sums in an order that depends on the batch size only.
template <typename A>
__global__ void __launch_bounds__(kMeanThreads) loss_mean_kernel(LossMeanParams p) {
  __shared__ A scratch[kMeanThreads / kWarpSize];
  A loss = 0, denom = 0;
  for (int64_t b = threadIdx.x; b < p.batch; b += kMeanThreads) {
    loss += static_cast<const A*>(p.row_loss)[b];
    denom += static_cast<const A*>(p.denom)[b];
  }
  loss = block_sum<kMeanThreads / kWarpSize>(loss, scratch);
  denom = block_sum<kMeanThreads / kWarpSize>(denom, scratch);
  if (threadIdx.x != 0) return;
  const A factor = p.mean ? mean_factor(denom) : A(1);
  *static_cast<A*>(p.loss) = loss * factor;
  *static_cast<A*>(p.factor) = factor;
}

// ------------------------------------------------------------------------------------------------ backward
template <typename T>
__global__ void __launch_bounds__(kBwdThreads) loss_bwd_kernel(LossBwdParams p) {
  using A = acc_t<T>;
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  const LossUpstream<A> up(p, b);
  for (int64_t k = threadIdx.x; k < entries; k += kBwdThreads) {
    const A coef = up.combine(p.coef_loss, p.coef_lse, b * entries + k);
    if (k < P)
      static_cast<A*>(p.coef_target)[b * P + k] = coef;
    else
      static_cast<A*>(p.coef_draw)[b * m + k - P] = coef;
  }
  T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
  const bool none = up.none(p, b);
  for (int64_t c = threadIdx.x; c < p.dim; c += kBwdThreads) {
    d_hidden[c] = from_acc<T>(none ? A(0) : up.combine(p.d_loss, p.d_lse, b * p.dim + c));
  }
  if (p.clean_hidden == nullptr) return;
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  A* clean = static_cast<A*>(p.clean_hidden) + b * p.dim;
  for (int64_t c = threadIdx.x; c < p.dim; c += kBwdThreads) {
    clean[c] = none ? A(0) : A(p.hidden_factor) * A(to_acc(hidden[c]));
  }
}

// ------------------------------------------------------------------------------------------------ debug check
// One thread an id: stops with a message at one that is out of range. skipped(id): whether a target is no class.
template <int kBlock, typename F>
SX_DEVICE inline void check_loss_id(const char* op, const int64_t* target, int64_t targets, const int64_t* ids,
                                    int64_t draws, int64_t num_classes, const F& skipped) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= targets + draws) return;
  const bool is_target = i < targets;
  const int64_t at = is_target ? i : i - targets;
  const int64_t id = is_target ? target[at] : ids[at];
  if ((id >= 0 && id < num_classes) || (is_target && skipped(id))) return;
  printf("%s: %s must be in [0, %lld), got %lld at flat position %lld\n", op, is_target ? "target" : "ids",
         (long long)num_classes, (long long)id, (long long)at);
  __trap();
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
