// Fused sampled softmax on the GPU: one block per batch row. Formulas in sampled_softmax_params.h.
//
//   sampled_softmax_kernel         float, half, bfloat16 storage and d <= 1024: one pass over the gathered rows
//   sampled_softmax_wide_kernel    any d, double, and shared draws (whose products come from a GEMM)
//   sampled_softmax_bwd_kernel     coefficients and d_hidden from what the forward saved
//   sampled_softmax_check_kernel   SAMPLEX_DEBUG=1: stops with a message at the first id out of range
//
// One pass: a group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running unit
// gradient in registers. kRows class rows are in flight in a group; their products are folded so that lane q of a group
// ends with the sum of row q / (kGroup / kRows), computes one exponential, and hands it back. All groups of a warp share
// one running maximum, so their partial gradients simply add up in shared memory at the end. No float atomics, no order
// that depends on scheduling: the same bits every time. What bounds it is the gather: 4 d bytes a class row.
#pragma once

#include <cstdio>

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/sampled_softmax_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kOneWarps = 2;  // block of the one-pass kernel: few threads, so that what a block does once costs little
constexpr int kOneThreads = kOneWarps * kWarpSize;
constexpr int kWarps = 4;  // block of the others
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kStage = 256;  // entries staged in shared memory at a time, a multiple of every kRound

// ------------------------------------------------------------------------------------------------ entries of a row
SX_DEVICE inline bool counts_as_target(const SampledSoftmaxParams& p, int64_t id) {
  return id != p.ignore_index && !(p.num_targets > 1 && id == kPadding);
}

SX_DEVICE inline bool draw_masked(const SampledSoftmaxParams& p, int64_t b, int64_t id) {
  for (int64_t k = 0; k < p.num_targets; ++k) {
    const int64_t target = p.target[b * p.num_targets + k];
    if (target == id && counts_as_target(p, target)) return true;
  }
  if (p.known_offsets != nullptr) {
    for (int64_t k = p.known_offsets[b]; k < p.known_offsets[b + 1]; ++k) {
      if (p.known_ids[k] == id) return true;
    }
  }
  return false;
}

// Class of entry k (target, then draws), or -1 where it takes no part.
SX_DEVICE inline int64_t entry_id(const SampledSoftmaxParams& p, int64_t b, int64_t k) {
  if (k < p.num_targets) {
    const int64_t id = p.target[b * p.num_targets + k];
    return counts_as_target(p, id) ? id : -1;
  }
  const int64_t draw = k - p.num_targets;
  const int64_t id = p.ids[(p.shared ? 0 : b * p.num_samples) + draw];
  return draw_masked(p, b, id) ? -1 : id;
}

// What is added to scale * h.w before and after the absolute value.
template <typename A>
struct EntryOffsets {
  A inside;   // scale * bias
  A outside;  // -log_q - log m for a draw; nan where log_q is not finite, so that bad input shows
};

template <typename A>
SX_DEVICE inline EntryOffsets<A> entry_offsets(const SampledSoftmaxParams& p, int64_t b, int64_t k, int64_t id,
                                               A log_m) {
  const A inside = A(p.scale) * load_scalar<A>(p.bias, id, A(0));
  if (k < p.num_targets) return {inside, A(0)};
  const A log_q = static_cast<const A*>(p.log_q)[(p.shared ? 0 : b * p.num_samples) + k - p.num_targets];
  return {inside, is_finite(log_q) ? -log_q - log_m : quiet_nan<A>()};
}

// sign(x) with sign(0) = 0, and nan for nan
template <typename A>
SX_DEVICE inline A sign_of(A x) {
  return x > 0 ? A(1) : x < 0 ? A(-1) : x;
}

// Every logit -inf (an infinite h) is not a sum of nothing but a bad row.
template <typename A>
SX_DEVICE inline A row_lse(A max, A sum) {
  return max == negative_infinity<A>() ? quiet_nan<A>() : max + log_acc(sum);
}

// What a row knows before it reads any class row.
template <typename A>
struct RowSetup {
  int64_t num_targets;  // without padding
  A weight_sum;         // class weights of the targets, summed
  A target_share, every_share;
};

