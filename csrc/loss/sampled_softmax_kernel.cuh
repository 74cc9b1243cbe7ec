// Fused sampled softmax on the GPU: one block of 4 warps per batch row. Formulas in sampled_softmax_params.h.
//
//   sampled_softmax_kernel         float, half, bfloat16 storage and d <= 1024: one pass over the gathered rows
//   sampled_softmax_wide_kernel    any d, double, and shared draws (whose products come from a GEMM)
//   sampled_softmax_bwd_kernel     coefficients and d_hidden from what the forward saved
//
// One pass: a group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running unit
// gradient in registers. kRows class rows are in flight in a group; their products are folded so that lane q of a group
// ends with the sum of row q / (kGroup / kRows), computes one exponential, and hands it back. All groups of a warp share
// one running maximum, so their partial gradients simply add up in shared memory at the end. No float atomics, no order
// that depends on scheduling: the same bits every time.
#pragma once

#include <cstdio>

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/sampled_softmax_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kStage = 512;  // entries staged in shared memory at a time

// ------------------------------------------------------------------------------------------------ entries of a row
SX_DEVICE inline bool counts_as_target(const SampledSoftmaxParams& p, int64_t id) {
  return id != p.ignore_index && !(p.num_targets > 1 && id == kPadding);
}

SX_DEVICE inline int64_t checked_id(const SampledSoftmaxParams& p, const char* arg, int64_t b, int64_t k, int64_t id) {
  if (p.debug && (id < 0 || id >= p.num_classes)) {
    printf("sampled_softmax: %s must be in [0, %lld), got %lld at row %lld, column %lld\n", arg,
           (long long)p.num_classes, (long long)id, (long long)b, (long long)k);
    __trap();
  }
  return id;
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
    return counts_as_target(p, id) ? checked_id(p, "target", b, k, id) : -1;
  }
  const int64_t draw = k - p.num_targets;
  const int64_t id = checked_id(p, "ids", b, draw, p.ids[(p.shared ? 0 : b * p.num_samples) + draw]);
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
template <typename A>
SX_DEVICE inline RowSetup<A> setup_row(const SampledSoftmaxParams& p, int64_t b, A* scratch) {
  RowSetup<A> row = {0, A(0), A(0), A(0)};
  for (int64_t k = 0; k < p.num_targets; ++k) {
    const int64_t id = p.target[b * p.num_targets + k];
    if (!counts_as_target(p, id)) continue;
    ++row.num_targets;
    row.weight_sum += load_scalar<A>(p.class_weight, checked_id(p, "target", b, k, id), A(1));
  }
  if (row.num_targets == 0) return row;
  row.target_share = A(1 - p.label_smoothing) / A(row.num_targets);
  if (p.label_smoothing > 0) {
    // Counted in the accumulation type: exact up to 2^24 draws, the most a key allows.
    A entries = 0;
    for (int64_t k = threadIdx.x; k < p.num_targets + p.num_samples; k += kThreads) {
      entries += entry_id(p, b, k) >= 0 ? A(1) : A(0);
    }
    row.every_share = A(p.label_smoothing) / block_sum<kWarps>(entries, scratch);
  }
  return row;
}

template <typename A>
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
  for (int64_t k = threadIdx.x; k < entries; k += kThreads) static_cast<A*>(p.push)[b * entries + k] = A(0);
  for (int64_t k = threadIdx.x; k < pull_width; k += kThreads) static_cast<A*>(p.pull)[b * pull_width + k] = A(0);
  for (int64_t c = threadIdx.x; c < p.dim; c += kThreads) {
    static_cast<A*>(p.d_push)[b * p.dim + c] = A(0);
    static_cast<A*>(p.d_pull)[b * p.dim + c] = A(0);
  }
}

