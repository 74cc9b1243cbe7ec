// Forward over rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: a tile of class rows is scored, the draws' coefficients follow at once (they need
// their own score, and for the relative losses the targets', which come first), and they are added to the unit gradient
// of h while they are in the L1 cache. The rows behind them are prefetched meanwhile, over the borders of batch rows:
// with one draw a row there are only two of them in each. The targets of a relative loss are added last.
// Deterministic: the order of operations in a row depends on its entries only.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/entry_loss/entry_loss_math.h"
#include "loss/fused/fused_loss_cpu_rows.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename T, EntryLoss kKind>
struct EntryLossRow {
  using A = acc_t<T>;
  static constexpr bool kRelative = is_relative(kKind);
  static constexpr int64_t kMostDraws = 128;  // of a relative loss that are worked on together

  const EntryLossParams& p;
  const EntryLossFactors<A> f;
  const int64_t P, m, entries, rows_read, tile_rows;
  const bool masking;
  const RowPrefetch ahead_of;
  A* const h;       // [d], the current row in the accumulation type
  A* const scores;  // [P], of its targets, for a relative loss
  A* const shares;  // [P]: a_y, 0 for a padded target
  A* const pulls;   // [P]: how much the draws pull at a target (one_vs_each)
  // Of the current row: its first target (stands in for what takes no part), a, the target's score and log eta.
  int64_t stand_in = 0;
  A row_weight = 0, level = 0, log_eta = 0;

  static size_t padded(int64_t n) { return (size_t(n) * sizeof(A) + 63) / 64 * 64; }

  explicit EntryLossRow(const EntryLossParams& params)
      : p(params),
        f(params),
        P(params.num_targets),
        m(params.num_samples),
        entries(params.num_targets + params.num_samples),
        rows_read(params.shared ? params.num_targets : params.num_targets + params.num_samples),
        tile_rows(rows_of_tile<T>(params.dim)),
        masking(kRelative || params.known_offsets != nullptr),
        ahead_of(row_prefetch<T>(params.dim)),
        h(static_cast<A*>(std::aligned_alloc(64, padded(params.dim) + 3 * padded(params.num_targets) + 64))),
        scores(h + padded(params.dim) / sizeof(A)),
        shares(scores + padded(params.num_targets) / sizeof(A)),
        pulls(shares + padded(params.num_targets) / sizeof(A)) {}
  ~EntryLossRow() { std::free(h); }
  EntryLossRow(const EntryLossRow&) = delete;
  EntryLossRow& operator=(const EntryLossRow&) = delete;

  const T* weight_row(int64_t id) const { return static_cast<const T*>(p.weight) + id * p.dim; }
  int64_t first_draw(int64_t b) const { return p.shared ? 0 : b * m; }
  int64_t entry_id(int64_t b, int64_t k) const { return k < P ? p.target[b * P + k] : p.ids[first_draw(b) + k - P]; }

  bool masked(int64_t b, int64_t id) const {
    if (kRelative) {
      const int64_t* target = p.target + b * P;
      for (int64_t k = 0; k < P; ++k) {
        if (target[k] == id && counts_as_target(p, id)) return true;
      }
    }
    if (p.known_offsets == nullptr) return false;
    bool found = false;
    for (int64_t k = p.known_offsets[b]; k < p.known_offsets[b + 1]; ++k) found |= p.known_ids[k] == id;
    return found;
  }

  // The class whose row is read for entry k.
  int64_t row_id(int64_t b, int64_t k) const {
    const int64_t id = entry_id(b, k);
    if (k < P) return P == 1 || counts_as_target(p, id) ? id : stand_in;
    return masking && masked(b, id) ? stand_in : id;
  }

  // Entry k of row b, where k may lie in one of the rows after it.
  SX_ALWAYS_INLINE void prefetch(int64_t b, int64_t k) const {
    for (; k >= rows_read; k -= rows_read) ++b;
    if (b >= p.batch) return;
    const int64_t id = entry_id(b, k);
    if (uint64_t(id) < uint64_t(p.num_classes)) prefetch_row(weight_row(id), ahead_of);
  }

