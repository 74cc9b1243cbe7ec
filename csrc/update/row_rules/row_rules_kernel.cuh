// Row updates on the GPU. `group` lanes (a power of two) share a row: all 32 where it is wide, one lane a row for a
// bias. Gradients are given rows, or sums over the row's entries in sorted order, walked for each block of columns: no
// atomics, and no gradient row in memory. Row-wise Adagrad needs the whole row first and walks it twice.
#pragma once

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "update/row_rules/row_rules_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kOptimThreads = 128;
// Blocks of a multiprocessor at the least. Not asked, ptxas takes fewer registers than it needs on some architectures,
// and spills.
constexpr int kOptimResident = 4;

// Numbers of a row that a lane takes at a time: 16 bytes of fp32; with more of a 16-bit type registers are spilled.
template <typename T>
constexpr int kOptimWidth = sizeof(T) == 8 ? 1 : 4;

template <int Width, typename T, typename A>
SX_DEVICE inline void load_numbers(const T* from, A* to) {
  if constexpr (Width == 1) {
    to[0] = A(to_acc(from[0]));
  } else if constexpr (sizeof(T) == 4) {
    load_values<Width>(from, to);
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = to_acc(bit_copy<T>(uint16_t(x.x)));
    to[1] = to_acc(bit_copy<T>(uint16_t(x.x >> 16)));
    to[2] = to_acc(bit_copy<T>(uint16_t(x.y)));
    to[3] = to_acc(bit_copy<T>(uint16_t(x.y >> 16)));
  }
}

template <int Width, typename A>
SX_DEVICE inline void load_state(const A* from, A* to) {
  if constexpr (Width == 1)
    to[0] = from[0];
  else
    load_floats<Width>(from, to);
}

template <int Width, typename A>
SX_DEVICE inline void store_state(A* to, const A* from) {
  if constexpr (Width == 1)
    to[0] = from[0];
  else
    store_floats<Width>(to, from);
}

// row[c .. c + Width) of class `id` = x, rounded.
template <int Width, typename T, typename A>
SX_DEVICE inline void store_numbers(T* row, int64_t c, const A* x, const int64_t* key, int64_t id) {
  if constexpr (sizeof(T) == sizeof(A)) {
    store_state<Width>(row + c, x);
  } else {
    T out[Width];
    if (key != nullptr) {
      const PhiloxWords words = philox_at({uint64_t(key[0]), uint64_t(key[1])}, id, c / kNoiseColumns, 0);
#pragma unroll
      for (int i = 0; i < Width; ++i) out[i] = round_with(x[i], noise_of(words, c + i), T{});
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) out[i] = from_acc<T>(x[i]);
    }
    if constexpr (Width == 1) {
      row[c] = out[0];
    } else {
      const auto pair = [&](int i) {
        return uint32_t(bit_copy<uint16_t>(out[i])) | uint32_t(bit_copy<uint16_t>(out[i + 1])) << 16;
      };
      *reinterpret_cast<uint2*>(row + c) = make_uint2(pair(0), pair(2));
    }
  }
}

// Rows in the weight's type or in the accumulation type.
template <int Width, typename T, typename A>
SX_DEVICE inline void load_either(const void* rows, bool narrow, int64_t at, A* to) {
  if (narrow)
    load_numbers<Width>(static_cast<const T*>(rows) + at, to);
  else
    load_state<Width>(static_cast<const A*>(rows) + at, to);
}

template <int Width, typename T, typename A>
struct GivenGradient {
  const RowRulesParams& p;
  int64_t row;
  SX_DEVICE void load(int64_t c, A* g) const {
    load_either<Width, T>(p.rows, p.rows_dtype == p.weight.dtype, row * p.dim + c, g);
  }
};

template <int Width, typename T, typename A>
struct SummedGradient {
  const RowRulesParams& p;
  int64_t place, id;  // the first of the row's entries among the sorted ones

  template <typename F>
  SX_DEVICE void for_entries(const F& body) const {
    const RowReduceParams& e = p.entries;
    const int64_t entries = e.source[0].entries + e.source[1].entries;
    for (int64_t i = place; i < entries && e.sorted[i] == id; ++i) {
      const int64_t entry = e.order[i];
      const bool first = entry < e.source[0].entries;
      const RowReduceSource& source = e.source[first ? 0 : 1];
      const int64_t at = first ? entry : entry - e.source[0].entries;
      const A coef = source.coef != nullptr ? static_cast<const A*>(source.coef)[at] : A(1);
      body(source, at, coef, p.inverse[first ? 0 : 1]);
    }
  }
  SX_DEVICE void load(int64_t c, A* g) const {
#pragma unroll
    for (int i = 0; i < Width; ++i) g[i] = 0;
    for_entries([&](const RowReduceSource& source, int64_t at, A coef, uint64_t inverse) {
      A x[Width];
      const int64_t row = inverse == 0 ? at : int64_t(mul_high_u64(uint64_t(at), inverse));
      load_either<Width, T>(source.rows, source.dtype == p.weight.dtype, row * p.dim + c, x);
#pragma unroll
      for (int i = 0; i < Width; ++i) g[i] += coef * x[i];
    });
  }
  SX_DEVICE A bias() const {
    A sum = 0;
    for_entries([&](const RowReduceSource& source, int64_t at, A coef, uint64_t) {
      sum += source.bias != nullptr ? static_cast<const A*>(source.bias)[at] : coef;
    });
    return sum;
  }
};

