// The symmetric softmax over blocks [begin, end) of rows: the body shared by the scalar and the SIMD translation units.
// Two passes over the products, each row read once and kept in the cache: rows and the maximum of each column, then the
// sums of the columns, whose exponents need that maximum.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/symmetric_softmax/symmetric_softmax_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename A>
struct SymmetricRows {
  static constexpr A kOut = negative_infinity<A>();
  const SymmetricSoftmaxParams& p;
  const int64_t n;
  const A scale;
  A *scores, *shifted, *shares;  // [B] each
  void* memory;

  explicit SymmetricRows(const SymmetricSoftmaxParams& params) : p(params), n(params.batch), scale(A(params.scale)) {
    const int64_t row = (n + 15) / 16 * 16;
    memory = std::aligned_alloc(64, size_t(3 * row) * sizeof(A));
    scores = static_cast<A*>(memory);
    shifted = scores + row;
    shares = shifted + row;
  }
  ~SymmetricRows() { std::free(memory); }
  SymmetricRows(const SymmetricRows&) = delete;
  SymmetricRows& operator=(const SymmetricRows&) = delete;

  static const A* in(const void* from) { return static_cast<const A*>(from); }
  static A* out(void* to) { return static_cast<A*>(to); }
  int64_t first_row(int64_t block) const { return block * p.block_rows; }
  int64_t end_row(int64_t block) const { return first_row(block + 1) < n ? first_row(block + 1) : n; }
  // Of each column in this block.
  A* maxima(int64_t block) const { return out(p.partial) + block * n; }
  A* sums(int64_t block) const { return out(p.partial) + (symmetric_blocks(n) + block) * n; }

  // scores = s_i, -inf where masked. Returns s_ii.
  A score(int64_t i) {
    const A* const dots = in(p.dots) + i * n;
    for (int64_t j = 0; j < n; ++j) scores[j] = scale * dots[j];
    const A own = scores[i];
    if (p.labels != nullptr) {
      mask(p.labels[i]);
      if (p.known_offsets != nullptr) {
        for (int64_t k = p.known_offsets[i]; k < p.known_offsets[i + 1]; ++k) mask(p.known_ids[k]);
      }
    }
    scores[i] = own;
    return own;
  }
  void mask(int64_t label) {
    const int64_t* const labels = p.labels;
    for (int64_t j = 0; j < n; ++j) scores[j] = labels[j] == label ? kOut : scores[j];
  }

  // shifted = r_i
  void shift_row(int64_t i, A own) {
    const A* const shift = in(p.key_shift);
    for (int64_t j = 0; j < n; ++j) shifted[j] = scores[j] + shift[j];
    shifted[i] = own;
  }
  A query_shift(int64_t i) const { return p.query_shift == nullptr ? A(0) : in(p.query_shift)[i]; }

  void rows(int64_t block) {
    A* const most = maxima(block);
    for (int64_t j = 0; j < n; ++j) most[j] = kOut;
    for (int64_t i = first_row(block); i < end_row(block); ++i) {
      const A own = score(i), of_query = query_shift(i);
      const A above = most[i] > own ? most[i] : own;
      for (int64_t j = 0; j < n; ++j) {
        const A x = scores[j] + of_query;
        most[j] = x > most[j] ? x : most[j];
      }
      most[i] = above;
      const A* row = scores;
      if (p.key_shift != nullptr) {
        shift_row(i, own);
        row = shifted;
      }
      const A max = Rows<A>::max_of(row, n);
      out(p.row_lse)[i] = max + log_acc(Rows<A>::exp_sum(row, max, shifted, n));
      out(p.loss)[i] = own;
    }
  }

  // column_lse holds the maximum of each column.
  void columns(int64_t block) {
    A* const total = sums(block);
    const A* const most = in(p.column_lse);
    for (int64_t j = 0; j < n; ++j) total[j] = 0;
    for (int64_t i = first_row(block); i < end_row(block); ++i) {
      const A own = score(i), of_query = query_shift(i);
      for (int64_t j = 0; j < n; ++j) shifted[j] = scores[j] + of_query - most[j];
      shifted[i] = own - most[i];
      Rows<A>::exp_to(shifted, A(0), A(1), shifted, n);
      for (int64_t j = 0; j < n; ++j) total[j] += shifted[j];
    }
  }

  void grad(int64_t block) {
    const A half = scale / 2;
    const A* const upstream = in(p.grad);
    const A* const lse = in(p.column_lse);
    for (int64_t j = 0; j < n; ++j) shares[j] = half * upstream[j];
    for (int64_t i = first_row(block); i < end_row(block); ++i) {
      A* const coefs = out(p.coefs) + i * n;
      const A own = score(i), of_query = query_shift(i), row_lse = in(p.row_lse)[i];
      const A* row = scores;
      if (p.key_shift != nullptr) {
        shift_row(i, own);
        row = shifted;
      }
      Rows<A>::exp_to(row, row_lse, shares[i], coefs, n);
      for (int64_t j = 0; j < n; ++j) shifted[j] = scores[j] + of_query - lse[j];
      shifted[i] = own - lse[i];
      Rows<A>::exp_to(shifted, A(0), A(1), shifted, n);
      for (int64_t j = 0; j < n; ++j) coefs[j] += shares[j] * shifted[j];
      coefs[i] -= scale * upstream[i];
    }
  }
};

template <typename A>
inline void symmetric_rows(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  SymmetricRows<A> body(params);
  for (int64_t block = begin; block < end; ++block) body.rows(block);
}
template <typename A>
inline void symmetric_columns(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  SymmetricRows<A> body(params);
  for (int64_t block = begin; block < end; ++block) body.columns(block);
}
template <typename A>
inline void symmetric_grad(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  SymmetricRows<A> body(params);
  for (int64_t block = begin; block < end; ++block) body.grad(block);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