  // Shares of the targets. False: none, nothing to do.
  bool read_targets(int64_t b) {
    const int64_t* target = p.target + b * P;
    if (P == 1) {
      if (!counts_as_target(p, target[0])) return false;
      stand_in = target[0];
      row_weight = shares[0] = load_scalar<A>(p.class_weight, stand_in, A(1));
      return true;
    }
    int64_t count = 0;
    for (int64_t k = P - 1; k >= 0; --k) {
      if (!counts_as_target(p, target[k])) continue;
      stand_in = target[k];
      ++count;
    }
    if (count == 0) return false;
    row_weight = 0;
    for (int64_t k = 0; k < P; ++k) {
      shares[k] = counts_as_target(p, target[k]) ? load_scalar<A>(p.class_weight, target[k], A(1)) / A(count) : A(0);
      row_weight += shares[k];
    }
    return true;
  }

  void zero_outputs(int64_t b) const {
    static_cast<A*>(p.loss)[b] = 0;
    static_cast<A*>(p.denom)[b] = 0;
    if (p.ratio != nullptr) static_cast<A*>(p.ratio)[b] = 1;
    if (!p.need_grad) return;
    for (int64_t k = 0; k < entries; ++k) static_cast<A*>(p.coef_loss)[b * p.coefs.stride + k] = 0;
    for (int64_t c = b * p.dim; c < (b + 1) * p.dim; ++c) static_cast<A*>(p.d_loss)[c] = 0;
  }

  // Scores of n entries from their products, in place.
  void score(const int64_t* ids, int64_t n, A* dots) const {
    if (p.bias.data != nullptr) {
      for (int64_t j = 0; j < n; ++j) dots[j] += load_scalar<A>(p.bias, ids[j], A(0));
    }
    for (int64_t j = 0; j < n; ++j) dots[j] *= f.scale;
  }

  // Terms of entries first .. first + n - 1: the slopes, with their shares, take the place of the scores; returns their
  // part of the loss. Targets of a relative loss wait for the draws.
  A terms(int64_t b, int64_t first, int64_t n, A* s) {
    A value = 0;
    int64_t j = 0;
    for (; j < n && first + j < P; ++j) {
      const int64_t k = first + j;
      if (kRelative) {
        scores[k] = s[j];
        s[j] = 0;
      } else if (P > 1 && !counts_as_target(p, p.target[b * P + k])) {
        s[j] = 0;
      } else {
        const bool reads = kKind == EntryLoss::kNce || f.reg != 0;
        const A log_q = reads ? static_cast<const A*>(p.target_log_q)[b * P + k] : A(0);
        if (kKind == EntryLoss::kNce) s[j] += log_weight(log_q, f.log_m);
        const EntryTerm<A> term = entry_term(s[j], true, f.reg, log_q);
        value += shares[k] * term.value;
        s[j] = shares[k] * term.slope;
      }
    }
    if (kRelative && first < P && first + n >= P) start_draws(b);
    if (j == n) return value;  // no draw here, and with m = 0 no log_q to point into
    return value + draw_terms(b, first + j - P, n - j, s + j);
  }

  // Draws first .. first + n - 1.
  A draw_terms(int64_t b, int64_t first, int64_t n, A* s) {
    const A* log_q = static_cast<const A*>(p.log_q) + first_draw(b) + first;
    const int64_t* ids = p.ids + first_draw(b) + first;
    if constexpr (kRelative) {
      A value = 0;
      for (int64_t at = 0; at < n; at += kMostDraws) {
        const int64_t count = n - at < kMostDraws ? n - at : kMostDraws;
        value += relative_draws(b, ids + at, log_q + at, count, s + at);
      }
      return value;
    } else {
      const A share = row_weight * f.share;
      const A value = masking ? masked_draws(b, ids, log_q, n, s) : noise_draws(s, log_q, f.reg, f.log_m, n);
      for (int64_t j = 0; j < n; ++j) s[j] *= share;
      return share * value;
    }
  }