template <int Width, RowRuleKind Kind, typename T, typename A, typename Gradient>
SX_DEVICE inline void update_columns(const RowRulesParams& p, const RuleNumbers<A>& r, const Gradient& gradient,
                                     int64_t id, int lane, int group) {
  T* const row = static_cast<T*>(p.weight.values) + id * p.dim;
  // Roots and quotients in double are subroutines: unrolled, they spill on sm_90.
  [[maybe_unused]] constexpr int kUnroll = sizeof(A) == 8 ? 1 : 4;
#pragma unroll kUnroll
  for (int64_t c = int64_t(lane) * Width; c < p.dim; c += int64_t(group) * Width) {
    const int64_t at = id * p.dim + c;
    A w[Width], g[Width], s0[Width] = {}, s1[Width] = {};
    load_numbers<Width>(row + c, w);
    if constexpr (has_state0(Kind)) load_state<Width>(static_cast<const A*>(p.weight.state0) + at, s0);
    if constexpr (has_state1(Kind)) load_state<Width>(static_cast<const A*>(p.weight.state1) + at, s1);
    gradient.load(c, g);
#pragma unroll
    for (int i = 0; i < Width; ++i) w[i] = updated<Kind>(r, w[i], g[i], s0[i], s1[i]);
    if constexpr (has_state0(Kind)) store_state<Width>(static_cast<A*>(p.weight.state0) + at, s0);
    if constexpr (has_state1(Kind)) store_state<Width>(static_cast<A*>(p.weight.state1) + at, s1);
    store_numbers<Width>(row, c, w, p.key, id);
  }
}

// Every lane arrives; `here` says whether its group has a row.
template <int Width, typename T, typename A, typename Gradient>
SX_DEVICE inline void update_row_by_group(const RowRulesParams& p, const Gradient& gradient, int64_t id, bool here,
                                          int lane, int group) {
  RuleNumbers<A> r(p.weight);
  if (p.weight.rule.kind == RowRuleKind::kRowAdagrad) {
    const T* const row = static_cast<const T*>(p.weight.values) + id * p.dim;
    A squares = 0;
    for (int64_t c = int64_t(lane) * Width; here && c < p.dim; c += int64_t(group) * Width) {
      A w[Width], g[Width];
      load_numbers<Width>(row + c, w);
      gradient.load(c, g);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const A x = g[i] + r.weight_decay * w[i];
        squares += x * x;
      }
    }
    for (int step = group / 2; step > 0; step /= 2) squares += shuffle_xor(squares, step);
    A* const sum = static_cast<A*>(p.weight.state0) + id;
    const A next = here ? sum[0] + squares / A(p.dim) : A(0);
    warp_sync();  // all lanes have read the sum before one writes it
    if (here && lane == 0) sum[0] = next;
    r.lr = row_rate(r, next);
  }
  if (!here) return;
  switch (p.weight.rule.kind) {
    case RowRuleKind::kMomentum:
      return update_columns<Width, RowRuleKind::kMomentum, T>(p, r, gradient, id, lane, group);
    case RowRuleKind::kAdagrad:
      return update_columns<Width, RowRuleKind::kAdagrad, T>(p, r, gradient, id, lane, group);
    case RowRuleKind::kAdam:
      return update_columns<Width, RowRuleKind::kAdam, T>(p, r, gradient, id, lane, group);
    default:  // the two without a state of their own
      return update_columns<Width, RowRuleKind::kSgd, T>(p, r, gradient, id, lane, group);
  }
}

// A thread makes the weight's rule, another the bias's. Powers and roots in double, once a step.
__global__ void __launch_bounds__(kWarpSize) row_rules_live_kernel(RowRulesParams p) {
  if (threadIdx.x == 0) *p.weight.live.rule = live_rule(p.weight);
  if (threadIdx.x == 1 && p.bias.live.rule != nullptr) *p.bias.live.rule = live_rule(p.bias);
}

template <typename T, int Width>
__global__ void __launch_bounds__(kOptimThreads, kOptimResident)
    row_rules_rows_kernel(RowRulesParams p, int log_group) {
  using A = acc_t<T>;
  const int64_t i = (int64_t(blockIdx.x) * kOptimThreads + threadIdx.x) >> log_group;
  const int group = 1 << log_group, lane = int(threadIdx.x) & (group - 1);
  int64_t n = p.n;
  if (p.count != nullptr && p.count[0] < n) n = p.count[0];
  const int64_t id = i >= n ? -1 : p.row_ids != nullptr ? p.row_ids[i] : i;
  const bool here = id >= 0 && id < p.num_rows && !is_skipped(p.weight);
  update_row_by_group<Width, T, A>(p, GivenGradient<Width, T, A>{p, i}, here ? id : 0, here, lane, group);
}

template <typename T, int Width>
__global__ void __launch_bounds__(kOptimThreads, kOptimResident)
    row_rules_entries_kernel(RowRulesParams p, int log_group) {
  using A = acc_t<T>;
  const RowReduceParams& e = p.entries;
  const int64_t place = (int64_t(blockIdx.x) * kOptimThreads + threadIdx.x) >> log_group;
  const int group = 1 << log_group, lane = int(threadIdx.x) & (group - 1);
  int64_t id = -1;
  if (place < e.source[0].entries + e.source[1].entries) {
    id = e.sorted[place];
    if (place > 0 && e.sorted[place - 1] == id) id = -1;  // not the first of its row
  }
  const bool here = id >= 0 && id < p.num_rows && !is_skipped(p.weight);
  const SummedGradient<Width, T, A> gradient{p, place, here ? id : 0};
  update_row_by_group<Width, T, A>(p, gradient, gradient.id, here, lane, group);
  if (!here || p.bias.values == nullptr) return;
  const A sum = gradient.bias();
  if (lane == 0) update_bias<A>(p.bias, p.key, id, sum);
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