// Share a_k of entry k.
template <typename A>
SX_DEVICE inline A entry_share(const SampledSoftmaxParams& p, const RowSetup<A>& row, int64_t k, int64_t id) {
  A share = row.every_share + (k < p.num_targets ? row.target_share : A(0));
  if (share != A(0) && p.class_weight.data != nullptr) share *= load_scalar<A>(p.class_weight, id, A(1));
  return share;
}

// Counts targets and, for label smoothing, entries. All threads of the block call it.
template <int kBlockWarps, typename A>
SX_DEVICE inline RowSetup<A> setup_row(const SampledSoftmaxParams& p, int64_t b, A* scratch) {
  RowSetup<A> row = {0, A(0), A(0), A(0)};
  for (int64_t k = 0; k < p.num_targets; ++k) {
    const int64_t id = p.target[b * p.num_targets + k];
    if (!counts_as_target(p, id)) continue;
    ++row.num_targets;
    row.weight_sum += load_scalar<A>(p.class_weight, id, A(1));
  }
  if (row.num_targets == 0) return row;
  row.target_share = A(1 - p.label_smoothing) / A(row.num_targets);
  if (p.label_smoothing > 0) {
    // Counted in the accumulation type: exact up to 2^24 draws, the most a key allows.
    A entries = 0;
    for (int64_t k = threadIdx.x; k < p.num_targets + p.num_samples; k += kBlockWarps * kWarpSize) {
      entries += entry_id(p, b, k) >= 0 ? A(1) : A(0);
    }
    row.every_share = A(p.label_smoothing) / block_sum<kBlockWarps>(entries, scratch);
  }
  return row;
}

template <int kBlock, typename A>
SX_DEVICE inline void zero_row(const SampledSoftmaxParams& p, int64_t b) {
  const int64_t entries = p.num_targets + p.num_samples;
  const int64_t pull_width = p.label_smoothing > 0 ? entries : p.num_targets;
  if (threadIdx.x == 0) {
    static_cast<A*>(p.loss)[b] = A(0);
    static_cast<A*>(p.lse)[b] = A(0);
    static_cast<A*>(p.denom)[b] = A(0);
    if (p.need_grad) static_cast<A*>(p.total)[b] = A(0);
  }
  if (!p.need_grad) return;
  for (int64_t k = threadIdx.x; k < entries; k += kBlock) static_cast<A*>(p.push)[b * entries + k] = A(0);
  for (int64_t k = threadIdx.x; k < pull_width; k += kBlock) static_cast<A*>(p.pull)[b * pull_width + k] = A(0);
  for (int64_t c = threadIdx.x; c < p.dim; c += kBlock) {
    static_cast<A*>(p.d_push)[b * p.dim + c] = A(0);
    static_cast<A*>(p.d_pull)[b * p.dim + c] = A(0);
  }
}

// Logits (kept in `push` meanwhile) become push; shares become pull. Masked entries hold -inf and get 0 even in a nan row.
template <int kBlock, typename A>
SX_DEVICE inline void finish_coefficients(const SampledSoftmaxParams& p, const RowSetup<A>& row, int64_t b, A lse,
                                          bool trivial) {
  const int64_t entries = p.num_targets + p.num_samples;
  const int64_t pull_width = p.label_smoothing > 0 ? entries : p.num_targets;
  A* push = static_cast<A*>(p.push) + b * entries;
  A* pull = static_cast<A*>(p.pull) + b * pull_width;
  for (int64_t k = threadIdx.x; k < entries; k += kBlock) {
    const A logit = push[k];
    const bool part = logit != negative_infinity<A>() || (lse != lse && entry_id(p, b, k) >= 0);
    const A sign = p.absolute && part ? static_cast<const A*>(p.signs)[b * entries + k] : A(1);
    push[k] = part ? A(p.scale) * sign * exp_acc(logit - lse) : A(0);
    if (k < pull_width) {
      const int64_t id = entry_id(p, b, k);
      pull[k] = id < 0 || trivial ? A(0) : A(p.scale) * sign * entry_share(p, row, k, id);
    }
  }
}

