// Forward over rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: a tile of kTile class rows is scored, enters the online softmax, and is added to the
// unit gradient of h while it is still in the L1 cache. Rows further down the list are prefetched meanwhile, over the
// border of a batch row too: the gather is bound by memory latency, so the only thing to do is to have many rows under
// way. Deterministic: the order of operations in a row depends on its entries only.
#pragma once

#include <cstdlib>

#include "common/vec.h"
#include "loss/sampled_softmax_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTile = 16;

// ------------------------------------------------------------------------------------------------ row arithmetic
// Row primitives on A-type buffers: scalar code for any type, and vector code for float accumulation.
template <typename T>
struct Rows {
  using A = acc_t<T>;

  // out[j] = h . w[j], four class rows at a time so that h is read once for four
  static void dot4(const A* h, const T* const* w, int64_t d, A* out) {
    int64_t c = 0;
    A tail[4] = {0, 0, 0, 0};
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      Vec s0 = Vec::zero(), s1 = Vec::zero(), s2 = Vec::zero(), s3 = Vec::zero();
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        const Vec x = Vec::load(h + c);
        s0 = fma(x, Vec::load(w[0] + c), s0);
        s1 = fma(x, Vec::load(w[1] + c), s1);
        s2 = fma(x, Vec::load(w[2] + c), s2);
        s3 = fma(x, Vec::load(w[3] + c), s3);
      }
      tail[0] = s0.sum();
      tail[1] = s1.sum();
      tail[2] = s2.sum();
      tail[3] = s3.sum();
    }
#endif
    for (; c < d; ++c) {
      for (int j = 0; j < 4; ++j) tail[j] += h[c] * to_acc(w[j][c]);
    }
    for (int j = 0; j < 4; ++j) out[j] = tail[j];
  }

  // acc += sum_j coef[j] * w[j]
  static void axpy4(A* acc, const A* coef, const T* const* w, int64_t d) {
    int64_t c = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec c0 = Vec::all(coef[0]), c1 = Vec::all(coef[1]), c2 = Vec::all(coef[2]), c3 = Vec::all(coef[3]);
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        Vec x = fma(c0, Vec::load(w[0] + c), Vec::load(acc + c));
        x = fma(c1, Vec::load(w[1] + c), x);
        x = fma(c2, Vec::load(w[2] + c), x);
        fma(c3, Vec::load(w[3] + c), x).store(acc + c);
      }
    }
#endif
    for (; c < d; ++c) {
      A x = acc[c];
      for (int j = 0; j < 4; ++j) x += coef[j] * to_acc(w[j][c]);
      acc[c] = x;
    }
  }

  static void axpy1(A* acc, A coef, const T* w, int64_t d) {
    for (int64_t c = 0; c < d; ++c) acc[c] += coef * to_acc(w[c]);
  }

  static void scale_to(A* out, const A* acc, A factor, int64_t d) {
    for (int64_t c = 0; c < d; ++c) out[c] = acc[c] * factor;
  }

  // out[k] = exp(x[k] - shift); returns the sum
  static A exp_sum(const A* x, A shift, A* out, int64_t n) {
    int64_t k = 0;
    A sum = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec s = Vec::all(shift);
      Vec total = Vec::zero();
      for (; k + Vec::kSize <= n; k += Vec::kSize) {
        const Vec e = vexp(Vec::load(x + k) - s);
        e.store(out + k);
        total = total + e;
      }
      if (k < n) {
        const int rest = int(n - k);
        const Vec e = vexp(load_tail(x + k, rest) - s);
        store_tail(e, out + k, rest);
        for (; k < n; ++k) sum += out[k];
      }
      return total.sum() + sum;
    }
#endif
    for (; k < n; ++k) {
      out[k] = exp_acc(x[k] - shift);
      sum += out[k];
    }
    return sum;
  }
};

template <typename T>
inline void prefetch_row(const T* row, int64_t d) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < d * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// ------------------------------------------------------------------------------------------------ scratch of a thread
template <typename A>
struct Scratch {
  A *h, *push, *pull, *logits, *scores, *shares, *signs, *exps;
  int64_t *ids, *columns;
  void* memory;

