// Fused negative sampling on the GPU: one warp, which is one block, per batch row. Formulas in
// negative_sampling_params.h.
//
//   negative_sampling_kernel        float, half, bfloat16 storage; d <= 1024 (odd d: <= 256): each class row is read
//   once negative_sampling_wide_kernel   any other d, double, and shared draws (whose products come from a GEMM)
//   negative_sampling_check_kernel  SAMPLEX_DEBUG=1: stops with a message at the first id out of range
//
// One pass: a group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running
// gradient of h in registers; kRows class rows are in flight in a group. An entry's coefficient follows from its own
// product, so the rows are added to the gradient while they are still in registers. Nothing goes through shared memory
// and there is no float atomic; sums run in an order that the shapes fix: the same bits every time.
#pragma once

#include "common/fused_loss_kernel.cuh"
#include "common/vec_load.cuh"
#include "loss/negative_sampling_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kCheckThreads = 128;

// ------------------------------------------------------------------------------------------------ entries of a row
// What a lane knows of one entry before its class row is read. An entry that is not there has id -1.
template <typename A>
struct NegativeSamplingEntry {
  int64_t id;
  A bias, log_q;
};

template <typename A>
SX_DEVICE inline NegativeSamplingEntry<A> load_entry(const NegativeSamplingParams& p, int64_t b, int64_t k) {
  if (k > p.num_samples) return {-1, A(0), A(0)};
  const int64_t at = (p.shared ? 0 : b * p.num_samples) + k - 1;
  NegativeSamplingEntry<A> entry;
  entry.id = k == 0 ? p.target[b] : p.ids[at];
  entry.bias = load_scalar<A>(p.bias, entry.id, A(0));
  entry.log_q = A(0);
  if (p.reg != 0) entry.log_q = k == 0 ? static_cast<const A*>(p.target_log_q)[b] : static_cast<const A*>(p.log_q)[at];
  return entry;
}

// Adds the entry's term to `loss` and returns its coefficient.
template <typename A>
SX_DEVICE inline A finish_entry(const NegativeSamplingFactors<A>& f, A row_weight, bool target, A dot, A bias, A log_q,
                                A& loss) {
  const EntryTerm<A> term = entry_term(f.scale * (dot + bias), target, f.reg, log_q);
  const A share = row_weight * (target ? A(1) : f.share);
  loss += share * term.value;
  return share * f.scale * term.slope;
}

// An ignored row, by the whole warp.
template <typename A>
SX_DEVICE inline void zero_row(const NegativeSamplingParams& p, int64_t b) {
  if (lane_id() == 0) static_cast<A*>(p.loss)[b] = static_cast<A*>(p.denom)[b] = A(0);
  if (!p.need_grad) return;
  const int64_t entries = 1 + p.num_samples;
  for (int64_t k = lane_id(); k < entries; k += kWarpSize) static_cast<A*>(p.coef_loss)[b * entries + k] = A(0);
  for (int64_t c = lane_id(); c < p.dim; c += kWarpSize) static_cast<A*>(p.d_loss)[b * p.dim + c] = A(0);
}

// ------------------------------------------------------------------------------------------------ one pass
// Columns are split into chunks of kWidth: lane `place` of a group has chunks place, place + kGroup, … of a row. There
// are no branches around register arrays: an entry that is not there reads h instead of a class row, a column that is
// not there reads column 0 against h = 0.
template <typename T, int kWidth, int kChunks, int kGroup, int kRows>
__global__ void __launch_bounds__(kWarpSize) negative_sampling_kernel(NegativeSamplingParams p) {
  constexpr int kElements = kWidth * kChunks;
  constexpr int kGroups = kWarpSize / kGroup;
  constexpr int kRound = kGroups * kRows;  // entries of a tile
  static_assert(kRows <= kGroup && kWarpSize % kRound == 0);
  const int64_t b = blockIdx.x;
  if (p.target[b] == p.ignore_index) return zero_row<float>(p, b);  // the whole warp
  const int lane = lane_id(), group = lane / kGroup, place = lane % kGroup;
  const int dim = int(p.dim), entries = 1 + int(p.num_samples);
  const T* weight = static_cast<const T*>(p.weight);
  const T* hidden = static_cast<const T*>(p.hidden) + b * dim;
  const NegativeSamplingFactors<float> f(p);
  const float row_weight = load_scalar(p.class_weight, p.target[b], 1.0f);
  const auto column = [&](int chunk) { return (chunk * kGroup + place) * kWidth; };
  const auto load_row = [&](const T* row, float* to) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      load_values<kWidth>(row + (column(chunk) < dim ? column(chunk) : 0), to + chunk * kWidth);
    }
  };

  float h[kElements], sum[kElements];
  load_row(hidden, h);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (column(i / kWidth) >= dim) h[i] = 0;
    sum[i] = 0;
  }
  float loss = 0;
  // A lane holds id, bias and log_q of one entry of the stage and hands them round.
  for (int stage = 0; stage < entries; stage += kWarpSize) {
    const NegativeSamplingEntry<float> held = load_entry<float>(p, b, stage + lane);
    for (int tile = 0; tile < kWarpSize && stage + tile < entries; tile += kRound) {
      float rows[kRows][kElements], dots[kRows];
      // All class rows are requested before any is used: the gather is bound by latency.
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t id = shuffle_from(held.id, tile + r * kGroups + group);
        load_row(id < 0 ? hidden : weight + id * dim, rows[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dots[r] = h[0] * rows[r][0];
#pragma unroll
        for (int i = 1; i < kElements; ++i) dots[r] += h[i] * rows[r][i];
      }
      float dot = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float whole = group_sum<kGroup>(dots[r]);
        if (place % kRows == r) dot = whole;
      }
      // From here on a lane speaks for one entry of its group; of those that speak for the same one the first counts.
      const int mine = tile + (place % kRows) * kGroups + group, k = stage + mine;
      const float bias = shuffle_from(held.bias, mine), log_q = shuffle_from(held.log_q, mine);
      float term = 0;
      float coef = finish_entry(f, row_weight, k == 0, dot, bias, log_q, term);
      if (k >= entries) coef = 0;
      if (k < entries && place < kRows) {
        loss += term;
        if (p.need_grad) static_cast<float*>(p.coef_loss)[b * entries + k] = coef;
      }
      if (p.need_grad) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float c = shuffle_from(coef, group * kGroup + r);
          // Not 0 * row: what stands in for an entry that is not there may be infinite.
          if (stage + tile + r * kGroups + group < entries) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) sum[i] += c * rows[r][i];
          }
        }
      }
    }
  }
  loss = group_sum<kWarpSize>(loss);
  if (lane == 0) {
    static_cast<float*>(p.loss)[b] = loss;
    static_cast<float*>(p.denom)[b] = row_weight;
  }
  if (!p.need_grad) return;  // the whole warp
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int step = kGroup; step < kWarpSize; step *= 2) sum[i] += shuffle_xor(sum[i], step);
  }
  float* d_loss = static_cast<float*>(p.d_loss) + b * dim;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk % kGroups == group && column(chunk) < dim)
      store_floats<kWidth>(d_loss + column(chunk), sum + chunk * kWidth);
  }
}