  // -------------------------------------------------------------------------------------------- against noise
  // Sum of n draws' terms without their share; the slopes take the place of the scores.
  static A noise_draws(A* xi, const A* log_q, A reg, A log_m, int64_t n) {
    A value = 0;
    int64_t j = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const bool reads = kKind == EntryLoss::kNce || reg != 0;
      Vec sum = Vec::zero();
      for (; j + Vec::kSize <= n; j += Vec::kSize) {
        Vec term, slope;
        noise_vector(Vec::load(xi + j), reads ? Vec::load(log_q + j) : Vec::zero(), reg, log_m, term, slope);
        sum = sum + term;
        slope.store(xi + j);
      }
      value = sum.sum();
      if (n - j > 2) {
        const int rest = int(n - j);
        Vec term, slope;
        float terms[Vec::kSize];
        noise_vector(load_tail(xi + j, rest), reads ? load_tail(log_q + j, rest) : Vec::zero(), reg, log_m, term,
                     slope);
        store_tail(slope, xi + j, rest);
        store_tail(term, terms, rest);
        for (int i = 0; i < rest; ++i) value += terms[i];
        return value;
      }
    }
#endif
    for (; j < n; ++j) {
      const EntryTerm<A> term = noise_draw(xi[j], log_q + j, reg, log_m);
      value += term.value;
      xi[j] = term.slope;
    }
    return value;
  }

  static EntryTerm<A> noise_draw(A xi, const A* log_q, A reg, A log_m) {
    if (kKind == EntryLoss::kNce) return entry_term(xi + log_weight(*log_q, log_m), false, A(0), A(0));
    return entry_term(xi, false, reg, reg == 0 ? A(0) : *log_q);
  }

