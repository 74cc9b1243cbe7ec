// Segment sums over a sorted list of entries: the body shared by the scalar and the SIMD translation units.
#pragma once

#include "common/vec.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Rows whose sum is wanted: each of them, and what it is multiplied by.
template <typename A>
struct RowList {
  static constexpr int kMost = 16;
  const void* rows[kMost];
  A coefs[kMost];
  int n = 0;
};

// Columns [c, c + kVecs * Vec::kSize) of add_rows: sums stay in registers while all rows go by.
#if defined(__AVX2__)
template <int kVecs, bool kFirst, typename T>
inline void add_columns(float* out, const RowList<float>& list, int64_t c) {
  Vec sums[kVecs];
  const auto row_of = [&](int i) { return static_cast<const T*>(list.rows[i]) + c; };
  int i = 0;
  if constexpr (kFirst) {
    const Vec k = Vec::all(list.coefs[0]);
    for (int v = 0; v < kVecs; ++v) sums[v] = k * Vec::load(row_of(0) + v * Vec::kSize);
    i = 1;
  } else {
    for (int v = 0; v < kVecs; ++v) sums[v] = Vec::load(out + c + v * Vec::kSize);
  }
  for (; i < list.n; ++i) {
    const Vec k = Vec::all(list.coefs[i]);
    const T* const row = row_of(i);
    for (int v = 0; v < kVecs; ++v) sums[v] = fma(k, Vec::load(row + v * Vec::kSize), sums[v]);
  }
  for (int v = 0; v < kVecs; ++v) sums[v].store(out + c + v * Vec::kSize);
}
#endif

// out = sum of the list, or out += it: row after row in each column, so that the bits are those of one row at a time.
template <bool kFirst, typename T, typename A>
inline void add_rows(A* out, const RowList<A>& list, int64_t d) {
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4 && sizeof(T) <= 4) {
    constexpr int kVecs = 8;
    for (; c + kVecs * Vec::kSize <= d; c += kVecs * Vec::kSize) add_columns<kVecs, kFirst, T>(out, list, c);
    for (; c + Vec::kSize <= d; c += Vec::kSize) add_columns<1, kFirst, T>(out, list, c);
  }
#endif
  for (; c < d; ++c) {
    A sum = kFirst ? A(0) : out[c];
    for (int i = 0; i < list.n; ++i) {
      const A term = list.coefs[i] * A(to_acc(static_cast<const T*>(list.rows[i])[c]));
      sum = kFirst && i == 0 ? term : sum + term;
    }
    out[c] = sum;
  }
}

template <bool kFirst, typename A>
inline void add_rows(A* out, const RowList<A>& list, DType dtype, int64_t d) {
  switch (dtype) {
    case DType::kFloat32:
      return add_rows<kFirst, float>(out, list, d);
    case DType::kFloat64:
      return add_rows<kFirst, double>(out, list, d);
    case DType::kFloat16:
      return add_rows<kFirst, Half>(out, list, d);
    case DType::kBFloat16:
      return add_rows<kFirst, BFloat16>(out, list, d);
  }
}

// entry / entries_per_row by multiplication: a 64-bit division per entry costs more than adding the row up. Exact while
// entry * divisor < 2^64: the rounding error of the inverse is below 1, so the product is off by less than entry /
// 2^64.
struct Divider {
  uint64_t inverse;  // ceil(2^64 / divisor), 0 for 1
  explicit Divider(int64_t divisor) : inverse(divisor == 1 ? 0 : ~uint64_t(0) / uint64_t(divisor) + 1) {}
  int64_t operator()(int64_t entry) const {
    return inverse == 0 ? entry : int64_t((static_cast<unsigned __int128>(entry) * inverse) >> 64);
  }
};

// What the loops over sorted entries need of them.
struct EntryReader {
  const cpu::RowReduceRange& range;
  const RowReduceParams& e;
  const uint64_t entry_mask;
  const int64_t split;
  const Divider row_of[2];

  EntryReader(const RowReduceParams& params, const cpu::RowReduceRange& range_)
      : range(range_),
        e(params),
        entry_mask((uint64_t(1) << range_.entry_bits) - 1),
        split(params.source[0].entries),
        row_of{Divider(e.source[0].entries_per_row), Divider(e.source[1].entries_per_row)} {}