// ------------------------------------------------------------------------------------------------ one pass, d <= 1024
// Written without branches around register arrays: a class row that is not there is replaced by h with weight 0, a column
// that is not there by column 0 with h = 0.
template <typename T, int kWidth, int kChunks, int kGroup, bool kFull>
struct OnePass {
  static constexpr int kElements = kWidth * kChunks;     // columns of a lane
  static constexpr int kSpan = kElements * kGroup;       // columns of a group, >= d
  static constexpr int kGroups = kOneThreads / kGroup;   // groups of a block
  static constexpr int kRows = kElements > 16 ? 2 : 4;   // class rows in flight in a group: 64 registers of a lane
  static constexpr int kHolders = kGroup / kRows;        // lanes that hold the same folded sum
  static constexpr int kRound = kGroups * kRows;         // entries of a round of the block

  struct Shared {
    int64_t ids[kStage];
    float inside[kStage];
    float outside[kStage];
    float shares[kStage];
    float warp_max[kOneWarps];
    float warp_sum[kOneWarps];
    float warp_pulled[kOneWarps];
    float warp_drawn[kOneWarps];
    float scratch[kOneWarps];
  };

  const SampledSoftmaxParams& p;
  Shared& s;
  float* const pull;  // [groups, span] in shared memory: few entries pull, so it takes no registers
  const int64_t b;
  const int lane, group, place;  // lane in the warp, group in the block, lane in the group
  const int64_t dim;
  const T *const hidden, *const weight;
  float* const logits;  // where `push` of this row goes in the end
  const float scale;
  const bool absolute, need_grad;
  float h[kElements], push[kElements];
  float max, sum, pulled;

  SX_DEVICE OnePass(const SampledSoftmaxParams& params, Shared& shared, float* pull_buffer, int64_t row)
      : p(params),
        s(shared),
        pull(pull_buffer),
        b(row),
        lane(lane_id()),
        group(int(threadIdx.x) / kGroup),
        place(int(threadIdx.x) % kGroup),
        dim(params.dim),
        hidden(static_cast<const T*>(params.hidden) + row * params.dim),
        weight(static_cast<const T*>(params.weight)),
        logits(static_cast<float*>(params.push) + row * (params.num_targets + params.num_samples)),
        scale(float(params.scale)),
        absolute(params.absolute),
        need_grad(params.need_grad),
        max(negative_infinity<float>()),
        sum(0),
        pulled(0) {}

  SX_DEVICE int column(int chunk) const { return (chunk * kGroup + place) * kWidth; }

  SX_DEVICE void load_row(const T* row, float* out) const {
    const T* mine = row + place * kWidth;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool real = kFull || column(chunk) < dim;
      load_values<kWidth>(real ? mine + chunk * kGroup * kWidth : row, out + chunk * kWidth);
    }
  }

  // kRows products of this lane's columns -> the whole product of row `place / kHolders`, in log2(kGroup) exchanges.
  SX_DEVICE float fold(const float* v) const {
    const bool high = place & (kGroup / 2);
    float x;
    if constexpr (kRows == 4) {
      const bool odd = place & (kGroup / 4);
      const float a = (high ? v[2] : v[0]) + shuffle_xor(high ? v[0] : v[2], kGroup / 2);
      const float c = (high ? v[3] : v[1]) + shuffle_xor(high ? v[1] : v[3], kGroup / 2);
      x = (odd ? c : a) + shuffle_xor(odd ? a : c, kGroup / 4);
    } else {
      static_assert(kRows == 2);
      x = (high ? v[1] : v[0]) + shuffle_xor(high ? v[0] : v[1], kGroup / 2);
    }
#pragma unroll
    for (int step = kHolders / 2; step > 0; step /= 2) x += shuffle_xor(x, step);
    return x;
  }

  // Scores entries first .. first + kCount - 1 of the stage for this lane's group; kCount is kRows, or 1 for the rest.
  template <int kCount>
  SX_DEVICE void tile(int first, int64_t stage_begin) {
    constexpr int kSame = kCount == 1 ? kGroup : kHolders;  // lanes that speak for the same entry
    float rows[kCount][kElements];
    float products[kCount];
    // All class rows are requested before any is used: the gather is bound by latency.
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const int64_t id = s.ids[first + r];
      load_row(id < 0 ? hidden : weight + id * dim, rows[r]);
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      products[r] = h[0] * rows[r][0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) products[r] += h[i] * rows[r][i];
    }
    float dot;
    if constexpr (kCount == 1)
      dot = group_sum<kGroup>(products[0]);
    else
      dot = fold(products);

    // From here on a lane speaks for one entry of its group.
    const int mine = first + place / kSame;
    const bool part = s.ids[mine] >= 0;
    float value = scale * dot + s.inside[mine];
    const float sign = absolute ? sign_of(value) : 1.0f;
    value = absolute ? fabsf(value) : value;
    const float logit = part ? value + s.outside[mine] : negative_infinity<float>();
    if (need_grad && part && place % kSame == 0) {
      logits[stage_begin + mine] = logit;
      if (absolute) static_cast<float*>(p.signs)[(logits - static_cast<float*>(p.push)) + stage_begin + mine] = sign;
    }
    // One maximum for the warp. fmaxf drops a nan: exp carries it into the sum instead.
    float new_max = fmaxf(max, logit);
