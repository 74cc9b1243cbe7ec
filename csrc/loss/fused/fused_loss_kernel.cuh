// What fused losses share on the GPU. Formulas in fused_loss_params.h.
//
//   loss_mean_kernel   the loss over the batch: one block; where it can, the last block of a loss does it
//   loss_bwd_kernel    coefficients and d_hidden from what the forward saved: one block per batch row; besides, bias
//                      gradients of shared draws and the sort keys of the entries
//   gather_rows_kernel class rows of shared draws: one warp a row
//   row_norms_kernel   1 / |w| of shared draws: one warp a row
//   store_parts        coefficients in two parts of 16 bits
//   class_or_unknown   ids of a device come unchecked: one compare before a table is read
//   check_loss_id      for the losses' own check kernels (SAMPLEX_DEBUG=1)
#pragma once

#include <cstdio>
#include <type_traits>

#include "common/gather_rows.cuh"
#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/fused/fused_loss_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kGatherWarps = 4;
constexpr int kGatherThreads = kGatherWarps * kWarpSize;
constexpr int kBwdThreads = 256;
constexpr int kBwdResident = 4;    // blocks of a multiprocessor; left to itself, ptxas spills for a fifth on sm_120
constexpr int kBiasColumns = 8;    // floats of one sector
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

// ------------------------------------------------------------------------------------------------ over the batch
// One block: sums in an order that depends on the batch size only.
// By all threads of a block.
template <int kThreads, typename A>
SX_DEVICE inline void reduce_loss(const LossMeanParams& p, A* scratch) {
  A loss = 0, denom = 0;
#pragma unroll 8
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
    loss += static_cast<const A*>(p.row_loss)[b];
    denom += static_cast<const A*>(p.denom)[b];
  }
  loss = block_sum<kThreads / kWarpSize>(loss, scratch);
  denom = block_sum<kThreads / kWarpSize>(denom, scratch);
  if (threadIdx.x != 0) return;
  const A factor = p.mean ? mean_factor(denom) : A(1);
  *static_cast<A*>(p.loss) = loss * factor;
  *static_cast<A*>(p.factor) = factor;
}

template <typename A>
__global__ void __launch_bounds__(kMeanThreads) loss_mean_kernel(LossMeanParams p) {
  __shared__ A scratch[kMeanThreads / kWarpSize];
  reduce_loss<kMeanThreads>(p, scratch);
}

// At the end of a kernel with a block per batch row, by all threads. Whether this block came last and did it.
template <int kThreads, typename A>
SX_DEVICE inline bool reduce_loss_last(const LossMeanParams& p, A* scratch) {
  if (p.arrived == nullptr || !block_arrives_last(p.arrived, int(p.batch))) return false;
  reduce_loss<kThreads>(p, scratch);
  return true;
}

// ------------------------------------------------------------------------------------------------ shared draws
template <typename Word>
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(GatherRowsParams p, int64_t words) {
  const int64_t at = int64_t(blockIdx.x) * kGatherWarps + warp_id();
  if (at < p.width) gather_row<Word>(p, words, at, at < p.n ? p.ids[at] : 0);  // the whole warp
}

template <typename T>
__global__ void __launch_bounds__(kGatherThreads) row_norms_kernel(RowNormsParams p) {
  using A = acc_t<T>;
  const int64_t at = int64_t(blockIdx.x) * kGatherWarps + warp_id();
  const int64_t id = at < p.n ? class_or_unknown(p.ids[at], p.num_classes) : p.num_classes;
  const T* row = static_cast<const T*>(p.weight) + id * p.dim;
  A sum = 0;
  for (int64_t c = lane_id(); id < p.num_classes && c < p.dim; c += kWarpSize) sum += to_acc(row[c]) * to_acc(row[c]);
  sum = group_sum<kWarpSize>(sum);
  if (at >= p.n || lane_id() != 0) return;
  static_cast<A*>(p.inverse)[at] = id < p.num_classes ? inverse_norm(sum) : quiet_nan<A>();
}

// Coefficient of draw `draw` of row b in two parts, where they are wanted: T is the storage type.
template <typename T, typename A>
SX_DEVICE inline void store_parts(const DrawParts& x, int64_t b, int64_t draw, A coef) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (x.parts == nullptr) return;
    BFloat16* const high = static_cast<BFloat16*>(x.parts) + b * 2 * x.width + draw;
    split16(coef, high[0], high[x.width]);
  }
}

