// Row updates: the body shared by the scalar and the SIMD translation units.
//
// The loops are plain: every step is element by element, and the compiler makes vectors of it. The time is memory, so
// weight and state rows are prefetched ahead. (Square roots and quotients by estimates and Newton steps were tried:
// fewer cycles in the cache, but more instructions between two rows that are waited for, and a slower step.)
#pragma once

#include "common/rows.h"
#include "update/optim_math.h"
#include "update/row_reduce_cpu_rows.h"

namespace samplex {
inline namespace SX_ISA_NS {

// The gradient of a row that one entry alone touches, coef * row: never stored.
struct ScaledRow {
  const float* row;
  float coef;
};

template <typename A>
inline A gradient_at(const A* g, int64_t c) {
  return g[c];
}
inline float gradient_at(const ScaledRow& g, int64_t c) { return g.coef * g.row[c]; }

// `g` is a row [d] or a ScaledRow.
template <RowRuleKind Kind, typename A, typename G>
inline void update_numbers(const RuleNumbers<A>& r, A* __restrict w, const G g, A* __restrict s0, A* __restrict s1,
                           int64_t d) {
  for (int64_t c = 0; c < d; ++c) {
    A a = 0, b = 0;
    if constexpr (has_state0(Kind)) a = s0[c];
    if constexpr (has_state1(Kind)) b = s1[c];
    w[c] = updated<Kind>(r, w[c], gradient_at(g, c), a, b);
    if constexpr (has_state0(Kind)) s0[c] = a;
    if constexpr (has_state1(Kind)) s1[c] = b;
  }
}

// sum over c of (g + weight_decay * w)^2, in a fixed order that vectors can take
template <typename A, typename G>
inline A sum_of_squares(const A* w, const G g, A weight_decay, int64_t d) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const A x = gradient_at(g, c + k) + weight_decay * w[c + k];
      lanes[k] += x * x;
    }
  }
  for (; c < d; ++c) {
    const A x = gradient_at(g, c) + weight_decay * w[c];
    lanes[c % kLanes] += x * x;
  }
  A sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

template <typename T>
inline void store_row(T* to, const acc_t<T>* from, int64_t d, const int64_t* key, int64_t row) {
  if (key == nullptr) {
    for (int64_t c = 0; c < d; ++c) to[c] = from_acc<T>(from[c]);
    return;
  }
  const PhiloxKey philox{uint64_t(key[0]), uint64_t(key[1])};
  for (int64_t begin = 0; begin < d; begin += kNoiseColumns) {
    const PhiloxWords words = philox_at(philox, row, begin / kNoiseColumns, 0);
    const int64_t end = begin + kNoiseColumns < d ? begin + kNoiseColumns : d;
    for (int64_t c = begin; c < end; ++c) to[c] = round_with(from[c], noise_of(words, c), T{});
  }
}

// Row `id` of the weight by its gradient g; `wide` [d] is scratch for storage types that must be widened.
template <RowRuleKind Kind, typename T, typename G, typename A = acc_t<T>>
inline void update_row(const OptimParams& p, RuleNumbers<A> r, int64_t id, const G g, A* wide) {
  const int64_t d = p.dim;
  T* const row = static_cast<T*>(p.weight.values) + id * d;
  A* w = wide;
  if constexpr (sizeof(T) == sizeof(A))
    w = row;
  else
    for (int64_t c = 0; c < d; ++c) wide[c] = to_acc(row[c]);
  A *s0 = nullptr, *s1 = nullptr;
  if constexpr (has_state0(Kind)) s0 = static_cast<A*>(p.weight.state0) + id * d;
  if constexpr (has_state1(Kind)) s1 = static_cast<A*>(p.weight.state1) + id * d;
  if constexpr (Kind == RowRuleKind::kRowAdagrad) {
    A& sum = static_cast<A*>(p.weight.state0)[id];
    sum += sum_of_squares(w, g, r.weight_decay, d) / A(d);
    r.lr = row_rate(r, sum);
  }
  update_numbers<Kind>(r, w, g, s0, s1, d);
  if constexpr (sizeof(T) != sizeof(A)) store_row(row, wide, d, p.key, id);
}

// SX_ALWAYS_INLINE: see rows.h.
template <RowRuleKind Kind, typename T>
SX_ALWAYS_INLINE void prefetch_rows_of(const OptimParams& p, int64_t id, const RowPrefetch& how,
                                       const RowPrefetch& how_state) {
  using A = acc_t<T>;
  const int64_t at = id * p.dim;
  prefetch_row(static_cast<const T*>(p.weight.values) + at, how);
  if constexpr (has_state0(Kind)) prefetch_row(static_cast<const A*>(p.weight.state0) + at, how_state);
  if constexpr (has_state1(Kind)) prefetch_row(static_cast<const A*>(p.weight.state1) + at, how_state);
  if constexpr (Kind == RowRuleKind::kRowAdagrad) __builtin_prefetch(static_cast<const A*>(p.weight.state0) + id, 0, 3);
}

template <typename A>
SX_ALWAYS_INLINE void prefetch_bias(const RowTable& bias, int64_t id) {
  const int64_t item = bias.dtype == DType::kFloat64 ? 8 : bias.dtype == DType::kFloat32 ? 4 : 2;
  __builtin_prefetch(static_cast<const char*>(bias.values) + id * item, 0, 3);
  if (bias.state0 != nullptr) __builtin_prefetch(static_cast<const A*>(bias.state0) + id, 0, 3);
  if (bias.state1 != nullptr) __builtin_prefetch(static_cast<const A*>(bias.state1) + id, 0, 3);
}