#pragma unroll
    for (int step = kWarpSize / 2; step >= kSame; step /= 2) new_max = fmaxf(new_max, shuffle_xor(new_max, step));
    const float base = new_max == negative_infinity<float>() ? 0.0f : new_max;
    const float shrink = exp_acc(max - base);  // 0 the first time: max is -inf, and there is nothing to shrink
    max = new_max;
    const float mass = exp_acc(logit - base);
    // Every holder counts its entry; the sums are divided by kHolders, a power of two, at the end.
    sum = sum * shrink + mass * (float(kHolders) / kSame);
    const float share = part ? s.shares[mine] : 0.0f;
    if (warp_any(share != 0)) {
      pulled += share != 0 ? share * value * (float(kHolders) / kSame) : 0.0f;
      if (need_grad) add_pull<kCount>(rows, share * sign);
    }
    if (!need_grad) return;
    const float coefficient = part ? mass * sign : 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) push[i] *= shrink;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float c = from_holder<kSame>(coefficient, r);
#pragma unroll
      for (int i = 0; i < kElements; ++i) push[i] += c * rows[r][i];
    }
  }

  // The value that the holders of row `r` in this lane's group have.
  template <int kSame>
  SX_DEVICE float from_holder(float x, int r) const {
    return shuffle_from(x, (lane & ~(kGroup - 1)) + r * kSame);
  }

  template <int kCount>
  SX_DEVICE void add_pull(const float (&rows)[kCount][kElements], float amount) {
    constexpr int kSame = kCount == 1 ? kGroup : kHolders;
    for (int r = 0; r < kCount; ++r) {
      const float a = from_holder<kSame>(amount, r);
      if (a == 0) continue;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          pull[group * kSpan + column(chunk) + i] += a * rows_at<kCount>(rows, r, chunk * kWidth + i);
        }
      }
    }
  }

  // rows[r][i] for a run-time r without an indexed register array
  template <int kCount>
  SX_DEVICE static float rows_at(const float (&rows)[kCount][kElements], int r, int i) {
    float x = rows[0][i];
#pragma unroll
    for (int k = 1; k < kCount; ++k) x = r == k ? rows[k][i] : x;
    return x;
  }

  // Entries [begin, begin + n) into shared memory, and empty ones up to `padded`.
  SX_DEVICE void stage(const RowSetup<float>& row, int64_t begin, int n, int padded, float log_m, bool& drawn) {
    for (int j = threadIdx.x; j < padded; j += kOneThreads) {
      const int64_t k = begin + j;
      const int64_t id = j < n ? entry_id(p, b, k) : -1;
      EntryOffsets<float> offsets = {0.0f, 0.0f};
      float share = 0;
      if (id >= 0) {
        offsets = entry_offsets<float>(p, b, k, id, log_m);
        share = entry_share(p, row, k, id);
        drawn = drawn || k >= p.num_targets;
      } else if (need_grad && j < n) {
        logits[k] = negative_infinity<float>();
      }
      s.ids[j] = id;
      s.inside[j] = offsets.inside;
      s.outside[j] = offsets.outside;
      s.shares[j] = share;
    }
  }

  // out[c] = factor * sum over the groups of buffer[., c]
  SX_DEVICE void sum_groups(const float* buffer, int num_groups, float factor, float* out) const {
    for (int c = threadIdx.x; c < dim; c += kOneThreads) {
      float total = buffer[c];
      for (int g = 1; g < num_groups; ++g) total += buffer[g * kSpan + c];
      out[c] = total * factor;
    }
  }

  SX_DEVICE void run(float* buffer) {
    const RowSetup<float> row = setup_row<kOneWarps, float>(p, b, s.scratch);
    if (row.num_targets == 0) return zero_row<kOneThreads, float>(p, b);  // the whole block
    const float log_m = logf(float(p.num_samples > 0 ? p.num_samples : 1));
    load_row(hidden, h);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (!kFull && column(i / kWidth) >= dim) h[i] = 0;
      push[i] = 0;
    }
    // Without smoothing only targets pull; target k is in group k or k / kRows of a round.
    const int pullers = p.label_smoothing > 0 || p.num_targets > kGroups ? kGroups : int(p.num_targets);
    if (need_grad && group < pullers) {
      for (int i = 0; i < kElements; ++i) pull[group * kSpan + i * kGroup + place] = 0;
    }

    const int64_t entries = p.num_targets + p.num_samples;
    bool drawn = false;
    for (int64_t begin = 0; begin < entries; begin += kStage) {
      const int n = int(entries - begin < kStage ? entries - begin : kStage);
      // Whole rounds of kRows rows a group, then single rows, each round of them for all groups of a warp.
      const int whole = n / kRound * kRound;
      const int padded = (n + kGroups - 1) / kGroups * kGroups;
      stage(row, begin, n, padded, log_m, drawn);
      __syncthreads();
      for (int first = group * kRows; first < whole; first += kRound) tile<kRows>(first, begin);
      const int warp_first = int(threadIdx.x) / kWarpSize * (kWarpSize / kGroup);  // first group of this warp
      for (int at = whole; at + warp_first < n; at += kGroups) tile<1>(at + group, begin);
      __syncthreads();
    }

    // Warps -> block. Lane w of a warp speaks for warp w.
    const float warp_sum = group_sum<kWarpSize>(sum) / float(kHolders);
    const float warp_pulled = group_sum<kWarpSize>(pulled) / float(kHolders);
    const bool warp_drawn = warp_any(drawn);
    if (lane == 0) {
      s.warp_max[warp_id()] = max;
      s.warp_sum[warp_id()] = warp_sum;
      s.warp_pulled[warp_id()] = warp_pulled;
      s.warp_drawn[warp_id()] = warp_drawn ? 1.0f : 0.0f;
    }
    __syncthreads();
    float block_max = negative_infinity<float>();
