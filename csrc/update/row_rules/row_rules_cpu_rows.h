// Row updates: the body shared by the scalar and the SIMD translation units.
//
// The time is memory, so weight and state rows are prefetched ahead. (Square roots and quotients by estimates and
// Newton steps were tried: fewer cycles in the cache, but more instructions between two rows that are waited for, and a
// slower step.)
#pragma once

#include "common/philox_many.h"
#include "common/rows.h"
#include "update/row_reduce/row_reduce_cpu_rows.h"
#include "update/row_rules/row_rules_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// The gradient coef * row. Of a row that one entry alone touches it is never stored.
template <typename A>
struct ScaledRow {
  const A* row;
  A coef;
};

template <typename A>
inline A gradient_at(const A* g, int64_t c) {
  return g[c];
}
template <typename A>
inline A gradient_at(const ScaledRow<A>& g, int64_t c) {
  return g.coef * g.row[c];
}

#if defined(__AVX2__)
inline Vec gradient_vec(const float* g, int64_t c) { return Vec::load(g + c); }
inline Vec gradient_vec(const ScaledRow<float>& g, int64_t c) { return Vec::all(g.coef) * Vec::load(g.row + c); }

// `updated` on a vector of numbers: the same operations in the same order.
template <RowRuleKind Kind>
inline Vec updated_vec(const RuleNumbers<float>& r, Vec w, Vec gradient, Vec& s0, Vec& s1) {
  const auto all = [](float x) { return Vec::all(x); };
  const Vec g = r.weight_decay != 0.0f ? gradient + all(r.weight_decay) * w : gradient;
  if constexpr (Kind == RowRuleKind::kMomentum) {
    s0 = all(r.beta1) * s0 + g;
    return w - all(r.lr) * (r.nesterov ? g + all(r.beta1) * s0 : s0);
  } else if constexpr (Kind == RowRuleKind::kAdagrad) {
    s0 = s0 + g * g;
    return w - all(r.lr) * (g / (sqrt(s0) + all(r.eps)));
  } else if constexpr (Kind == RowRuleKind::kAdam) {
    s0 = s0 + all(1.0f - r.beta1) * (g - s0);
    s1 = all(r.beta2) * s1 + all(1.0f - r.beta2) * g * g;
    return all(r.keep) * w - all(r.lr) * (s0 / (sqrt(s1) * all(r.second) + all(r.eps)));
  } else {
    (void)s0, (void)s1;
    return w - all(r.lr) * g;
  }
}
#endif

// Bytes of a weight from which its rows are written past the cache, below.
constexpr int64_t kStreamTable = int64_t(32) << 20;
// Most entries of a row that is written past the cache: one with more is a frequent class, and better left in it. Where
// many entries share a row, draws come back to the same rows in the steps that follow and find them in the cache: on
// most processors all rows are then left there (log-uniform draws of 10^6 classes, Zen 4, one thread: 0.90 ms instead
// of 1.05), not on those of `streams_repeats` (Zen 5: 0.79 ms instead of 1.01 on two threads, 1.18 instead of 1.23 on
// one).
constexpr int64_t kStreamEntries = 8;

// How an updated row is stored: as ever, past the cache (w is 64-byte aligned and a row is whole cache lines), or
// rounded up and down by the random bits in noise [d].
enum class Store { kPlain, kStream, kByChance };

// `g` is a row [d] or a ScaledRow. A weight of 16 bits is widened and rounded in registers.
//
// Why past the cache: threads read the row in the next forward by its place in the batch, and update it by its id, so
// that it is some other thread's half of the time. Where the threads do not share a last-level cache (most servers), a
// row that is left dirty in one and is read in the other must be asked back before it can be written: 1.7 ms instead of
// 1.05 for 16,640 rows of 128. Past the cache it is 1.2 and 1.1. State rows stay with the thread that has their ids.
template <RowRuleKind Kind, Store kStore, typename T, typename A, typename G>
inline void update_numbers(const RuleNumbers<A>& r, T* __restrict w, const G g, A* __restrict s0, A* __restrict s1,
                           int64_t d, const uint16_t* noise) {
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    for (; c + Vec::kSize <= d; c += Vec::kSize) {
      Vec a = Vec::zero(), b = Vec::zero();
      if constexpr (has_state0(Kind)) a = Vec::load(s0 + c);
      if constexpr (has_state1(Kind)) b = Vec::load(s1 + c);
      const Vec next = updated_vec<Kind>(r, Vec::load(w + c), gradient_vec(g, c), a, b);
      if constexpr (kStore == Store::kStream)
        next.stream(w + c);
      else if constexpr (kStore == Store::kByChance)
        rounded_by_chance(next, load_words(noise + c), w).store(w + c);
      else
        next.store(w + c);
      if constexpr (has_state0(Kind)) a.store(s0 + c);
      if constexpr (has_state1(Kind)) b.store(s1 + c);
    }
  }