// Logits (kept in `push` meanwhile) become push; shares become pull. Masked entries hold -inf and get 0 even in a nan row.
template <typename A>
SX_DEVICE inline void finish_coefficients(const SampledSoftmaxParams& p, const RowSetup<A>& row, int64_t b, A lse,
                                          bool trivial) {
  const int64_t entries = p.num_targets + p.num_samples;
  const int64_t pull_width = p.label_smoothing > 0 ? entries : p.num_targets;
  A* push = static_cast<A*>(p.push) + b * entries;
  A* pull = static_cast<A*>(p.pull) + b * pull_width;
  for (int64_t k = threadIdx.x; k < entries; k += kThreads) {
    const A logit = push[k];
    const bool part = logit != negative_infinity<A>();
    const A sign = p.absolute && part ? static_cast<const A*>(p.signs)[b * entries + k] : A(1);
    push[k] = part ? A(p.scale) * sign * exp_acc(logit - lse) : A(0);
    if (k < pull_width) {
      const int64_t id = entry_id(p, b, k);
      pull[k] = id < 0 || trivial ? A(0) : A(p.scale) * sign * entry_share(p, row, k, id);
    }
  }
}

// ------------------------------------------------------------------------------------------------ one pass, d <= 1024
template <typename T, int kWidth, int kChunks, int kGroup, bool kFull>
struct OnePass {
  static constexpr int kElements = kWidth * kChunks;       // columns of a lane
  static constexpr int kRows = kElements > 16 ? 2 : 4;     // class rows in flight in a group: 64 registers of a lane
  static constexpr int kSpan = kElements * kGroup;         // columns of a group, >= d
  static constexpr int kGroups = kThreads / kGroup;        // groups of a block
  static constexpr int kWarpGroups = kWarpSize / kGroup;   // groups of a warp
  static constexpr int kHolders = kGroup / kRows;          // lanes that hold the same folded sum

  struct Shared {
    int64_t ids[kStage];
    float inside[kStage];
    float outside[kStage];
    float shares[kStage];
    float warp_max[kWarps];
    float warp_sum[kWarps];
    float warp_pulled[kWarps];
    float warp_drawn[kWarps];
    float scratch[kWarps];
  };

  const SampledSoftmaxParams& p;
  Shared& s;
  const int64_t b;
  const int lane, group, place;  // lane in the warp, group in the block, lane in the group
  float h[kElements], push[kElements], pull[kElements];
  float max, sum, pulled;

  SX_DEVICE OnePass(const SampledSoftmaxParams& params, Shared& shared, int64_t row)
      : p(params),
        s(shared),
        b(row),
        lane(lane_id()),
        group(int(threadIdx.x) / kGroup),
        place(int(threadIdx.x) % kGroup),
        max(negative_infinity<float>()),
        sum(0),
        pulled(0) {}

  SX_DEVICE int column(int chunk) const { return (chunk * kGroup + place) * kWidth; }
  SX_DEVICE bool has(int chunk) const { return kFull || column(chunk) < p.dim; }