#pragma unroll
    for (int w = 0; w < kOneWarps; ++w) block_max = fmaxf(block_max, s.warp_max[w]);
    float total_sum = 0, total_pulled = 0, total_drawn = 0;
#pragma unroll
    for (int w = 0; w < kOneWarps; ++w) {
      total_sum += s.warp_sum[w] * shifted_exp(s.warp_max[w], block_max);
      total_pulled += s.warp_pulled[w];
      total_drawn += s.warp_drawn[w];
    }
    const bool trivial = total_drawn == 0.0f;
    const float lse = row_lse(block_max, total_sum);

    float total = row.weight_sum * row.target_share;
    if (p.label_smoothing > 0) {
      float mine = 0;
      for (int64_t k = threadIdx.x; k < entries; k += kOneThreads) {
        const int64_t id = entry_id(p, b, k);
        if (id >= 0) mine += entry_share(p, row, k, id);
      }
      total = block_sum<kOneWarps>(mine, s.scratch);
    }
    if (trivial) total = 0;
    if (threadIdx.x == 0) {
      static_cast<float*>(p.loss)[b] = trivial ? 0.0f : total * lse - total_pulled;
      static_cast<float*>(p.lse)[b] = lse;
      static_cast<float*>(p.denom)[b] = row.weight_sum / float(row.num_targets);
      if (need_grad) static_cast<float*>(p.total)[b] = total;
    }
    if (!need_grad) return;  // the whole block
    const float factor = shifted_exp(max, block_max) * scale / total_sum;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float scaled[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) scaled[i] = push[chunk * kWidth + i] * factor;
      store_floats<kWidth>(buffer + group * kSpan + column(chunk), scaled);
    }
    __syncthreads();
    sum_groups(buffer, kGroups, 1.0f, static_cast<float*>(p.d_push) + b * dim);
    sum_groups(pull, pullers, trivial ? 0.0f : scale, static_cast<float*>(p.d_pull) + b * dim);
    finish_coefficients<kOneThreads, float>(p, row, b, lse, trivial);
  }
};

