// Forward over rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: a tile of class rows is scored, their coefficients follow at once (an entry
// needs its own xi only), and they are added to the unit gradient of h while they are in the L1 cache. The rows behind
// them are prefetched meanwhile, over the borders of batch rows: with one draw a row there are only two of them in
// each. Deterministic: the order of operations in a row depends on its entries only.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/negative_sampling_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename T>
struct NegativeSamplingRow {
  using A = acc_t<T>;

  const NegativeSamplingParams& p;
  const NegativeSamplingFactors<A> f;
  const int64_t m, entries, rows_read, tile_rows;
  const RowPrefetch ahead_of;
  A* const h;  // [d], the current row in the accumulation type

  explicit NegativeSamplingRow(const NegativeSamplingParams& params)
      : p(params),
        f(params),
        m(params.num_samples),
        entries(1 + params.num_samples),
        rows_read(params.shared ? 1 : 1 + params.num_samples),
        tile_rows(rows_of_tile<T>(params.dim)),
        ahead_of(row_prefetch<T>(params.dim)),
        h(static_cast<A*>(std::aligned_alloc(64, (size_t(params.dim) * sizeof(A) + 64) / 64 * 64))) {}
  ~NegativeSamplingRow() { std::free(h); }
  NegativeSamplingRow(const NegativeSamplingRow&) = delete;
  NegativeSamplingRow& operator=(const NegativeSamplingRow&) = delete;

  const T* weight_row(int64_t id) const { return static_cast<const T*>(p.weight) + id * p.dim; }
  int64_t first_draw(int64_t b) const { return p.shared ? 0 : b * m; }
  int64_t entry_id(int64_t b, int64_t k) const { return k == 0 ? p.target[b] : p.ids[first_draw(b) + k - 1]; }

  // Entry k of row b, where k may lie in one of the rows after it.
  SX_ALWAYS_INLINE void prefetch(int64_t b, int64_t k) const {
    for (; k >= rows_read; k -= rows_read) ++b;
    if (b >= p.batch) return;
    const int64_t id = entry_id(b, k);
    if (uint64_t(id) < uint64_t(p.num_classes)) prefetch_row(weight_row(id), ahead_of);
  }

  void zero_outputs(int64_t b) const {
    static_cast<A*>(p.loss)[b] = 0;
    static_cast<A*>(p.denom)[b] = 0;
    if (!p.need_grad) return;
    for (int64_t k = b * entries; k < (b + 1) * entries; ++k) static_cast<A*>(p.coef_loss)[k] = 0;
    for (int64_t c = b * p.dim; c < (b + 1) * p.dim; ++c) static_cast<A*>(p.d_loss)[c] = 0;
  }

  // xi of entries first .. first + n - 1 from their products, in place.
  void score(int64_t b, int64_t first, int64_t n, A* dots) const {
    if (p.bias.data != nullptr) {
      for (int64_t j = 0; j < n; ++j) dots[j] += load_scalar<A>(p.bias, entry_id(b, first + j), A(0));
    }
    for (int64_t j = 0; j < n; ++j) dots[j] *= f.scale;
  }

  // Terms of entries first .. first + n - 1: the slopes take the place of xi; returns the row's share of the loss.
  A terms(int64_t b, int64_t first, int64_t n, A* xi) const {
    A target_value = 0;
    int64_t j = 0;
    if (first == 0 && n > 0) {
      const A log_q = f.reg != 0 ? static_cast<const A*>(p.target_log_q)[b] : A(0);
      const EntryTerm<A> term = entry_term(xi[0], true, f.reg, log_q);
      target_value = term.value;
      xi[0] = term.slope;
      j = 1;
    }
    if (j == n) return target_value;  // no draw here, and with m = 0 no log_q to point into
    const A* log_q = static_cast<const A*>(p.log_q) + (first_draw(b) + first - 1 + j);
    const A value = draw_terms(xi + j, log_q, f.reg, n - j);
    for (; j < n; ++j) xi[j] *= f.share;
    return target_value + f.share * value;
  }