template <RowRuleKind Kind, typename T>
inline void update_given(const OptimParams& p, int64_t begin, int64_t end, acc_t<T>* buffer) {
  using A = acc_t<T>;
  const RuleNumbers<A> r(p.weight.rule);
  constexpr int64_t kTables = 1 + has_state0(Kind) + has_state1(Kind);
  const RowPrefetch how = row_prefetch<T>(p.dim, kTables), how_state = row_prefetch<A>(p.dim, kTables);
  A* const wide = buffer + p.dim;
  for (int64_t i = begin; i < end; ++i) {
    if (p.row_ids != nullptr && i + how.rows < end) {
      prefetch_rows_of<Kind, T>(p, p.row_ids[i + how.rows], how, how_state);
    }
    const A* g = static_cast<const A*>(p.rows) + i * p.dim;
    if (sizeof(T) != sizeof(A) && p.rows_dtype == p.weight.dtype) {
      const T* given = static_cast<const T*>(p.rows) + i * p.dim;
      for (int64_t c = 0; c < p.dim; ++c) buffer[c] = to_acc(given[c]);
      g = buffer;
    }
    update_row<Kind, T>(p, r, p.row_ids != nullptr ? p.row_ids[i] : i, g, wide);
  }
}

template <RowRuleKind Kind, typename T>
inline void update_range(const OptimParams& p, const cpu::RowReduceRange& range, acc_t<T>* buffer) {
  using A = acc_t<T>;
  const RuleNumbers<A> r(p.weight.rule);
  const RowReduceParams& e = p.entries;
  constexpr int64_t kTables = 1 + has_state0(Kind) + has_state1(Kind);
  const RowPrefetch how = row_prefetch<T>(p.dim, kTables), how_state = row_prefetch<A>(p.dim, kTables);
  const uint64_t entry_mask = (uint64_t(1) << range.entry_bits) - 1;
  const int64_t split = e.source[0].entries;
  const Divider row_of[2] = {Divider(e.source[0].entries_per_row), Divider(e.source[1].entries_per_row)};
  A* const wide = buffer + p.dim;
  const auto id_at = [&](int64_t i) { return range.keys[i] >> range.entry_bits; };
  for (int64_t i = 0; i < range.num_keys;) {
    const uint64_t id = id_at(i);
    A coef_sum = 0;
    bool first = true, alone = false;
    ScaledRow scaled{};
    for (; i < range.num_keys && id_at(i) == id; ++i) {
      const int64_t next = i + how.rows;
      if (next < range.readable && id_at(next) != id_at(next - 1)) {
        prefetch_rows_of<Kind, T>(p, int64_t(id_at(next)), how, how_state);
        if (p.bias.values != nullptr) prefetch_bias<A>(p.bias, int64_t(id_at(next)));
      }
      const int64_t entry = int64_t(range.keys[i] & entry_mask);
      const int which = entry < split ? 0 : 1;
      const RowReduceSource& source = e.source[which];
      const int64_t at = entry < split ? entry : entry - split;
      const A coef = source.coef ? static_cast<const A*>(source.coef)[at] : A(1);
      alone =
          first && sizeof(A) == 4 && source.dtype == DType::kFloat32 && (i + 1 == range.num_keys || id_at(i + 1) != id);
      if (alone)  // most rows have one entry: nothing to collect
        scaled = {static_cast<const float*>(source.rows) + row_of[which](at) * p.dim, float(coef)};
      else if (first)
        add_entry<true>(buffer, source, row_of[which](at), coef, p.dim);
      else
        add_entry<false>(buffer, source, row_of[which](at), coef, p.dim);
      coef_sum += source.bias ? static_cast<const A*>(source.bias)[at] : coef;
      first = false;
    }
    if constexpr (sizeof(A) == 4) {
      if (alone) update_row<Kind, T>(p, r, int64_t(id), scaled, wide);
    }
    if (!alone) update_row<Kind, T>(p, r, int64_t(id), static_cast<const A*>(buffer), wide);
    if (p.bias.values != nullptr) update_bias<A>(p.bias, p.key, int64_t(id), coef_sum);
  }
}

// body(rule tag, type tag). No dispatch_dtype: its error message is standard library code, which must not be compiled
// for one ISA.
template <typename F>
inline void dispatch_update(const OptimParams& p, const F& body) {
  dispatch_rule(p.weight.rule.kind, [&](auto rule) {
    switch (p.weight.dtype) {
      case DType::kFloat64:
        return body(rule, TypeTag<double>{});
      case DType::kFloat16:
        return body(rule, TypeTag<Half>{});
      case DType::kBFloat16:
        return body(rule, TypeTag<BFloat16>{});
      default:
        return body(rule, TypeTag<float>{});
    }
  });
}

inline void optim_rows_by_type(const OptimParams& p, int64_t begin, int64_t end, void* buffer) {
  dispatch_update(p, [&](auto rule, auto type) {
    using T = typename decltype(type)::type;
    update_given<decltype(rule)::kind, T>(p, begin, end, static_cast<acc_t<T>*>(buffer));
  });
}

inline void optim_range_by_type(const OptimParams& p, const cpu::RowReduceRange& range, void* buffer) {
  dispatch_update(p, [&](auto rule, auto type) {
    using T = typename decltype(type)::type;
    update_range<decltype(rule)::kind, T>(p, range, static_cast<acc_t<T>*>(buffer));
  });
}

}  // namespace SX_ISA_NS
}  // namespace samplex