template <typename T, int kWidth, int kChunks, int kGroup, bool kFull>
__global__ void __launch_bounds__(kOneThreads) sampled_softmax_kernel(SampledSoftmaxParams p) {
  using Body = OnePass<T, kWidth, kChunks, kGroup, kFull>;
  __shared__ typename Body::Shared shared;
  SX_DYN_SMEM(float, buffer);  // [2, groups, span]
  Body body(p, shared, buffer + Body::kGroups * Body::kSpan, blockIdx.x);
  body.run(buffer);
}

// ------------------------------------------------------------------------------------------------ any d, shared draws
// A warp scores an entry; draws that come with their product are scored one a thread. The unit gradient takes a second
// pass over the rows, one column a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4) sampled_softmax_wide_kernel(SampledSoftmaxParams p) {
  using A = acc_t<T>;
  __shared__ A scratch[kWarps];
  __shared__ A coefs[kThreads];
  __shared__ A pulls[kThreads];
  __shared__ int64_t ids[kThreads];
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  const RowSetup<A> row = setup_row<kWarps, A>(p, b, scratch);
  if (row.num_targets == 0) return zero_row<kThreads, A>(p, b);  // the whole block
  const A log_m = log_acc(A(m > 0 ? m : 1));
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  const T* weight = static_cast<const T*>(p.weight);
  A* push = static_cast<A*>(p.push) + b * entries;
  A* signs = static_cast<A*>(p.signs) + b * entries;

  OnlineSoftmax<A> online = online_empty<A>();
  A pulled = 0, shares = 0, drawn = 0;
  const auto score = [&](int64_t k, int64_t id, A dot) {
    const EntryOffsets<A> offsets = entry_offsets<A>(p, b, k, id, log_m);
    A value = A(p.scale) * dot + offsets.inside, sign = 1;
    if (p.absolute) {
      sign = sign_of(value);
      value = value < 0 ? -value : value;
    }
    const A logit = value + offsets.outside;
    const A share = entry_share(p, row, k, id);
    pulled += share != A(0) ? share * value : A(0);
    shares += share;
    drawn += k >= P ? A(1) : A(0);
    // Not online_merge of (logit, 1): a nan logit must reach the sum.
    if (logit > online.max) {
      online.sum *= shifted_exp(online.max, logit);
      online.max = logit;
    }
    online.sum += shifted_exp(logit, online.max);
    if (p.need_grad) {
      push[k] = logit;
      if (p.absolute) signs[k] = sign;
    }
  };

  const int64_t scored_by_warps = p.shared ? P : entries;
  for (int64_t k = warp_id(); k < scored_by_warps; k += kWarps) {
    const int64_t id = entry_id(p, b, k);
    A dot = 0;
    if (id >= 0) {
      const T* class_row = weight + id * p.dim;
      for (int64_t c = lane_id(); c < p.dim; c += kWarpSize) dot += to_acc(hidden[c]) * to_acc(class_row[c]);
    }
    dot = group_sum<kWarpSize>(dot);
    if (lane_id() == 0) {
      if (id >= 0)
        score(k, id, dot);
      else if (p.need_grad)
        push[k] = negative_infinity<A>();
    }
  }
  if (p.shared) {
    for (int64_t k = P + threadIdx.x; k < entries; k += kThreads) {
      const int64_t id = entry_id(p, b, k);
      if (id >= 0)
        score(k, id, static_cast<const A*>(p.dots)[b * m + k - P]);
      else if (p.need_grad)
        push[k] = negative_infinity<A>();
    }
  }

  const A block_max_value = block_max<kWarps>(online.max, scratch);
  const A block_total = block_sum<kWarps>(online.sum * shifted_exp(online.max, block_max_value), scratch);
  const A lse = row_lse(block_max_value, block_total);
  const bool trivial = block_sum<kWarps>(drawn, scratch) == A(0);
  const A total = block_sum<kWarps>(shares, scratch) * (trivial ? A(0) : A(1));
  const A total_pulled = block_sum<kWarps>(pulled, scratch);
  if (threadIdx.x == 0) {
    static_cast<A*>(p.loss)[b] = trivial ? A(0) : total * lse - total_pulled;
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.denom)[b] = row.weight_sum / A(row.num_targets);
    if (p.need_grad) static_cast<A*>(p.total)[b] = total;
  }
  if (!p.need_grad) return;  // the whole block
  finish_coefficients<kThreads, A>(p, row, b, lse, trivial);
  __syncthreads();

  A* d_push = static_cast<A*>(p.d_push) + b * p.dim;
  A* d_pull = static_cast<A*>(p.d_pull) + b * p.dim;
  const int64_t pull_width = p.label_smoothing > 0 ? entries : P;
  const A* pull = static_cast<const A*>(p.pull) + b * pull_width;
  for (int64_t column = 0; column < p.dim; column += kThreads) {
    const int64_t c = column + threadIdx.x;
    A pushed = 0, pulled_here = 0;
    for (int64_t begin = 0; begin < scored_by_warps; begin += kThreads) {
      const int64_t k = begin + threadIdx.x;
      if (k < scored_by_warps) {
        ids[threadIdx.x] = entry_id(p, b, k);
        coefs[threadIdx.x] = push[k];
        pulls[threadIdx.x] = k < pull_width ? pull[k] : A(0);
      }
      __syncthreads();
      const int64_t n = scored_by_warps - begin < kThreads ? scored_by_warps - begin : kThreads;
      if (c < p.dim) {
        for (int64_t j = 0; j < n; ++j) {
          if (ids[j] < 0) continue;
          const A w = to_acc(weight[ids[j] * p.dim + c]);
          pushed += coefs[j] * w;
          if (pulls[j] != A(0)) pulled_here += pulls[j] * w;
        }
      }
      __syncthreads();
    }
    if (c < p.dim) {
      d_push[c] = pushed;
      d_pull[c] = pulled_here;
    }
  }
}