#endif
  for (; c < d; ++c) {
    A a = 0, b = 0;
    if constexpr (has_state0(Kind)) a = s0[c];
    if constexpr (has_state1(Kind)) b = s1[c];
    const A next = updated<Kind>(r, to_acc(w[c]), gradient_at(g, c), a, b);
    if constexpr (kStore == Store::kByChance)
      w[c] = round_with(next, noise[c], T{});
    else
      w[c] = from_acc<T>(next);
    if constexpr (has_state0(Kind)) s0[c] = a;
    if constexpr (has_state1(Kind)) s1[c] = b;
  }
}

// sum over c of (g + weight_decay * w)^2, in a fixed order that vectors can take
template <typename T, typename A, typename G>
inline A sum_of_squares(const T* w, const G g, A weight_decay, int64_t d) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    constexpr int kVecs = kLanes / Vec::kSize;
    Vec sums[kVecs];
    for (int k = 0; k < kVecs; ++k) sums[k] = Vec::zero();
    for (; c + kLanes <= d; c += kLanes) {
      for (int k = 0; k < kVecs; ++k) {
        Vec x = gradient_vec(g, c + k * Vec::kSize);
        if (weight_decay != 0) x = x + Vec::all(weight_decay) * Vec::load(w + c + k * Vec::kSize);
        sums[k] = sums[k] + x * x;
      }
    }
    for (int k = 0; k < kVecs; ++k) sums[k].store(lanes + k * Vec::kSize);
  }
#endif
  for (; c < d; ++c) {
    A x = gradient_at(g, c);
    if (weight_decay != 0) x += weight_decay * to_acc(w[c]);  // 0 * inf is nan
    lanes[c % kLanes] += x * x;
  }
  A sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

// (g . w) / (w . w), 0 for a row of zeros: the gradient of w / |w| is g less this times w, so it enters the rule as a
// negative weight decay of the row.
template <typename T, typename A, typename G>
inline A part_along(const T* w, const G g, int64_t d) {
  constexpr int kLanes = 16;
  A dots[kLanes] = {}, norms[kLanes] = {};
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    constexpr int kVecs = kLanes / Vec::kSize;
    Vec dot[kVecs], norm[kVecs];
    for (int k = 0; k < kVecs; ++k) dot[k] = norm[k] = Vec::zero();
    for (; c + kLanes <= d; c += kLanes) {
      for (int k = 0; k < kVecs; ++k) {
        const Vec x = Vec::load(w + c + k * Vec::kSize);
        dot[k] = fma(gradient_vec(g, c + k * Vec::kSize), x, dot[k]);
        norm[k] = fma(x, x, norm[k]);
      }
    }
    for (int k = 0; k < kVecs; ++k) {
      dot[k].store(dots + k * Vec::kSize);
      norm[k].store(norms + k * Vec::kSize);
    }
  }
#endif
  for (; c < d; ++c) {
    const A x = to_acc(w[c]);
    dots[c % kLanes] += gradient_at(g, c) * x;
    norms[c % kLanes] += x * x;
  }
  A dot = 0, norm = 0;
  for (int k = 0; k < kLanes; ++k) {
    dot += dots[k];
    norm += norms[k];
  }
  return norm > 0 ? dot / norm : A(0);
}