// ------------------------------------------------------------------------------------------------ any width
template <int kWidth, typename T, typename A>
SX_DEVICE inline void load_columns(const T* row, A* to) {
  if constexpr (sizeof(A) == 8)
    to[0] = row[0];
  else
    load_values<kWidth>(row, to);
}

// Rows too wide for registers: a lane adds the columns it has read to its own columns of d_loss in memory, right after
// the product, so that the class row comes from the cache the second time.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarpSize) negative_sampling_wide_kernel(NegativeSamplingParams p) {
  using A = acc_t<T>;
  const int64_t b = blockIdx.x;
  if (p.target[b] == p.ignore_index) return zero_row<A>(p, b);  // the whole warp
  const int64_t entries = 1 + p.num_samples, first = int64_t(lane_id()) * kWidth, step = int64_t(kWarpSize) * kWidth;
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  A* coefs = static_cast<A*>(p.coef_loss) + b * entries;
  A* d_loss = static_cast<A*>(p.d_loss) + b * p.dim;
  const NegativeSamplingFactors<A> f(p);
  const A row_weight = load_scalar<A>(p.class_weight, p.target[b], A(1));
  A loss = 0;
  const int64_t rows_read = p.shared ? 1 : entries;
  for (int64_t k = 0; k < rows_read; ++k) {
    const NegativeSamplingEntry<A> entry = load_entry<A>(p, b, k);
    const T* row = static_cast<const T*>(p.weight) + entry.id * p.dim;
    A x[kWidth], w[kWidth];
    A dot = 0;
    for (int64_t c = first; c < p.dim; c += step) {
      load_columns<kWidth>(hidden + c, x);
      load_columns<kWidth>(row + c, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot += x[i] * w[i];
    }
    dot = group_sum<kWarpSize>(dot);
    A term = 0;
    const A coef = finish_entry(f, row_weight, k == 0, dot, entry.bias, entry.log_q, term);
    if (lane_id() == 0) {
      loss += term;
      if (p.need_grad) coefs[k] = coef;
    }
    if (!p.need_grad) continue;  // the whole warp
    for (int64_t c = first; c < p.dim; c += step) {
      load_columns<kWidth>(row + c, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d_loss[c + i] = (k == 0 ? A(0) : d_loss[c + i]) + coef * w[i];
    }
  }
  // Shared draws: the products are there, and their part of d_loss goes to a GEMM.
  for (int64_t k = rows_read + lane_id(); k < entries; k += kWarpSize) {
    const NegativeSamplingEntry<A> entry = load_entry<A>(p, b, k);
    const A dot = static_cast<const A*>(p.dots)[b * p.num_samples + k - 1];
    const A coef = finish_entry(f, row_weight, false, dot, entry.bias, entry.log_q, loss);
    if (p.need_grad) coefs[k] = coef;
  }
  loss = group_sum<kWarpSize>(loss);
  if (lane_id() == 0) {
    static_cast<A*>(p.loss)[b] = loss;
    static_cast<A*>(p.denom)[b] = row_weight;
  }
}

// ------------------------------------------------------------------------------------------------ debug check
// A kernel of its own: a printf in the hot kernels costs them a stack frame and registers.
__global__ void __launch_bounds__(kCheckThreads) negative_sampling_check_kernel(NegativeSamplingParams p) {
  check_loss_id<kCheckThreads>("negative_sampling", p.target, p.batch, p.ids, (p.shared ? 1 : p.batch) * p.num_samples,
                               p.num_classes, [&](int64_t id) { return id == p.ignore_index; });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