  SX_ALWAYS_INLINE int64_t id(int64_t i) const { return int64_t(range.keys[i] >> range.entry_bits); }
  // Whether no other entry has the id of entry i, the first with it.
  SX_ALWAYS_INLINE bool single(int64_t i) const { return i + 1 == range.num_keys || id(i + 1) != id(i); }
  struct Place {
    const RowReduceSource& source;
    int64_t at, row;
  };
  SX_ALWAYS_INLINE Place place(int64_t i) const {
    const int64_t entry = int64_t(range.keys[i] & entry_mask);
    const int which = entry < split ? 0 : 1;
    const int64_t at = which == 0 ? entry : entry - split;
    return {e.source[which], at, row_of[which](at)};
  }
  // Asks for the coefficient of entry i + kAhead: another thread has written half of them, and they are read in the
  // order of ids.
  template <typename A>
  SX_ALWAYS_INLINE void prefetch_coef(int64_t i) const {
    constexpr int64_t kAhead = 24;
    if (i + kAhead >= range.readable) return;
    const int64_t entry = int64_t(range.keys[i + kAhead] & entry_mask);
    const int which = entry < split ? 0 : 1;
    const A* const coefs = static_cast<const A*>(e.source[which].coef);
    if (coefs != nullptr) __builtin_prefetch(coefs + (which == 0 ? entry : entry - split), 0, 3);
  }
  template <typename A>
  static A coef(const Place& x) {
    return x.source.coef ? static_cast<const A*>(x.source.coef)[x.at] : A(1);
  }
  template <typename A>
  static A bias(const Place& x, A coef) {
    return x.source.bias ? static_cast<const A*>(x.source.bias)[x.at] : coef;
  }
  SX_ALWAYS_INLINE const void* row(const Place& x) const {
    return static_cast<const char*>(x.source.rows) + x.row * e.dim * int64_t(size_of(x.source.dtype));
  }
};

// Adds up the entries from `i` on that share its id, into out [d]; returns the first after them.
template <typename A>
SX_NOINLINE int64_t sum_entries(const EntryReader& entries, int64_t i, A* out, A& coef_sum) {
  const int64_t id = entries.id(i);
  RowList<A> list;
  DType dtype = entries.place(i).source.dtype;
  bool first = true;
  const auto add = [&] {
    if (first)
      add_rows<true>(out, list, dtype, entries.e.dim);
    else
      add_rows<false>(out, list, dtype, entries.e.dim);
    list.n = 0;
    first = false;
  };
  for (; i < entries.range.num_keys && entries.id(i) == id; ++i) {
    const EntryReader::Place x = entries.place(i);
    entries.prefetch_coef<A>(i);
    if (list.n == RowList<A>::kMost || (x.source.dtype != dtype && list.n > 0)) add();
    dtype = x.source.dtype;
    list.rows[list.n] = entries.row(x);
    list.coefs[list.n] = EntryReader::coef<A>(x);
    coef_sum += EntryReader::bias<A>(x, list.coefs[list.n]);
    ++list.n;
  }
  add();
  return i;
}

// to = coef * row, past the cache
template <typename T, typename A>
inline void stream_scaled_row(A* to, A coef, const T* row, int64_t d) {
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4 && sizeof(T) <= 4) {
    const Vec k = Vec::all(coef);
    for (int64_t c = 0; c < d; c += Vec::kSize) (k * Vec::load(row + c)).stream(to + c);
    return;
  }
#endif
  for (int64_t c = 0; c < d; ++c) to[c] = coef * A(to_acc(row[c]));
}

template <typename A>
inline void stream_entry(A* to, const void* row, DType dtype, A coef, int64_t d) {
  switch (dtype) {
    case DType::kFloat16:
      return stream_scaled_row(to, coef, static_cast<const Half*>(row), d);
    case DType::kBFloat16:
      return stream_scaled_row(to, coef, static_cast<const BFloat16*>(row), d);
    default:
      return stream_scaled_row(to, coef, static_cast<const float*>(row), d);
  }
}

// to = from, past the cache: the rows of a large batch do not fit it, and a store that misses would read them first.
template <typename A>
inline void stream_row(A* to, const A* from, int64_t d) {
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    for (int64_t c = 0; c < d; c += Vec::kSize) Vec::load(from + c).stream(to + c);
    return;
  }
#endif
  for (int64_t c = 0; c < d; ++c) to[c] = from[c];
}

template <typename A>
inline void row_reduce_range(const RowReduceParams& p, const cpu::RowReduceRange& range) {
  A* const bias = static_cast<A*>(p.row_bias);
  const EntryReader entries(p, range);
  alignas(64) A scratch[kStreamWidth];
  int64_t row = range.first_row;
  for (int64_t i = 0; i < range.num_keys; ++row) {
    p.row_ids[row] = entries.id(i);
    A* const place = static_cast<A*>(p.row_grads) + row * p.dim;
    A coef_sum = 0;
    const EntryReader::Place x = entries.place(i);
    if (p.stream && x.source.dtype != DType::kFloat64 && entries.single(i)) {
      // Most rows have one entry: nothing to collect.
      entries.prefetch_coef<A>(i);
      const A coef = EntryReader::coef<A>(x);
      stream_entry(place, entries.row(x), x.source.dtype, coef, p.dim);
      coef_sum += EntryReader::bias<A>(x, coef);
      ++i;
    } else {
      i = sum_entries<A>(entries, i, p.stream ? scratch : place, coef_sum);
      if (p.stream) stream_row(place, scratch, p.dim);
    }
    if (bias) bias[row] = coef_sum;
  }
#if defined(__AVX2__)
  _mm_sfence();  // streamed rows are visible before the thread says that it is done
#endif
}

}  // namespace SX_ISA_NS
}  // namespace samplex