// noise [d]: the random bits of a row's columns, as `noise_of` has them.
inline void fill_noise(const int64_t* key, int64_t row, int64_t d, uint16_t* noise) {
  const PhiloxKey philox{uint64_t(key[0]), uint64_t(key[1])};
  constexpr int kCounters = 16;
  uint32_t rows[kCounters], positions[kCounters];
  uint64_t bits0[kCounters], bits1[kCounters];
  const int64_t counters = (d + kNoiseColumns - 1) / kNoiseColumns;
  for (int i = 0; i < kCounters; ++i) rows[i] = uint32_t(row);
  for (int64_t first = 0; first < counters; first += kCounters) {
    const int n = int(counters - first < kCounters ? counters - first : kCounters);
    for (int i = 0; i < kCounters; ++i) positions[i] = uint32_t(first + i) << 8;
    philox_many(philox, rows, positions, n, bits0, bits1);
    for (int i = 0; i < n; ++i) {
      const int64_t begin = (first + i) * kNoiseColumns, rest = d - begin;
      const uint64_t both[2] = {bits0[i], bits1[i]};  // column by column: the low half of each word comes first
      if (rest >= kNoiseColumns)
        __builtin_memcpy(noise + begin, both, sizeof(both));
      else
        __builtin_memcpy(noise + begin, both, size_t(rest) * sizeof(uint16_t));
    }
  }
}

// kRowAdagrad: adds the gradient of row `id` to its sum; the rate that follows.
template <typename T, typename G, typename A = acc_t<T>>
inline A next_row_rate(const RowRulesParams& p, const RuleNumbers<A>& r, int64_t id, const G g) {
  const T* const row = static_cast<const T*>(p.weight.values) + id * p.dim;
  A& sum = static_cast<A*>(p.weight.state0)[id];
  sum += sum_of_squares(row, g, r.weight_decay, p.dim) / A(p.dim);
  return row_rate(r, sum);
}

// Row `id` of the weight by its gradient g; with kRowAdagrad r.lr is the row's rate. `scratch` has room for d numbers.
template <RowRuleKind Kind, typename T, bool kStream = false, typename G, typename A = acc_t<T>>
inline void update_row(const RowRulesParams& p, const RuleNumbers<A>& r, int64_t id, const G g, A* scratch) {
  const int64_t d = p.dim;
  T* const row = static_cast<T*>(p.weight.values) + id * d;
  A *s0 = nullptr, *s1 = nullptr;
  if constexpr (has_state0(Kind)) s0 = static_cast<A*>(p.weight.state0) + id * d;
  if constexpr (has_state1(Kind)) s1 = static_cast<A*>(p.weight.state1) + id * d;
  if constexpr (sizeof(T) == 2) {
    if (p.key != nullptr) {
      uint16_t* const noise = reinterpret_cast<uint16_t*>(scratch);
      fill_noise(p.key, id + p.first_row, d, noise);
      return update_numbers<Kind, Store::kByChance>(r, row, g, s0, s1, d, noise);
    }
  }
  update_numbers<Kind, kStream ? Store::kStream : Store::kPlain>(r, row, g, s0, s1, d, nullptr);
}

// SX_ALWAYS_INLINE: see rows.h.
template <RowRuleKind Kind, typename T>
SX_ALWAYS_INLINE void prefetch_rows_of(const RowRulesParams& p, int64_t id, const RowPrefetch& how,
                                       const RowPrefetch& how_state) {
  using A = acc_t<T>;
  const int64_t at = id * p.dim;
  prefetch_row(static_cast<const T*>(p.weight.values) + at, how);
  if constexpr (has_state0(Kind)) prefetch_row(static_cast<const A*>(p.weight.state0) + at, how_state);
  if constexpr (has_state1(Kind)) prefetch_row(static_cast<const A*>(p.weight.state1) + at, how_state);
}

// kRowAdagrad
template <typename A>
SX_ALWAYS_INLINE void prefetch_row_sum(const RowRulesParams& p, int64_t id) {
  __builtin_prefetch(static_cast<const A*>(p.weight.state0) + id, 1, 3);
}

template <typename A>
SX_ALWAYS_INLINE void prefetch_bias(const RowTable& bias, int64_t id) {
  const int64_t item = bias.dtype == DType::kFloat64 ? 8 : bias.dtype == DType::kFloat32 ? 4 : 2;
  __builtin_prefetch(static_cast<const char*>(bias.values) + id * item, 0, 3);
  if (bias.state0 != nullptr) __builtin_prefetch(static_cast<const A*>(bias.state0) + id, 0, 3);
  if (bias.state1 != nullptr) __builtin_prefetch(static_cast<const A*>(bias.state1) + id, 0, 3);
}