  // The same for n draws without the share.
  static A draw_terms(A* xi, const A* log_q, A reg, int64_t n) {
    A value = 0;
    int64_t j = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      Vec sum = Vec::zero();
      for (; j + Vec::kSize <= n; j += Vec::kSize) {
        Vec term, slope;
        draw_vector(Vec::load(xi + j), reg == 0 ? Vec::zero() : Vec::load(log_q + j), reg, term, slope);
        sum = sum + term;
        slope.store(xi + j);
      }
      value = sum.sum();
      if (n - j > 2) {
        const int rest = int(n - j);
        Vec term, slope;
        float terms[Vec::kSize];
        draw_vector(load_tail(xi + j, rest), reg == 0 ? Vec::zero() : load_tail(log_q + j, rest), reg, term, slope);
        store_tail(slope, xi + j, rest);
        store_tail(term, terms, rest);
        for (int i = 0; i < rest; ++i) value += terms[i];
        return value;
      }
    }
#endif
    for (; j < n; ++j) {
      const EntryTerm<A> term = entry_term(xi[j], false, reg, reg == 0 ? A(0) : log_q[j]);
      value += term.value;
      xi[j] = term.slope;
    }
    return value;
  }

#if defined(__AVX2__)
  // As entry_term of a draw: e = exp(-|xi|); max takes its second argument where the first is nan, so e carries the
  // nan.
  static void draw_vector(Vec xi, Vec log_q, float reg, Vec& term, Vec& slope) {
    const Vec zero = Vec::zero(), one = Vec::all(1.0f), up = max(xi, zero), down = min(xi, zero);
    const Vec e = vexp(keep_nan(down - up, xi));
    term = up + vlog1p_unit(e);
    // sigmoid(xi) = 1 / (1 + e) above zero, e / (1 + e) below; exp(down) is 1 and e there.
    slope = vexp(keep_nan(down, xi)) / (one + e);
    if (reg == 0) return;
    const Vec off = xi + log_q, pull = Vec::all(reg) * off;
    term = fma(pull, off, term);
    slope = slope + pull + pull;
  }
#endif

  void run(int64_t b) const {
    if (p.target[b] == p.ignore_index) return zero_outputs(b);
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) h[c] = to_acc(hidden[c]);
    A* coefs = p.need_grad ? static_cast<A*>(p.coef_loss) + b * entries : nullptr;
    A* d_loss = p.need_grad ? static_cast<A*>(p.d_loss) + b * p.dim : nullptr;
    if (p.need_grad) {
      for (int64_t c = 0; c < p.dim; ++c) d_loss[c] = 0;
    }
    const A row_weight = load_scalar<A>(p.class_weight, p.target[b], A(1));
    const A factor = row_weight * f.scale;  // of a slope in its coefficient
    A loss = 0;
    for (int64_t first = 0; first < rows_read; first += tile_rows) {
      const int64_t n = rows_read - first < tile_rows ? rows_read - first : tile_rows;
      const T* rows[kTile];
      A values[kTile];
      for (int64_t j = 0; j < kTile; ++j) rows[j] = weight_row(entry_id(b, first + (j < n ? j : n - 1)));
      for (int64_t j = 0; j < n; j += 4) {  // the last row is repeated: no read of its own
        for (int64_t ahead = j; ahead < j + 4 && ahead < n; ++ahead) prefetch(b, first + ahead + ahead_of.rows);
        Rows<T>::dot4(h, rows + j, p.dim, values + j);
      }
      score(b, first, n, values);
      loss += terms(b, first, n, values);
      if (!p.need_grad) continue;
      for (int64_t j = 0; j < n; ++j) coefs[first + j] = values[j] *= factor;
      int64_t j = 0;
      for (; j + 4 <= n; j += 4) Rows<T>::axpy4(d_loss, values + j, rows + j, p.dim);
      for (; j < n; ++j) Rows<T>::axpy1(d_loss, values[j], rows[j], p.dim);
    }
    // Shared draws come with their products, and their part of d_loss goes to a GEMM.
    if (rows_read < entries) {
      A* values = static_cast<A*>(p.dots) + b * m;  // ours to overwrite
      score(b, 1, m, values);
      loss += terms(b, 1, m, values);
      for (int64_t k = 0; p.need_grad && k < m; ++k) coefs[1 + k] = values[k] * factor;
    }
    static_cast<A*>(p.loss)[b] = row_weight * loss;
    static_cast<A*>(p.denom)[b] = row_weight;
  }
};

template <typename T>
inline void negative_sampling_rows(const NegativeSamplingParams& params, int64_t begin, int64_t end) {
  const NegativeSamplingRow<T> row(params);
  for (int64_t b = begin; b < end; ++b) row.run(b);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
