// Segment sums over a sorted list of entries: the body shared by the scalar and the SIMD translation units.
#pragma once

#include "common/vec.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// out = coef * row, or out += coef * row
template <bool kFirst, typename T, typename A>
inline void add_row(A* out, A coef, const T* row, int64_t d) {
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4 && sizeof(T) <= 4) {
    const Vec k = Vec::all(coef);
    for (; c + Vec::kSize <= d; c += Vec::kSize) {
      const Vec x = Vec::load(row + c);
      (kFirst ? k * x : fma(k, x, Vec::load(out + c))).store(out + c);
    }
  }
#endif
  for (; c < d; ++c) {
    const A term = coef * A(to_acc(row[c]));
    out[c] = kFirst ? term : out[c] + term;
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

template <bool kFirst, typename A>
inline void add_entry(A* out, const RowReduceSource& source, int64_t row, A coef, int64_t d) {
  const int64_t at = row * d;
  switch (source.dtype) {
    case DType::kFloat32:
      return add_row<kFirst>(out, coef, static_cast<const float*>(source.rows) + at, d);
    case DType::kFloat64:
      return add_row<kFirst>(out, coef, static_cast<const double*>(source.rows) + at, d);
    case DType::kFloat16:
      return add_row<kFirst>(out, coef, static_cast<const Half*>(source.rows) + at, d);
    case DType::kBFloat16:
      return add_row<kFirst>(out, coef, static_cast<const BFloat16*>(source.rows) + at, d);
  }
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
inline void stream_entry(A* to, const RowReduceSource& source, int64_t row, A coef, int64_t d) {
  const int64_t at = row * d;
  switch (source.dtype) {
    case DType::kFloat16:
      return stream_scaled_row(to, coef, static_cast<const Half*>(source.rows) + at, d);
    case DType::kBFloat16:
      return stream_scaled_row(to, coef, static_cast<const BFloat16*>(source.rows) + at, d);
    default:
      return stream_scaled_row(to, coef, static_cast<const float*>(source.rows) + at, d);
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
  const uint64_t entry_mask = (uint64_t(1) << range.entry_bits) - 1;
  A* grads = static_cast<A*>(p.row_grads);
  A* bias = static_cast<A*>(p.row_bias);
  const int64_t split = p.source[0].entries;
  const Divider row_of[2] = {Divider(p.source[0].entries_per_row), Divider(p.source[1].entries_per_row)};
  int64_t row = range.first_row - 1;
  alignas(64) A scratch[kStreamWidth];
  for (int64_t i = 0; i < range.num_keys;) {
    const uint64_t id = range.keys[i] >> range.entry_bits;
    ++row;
    p.row_ids[row] = int64_t(id);
    A* const place = grads + row * p.dim;
    A* const out = p.stream ? scratch : place;
    A coef_sum = 0;
    bool first = true, written = false;
    for (; i < range.num_keys && (range.keys[i] >> range.entry_bits) == id; ++i) {
      const int64_t entry = int64_t(range.keys[i] & entry_mask);
      const int which = entry < split ? 0 : 1;
      const RowReduceSource& source = p.source[which];
      const int64_t at = entry < split ? entry : entry - split;
      const A coef = source.coef ? static_cast<const A*>(source.coef)[at] : A(1);
      const bool last = i + 1 == range.num_keys || (range.keys[i + 1] >> range.entry_bits) != id;
      written = p.stream && first && last && source.dtype != DType::kFloat64;
      if (written)  // most rows have one entry: nothing to collect
        stream_entry(place, source, row_of[which](at), coef, p.dim);
      else if (first)
        add_entry<true>(out, source, row_of[which](at), coef, p.dim);
      else
        add_entry<false>(out, source, row_of[which](at), coef, p.dim);
      coef_sum += source.bias ? static_cast<const A*>(source.bias)[at] : coef;
      first = false;
    }
    if (p.stream && !written) stream_row(place, out, p.dim);
    if (bias) bias[row] = coef_sum;
  }
#if defined(__AVX2__)
  _mm_sfence();  // streamed rows are visible before the thread says that it is done
#endif
}

}  // namespace SX_ISA_NS
}  // namespace samplex