template <RowRuleKind Kind, typename T>
inline void update_given(const RowRulesParams& p, int64_t begin, int64_t end, acc_t<T>* buffer) {
  using A = acc_t<T>;
  const RuleNumbers<A> r(p.weight);
  constexpr int64_t kStates = has_state0(Kind) + has_state1(Kind);
  const RowPrefetch how = row_prefetch<T>(p.dim, kStates * p.dim * int64_t(sizeof(A)));
  const RowPrefetch how_state = row_prefetch<A>(p.dim);
  A* const scratch = buffer + p.dim;
  RuleNumbers<A> of_row = r;
  for (int64_t i = begin; i < end; ++i) {
    if (p.row_ids != nullptr && i + how.rows < end) {
      prefetch_rows_of<Kind, T>(p, p.row_ids[i + how.rows], how, how_state);
      if constexpr (Kind == RowRuleKind::kRowAdagrad) prefetch_row_sum<A>(p, p.row_ids[i + how.rows]);
    }
    const A* g = static_cast<const A*>(p.rows) + i * p.dim;
    if (sizeof(T) != sizeof(A) && p.rows_dtype == p.weight.dtype) {
      const T* given = static_cast<const T*>(p.rows) + i * p.dim;
      for (int64_t c = 0; c < p.dim; ++c) buffer[c] = to_acc(given[c]);
      g = buffer;
    }
    const int64_t id = p.row_ids != nullptr ? p.row_ids[i] : i;
    if constexpr (Kind == RowRuleKind::kRowAdagrad) of_row.lr = next_row_rate<T>(p, r, id, g);
    update_row<Kind, T>(p, of_row, id, g, scratch);
  }
}

// A row and its gradient, ready for the update.
template <typename A>
struct ReadyRow {
  int64_t id;
  ScaledRow<A> g;
  bool rare;  // few entries
};
constexpr int64_t kReady = 128;
static_assert(kReady >= kMostAhead);

// Nothing else in this loop: rows come from the L2 cache, and the next row's loads are under way only while they fit
// the core's window together with this row. `after` are ids that follow the rows.
template <RowRuleKind Kind, typename T, bool kStream, typename A = acc_t<T>>
SX_NOINLINE void update_ready(const RowRulesParams& p, const RuleNumbers<A>& r, const ReadyRow<A>* rows, int64_t n,
                              const int64_t* after, const RowPrefetch& how, const RowPrefetch& how_state, A* scratch) {
  RuleNumbers<A> of_row = r;
  A rates[Kind == RowRuleKind::kRowAdagrad ? kReady : 1];
  // The way from a gradient to its row's rate is long: all of them first, where many are under way at once. Weight
  // decay wants the weight, which is best read once.
  const bool rates_first = Kind == RowRuleKind::kRowAdagrad && r.weight_decay == 0 && !p.project;
  if (rates_first) {
    for (int64_t i = 0; i < n; ++i) rates[i] = next_row_rate<T>(p, r, rows[i].id, rows[i].g);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t ahead = i + how.rows < n ? rows[i + how.rows].id : after[i + how.rows - n];
    prefetch_rows_of<Kind, T>(p, ahead, how, how_state);
    if (p.project) {
      const T* const row = static_cast<const T*>(p.weight.values) + rows[i].id * p.dim;
      of_row.weight_decay = r.weight_decay - part_along<T, A>(row, rows[i].g, p.dim);
    }
    if constexpr (Kind == RowRuleKind::kRowAdagrad) {
      prefetch_row_sum<A>(p, after[i]);
      if (!rates_first) of_row.lr = r.lr;
      of_row.lr = rates_first ? rates[i] : next_row_rate<T>(p, of_row, rows[i].id, rows[i].g);
    }
    if (kStream && rows[i].rare)
      update_row<Kind, T, kStream>(p, of_row, rows[i].id, rows[i].g, scratch);
    else
      update_row<Kind, T, false>(p, of_row, rows[i].id, rows[i].g, scratch);
  }
}

