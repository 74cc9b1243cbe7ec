// What fused losses share on the GPU. Formulas in fused_loss_params.h.
//
//   loss_mean_kernel   the loss over the batch: one block
//   loss_bwd_kernel    coefficients and d_hidden from what the forward saved: one block per batch row
//   check_loss_id      for the losses' own check kernels (SAMPLEX_DEBUG=1)
#pragma once

#include <cstdio>

#include "common/warp.cuh"
#include "loss/fused/fused_loss_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kBwdThreads = 128;
constexpr int kMeanThreads = 256;  // of the one block that sums over the batch

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
  const LossUpstream<A> up(p, b), of_rows = up.unscaled(p);
  A largest = 0;
  for (int64_t k = threadIdx.x; k < entries; k += kBwdThreads) {
    const A coef = of_rows.combine(p.coef_loss, p.coef_lse, b * entries + k);
    largest = max_nan(largest, A(fabs(coef)));
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
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  if (p.found_inf != nullptr) {
    __shared__ A scratch[kBwdThreads / kWarpSize];
    A widest = 0;
    for (int64_t c = threadIdx.x; c < p.dim; c += kBwdThreads) widest = max_nan(widest, A(fabs(to_acc(hidden[c]))));
    largest = block_max<kBwdThreads / kWarpSize>(largest, scratch);
    widest = block_max<kBwdThreads / kWarpSize>(widest, scratch);
    // Every block that writes writes the same number.
    if (threadIdx.x == 0 && may_overflow(p, largest, widest)) *p.found_inf = 1.0f;
  }
  if (p.clean_hidden == nullptr) return;
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