  Scratch(int64_t d, int64_t entries) {
    const int64_t row = (d + 15) / 16 * 16, list = (entries + 15) / 16 * 16;
    const size_t bytes = size_t(3 * row + 5 * list) * sizeof(A) + size_t(2 * list) * sizeof(int64_t);
    memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    h = static_cast<A*>(memory);
    push = h + row;
    pull = push + row;
    logits = pull + row;
    scores = logits + list;
    shares = scores + list;
    signs = shares + list;
    exps = signs + list;
    ids = reinterpret_cast<int64_t*>(exps + list);
    columns = ids + list;
  }
  ~Scratch() { std::free(memory); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// ------------------------------------------------------------------------------------------------ one row
template <typename T>
struct SampledSoftmaxRow {
  using A = acc_t<T>;
  const SampledSoftmaxParams& p;
  Scratch<A> s;
  const A log_m;
  const int64_t row_entries, lookahead;
  int64_t num_targets = 0;  // of the current row, without padding
  int64_t num_entries = 0;

  explicit SampledSoftmaxRow(const SampledSoftmaxParams& params)
      : p(params),
        s(params.dim, params.num_targets + params.num_samples + kTile),
        log_m(A(params.log_num_samples)),
        row_entries(params.num_targets + params.num_samples),
        // About 128 cache lines under way, into the L2 cache: it takes 48 misses at a time, the L1 only 16. Measured.
        lookahead(clamp_lookahead(128 * 64 / (params.dim * int64_t(sizeof(T)) + 1) + 1)) {}

  static int64_t clamp_lookahead(int64_t rows) { return rows < 4 ? 4 : rows > 32 ? 32 : rows / 4 * 4; }

  const T* weight_row(int64_t id) const { return static_cast<const T*>(p.weight) + id * p.dim; }
  bool is_target(int64_t id) const { return id != p.ignore_index && !(p.num_targets > 1 && id == kPadding); }

  bool masked(int64_t b, int64_t id) const {
    for (int64_t k = 0; k < num_targets; ++k) {
      if (s.ids[k] == id) return true;
    }
    if (p.known_offsets == nullptr) return false;
    bool found = false;
    for (int64_t k = p.known_offsets[b]; k < p.known_offsets[b + 1]; ++k) found |= p.known_ids[k] == id;
    return found;
  }

  // Lists the row's targets and unmasked draws; logits start as the part that does not need the class row.
  void list_entries(int64_t b) {
    num_entries = 0;
    for (int64_t k = 0; k < p.num_targets; ++k) {
      const int64_t id = p.target[b * p.num_targets + k];
      if (!is_target(id)) continue;
      s.ids[num_entries] = id;
      s.columns[num_entries] = k;
      s.logits[num_entries] = 0;
      ++num_entries;
    }
    num_targets = num_entries;
    if (num_targets == 0) return;
    const int64_t* ids = p.ids + (p.shared ? 0 : b * p.num_samples);
    const A* log_q = static_cast<const A*>(p.log_q) + (p.shared ? 0 : b * p.num_samples);
    for (int64_t k = 0; k < p.num_samples; ++k) {
      const int64_t id = ids[k];
      if (masked(b, id)) continue;
      s.ids[num_entries] = id;
      s.columns[num_entries] = p.num_targets + k;
      // inf in log_q would silently drop the draw (or win it all): a row with bad input is nan, not plausible.
      s.logits[num_entries] = is_finite(log_q[k]) ? -log_q[k] - log_m : quiet_nan<A>();
      ++num_entries;
    }
  }

  // The class row `i` places after the start of this batch row's list, looking into the next batch row.
  void prefetch(int64_t b, int64_t end, int64_t i) const {
    if (i < num_entries) return prefetch_row(weight_row(s.ids[i]), p.dim);
    i -= num_entries;
    if (b + 1 >= end || i >= row_entries) return;
    const int64_t id =
        i < p.num_targets ? p.target[(b + 1) * p.num_targets + i] : p.ids[(b + 1) * p.num_samples + i - p.num_targets];
    if (id >= 0) prefetch_row(weight_row(id), p.dim);
  }

  void zero_outputs(int64_t b) {
    static_cast<A*>(p.loss)[b] = 0;
    static_cast<A*>(p.lse)[b] = 0;
    static_cast<A*>(p.denom)[b] = 0;
    if (!p.need_grad) return;
    static_cast<A*>(p.total)[b] = 0;
    clear_coefficients(b);
    A* d_push = static_cast<A*>(p.d_push) + b * p.dim;
    A* d_pull = static_cast<A*>(p.d_pull) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) d_push[c] = d_pull[c] = 0;
  }

  int64_t pull_width() const { return p.label_smoothing > 0 ? row_entries : p.num_targets; }

  void clear_coefficients(int64_t b) {
    A* push = static_cast<A*>(p.push) + b * row_entries;
    A* pull = static_cast<A*>(p.pull) + b * pull_width();
    for (int64_t k = 0; k < row_entries; ++k) push[k] = 0;
    for (int64_t k = 0; k < pull_width(); ++k) pull[k] = 0;
  }

  void run(int64_t b, int64_t end) {
    list_entries(b);
    if (num_targets == 0) return zero_outputs(b);
    const A scale = A(p.scale), eps = A(p.label_smoothing);
    const bool trivial = num_entries == num_targets;  // every draw is masked: nothing to learn from this row
    // Rows of class memory are read for the listed entries, but shared draws come with their products.
    const int64_t num_rows = p.shared ? num_targets : num_entries;

    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) s.h[c] = to_acc(hidden[c]);
    if (p.need_grad) {
      for (int64_t c = 0; c < p.dim; ++c) s.push[c] = s.pull[c] = 0;
    }

    A weight_sum = 0, every_sum = 0;  // class weights of the targets, and of all entries when smoothing
    for (int64_t k = 0; k < num_entries; ++k) {
      const bool target = k < num_targets;
      A share = target ? (1 - eps) / A(num_targets) : A(0);
      if (eps > 0) share += eps / A(num_entries);
      if (target || eps > 0) {
        const A class_weight = load_scalar<A>(p.class_weight, s.ids[k], A(1));
        if (target) weight_sum += class_weight;
        every_sum += class_weight;
        share *= class_weight;
      }
      s.shares[k] = trivial ? A(0) : share;
    }
    // Not the sum of the shares: many small equal terms drift, and without class weights this is 1.
    A total = (1 - eps) / A(num_targets) * weight_sum;
    if (eps > 0) total += eps / A(num_entries) * every_sum;
    if (trivial) total = 0;

    OnlineSoftmax<A> online = online_empty<A>();
    A pulled = 0;  // sum a_k s_k
    int64_t done = 0;
    for (; done < num_rows; done += kTile) {
      const int64_t n = num_rows - done < kTile ? num_rows - done : kTile;
      online = tile(b, end, done, n, online, pulled, scale);
    }
    if (p.shared) online = shared_tail(b, online, pulled, scale);

    // Every logit -inf (an infinite h): not a sum of nothing but a bad row.
    const A lse = online.max == negative_infinity<A>() ? quiet_nan<A>() : online_lse(online);
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.loss)[b] = trivial ? A(0) : total * lse - pulled;
    static_cast<A*>(p.denom)[b] = weight_sum / A(num_targets);
    if (!p.need_grad) return;
    static_cast<A*>(p.total)[b] = total;
    if (num_entries < row_entries || p.label_smoothing > 0) clear_coefficients(b);
    A* push = static_cast<A*>(p.push) + b * row_entries;
    A* pull = static_cast<A*>(p.pull) + b * pull_width();
    Rows<T>::exp_sum(s.logits, lse, s.exps, num_entries);
    for (int64_t k = 0; k < num_entries; ++k) push[s.columns[k]] = scale * s.signs[k] * s.exps[k];
    const int64_t num_pulled = eps > 0 ? num_entries : num_targets;
    for (int64_t k = 0; k < num_pulled; ++k) pull[s.columns[k]] = scale * s.signs[k] * s.shares[k];
    Rows<T>::scale_to(static_cast<A*>(p.d_push) + b * p.dim, s.push, scale * exp_acc(online.max - lse), p.dim);
    Rows<T>::scale_to(static_cast<A*>(p.d_pull) + b * p.dim, s.pull, scale, p.dim);
  }

  // s_k, sign and o_k of entry k from its product with h
  void score(int64_t k, A dot, A scale, A& pulled) {
    A value = scale * (dot + load_scalar<A>(p.bias, s.ids[k], A(0)));
    A sign = 1;
    if (p.absolute) {
      sign = value > 0 ? A(1) : value < 0 ? A(-1) : value == 0 ? A(0) : value;
      value = value < 0 ? -value : value;
    }
    s.signs[k] = sign;
    s.logits[k] += value;
    if (s.shares[k] != 0) pulled += s.shares[k] * value;
  }

  OnlineSoftmax<A> merge_max(OnlineSoftmax<A> online, A max) {
    if (max > online.max) {
      const A shrink = shifted_exp(online.max, max);
      online.sum *= shrink;
      if (p.need_grad && online.max != negative_infinity<A>()) Rows<T>::scale_to(s.push, s.push, shrink, p.dim);
      online.max = max;
    }
    return online;
  }

  // What to subtract before exp: where every logit so far is -inf, 0, or -inf - -inf would be nan.
  static A shift_of(OnlineSoftmax<A> online) { return online.max == negative_infinity<A>() ? A(0) : online.max; }

  OnlineSoftmax<A> tile(int64_t b, int64_t end, int64_t first, int64_t n, OnlineSoftmax<A> online, A& pulled, A scale) {
    const T* rows[kTile];
    A dots[kTile];
    // A short tile repeats its last row: four rows at a time need no special case, and a repeat costs no memory.
    for (int64_t j = 0; j < kTile; ++j) rows[j] = weight_row(s.ids[first + (j < n ? j : n - 1)]);
    for (int64_t j = 0; j < n; j += 4) {
      if (!p.shared) {
        for (int64_t ahead = 0; ahead < 4 && j + ahead < n; ++ahead) prefetch(b, end, first + j + ahead + lookahead);
      }
      Rows<T>::dot4(s.h, rows + j, p.dim, dots + j);
    }
    A max = negative_infinity<A>();
    for (int64_t j = 0; j < n; ++j) {
      score(first + j, dots[j], scale, pulled);
      max = s.logits[first + j] > max ? s.logits[first + j] : max;
    }
    online = merge_max(online, max);
    A coef[kTile];
    online.sum += Rows<T>::exp_sum(s.logits + first, shift_of(online), coef, n);
    if (!p.need_grad) return online;
    for (int64_t j = 0; j < n; ++j) coef[j] *= s.signs[first + j];
    for (int64_t j = n; j < kTile; ++j) coef[j] = 0;
    for (int64_t j = 0; j < n; j += 4) {
      // A repeated row with coefficient 0 would turn an inf weight into nan for rows that never drew it.
      if (j + 4 <= n)
        Rows<T>::axpy4(s.push, coef + j, rows + j, p.dim);
      else
        for (int64_t i = j; i < n; ++i) Rows<T>::axpy1(s.push, coef[i], rows[i], p.dim);
    }
    for (int64_t j = 0; j < n; ++j) {
      if (s.shares[first + j] != 0) {
        Rows<T>::axpy1(s.pull, s.shares[first + j] * s.signs[first + j], rows[j], p.dim);
      }
    }
    return online;
  }

  // Shared draws: the products come from a GEMM, and their part of d_push and d_pull goes to one.
  OnlineSoftmax<A> shared_tail(int64_t b, OnlineSoftmax<A> online, A& pulled, A scale) {
    const A* dots = static_cast<const A*>(p.dots) + b * p.num_samples;
    A max = negative_infinity<A>();
    for (int64_t k = num_targets; k < num_entries; ++k) {
      score(k, dots[s.columns[k] - p.num_targets], scale, pulled);
      max = s.logits[k] > max ? s.logits[k] : max;
    }
    online = merge_max(online, max);
    online.sum += Rows<T>::exp_sum(s.logits + num_targets, shift_of(online), s.exps, num_entries - num_targets);
    return online;
  }
};

template <typename T>
inline void sampled_softmax_rows(const SampledSoftmaxParams& params, int64_t begin, int64_t end) {
  SampledSoftmaxRow<T> row(params);
  for (int64_t b = begin; b < end; ++b) row.run(b, end);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