// `buffer` holds cpu::kUpdateBuffer rows: one of scratch, and sums of rows that several entries touch.
template <RowRuleKind Kind, typename T>
inline void update_range(const RowRulesParams& p, const cpu::RowReduceRange& range, acc_t<T>* buffer) {
  using A = acc_t<T>;
  const RuleNumbers<A> r(p.weight);
  constexpr int64_t kStates = has_state0(Kind) + has_state1(Kind);
  const RowPrefetch how = row_prefetch<T>(p.dim, kStates * p.dim * int64_t(sizeof(A)));
  const RowPrefetch how_state = row_prefetch<A>(p.dim);
  const EntryReader entries(p.entries, range);
  const DType own = sizeof(A) == 4 ? DType::kFloat32 : DType::kFloat64;
  constexpr bool kCanStream = sizeof(T) <= 4;
  const int64_t row_bytes = p.dim * int64_t(sizeof(T));
  const int64_t few = streams_repeats() ? kStreamEntries : 1;
  const bool stream = kCanStream && (!range.repeats || few > 1) && row_bytes % 64 == 0 &&
                      reinterpret_cast<uintptr_t>(p.weight.values) % 64 == 0 && p.num_rows * row_bytes >= kStreamTable;
  const bool with_bias = p.bias.values != nullptr;
  ReadyRow<A> rows[kReady];
  // Sums of rows are read for all rows of a list before its updates: those of the next list are asked for meanwhile.
  const int64_t num_after = Kind == RowRuleKind::kRowAdagrad ? kReady : how.rows;
  int64_t after[kReady];
  const auto look_ahead = [&](int64_t i) {
    for (int64_t k = 0; k < num_after; ++k) after[k] = entries.id(i + k < range.readable ? i + k : range.readable - 1);
  };
  if constexpr (Kind == RowRuleKind::kRowAdagrad) {
    look_ahead(0);
    for (int64_t k = 0; k < num_after; ++k) prefetch_row_sum<A>(p, after[k]);
  }
  for (int64_t i = 0; i < range.num_keys;) {
    int64_t n = 0, sums = 0;
    while (i < range.num_keys && n < kReady && sums < cpu::kUpdateBuffer - 1) {
      const int64_t id = entries.id(i);
      const EntryReader::Place x = entries.place(i);
      A coef_sum = 0;
      if (x.source.dtype == own && entries.single(i)) {
        entries.prefetch_coef<A>(i);
        const A coef = EntryReader::coef<A>(x);
        rows[n++] = {id, {static_cast<const A*>(x.source.rows) + x.row * p.dim, coef}, true};
        coef_sum = EntryReader::bias<A>(x, coef);
        ++i;
      } else {
        A* const sum = buffer + ++sums * p.dim;
        const int64_t begin = i;
        i = sum_entries<A>(entries, i, sum, coef_sum);
        rows[n++] = {id, {sum, A(1)}, i - begin <= few};
      }
      if (with_bias) {
        prefetch_bias<A>(p.bias, entries.id(i + how.rows < range.readable ? i + how.rows : range.readable - 1));
        update_bias<A>(p.bias, RuleNumbers<A>(p.bias), p.key, id, p.first_row, coef_sum);
      }
    }
    look_ahead(i);
    if (stream)
      update_ready<Kind, T, kCanStream>(p, r, rows, n, after, how, how_state, buffer);
    else
      update_ready<Kind, T, false>(p, r, rows, n, after, how, how_state, buffer);
  }
#if defined(__AVX2__)
  if (stream) _mm_sfence();  // streamed rows are visible before the thread says that it is done
#endif
}

inline void widen_by_type(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
  const auto widen = [&](const auto* numbers) {
    int64_t i = begin;
#if defined(__AVX2__)
    for (; i + Vec::kSize <= end; i += Vec::kSize) Vec::load(numbers + i).store(to + i);
#endif
    for (; i < end; ++i) to[i] = to_acc(numbers[i]);
  };
  if (dtype == DType::kBFloat16)
    widen(static_cast<const BFloat16*>(from));
  else
    widen(static_cast<const Half*>(from));
}

// body(rule tag, type tag). No dispatch_dtype: its error message is standard library code, which must not be compiled
// for one ISA.
template <typename F>
inline void dispatch_update(const RowRulesParams& p, const F& body) {
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

inline void row_rules_rows_by_type(const RowRulesParams& p, int64_t begin, int64_t end, void* buffer) {
  dispatch_update(p, [&](auto rule, auto type) {
    using T = typename decltype(type)::type;
    update_given<decltype(rule)::kind, T>(p, begin, end, static_cast<acc_t<T>*>(buffer));
  });
}

inline void row_rules_range_by_type(const RowRulesParams& p, const cpu::RowReduceRange& range, void* buffer) {
  dispatch_update(p, [&](auto rule, auto type) {
    using T = typename decltype(type)::type;
    update_range<decltype(rule)::kind, T>(p, range, static_cast<acc_t<T>*>(buffer));
  });
}

}  // namespace SX_ISA_NS
}  // namespace samplex