  SX_DEVICE void load_row(const T* row, bool wanted, float* out) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (wanted && has(chunk)) {
        load_values<kWidth>(row + column(chunk), out + chunk * kWidth);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) out[chunk * kWidth + i] = 0;
      }
    }
  }

  // kRows products of this lane's columns -> the whole product of row `place / kHolders`, in log2(kGroup) exchanges.
  SX_DEVICE float fold(const float (&v)[kRows]) const {
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

  // The value that the holders of row `r` in this lane's group have.
  SX_DEVICE float from_holder(float x, int r) const { return shuffle_from(x, (lane & ~(kGroup - 1)) + r * kHolders); }

  // Scores the entries first .. first + kCount - 1 of the stage (kCount is 1 or kRows) of this lane's group.
  template <int kCount>
  SX_DEVICE void tile(int first, int num_staged, int64_t stage_begin) {
    float rows[kCount][kElements];
    float products[kRows];
    // All class rows are requested before any is used: the gather is bound by latency.
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const int64_t id = first + r < num_staged ? s.ids[first + r] : -1;
      load_row(static_cast<const T*>(p.weight) + (id < 0 ? 0 : id) * p.dim, id >= 0, rows[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float product = 0;
      if (r < kCount) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) product += h[i] * rows[r < kCount ? r : 0][i];
      }
      products[r] = product;
    }
    float dot;
    if constexpr (kCount == kRows) {
      dot = fold(products);
    } else {
      dot = group_sum<kGroup>(products[0]);
    }

    // From here on a lane speaks for one row of its group.
    const int mine = first + (kCount == 1 ? 0 : place / kHolders);
    const bool part = mine < num_staged && s.ids[mine < num_staged ? mine : 0] >= 0;
    float value = 0, sign = 0, share = 0, logit = negative_infinity<float>();
    if (part) {
      value = float(p.scale) * dot + s.inside[mine];
      sign = 1;
      if (p.absolute) {
        sign = sign_of(value);
        value = value < 0 ? -value : value;
      }
      logit = value + s.outside[mine];
      share = s.shares[mine];
      pulled += share != 0 ? share * value : 0.0f;
      if (p.need_grad && place % (kCount == 1 ? kGroup : kHolders) == 0) {
        const int64_t at = b * (p.num_targets + p.num_samples) + stage_begin + mine;
        static_cast<float*>(p.push)[at] = logit;
        if (p.absolute) static_cast<float*>(p.signs)[at] = sign;
      }
    }
    const float tile_max = group_max<kWarpSize>(logit);
    if (tile_max > max) {  // the same in every lane of the warp
      const float shrink = shifted_exp(max, tile_max);
      sum *= shrink;
#pragma unroll
      for (int i = 0; i < kElements; ++i) push[i] *= shrink;
      max = tile_max;
    }
    // A nan logit never raises the maximum; exp(nan) carries it into the sum.
    const float weight = part ? exp_acc(logit - max) : 0.0f;
    // Lanes that hold the same entry all count it; the sums are divided by their number, a power of two, at the end.
    sum += kCount == 1 ? weight * (float(kHolders) / kGroup) : weight;
    if (kCount == 1 && part) pulled += (float(kHolders) / kGroup - 1.0f) * (share != 0 ? share * value : 0.0f);
    if (!p.need_grad) return;
    const float coefficient = weight * sign;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float c = kCount == 1 ? coefficient : from_holder(coefficient, r);
#pragma unroll
      for (int i = 0; i < kElements; ++i) push[i] += c * rows[r][i];
      const float a = kCount == 1 ? share * sign : from_holder(share * sign, r);
      if (warp_any(a != 0)) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) pull[i] += a * rows[r][i];
      }
    }
  }

  SX_DEVICE void stage(const RowSetup<float>& row, int64_t begin, int n, float log_m, bool& drawn) {
    for (int j = threadIdx.x; j < n; j += kThreads) {
      const int64_t k = begin + j;
      const int64_t id = entry_id(p, b, k);
      s.ids[j] = id;
      if (id >= 0) {
        const EntryOffsets<float> offsets = entry_offsets<float>(p, b, k, id, log_m);
        s.inside[j] = offsets.inside;
        s.outside[j] = offsets.outside;
        s.shares[j] = entry_share(p, row, k, id);
        drawn = drawn || k >= p.num_targets;
      } else if (p.need_grad) {
        static_cast<float*>(p.push)[b * (p.num_targets + p.num_samples) + k] = negative_infinity<float>();
      }
    }
  }

  // Sums the groups' partial gradients, scaled by `factor` of their warp, into out [d].
  SX_DEVICE void merge_groups(float* buffer, const float* partial, float factor, int num_groups, float out_factor,
                              float* out) {
    if (group < num_groups) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float scaled[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) scaled[i] = partial[chunk * kWidth + i] * factor;
        store_floats<kWidth>(buffer + group * kSpan + column(chunk), scaled);
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < p.dim; c += kThreads) {
      float total = buffer[c];
      for (int g = 1; g < num_groups; ++g) total += buffer[g * kSpan + c];
      out[c] = total * out_factor;
    }
    __syncthreads();
  }

  SX_DEVICE void run(float* buffer) {
    const RowSetup<float> row = setup_row<float>(p, b, s.scratch);
    if (row.num_targets == 0) return zero_row<float>(p, b);  // the whole block
    const float log_m = logf(float(p.num_samples > 0 ? p.num_samples : 1));
    load_row(static_cast<const T*>(p.hidden) + b * p.dim, true, h);
#pragma unroll
    for (int i = 0; i < kElements; ++i) push[i] = pull[i] = 0;

    const int64_t entries = p.num_targets + p.num_samples;
    bool drawn = false;
    for (int64_t begin = 0; begin < entries; begin += kStage) {
      const int n = int(entries - begin < kStage ? entries - begin : kStage);
      stage(row, begin, n, log_m, drawn);
      __syncthreads();
      // Whole rounds of kRows rows for every group, then what is left one row a group.
      const int whole = n / (kGroups * kRows) * (kGroups * kRows);
      for (int first = group * kRows; first < whole; first += kGroups * kRows) tile<kRows>(first, n, begin);
      const int warp_group = group / kWarpGroups * kWarpGroups;  // the loop is the same for all lanes of a warp
      for (int at = whole; at + warp_group < n; at += kGroups) tile<1>(at + group, n, begin);
      __syncthreads();
    }

    // Warps -> block. Lane w < kWarps speaks for warp w.
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
    const int w = lane % kWarps;
    const float their_max = s.warp_max[w];
    const float block_max = group_max<kWarps>(their_max);
    const float their_factor = shifted_exp(their_max, block_max);
    const float total_sum = group_sum<kWarps>(s.warp_sum[w] * their_factor);
    const float total_pulled = group_sum<kWarps>(s.warp_pulled[w]);
    const bool trivial = group_sum<kWarps>(s.warp_drawn[w]) == 0.0f;
    const float my_factor = shuffle_from(their_factor, warp_id());
    const float lse = block_max + logf(total_sum);

    float total = row.weight_sum * row.target_share;
    if (p.label_smoothing > 0) {
      float mine = 0;
      for (int64_t k = threadIdx.x; k < entries; k += kThreads) {
        const int64_t id = entry_id(p, b, k);
        if (id >= 0) mine += entry_share(p, row, k, id);
      }
      total = block_sum<kWarps>(mine, s.scratch);
    }
    if (trivial) total = 0;
    if (threadIdx.x == 0) {
      static_cast<float*>(p.loss)[b] = trivial ? 0.0f : total * lse - total_pulled;
      static_cast<float*>(p.lse)[b] = lse;
      static_cast<float*>(p.denom)[b] = row.weight_sum / float(row.num_targets);
      if (p.need_grad) static_cast<float*>(p.total)[b] = total;
    }
    if (!p.need_grad) return;  // the whole block
    const float scale = float(p.scale);
    merge_groups(buffer, push, my_factor, kGroups, scale / total_sum, static_cast<float*>(p.d_push) + b * p.dim);
    // Without smoothing only the groups that held targets pulled; entry k < P was in group k or k / kRows.
    const int pullers = p.label_smoothing > 0 || p.num_targets > kGroups ? kGroups : int(p.num_targets);
    merge_groups(buffer, pull, 1.0f, pullers, trivial ? 0.0f : scale, static_cast<float*>(p.d_pull) + b * p.dim);
    finish_coefficients<float>(p, row, b, lse, trivial);
  }
};

