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

constexpr int kKnownLoads = 2;  // of a lane, under way at once

// Whether each lane's class is one of the row's known positives; by the whole warp. `asks`: whether the lane wants to
// know. Offsets are clamped: those of a device come unchecked, too.
//
// The warp reads the list once for all of its lanes, 32 entries a load. A filter of 1,024 bits, a word a lane, says
// which of them may be asked for: few, and only those go round.
SX_DEVICE inline bool is_known_positive(const int64_t* offsets, const int64_t* ids, int64_t size, int64_t b, int64_t id,
                                        bool asks) {
  if (offsets == nullptr || !warp_any(asks)) return false;
  const int64_t begin = offsets[b] < 0 ? 0 : offsets[b], end = offsets[b + 1] < size ? offsets[b + 1] : size;
  const auto bit_of = [](int64_t x) { return uint32_t(x) * 2654435761u >> 22; };
  unsigned word = 0xFFFFFFFFu;  // a list of one load passes as it is
  if (end - begin > kWarpSize) {
    word = 0;
    const unsigned own = asks ? bit_of(id) : 1024u;
#pragma unroll 4
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const unsigned bit = shuffle_from(own, lane);
      if (int(bit >> 5) == lane_id()) word |= 1u << (bit & 31u);
    }
  }
  bool known = false;
#pragma unroll 1
  for (int64_t at = begin; at < end; at += kKnownLoads * kWarpSize) {
    int64_t listed[kKnownLoads];
#pragma unroll
    for (int i = 0; i < kKnownLoads; ++i) {
      const int64_t k = at + i * kWarpSize + lane_id();
      listed[i] = ids[k < end ? k : end - 1];
    }
#pragma unroll
    for (int i = 0; i < kKnownLoads; ++i) {
      if (at + i * kWarpSize >= end) break;  // the whole warp
      const unsigned bit = bit_of(listed[i]);
      const unsigned found = shuffle_from(word, int(bit >> 5)) >> (bit & 31u) & 1u;
      const bool inside = at + i * kWarpSize + lane_id() < end;
#pragma unroll 1
      for (unsigned rest = warp_ballot(inside && found != 0); rest != 0; rest &= rest - 1) {
        const int64_t other = shuffle_from(listed[i], __ffs(int(rest)) - 1);
        known = known || other == id;
      }
    }
  }
  return known && asks;
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

template <typename T, int kWidth>
__global__ void __launch_bounds__(kGatherThreads) row_norms_kernel(RowNormsParams p) {
  using A = acc_t<T>;
  const int64_t at = int64_t(blockIdx.x) * kGatherWarps + warp_id();
  const int64_t id = at < p.n ? class_or_unknown(p.ids[at], p.num_classes) : p.num_classes;
  const T* row = static_cast<const T*>(p.weight) + id * p.dim;
  A sum = 0;
#pragma unroll 4
  for (int64_t c = lane_id() * kWidth; id < p.num_classes && c < p.dim; c += kWarpSize * kWidth) {
    A w[kWidth];
    load_columns<kWidth>(row + c, w);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += w[i] * w[i];
  }
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

// `Width` numbers that are read or written at once.
template <typename T, int Width>
struct alignas(Width * sizeof(T)) Columns {
  T x[Width];
};
template <int Width, typename T>
SX_DEVICE inline Columns<T, Width> columns_at(const void* from, int64_t at) {
  return *reinterpret_cast<const Columns<T, Width>*>(static_cast<const T*>(from) + at);
}
template <int Width, typename T>
SX_DEVICE inline void store_at(void* to, int64_t at, const Columns<T, Width>& x) {
  *reinterpret_cast<Columns<T, Width>*>(static_cast<T*>(to) + at) = x;
}

// What the backward does with h and its gradient in row b; `Width` columns of a thread at a time. Returns the largest
// |h| if a loss scale asks for it.
template <int Width, typename T, typename A>
SX_DEVICE inline A hidden_columns(const LossBwdParams& p, const LossUpstream<A>& up, int64_t b) {
  const bool none = up.none(p, b), asks = p.found_inf != nullptr;
  A widest = 0;
  for (int64_t c = int64_t(threadIdx.x) * Width; c < p.dim; c += kBwdThreads * Width) {
    const int64_t at = b * p.dim + c;
    Columns<T, Width> d;
    A parts[Width] = {};
    // As LossUpstream::combine_hidden, number for number.
    const auto add = [&](A factor, const void* own, const void* draws, bool first) {
      if (factor == A(0)) return;
      const auto x = columns_at<Width, A>(own, at);
      Columns<A, Width> more{};
      if (draws != nullptr) more = columns_at<Width, A>(draws, at);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const A term = factor * (draws != nullptr ? x.x[i] + more.x[i] : x.x[i]);
        parts[i] = first ? term : parts[i] + term;
      }
    };
    if (!none) {
      add(up.of_loss, p.d_loss, p.draws_loss, true);
      add(up.of_lse, p.d_lse, p.draws_lse, false);
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) d.x[i] = from_acc<T>(parts[i]);
    store_at<Width, T>(p.d_hidden, at, d);
    if (p.clean_hidden == nullptr && !asks) continue;
    const auto h = columns_at<Width, T>(p.hidden, at);
#pragma unroll
    for (int i = 0; i < Width; ++i) widest = max_nan(widest, A(fabs(to_acc(h.x[i]))));
    if (p.clean_hidden == nullptr) continue;
    if (p.draw_parts.parts != nullptr) {
      const auto twice = none ? Columns<T, Width>{} : h;
      store_at<Width, T>(p.clean_hidden, at + b * p.dim, twice);
      store_at<Width, T>(p.clean_hidden, at + (b + 1) * p.dim, twice);
      continue;
    }
    Columns<A, Width> clean;
#pragma unroll
    for (int i = 0; i < Width; ++i) clean.x[i] = none ? A(0) : A(p.hidden_factor) * A(to_acc(h.x[i]));
    store_at<Width, A>(p.clean_hidden, at, clean);
  }
  return widest;
}

// One block per batch row, behind the blocks that sum the biases, which take longest.
template <typename T>
__global__ void __launch_bounds__(kBwdThreads, kBwdResident)
    loss_bwd_kernel(LossBwdParams p, int bias_blocks, bool wide) {
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
  // Four numbers at a time: 16 bytes of the accumulation type.
  constexpr int kWidth = sizeof(A) == 4 ? 4 : 1;
  A widest;
  if (kWidth > 1 && wide)
    widest = hidden_columns<kWidth, T>(p, up, b);
  else
    widest = hidden_columns<1, T>(p, up, b);
  if (p.found_inf == nullptr) return;
  __shared__ A scratch[kBwdThreads / kWarpSize];
  largest = block_max<kBwdThreads / kWarpSize>(largest, scratch);
  widest = block_max<kBwdThreads / kWarpSize>(widest, scratch);
  // Every block that writes writes the same number.
  if (threadIdx.x == 0 && may_overflow(p, largest, widest)) *p.found_inf = 1.0f;
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
