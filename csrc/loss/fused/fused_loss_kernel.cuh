// What fused losses share on the GPU. Formulas in fused_loss_params.h.
//
//   loss_mean_kernel   the loss over the batch: one block
//   loss_bwd_kernel    coefficients and d_hidden from what the forward saved: one block per batch row
//   gather_rows_kernel class rows of shared draws: one warp a row
//   split_kernel       coefficients in two parts of 16 bits: one block per batch row
//   across_warps       product of a class row that the warps of a block share
//   class_or_unknown   ids of a device come unchecked: one compare before a table is read
//   check_loss_id      for the losses' own check kernels (SAMPLEX_DEBUG=1)
#pragma once

#include <cstdio>
#include <cstring>
#include <type_traits>

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

// ------------------------------------------------------------------------------------------------ shared draws
// Rows are copied as words of type Word, `words` a row.
template <typename Word>
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(GatherRowsParams p, int64_t words) {
  const int64_t i = int64_t(blockIdx.x) * kGatherWarps + warp_id();
  if (i >= p.copies * p.width) return;  // the whole warp
  const int64_t at = i % p.width, id = at < p.n ? p.ids[at] : 0;
  const bool inside = at < p.n && id >= 0 && id < p.num_classes;
  Word fill;
  memset(&fill, at < p.n ? 0xFF : 0, sizeof(Word));  // all bits set is a nan of every type
  const Word* from = static_cast<const Word*>(p.weight) + (inside ? id : 0) * words;
  Word* to = static_cast<Word*>(p.rows) + i * words;
  for (int64_t c = lane_id(); c < words; c += kWarpSize) to[c] = inside ? from[c] : fill;
}

template <typename T>
__global__ void __launch_bounds__(kBwdThreads) split_kernel(SplitParams p) {
  const int64_t b = blockIdx.x;
  T* high = static_cast<T*>(p.parts) + b * 2 * p.width;
  for (int64_t k = threadIdx.x; k < p.width; k += kBwdThreads) {
    split16(k < p.columns ? static_cast<const float*>(p.from)[b * p.stride + k] : 0.0f, high[k], high[p.width + k]);
  }
}

// ------------------------------------------------------------------------------------------------ backward
template <typename T>
__global__ void __launch_bounds__(kBwdThreads) loss_bwd_kernel(LossBwdParams p) {
  using A = acc_t<T>;
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  const LossUpstream<A> up(p, b), of_rows = up.unscaled(p);
  A largest = 0;
  for (int64_t k = threadIdx.x; k < entries; k += kBwdThreads) {
    const A coef = of_rows.combine(p.coef_loss, p.coef_lse, b * p.coefs.stride + k);
    largest = max_nan(largest, A(fabs(coef)));
    if (k < P)
      static_cast<A*>(p.coef_target)[b * P + k] = coef;
    else if (p.coef_draw != nullptr)
      static_cast<A*>(p.coef_draw)[b * m + k - P] = coef;
    if constexpr (std::is_same_v<T, BFloat16>) {
      BFloat16* high = static_cast<BFloat16*>(p.draw_parts) + b * 2 * p.parts_width;
      if (p.draw_parts != nullptr && k >= P) split16(coef, high[k - P], high[p.parts_width + k - P]);
    }
  }
  T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
  const bool none = up.none(p, b);
  for (int64_t c = threadIdx.x; c < p.dim; c += kBwdThreads) {
    d_hidden[c] = from_acc<T>(none ? A(0) : up.combine_hidden(p, b * p.dim + c));
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
  if (p.draw_parts != nullptr) {
    T* twice = static_cast<T*>(p.clean_hidden) + b * 2 * p.dim;
    for (int64_t c = threadIdx.x; c < p.dim; c += kBwdThreads) {
      twice[c] = twice[p.dim + c] = none ? from_acc<T>(A(0)) : hidden[c];
    }
    return;
  }
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