#if defined(__AVX2__)
  // As noise_draw: e = exp(-|xi|); max takes its second argument where the first is nan, so e carries the nan.
  static void noise_vector(Vec xi, Vec log_q, float reg, float log_m, Vec& term, Vec& slope) {
    const Vec zero = Vec::zero(), one = Vec::all(1.0f);
    if (kKind == EntryLoss::kNce) xi = xi - log_q - Vec::all(log_m) + zero * log_q;
    const Vec up = max(xi, zero), down = min(xi, zero);
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

  // The same where known positives are left out: one by one, it is rare.
  A masked_draws(int64_t b, const int64_t* ids, const A* log_q, int64_t n, A* xi) const {
    A value = 0;
    for (int64_t j = 0; j < n; ++j) {
      EntryTerm<A> term{0, 0};
      if (!masked(b, ids[j])) term = noise_draw(xi[j], log_q + j, f.reg, f.log_m);
      value += term.value;
      xi[j] = term.slope;
    }
    return value;
  }

  // -------------------------------------------------------------------------------------------- relative to targets
  // All scores of targets are there.
  void start_draws(int64_t b) {
    for (int64_t k = 0; k < P; ++k) pulls[k] = 0;
    if (kKind != EntryLoss::kAugmentReduce) return;
    log_eta = example_log_eta<A>(p.examples, p.log_eta, b);
    level = scores[0];
    if (P == 1) return;
    // With class weights of zero their plain mean.
    A sum = 0, total = 0;
    for (int64_t k = 0; k < P; ++k) {
      if (!counts_as_target(p, p.target[b * P + k])) continue;
      const A share = row_weight == 0 ? A(1) : shares[k];
      sum += share * scores[k];
      total += share;
    }
    level = sum / total;
  }

  // At most kMostDraws. Masked ones get score and log weight -inf, which gives them term and slope 0.
  A relative_draws(int64_t b, const int64_t* ids, const A* log_q, int64_t n, A* s) {
    A log_v[kMostDraws];
    bool any = false;
    for (int64_t j = 0; j < n; ++j) log_v[j] = log_weight(log_q[j], f.log_m);
    if (P == 1 && p.known_offsets == nullptr) {
      for (int64_t j = 0; j < n; ++j) {
        const bool out = ids[j] == stand_in;
        any |= out;
        s[j] = out ? negative_infinity<A>() : s[j];
        log_v[j] = out ? negative_infinity<A>() : log_v[j];
      }
    } else {
      for (int64_t j = 0; j < n; ++j) {
        if (!masked(b, ids[j])) continue;
        any = true;
        s[j] = log_v[j] = negative_infinity<A>();
      }
    }
    A value;
    if constexpr (kKind == EntryLoss::kAugmentReduce) {
      for (int64_t j = 0; j < n; ++j) s[j] += log_v[j];
      value = Rows<T>::exp_sum(s, level + log_eta, s, n);
      pulls[0] += value;
      for (int64_t j = 0; j < n; ++j) s[j] *= row_weight;
      value *= row_weight;
    } else {
      value = one_vs_each_draws(b, n, log_v, s);
    }
    // Where a target's score is nan.
    for (int64_t j = 0; any && j < n; ++j) {
      if (masked(b, ids[j])) s[j] = 0;
    }
    return value;
  }

  A one_vs_each_draws(int64_t b, int64_t n, const A* log_v, A* s) {
    A v[kMostDraws], slopes[kMostDraws];
    Rows<T>::exp_to(log_v, A(0), A(1), v, n);
    for (int64_t j = 0; j < n; ++j) slopes[j] = 0;
    A value = 0;
    for (int64_t k = 0; k < P; ++k) {
      if (P > 1 && !counts_as_target(p, p.target[b * P + k])) continue;
      A pull = 0;
      value += shares[k] * versus(scores[k], shares[k], v, s, slopes, n, pull);
      pulls[k] += pull;
    }
    for (int64_t j = 0; j < n; ++j) s[j] = slopes[j];
    return value;
  }

  // sum_j v_j softplus(s_j - target); the slopes are added to `slopes` with the share and to `pull` without.
  static A versus(A target, A share, const A* v, const A* s, A* slopes, int64_t n, A& pull) {
    A value = 0;
    int64_t j = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec zero = Vec::zero(), one = Vec::all(1.0f), t = Vec::all(target), a = Vec::all(share);
      const auto vector = [&](Vec z, Vec weight, Vec& term, Vec& slope) {
        const Vec up = max(z, zero), down = min(z, zero), e = vexp(keep_nan(down - up, z));
        term = weight * (up + vlog1p_unit(e));
        slope = weight * vexp(keep_nan(down, z)) / (one + e);
      };
      Vec sum = zero, slope_sum = zero;
      for (; j + Vec::kSize <= n; j += Vec::kSize) {
        Vec term, slope;
        vector(Vec::load(s + j) - t, Vec::load(v + j), term, slope);
        sum = sum + term;
        slope_sum = slope_sum + slope;
        fma(a, slope, Vec::load(slopes + j)).store(slopes + j);
      }
      if (n > j) {  // behind the tail v is 0, and so is the term
        const int rest = int(n - j);
        Vec term, slope;
        vector(load_tail(s + j, rest) - t, load_tail(v + j, rest), term, slope);
        sum = sum + only_tail(term, rest);
        slope_sum = slope_sum + only_tail(slope, rest);
        store_tail(fma(a, slope, load_tail(slopes + j, rest)), slopes + j, rest);
      }
      pull = slope_sum.sum();
      return sum.sum();
    }
#endif
    for (; j < n; ++j) {
      const EntryTerm<A> term = softplus_term(s[j] - target);
      value += v[j] * term.value;
      const A slope = v[j] * term.slope;
      slopes[j] += share * slope;
      pull += slope;
    }
    return value;
  }

#if defined(__AVX2__)
  // Zeros behind the tail, where 0 * inf would be nan.
  static Vec only_tail(Vec x, int rest) {
    float values[Vec::kSize];
    x.store(values);
    return load_tail(values, rest);
  }