template <typename T, int kWidth, int kChunks, int kGroup, bool kFull>
__global__ void __launch_bounds__(kThreads) sampled_softmax_kernel(SampledSoftmaxParams p) {
  using Body = OnePass<T, kWidth, kChunks, kGroup, kFull>;
  __shared__ typename Body::Shared shared;
  SX_DYN_SMEM(float, buffer);  // [groups, span]
  Body body(p, shared, blockIdx.x);
  body.run(buffer);
}

// ------------------------------------------------------------------------------------------------ any d, shared draws
// A warp scores an entry; draws that come with their product are scored one a thread. The unit gradient takes a second
// pass over the rows, one column a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) sampled_softmax_wide_kernel(SampledSoftmaxParams p) {
  using A = acc_t<T>;
  __shared__ A scratch[kWarps];
  __shared__ A coefs[kThreads];
  __shared__ A pulls[kThreads];
  __shared__ int64_t ids[kThreads];
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  const RowSetup<A> row = setup_row<A>(p, b, scratch);
  if (row.num_targets == 0) return zero_row<A>(p, b);  // the whole block
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
    online.sum += exp_acc(logit - online.max);
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
  const A lse = block_max_value + log_acc(block_total);
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
  finish_coefficients<A>(p, row, b, lse, trivial);
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
