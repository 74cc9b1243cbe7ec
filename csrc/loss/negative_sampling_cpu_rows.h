// Forward over rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: four class rows are scored, their coefficients follow at once (an entry needs its
// own xi only), and they are added to the unit gradient of h while they are in the L1 cache. The rows behind them are
// prefetched meanwhile, over the borders of batch rows: with one draw a row there are only two of them in each.
// Deterministic: the order of operations in a row depends on its entries only.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/negative_sampling_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename T>
struct NegativeSamplingRow {
  using A = acc_t<T>;
  static constexpr int64_t kTile = 4;  // what dot4 and axpy4 take

  const NegativeSamplingParams& p;
  const NegativeSamplingFactors<A> f;
  const int64_t m, entries, rows_read, lookahead;
  A* const h;  // [d], the current row in the accumulation type

  explicit NegativeSamplingRow(const NegativeSamplingParams& params)
      : p(params),
        f(params),
        m(params.num_samples),
        entries(1 + params.num_samples),
        rows_read(params.shared ? 1 : 1 + params.num_samples),
        lookahead(rows_ahead<T>(params.dim)),
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
    if (uint64_t(id) < uint64_t(p.num_classes)) prefetch_row(weight_row(id), p.dim);
  }

  void zero_outputs(int64_t b) const {
    static_cast<A*>(p.loss)[b] = 0;
    static_cast<A*>(p.denom)[b] = 0;
    if (!p.need_grad) return;
    for (int64_t k = b * entries; k < (b + 1) * entries; ++k) static_cast<A*>(p.coef_loss)[k] = 0;
    for (int64_t c = b * p.dim; c < (b + 1) * p.dim; ++c) static_cast<A*>(p.d_loss)[c] = 0;
  }

  // Adds entry k's term to the loss of the row and returns its coefficient; dot = h . w.
  A finish(int64_t b, int64_t k, int64_t id, A dot, A row_weight, A& loss) const {
    const A xi = f.scale * (dot + load_scalar<A>(p.bias, id, A(0)));
    A log_q = 0;
    if (f.reg != 0) {
      log_q = k == 0 ? static_cast<const A*>(p.target_log_q)[b] : static_cast<const A*>(p.log_q)[first_draw(b) + k - 1];
    }
    const EntryTerm<A> term = entry_term(xi, k == 0, f.reg, log_q);
    const A share = row_weight * (k == 0 ? A(1) : f.share);
    loss += share * term.value;
    return share * f.scale * term.slope;
  }

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
    A loss = 0;
    for (int64_t first = 0; first < rows_read; first += kTile) {
      const int64_t n = rows_read - first < kTile ? rows_read - first : kTile;
      const T* rows[kTile];
      A dots[kTile], coef[kTile];
      for (int64_t j = 0; j < kTile; ++j) {  // the last one is repeated, with coefficient 0
        rows[j] = weight_row(entry_id(b, first + (j < n ? j : n - 1)));
        coef[j] = 0;
      }
      for (int64_t j = 0; j < n; ++j) prefetch(b, first + j + lookahead);
      Rows<T>::dot4(h, rows, p.dim, dots);
      for (int64_t j = 0; j < n; ++j) {
        coef[j] = finish(b, first + j, entry_id(b, first + j), dots[j], row_weight, loss);
        if (p.need_grad) coefs[first + j] = coef[j];
      }
      if (p.need_grad) add_rows(d_loss, coef, rows, n);
    }
    // Shared draws come with their products, and their part of d_loss goes to a GEMM.
    for (int64_t k = rows_read; k < entries; ++k) {
      const A dot = static_cast<const A*>(p.dots)[b * m + k - 1];
      const A coef = finish(b, k, p.ids[k - 1], dot, row_weight, loss);
      if (p.need_grad) coefs[k] = coef;
    }
    static_cast<A*>(p.loss)[b] = loss;
    static_cast<A*>(p.denom)[b] = row_weight;
  }

  // A short tile by single rows where that is less work; 0 times an infinite row would not be 0 either.
  void add_rows(A* sum, const A* coef, const T* const* rows, int64_t n) const {
    if (n == kTile) return Rows<T>::axpy4(sum, coef, rows, p.dim);
    for (int64_t j = 0; j < n; ++j) Rows<T>::axpy1(sum, coef[j], rows[j], p.dim);
  }
};

template <typename T>
inline void negative_sampling_rows(const NegativeSamplingParams& params, int64_t begin, int64_t end) {
  const NegativeSamplingRow<T> row(params);
  for (int64_t b = begin; b < end; ++b) row.run(b);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