#endif

  // The targets' coefficients of a relative loss, and the rest of its value.
  A finish_targets(int64_t b, A* coefs, A* d_loss) {
    A base = 0;
    if (kKind == EntryLoss::kAugmentReduce) {
      for (int64_t k = 0; k < P; ++k) {
        if (P > 1 && !counts_as_target(p, p.target[b * P + k])) continue;
        scores[k] = exp_acc(scores[k] - level - log_eta);
        base += scores[k];
      }
      static_cast<A*>(p.ratio)[b] = base + pulls[0];
    }
    for (int64_t k = 0; p.need_grad && k < P; ++k) {
      A coef = 0;
      if (P == 1 || counts_as_target(p, p.target[b * P + k])) {
        coef = kKind == EntryLoss::kAugmentReduce
                   ? f.scale * ((row_weight * scores[k] - shares[k] * base) - shares[k] * pulls[0])
                   : -f.scale * shares[k] * pulls[k];
        Rows<T>::axpy1(d_loss, coef, weight_row(p.target[b * P + k]), p.dim);
      }
      coefs[k] = coef;
    }
    return kKind == EntryLoss::kAugmentReduce ? row_weight * (log_eta - A(1) + base) : A(0);
  }

  void run(int64_t b) {
    if (!read_targets(b)) return zero_outputs(b);
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) h[c] = to_acc(hidden[c]);
    A* coefs = p.need_grad ? static_cast<A*>(p.coef_loss) + b * p.coefs.stride : nullptr;
    A* d_loss = p.need_grad ? static_cast<A*>(p.d_loss) + b * p.dim : nullptr;
    if (p.need_grad) {
      for (int64_t c = 0; c < p.dim; ++c) d_loss[c] = 0;
    }
    A loss = 0;
    for (int64_t first = 0, n; first < rows_read; first += n) {
      // Several targets of a relative loss are scored before any draw.
      const int64_t end = kRelative && P > 1 && first < P ? P : rows_read;
      n = end - first < tile_rows ? end - first : tile_rows;
      const T* rows[kTile];
      int64_t ids[kTile];
      A values[kTile];
      for (int64_t j = 0; j < n; ++j) rows[j] = weight_row(ids[j] = row_id(b, first + j));
      for (int64_t j = n; j < kTile; ++j) rows[j] = rows[n - 1];  // the last row is repeated: no read of its own
      for (int64_t j = 0; j < n; j += 4) {
        for (int64_t ahead = j; ahead < j + 4 && ahead < n; ++ahead) prefetch(b, first + ahead + ahead_of.rows);
        Rows<T>::dot4(h, rows + j, p.dim, values + j);
      }
      score(ids, n, values);
      loss += terms(b, first, n, values);
      if (!p.need_grad) continue;
      for (int64_t j = 0; j < n; ++j) coefs[first + j] = values[j] *= f.scale;
      // A relative loss adds its targets at the end.
      int64_t j = !kRelative || first >= P ? 0 : P - first < n ? P - first : n;
      for (; j + 4 <= n; j += 4) Rows<T>::axpy4(d_loss, values + j, rows + j, p.dim);
      for (; j < n; ++j) Rows<T>::axpy1(d_loss, values[j], rows[j], p.dim);
    }
    // Shared draws come with their products, and their part of d_loss goes to a GEMM.
    if (rows_read < entries) {
      A* values = static_cast<A*>(p.dots) + b * p.dots_stride;  // ours to overwrite
      score(p.ids, m, values);
      loss += draw_terms(b, 0, m, values);
      for (int64_t k = 0; p.need_grad && k < m; ++k) coefs[P + k] = values[k] * f.scale;
    }
    if (kRelative) loss += finish_targets(b, coefs, d_loss);
    static_cast<A*>(p.loss)[b] = loss;
    static_cast<A*>(p.denom)[b] = row_weight;
  }
};

template <typename T, EntryLoss kKind>
inline void entry_loss_rows_of(const EntryLossParams& params, int64_t begin, int64_t end) {
  EntryLossRow<T, kKind> row(params);
  draw_dots(params.products, begin, end);
  for (int64_t b = begin; b < end; ++b) {
    row.run(b);
    clear_padding<acc_t<T>>(params.coefs, params.coef_loss, b, params.num_targets + params.num_samples);
  }
  draw_sums(params.products, begin, end);
}

template <typename T>
inline void entry_loss_rows(const EntryLossParams& params, int64_t begin, int64_t end) {
  switch (params.kind) {
    case EntryLoss::kNegativeSampling:
      return entry_loss_rows_of<T, EntryLoss::kNegativeSampling>(params, begin, end);
    case EntryLoss::kNce:
      return entry_loss_rows_of<T, EntryLoss::kNce>(params, begin, end);
    case EntryLoss::kOneVsEach:
      return entry_loss_rows_of<T, EntryLoss::kOneVsEach>(params, begin, end);
    case EntryLoss::kAugmentReduce:
      return entry_loss_rows_of<T, EntryLoss::kAugmentReduce>(params, begin, end);
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