// Zeros in the columns of row b that no draw has, and in all of them with draws = 0; by `threads` threads, of which
// this is one.
template <typename T>
SX_DEVICE inline void clear_parts(const DrawParts& x, int64_t b, int64_t draws, int64_t thread, int64_t threads) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (x.parts == nullptr) return;
    for (int64_t k = draws + thread; k < x.width; k += threads) store_parts<T>(x, b, k, 0.0f);
  }
}

// ------------------------------------------------------------------------------------------------ backward
// What kBiasColumns shared draws from `first` on add to their biases: columns of coefficients, summed over the batch. A
// thread walks every kWalkers-th row of a column; then the walkers are added in their order.
template <typename A>
SX_DEVICE inline void sum_draw_coefs(const LossBwdParams& p, int64_t first) {
  constexpr int kWalkers = kBwdThreads / kBiasColumns;
  __shared__ A parts[kWalkers][kBiasColumns];
  const int column = int(threadIdx.x) % kBiasColumns, walker = int(threadIdx.x) / kBiasColumns;
  const bool inside = first + column < p.num_samples;
  const int64_t at = p.num_targets + (inside ? first + column : 0);
  const bool one_factor = p.factor != nullptr && p.grad_lse == nullptr;
  A sum = 0;
  if (one_factor) {  // it goes onto the sum
    const A* const from = static_cast<const A*>(p.coef_loss) + at;
#pragma unroll 16
    for (int64_t b = walker; b < p.batch; b += kWalkers) sum += from[b * p.coefs.stride];
  } else {
    for (int64_t b = walker; b < p.batch; b += kWalkers) {
      sum += LossUpstream<A>(p, b).unscaled(p).combine(p.coef_loss, p.coef_lse, b * p.coefs.stride + at);
    }
  }
  parts[walker][column] = sum;
  __syncthreads();
  if (walker != 0 || !inside) return;
  for (int w = 1; w < kWalkers; ++w) sum += parts[w][column];
  if (one_factor) {
    const A factor = LossUpstream<A>(p, 0).unscaled(p).of_loss;
    sum = factor == A(0) ? A(0) : factor * sum;
  }
  static_cast<A*>(p.draw_bias)[first + column] = sum;
}

// One block per batch row, behind the blocks that sum the biases, which take longest.
template <typename T>
__global__ void __launch_bounds__(kBwdThreads, kBwdResident) loss_bwd_kernel(LossBwdParams p, int bias_blocks) {
  using A = acc_t<T>;
  if (int(blockIdx.x) < bias_blocks) return sum_draw_coefs<A>(p, int64_t(blockIdx.x) * kBiasColumns);
  const int64_t b = int64_t(blockIdx.x) - bias_blocks, P = p.num_targets, m = p.num_samples, entries = P + m;
  const LossUpstream<A> up(p, b), of_rows = up.unscaled(p);
  const bool with_keys = p.keys.keys != nullptr;
  A largest = 0;
  const int64_t combined = p.unit_coefs && p.found_inf == nullptr ? P : entries;
  for (int64_t k = threadIdx.x; k < combined; k += kBwdThreads) {
    const A coef = of_rows.combine(p.coef_loss, p.coef_lse, b * p.coefs.stride + k);
    largest = max_nan(largest, A(fabs(coef)));
    if (k < P) {
      static_cast<A*>(p.coef_target)[b * P + k] = coef;
      if (with_keys) store_row_key(p.keys, b * P + k, p.target[b * P + k], coef == A(0));
      continue;
    }
    const int64_t draw = k - P;
    if (p.coef_draw != nullptr) static_cast<A*>(p.coef_draw)[b * m + draw] = coef;
    if (with_keys && !p.shared) store_row_key(p.keys, p.batch * P + b * m + draw, p.ids[b * m + draw], coef == A(0));
    store_parts<T>(p.draw_parts, b, draw, coef);
  }
  const int64_t first = b * kBwdThreads + threadIdx.x, threads = p.batch * kBwdThreads;
  if (p.shared) {
    const A coef = p.unit_coefs ? of_rows.of_loss : A(1);
    for (int64_t j = first; j < m; j += threads) {
      if (p.draw_coef != nullptr) static_cast<A*>(p.draw_coef)[j] = coef;
      if (with_keys) store_row_key(p.keys, p.batch * P + j, p.ids[j], coef == A(0));
    }
  }
  for (int64_t j = first; with_keys && j < p.keys.num_counters; j += threads) p.keys.counters[j] = 0;
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
  if (p.draw_parts.parts != nullptr) {
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
// One thread an id: stops with a message at one that is out of range. skipped(id): whether a target is not a class.
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