// ------------------------------------------------------------------------------------------------ debug check
// A kernel of its own: a printf in the hot kernels costs them a stack frame and registers.
__global__ void __launch_bounds__(kThreads) sampled_softmax_check_kernel(SampledSoftmaxParams p) {
  const int64_t targets = p.batch * p.num_targets, draws = (p.shared ? 1 : p.batch) * p.num_samples;
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= targets + draws) return;
  const bool target = i < targets;
  const int64_t at = target ? i : i - targets;
  const int64_t id = target ? p.target[at] : p.ids[at];
  if ((id >= 0 && id < p.num_classes) || (target && !counts_as_target(p, id))) return;
  printf("sampled_softmax: %s must be in [0, %lld), got %lld at flat position %lld\n", target ? "target" : "ids",
         (long long)p.num_classes, (long long)id, (long long)at);
  __trap();
}

// ------------------------------------------------------------------------------------------------ backward
template <typename T>
__global__ void __launch_bounds__(kThreads) sampled_softmax_bwd_kernel(SampledSoftmaxBwdParams p) {
  using A = acc_t<T>;
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  const A g = static_cast<const A*>(p.grad_loss)[b];
  const A extra = p.grad_lse != nullptr ? static_cast<const A*>(p.grad_lse)[b] : A(0);
  const A alpha = g * static_cast<const A*>(p.total)[b] + extra;
  // A zero factor wins over a nan coefficient: a row nobody asked a gradient of has none.
  const auto combine = [&](A push, A pull) { return (alpha == A(0) ? A(0) : alpha * push) - (g == A(0) ? A(0) : g * pull); };
  const A* push = static_cast<const A*>(p.push) + b * entries;
  const A* pull = static_cast<const A*>(p.pull) + b * p.pull_width;
  for (int64_t k = threadIdx.x; k < entries; k += kThreads) {
    const A coef = combine(push[k], k < p.pull_width ? pull[k] : A(0));
    if (k < P)
      static_cast<A*>(p.coef_target)[b * P + k] = coef;
    else
      static_cast<A*>(p.coef_draw)[b * m + k - P] = coef;
  }
  const A* d_push = static_cast<const A*>(p.d_push) + b * p.dim;
  const A* d_pull = static_cast<const A*>(p.d_pull) + b * p.dim;
  T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
  for (int64_t c = threadIdx.x; c < p.dim; c += kThreads) d_hidden[c] = from_acc<T>(combine(d_push[c], d_pull[c]));
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
