// Forward over rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: a tile of class rows is scored, enters the online softmax, and is added to the
// unit gradient of h while it is still in the L1 cache. Rows further down the list are prefetched meanwhile, over the
// border of a batch row too: the gather is bound by memory latency, so the only thing to do is to have many rows under
// way. Deterministic: the order of operations in a row depends on its entries only.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/fused/fused_loss_cpu_rows.h"
#include "loss/sampled_softmax/sampled_softmax_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// ------------------------------------------------------------------------------------------------ scratch of a thread
template <typename A>
struct Scratch {
  A *h, *push, *pull, *logits;
  A *shares, *signs;  // `run`: the weight of each entry in the loss, and the slope of its logit if that is not 1
  A* radial;          // with a margin: `MarginValue::radial` of each target
  A *draw_bias, *corrections;  // `run_shared`, in the same memory: bias and correction of each draw, equal for all rows
  int64_t* ids;
  void* memory;

  Scratch(int64_t d, int64_t entries) {
    const int64_t row = (d + 15) / 16 * 16, list = (entries + 7 + 15) / 16 * 16;
    const size_t bytes = size_t(3 * row + 4 * list) * sizeof(A) + size_t(list) * sizeof(int64_t);
    memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    h = static_cast<A*>(memory);
    push = h + row;
    pull = push + row;
    logits = pull + row;
    shares = logits + list;
    signs = shares + list;
    draw_bias = shares;
    corrections = signs;
    radial = signs + list;
    ids = reinterpret_cast<int64_t*>(radial + list);
  }
  ~Scratch() { std::free(memory); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// ------------------------------------------------------------------------------------------------ one row
// Entries keep their columns: one that takes no part (a masked draw, a padded target) stands for the row's first target
// with logit -inf, so that it reads no memory of its own and has no mass. Loops over entries are then free of branches.
template <typename T>
struct SampledSoftmaxRow {
  using A = acc_t<T>;
  static constexpr A kOut = negative_infinity<A>();
  const SampledSoftmaxParams& p;
  Scratch<A> s;
  const A log_m, scale, eps;
  const int64_t P, m, row_entries, tile_rows;
  const RowPrefetch ahead_of;
  const bool slopes;        // logits have a slope other than 1
  const bool one_target;    // the usual row: one target, no further positives
  const bool plain_shared;  // shared draws in their usual form: `run_shared`
  const bool plain_rows;    // draws of each row in theirs: `run_plain`
  int64_t num_targets = 0;  // of the current row, without padding
  int64_t num_entries = 0;  // that take part

  explicit SampledSoftmaxRow(const SampledSoftmaxParams& params)
      : p(params),
        s(params.dim, params.num_targets + params.num_samples),
        log_m(A(params.log_num_samples)),
        scale(A(params.scale)),
        eps(A(params.label_smoothing)),
        P(params.num_targets),
        m(params.num_samples),
        row_entries(params.num_targets + params.num_samples),
        tile_rows(rows_of_tile<T>(params.dim)),
        ahead_of(row_prefetch<T>(params.dim)),
        slopes(params.absolute || params.normalize),
        one_target(params.num_targets == 1 && params.known_offsets == nullptr),
        plain_shared(params.shared && params.num_targets == 1 && !params.absolute && params.label_smoothing == 0 &&
                     params.target_weight == nullptr),
        plain_rows(!params.shared && one_target && !params.absolute && params.label_smoothing == 0 &&
                   params.target_weight == nullptr && params.coef_lse == nullptr && params.num_samples > 0 &&
                   can_run_plain(params.dim)) {
    if (!plain_shared) return;
    const A* log_q = static_cast<const A*>(p.log_q);
    for (int64_t k = 0; k < m; ++k) s.corrections[k] = correction(log_q[k]);
    for (int64_t k = 0; k < m; ++k) s.draw_bias[k] = load_scalar<A>(p.bias, p.ids[k], A(0));
  }

  // inf in log_q would silently drop the draw (or win it all): 0 * inf makes it nan, so that the bad row shows.
  A correction(A log_q) const { return (-log_q - log_m) + A(0) * log_q; }

  const T* weight_row(int64_t id) const { return static_cast<const T*>(p.weight) + id * p.dim; }
  bool is_target(int64_t id) const { return id != p.ignore_index && !(P > 1 && id == kPadding); }
  const int64_t* draws_of(int64_t b) const { return p.ids + (p.shared ? 0 : b * m); }

  bool masked(int64_t b, int64_t id) const {
    const int64_t* target = p.target + b * P;
    for (int64_t k = 0; k < P; ++k) {
      if (target[k] == id && is_target(id)) return true;
    }
    return is_known(b, id);
  }
  bool is_known(int64_t b, int64_t label) const {
    if (p.known_offsets == nullptr) return false;
    bool found = false;
    for (int64_t k = p.known_offsets[b]; k < p.known_offsets[b + 1]; ++k) found |= p.known_ids[k] == label;
    return found;
  }
  bool draw_masked(int64_t b, int64_t k) const {
    if (p.draw_labels == nullptr) return masked(b, draws_of(b)[k]);
    return p.draw_labels[k] == p.row_labels[b] || is_known(b, p.draw_labels[k]);
  }

  // Ids of the entries, and logits as far as they do not need the class row. False: no target, nothing to do.
  bool list_entries(int64_t b) {
    const int64_t* target = p.target + b * P;
    num_targets = 0;
    int64_t first = 0;
    for (int64_t k = P - 1; k >= 0; --k) {
      const bool part = is_target(target[k]);
      num_targets += part;
      if (part) first = target[k];
    }
    if (num_targets == 0) return false;
    for (int64_t k = 0; k < P; ++k) {
      const bool part = is_target(target[k]);
      s.ids[k] = part ? target[k] : first;
      s.logits[k] = part ? A(0) : kOut;
    }
    const int64_t* ids = draws_of(b);
    const A* log_q = static_cast<const A*>(p.log_q) + (ids - p.ids);
    int64_t* to_ids = s.ids + P;
    A* logits = s.logits + P;
    int64_t out = 0;
    if (one_target && p.draw_labels == nullptr) {
      for (int64_t k = 0; k < m; ++k) {
        const bool hit = ids[k] == first;
        to_ids[k] = ids[k];
        logits[k] = hit ? kOut : correction(log_q[k]);
        out += hit;
      }
    } else {
      for (int64_t k = 0; k < m; ++k) {
        const bool hit = draw_masked(b, k);
        to_ids[k] = hit ? first : ids[k];
        logits[k] = hit ? kOut : correction(log_q[k]);
        out += hit;
      }
    }
    num_entries = num_targets + m - out;
    return true;
  }

  // The class row `i` places after the start of this batch row's list, looking into the next batch row.
  SX_ALWAYS_INLINE void prefetch(int64_t b, int64_t i) const {
    if (i < row_entries) return prefetch_row(weight_row(s.ids[i]), ahead_of);
    i -= row_entries;
    if (b + 1 >= p.batch || i >= row_entries) return;
    const int64_t id = i < P ? p.target[(b + 1) * P + i] : p.ids[(b + 1) * m + i - P];
    if (uint64_t(id) < uint64_t(p.num_classes)) prefetch_row(weight_row(id), ahead_of);
  }

  void zero_outputs(int64_t b) {
    static_cast<A*>(p.loss)[b] = 0;
    static_cast<A*>(p.lse)[b] = 0;
    static_cast<A*>(p.denom)[b] = 0;
    const auto clear = [b](void* rows, int64_t width, int64_t stride) {
      if (rows == nullptr) return;
      for (int64_t k = 0; k < width; ++k) static_cast<A*>(rows)[b * stride + k] = 0;
    };
    clear(p.coef_loss, row_entries, p.coefs.stride);
    clear(p.coef_lse, row_entries, p.coefs.stride);
    clear(p.d_loss, p.dim, p.dim);
    clear(p.d_lse, p.dim, p.dim);
  }

  // A product with the only target as its logit has it, without bias and scale, and what it is made of: the gradient of
  // h by it is slope * w + radial * h. s.h is set.
  struct TargetScore {
    A value, slope, radial;
  };
  TargetScore target_score(A product, const T* row) const {
    if (!p.normalize) return {product, A(1), A(0)};
    const T* const rows[4] = {row, row, row, row};
    A squares[4];
    Rows<T>::squares4(rows, p.dim, squares);
    const A inverse = inverse_norm(squares[0]);
    return p.has_margin ? with_margin(product * inverse, inverse) : TargetScore{product * inverse, inverse, A(0)};
  }
  // From a product with a row on the sphere, and 1 / |w| of that row.
  TargetScore with_margin(A product, A inverse) const {
    A squares = 0;
    for (int64_t c = 0; c < p.dim; ++c) squares += s.h[c] * s.h[c];
    const A of_h = inverse_norm(squares);
    const MarginValue<A> margin = margin_value(p.margin, product * of_h);
    return {sqrt_of(squares) * margin.value, margin.slope * inverse, margin.radial * of_h};
  }
  // out = coef * (slope * w + radial * h)
  void target_gradient(A* out, A coef, const TargetScore& score, const T* row) const {
    Rows<T>::scale_row(out, coef * score.slope, row, p.dim);
    if (score.radial == 0) return;
    for (int64_t c = 0; c < p.dim; ++c) out[c] += coef * score.radial * s.h[c];
  }

  int64_t pull_width() const { return eps > 0 ? row_entries : P; }  // entries that may pull

  // What a row's loss is made of before any class row is read: shares a_k, their sum, and the mean class weight.
  A set_shares(int64_t b, bool trivial, A& denom) {
    const A* const given = p.target_weight == nullptr ? nullptr : static_cast<const A*>(p.target_weight) + b * P;
    const A of_target = (1 - eps) / A(num_targets);
    A weight_sum = 0, every_sum = 0;  // class weights of the targets, and of all entries when smoothing
    for (int64_t k = 0; k < pull_width(); ++k) {
      if (s.logits[k] == kOut) {
        s.shares[k] = 0;
        continue;
      }
      const A class_weight = load_scalar<A>(p.class_weight, s.ids[k], A(1));
      const A own = k >= P ? A(0) : given != nullptr ? (1 - eps) * given[k] : of_target;
      const A share = own + (eps > 0 ? eps / A(num_entries) : A(0));
      if (k < P) weight_sum += given != nullptr ? given[k] * class_weight : class_weight;
      every_sum += class_weight;
      s.shares[k] = trivial ? A(0) : share * class_weight;
    }
    denom = given != nullptr ? A(1) : weight_sum / A(num_targets);
    if (trivial) return 0;
    // Not the sum of the shares: many small equal terms drift, and without class weights this is 1.
    const A total = (given != nullptr ? 1 - eps : of_target) * weight_sum;
    return eps > 0 ? total + eps / A(num_entries) * every_sum : total;
  }

  // Shared draws, one target: the products of the draws are there, and what is left is a softmax in two
  // passes over them. Bias and corrections of the draws are the same for every row and were made once.
  void run_shared(int64_t b) {
    const int64_t target = p.target[b];
    constexpr int64_t kAhead = 4;
    if (b + kAhead < p.batch && uint64_t(p.target[b + kAhead]) < uint64_t(p.num_classes)) {
      prefetch_row(weight_row(p.target[b + kAhead]), ahead_of);
    }
    if (!is_target(target)) return zero_outputs(b);
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    const T* row = weight_row(target);
    const T* const rows[4] = {row, row, row, row};
    for (int64_t c = 0; c < p.dim; ++c) s.h[c] = to_acc(hidden[c]);
    A product[4];
    Rows<T>::dot4(s.h, rows, p.dim, product);
    A* logits = static_cast<A*>(p.dots) + b * p.dots_stride;  // ours to overwrite
    const int64_t* const labels = p.draw_labels != nullptr ? p.draw_labels : p.ids;
    const int64_t label = p.draw_labels != nullptr ? p.row_labels[b] : target;
    int64_t hits = 0;
    const bool listed = p.known_offsets != nullptr && p.known_offsets[b] != p.known_offsets[b + 1];
    if (listed) {  // one known label at a time: comparing it with all draws takes vectors
      int64_t* const out = s.ids;
      for (int64_t k = 0; k < m; ++k) out[k] = labels[k] == label;
      for (int64_t i = p.known_offsets[b]; i < p.known_offsets[b + 1]; ++i) {
        const int64_t known = p.known_ids[i];
        for (int64_t k = 0; k < m; ++k) out[k] |= labels[k] == known;
      }
      for (int64_t k = 0; k < m; ++k) hits += out[k];
    } else {
      for (int64_t k = 0; k < m; ++k) hits += labels[k] == label;
    }
    TargetScore score = target_score(product[0], row);
    score.value += load_scalar<A>(p.bias, target, A(0));
    const A* const inverse = static_cast<const A*>(p.draw_inverse);
    if (inverse != nullptr) {
      for (int64_t k = 0; k < m; ++k) logits[k] *= inverse[k];
    }
    for (int64_t k = 0; k < m; ++k) logits[k] = (logits[k] + s.draw_bias[k]) * scale + s.corrections[k];
    if (hits > 0 && listed) {
      for (int64_t k = 0; k < m; ++k) logits[k] = s.ids[k] != 0 ? kOut : logits[k];
    } else if (hits > 0) {
      for (int64_t k = 0; k < m; ++k) logits[k] = labels[k] == label ? kOut : logits[k];
    }
    const A share = load_scalar<A>(p.class_weight, target, A(1)), own = score.value * scale;
    const bool trivial = hits == m;  // every draw is masked: nothing to learn from this row
    const A total = trivial ? A(0) : share;
    const A most = Rows<T>::max_of(logits, m), max = own > most ? own : most;
    const A shift = max == kOut ? A(0) : max;
    A* coef = p.need_grad ? static_cast<A*>(p.coef_loss) + b * p.coefs.stride : s.logits;
    A sum = Rows<T>::exp_sum(logits, shift, coef + 1, m);
    coef[0] = exp_acc(own - shift);
    sum += coef[0];
    const A lse = max == kOut ? quiet_nan<A>() : max + log_acc(sum);
    static_cast<A*>(p.denom)[b] = share;
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.loss)[b] = trivial ? A(0) : total * (lse - own);
    if (!p.need_grad) return;
    const A of_sum = scale / sum + A(0) * lse;  // nan where the row is
    A* const d_loss = static_cast<A*>(p.d_loss) + b * p.dim;
    if (p.coef_lse != nullptr) {
      A* coef_lse = static_cast<A*>(p.coef_lse) + b * p.coefs.stride;
      Rows<T>::scale_to(coef_lse, coef, of_sum, row_entries);
      if (lse != lse) clear_masked(b, coef_lse);
      target_gradient(static_cast<A*>(p.d_lse) + b * p.dim, coef_lse[0], score, row);
      to_rows(coef_lse, score.slope);
    }
    if (total == 0) {  // wins over nan
      for (int64_t k = 0; k < row_entries; ++k) coef[k] = 0;
      for (int64_t c = 0; c < p.dim; ++c) d_loss[c] = 0;
      return;
    }
    Rows<T>::scale_to(coef, coef, total * of_sum, row_entries);
    if (lse != lse) clear_masked(b, coef);
    coef[0] -= total * scale;
    target_gradient(d_loss, coef[0], score, row);
    to_rows(coef, score.slope);
  }
  // Coefficients by logits become those by h . w.
  void to_rows(A* coef, A target_slope) const {
    if (!p.normalize) return;
    const A* const inverse = static_cast<const A*>(p.draw_inverse);
    coef[0] *= target_slope;
    for (int64_t k = 0; k < m; ++k) coef[1 + k] *= inverse[k];
  }

#if defined(__AVX2__)
  static constexpr int64_t kGroup = 8;
  // Two groups of rows stay in the L1 cache.
  static bool can_run_plain(int64_t d) {
    return sizeof(A) == 4 && d > 0 && d % Rows<T>::kLoad == 0 && 2 * kGroup * d * int64_t(sizeof(T)) <= 16384;
  }

  // The draws k .. k + 7 of a row: their class rows, and products with h. A group at the end is filled up with its last
  // draw.
  template <bool kNormalize>
  Vec plain_dots(const int64_t* ids, int64_t k, const T** rows) const {
    for (int64_t j = 0; j < kGroup; ++j) rows[j] = weight_row(ids[k + j < m ? k + j : m - 1]);
    const Vec dots = Rows<T>::dot8(s.h, rows, p.dim);
    if constexpr (!kNormalize) return dots;
    A inverse[Vec::kSize];
    Rows<T>::squares8(rows, p.dim).store(inverse);
    for (int64_t j = 0; j < kGroup; ++j) s.signs[1 + k + j] = inverse_norm(inverse[j]);
    return dots * load8(s.signs + 1 + k, 0.0f);
  }
  // Half a group of rows, `ahead_of.rows` after draw `flat` of the flat [B, m] list.
  SX_ALWAYS_INLINE void plain_prefetch(int64_t flat) const {
    const int64_t end = p.batch * m;
    const int64_t begin = flat + ahead_of.rows;
    for (int64_t i = begin; i < begin + kGroup / 2 && i < end; ++i) {
      prefetch_row(weight_row(p.ids[i]), ahead_of);
    }
  }

  // One target, draws of its own, nothing else. Groups of eight draws, each scored while the one before enters the
  // online softmax: the way from products to coefficients is long, and would stand between two groups. Half of the
  // prefetches go before the scores, half before the sums, to keep loads in flight. False: a case for `run`.
  template <bool kNormalize>
  bool run_plain(int64_t b) {
    const int64_t target = p.target[b], *const ids = p.ids + b * m;
    if (b + 1 < p.batch && uint64_t(p.target[b + 1]) < uint64_t(p.num_classes)) {
      prefetch_row(weight_row(p.target[b + 1]), ahead_of);
    }
    if (!is_target(target)) return false;
    const A total = load_scalar<A>(p.class_weight, target, A(1));
    const int64_t d = p.dim, groups = (m + kGroup - 1) / kGroup;
    const A* log_q = static_cast<const A*>(p.log_q) + b * m;
    int64_t hits = 0;
    for (int64_t k = 0; k < m; ++k) {
      const bool hit = ids[k] == target;
      s.logits[1 + k] = hit ? kOut : correction(log_q[k]);
      hits += hit;
    }
    for (int64_t k = m; k < groups * kGroup; ++k) s.logits[1 + k] = kOut;
    const T* hidden = static_cast<const T*>(p.hidden) + b * d;
    // h and the sum in the layout of dot8 and axpy8.
    const T* const own_row = weight_row(target);
    Vec first = Vec::zero();
    for (int64_t c = 0; c < d; c += Rows<T>::kLoad) {
      Vec x[Rows<T>::kParts], w[Rows<T>::kParts];
      Rows<T>::load_parts(hidden + c, x);
      Rows<T>::load_parts(own_row + c, w);
      for (int part = 0; part < Rows<T>::kParts; ++part) {
        first = fma(x[part], w[part], first);
        x[part].store(s.h + c + part * Vec::kSize);
        w[part].store(s.push + c + part * Vec::kSize);
      }
    }
    const TargetScore score = target_score(first.sum(), own_row);
    const A own = scale * (score.value + load_scalar<A>(p.bias, target, A(0)));
    // Every draw masked, a class weight of 0, an infinite h.
    if (hits == m || total == 0 || !is_finite(own)) return false;
    s.logits[0] = own;
    if constexpr (kNormalize) {
      s.signs[0] = score.slope;
      for (int64_t c = 0; c < d; ++c) s.push[c] = score.slope * s.push[c] + score.radial * s.h[c];
    }

    A max = own;
    Vec sums = Vec::zero();
    A own_sum = 1, coef[Vec::kSize];
    const T* rows[2][kGroup];
    plain_prefetch(b * m);
    Vec dots = plain_dots<kNormalize>(ids, 0, rows[0]);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t k = group * kGroup;
      const T** const mine = rows[group % 2];
      Vec next = dots;
      if (group + 1 < groups) {
        plain_prefetch(b * m + k + kGroup);
        next = plain_dots<kNormalize>(ids, k + kGroup, rows[(group + 1) % 2]);
      }
      if (p.bias.data != nullptr) {
        A biased[Vec::kSize];
        dots.store(biased);
        for (int64_t j = 0; j < kGroup; ++j) biased[j] += load_scalar<A>(p.bias, ids[k + j < m ? k + j : m - 1], A(0));
        dots = Vec::load(biased);
      }
      const Vec logits = fma(dots, Vec::all(scale), load8(s.logits + 1 + k, kOut));
      store8(logits, s.logits + 1 + k);
      if (above(logits, Vec::all(max)) != 0) {
        A lanes[Vec::kSize];
        logits.store(lanes);
        const A most = Rows<T>::max_of(lanes, kGroup);
        if (most > max) {  // or there is a nan, which comes through by itself
          const A shrink = exp_acc(max - most);
          sums = sums * Vec::all(shrink);
          own_sum *= shrink;
          if (p.need_grad) Rows<T>::scale_to(s.push, s.push, shrink, d);
          max = most;
        }
      }
      const Vec e = vexp(logits - Vec::all(max));
      sums = sums + e;
      plain_prefetch(b * m + k + kGroup / 2);
      if (p.need_grad) {
        (kNormalize ? e * load8(s.signs + 1 + k, 0.0f) : e).store(coef);
        Rows<T>::axpy8(s.push, coef, mine, d);
      }
      dots = next;
    }
    const A sum = own_sum + sums.sum(), lse = max + log_acc(sum);
    static_cast<A*>(p.denom)[b] = total;
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.loss)[b] = total * (lse - own);
    if (!p.need_grad) return true;
    A* out = static_cast<A*>(p.coef_loss) + b * p.coefs.stride;
    Rows<T>::exp_to(s.logits, lse, total * scale, out, row_entries);
    if (lse != lse) clear_masked(b, out);
    out[0] -= total * scale;
    if constexpr (kNormalize) {
      for (int64_t k = 0; k < row_entries; ++k) out[k] *= s.signs[k];
    }
    const Vec of_push = Vec::all(total * scale / sum), of_own = Vec::all(total * scale * score.slope);
    [[maybe_unused]] const Vec of_hidden = Vec::all(total * scale * score.radial);
    A* d_loss = static_cast<A*>(p.d_loss) + b * d;
    for (int64_t c = 0; c < d; c += Rows<T>::kLoad) {
      Vec w[Rows<T>::kParts];
      Rows<T>::load_parts(own_row + c, w);
      for (int part = 0; part < Rows<T>::kParts; ++part) {
        w[part] = of_push * Vec::load(s.push + c + part * Vec::kSize) - of_own * w[part];
        if constexpr (kNormalize) w[part] = w[part] - of_hidden * Vec::load(s.h + c + part * Vec::kSize);
      }
      Rows<T>::store_parts(w, d_loss + c);
    }
    return true;
  }
#else
  static bool can_run_plain(int64_t) { return false; }
  template <bool>
  bool run_plain(int64_t) {
    return false;
  }
#endif

  void run(int64_t b) {
    if (plain_shared) return run_shared(b);
    if constexpr (sizeof(A) == 4) {
      if (plain_rows && (p.normalize ? run_plain<true>(b) : run_plain<false>(b))) return;
    }
    if (!list_entries(b)) return zero_outputs(b);
    const bool trivial = num_entries == num_targets;  // every draw is masked: nothing to learn from this row
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) s.h[c] = to_acc(hidden[c]);
    if (p.need_grad) {
      for (int64_t c = 0; c < p.dim; ++c) s.push[c] = s.pull[c] = 0;
    }
    const A total = set_shares(b, trivial, static_cast<A*>(p.denom)[b]);

    OnlineSoftmax<A> online = online_empty<A>();
    A pulled = 0;  // sum a_k s_k
    // Rows of class memory are read for all entries, but shared draws come with their products.
    const int64_t num_rows = p.shared ? P : row_entries;
    for (int64_t done = 0; done < num_rows; done += tile_rows) {
      const int64_t n = num_rows - done < tile_rows ? num_rows - done : tile_rows;
      online = tile(b, done, n, online, pulled);
    }
    if (p.shared) online = shared_draws(b, online, pulled);

    // Every logit -inf (an infinite h): not a sum of nothing but a bad row.
    const A lse = online.max == kOut ? quiet_nan<A>() : online_lse(online);
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.loss)[b] = trivial ? A(0) : total * lse - pulled;
    if (!p.need_grad) return;
    const A of_max = scale * exp_acc(online.max - lse);
    if (p.coef_lse != nullptr) {
      finish_coefs(b, lse, A(1), static_cast<A*>(p.coef_lse) + b * p.coefs.stride);
      Rows<T>::scale_to(static_cast<A*>(p.d_lse) + b * p.dim, s.push, of_max, p.dim);
      if (p.has_margin) add_radial(static_cast<A*>(p.d_lse) + b * p.dim, lse, A(1), false);
    }
    A* coef = static_cast<A*>(p.coef_loss) + b * p.coefs.stride;
    A* d_loss = static_cast<A*>(p.d_loss) + b * p.dim;
    finish_coefs(b, lse, total, coef);
    for (int64_t k = 0; k < pull_width(); ++k) {
      if (s.shares[k] != 0) coef[k] -= scale * s.shares[k] * (slopes ? s.signs[k] : A(1));
    }
    if (total == 0) {
      for (int64_t c = 0; c < p.dim; ++c) d_loss[c] = -scale * s.pull[c];
    } else {
      for (int64_t c = 0; c < p.dim; ++c) d_loss[c] = total * of_max * s.push[c] - scale * s.pull[c];
    }
    if (p.has_margin) add_radial(d_loss, lse, total, true);
  }

  // What the margins of the targets add to a gradient of h, in its own direction.
  void add_radial(A* out, A lse, A total, bool pulls) const {
    A amount = 0;
    for (int64_t k = 0; k < P; ++k) {
      if (s.logits[k] == kOut) continue;
      const A push = total == 0 ? A(0) : total * exp_acc(s.logits[k] - lse);
      amount += scale * (push - (pulls ? s.shares[k] : A(0))) * s.radial[k];
    }
    for (int64_t c = 0; c < p.dim; ++c) out[c] += amount * s.h[c];
  }

  // coef = total * push, where a zero total wins over nan.
  void finish_coefs(int64_t b, A lse, A total, A* coef) {
    if (total == 0) {
      for (int64_t k = 0; k < row_entries; ++k) coef[k] = 0;
      return;
    }
    Rows<T>::exp_to(s.logits, lse, total * scale, coef, row_entries);
    if (slopes) {
      for (int64_t k = 0; k < row_entries; ++k) coef[k] *= s.signs[k];
    }
    if (lse != lse) clear_masked(b, coef);
  }

  // In a row that is nan, entries that take no part still touch no row.
  void clear_masked(int64_t b, A* coef) {
    for (int64_t k = 0; k < P; ++k) {
      if (!is_target(p.target[b * P + k])) coef[k] = 0;
    }
    for (int64_t k = 0; k < m; ++k) {
      if (draw_masked(b, k)) coef[P + k] = 0;
    }
  }

  // Products of entries first .. first + n - 1 with h become logits; what pulls is added to `pulled`. With `normalize`,
  // s.signs holds 1 / |w| of these entries.
  void score(int64_t first, int64_t n, A* dots, A& pulled) {
    if (p.normalize) {
      for (int64_t j = 0; j < n; ++j) dots[j] *= s.signs[first + j];
    }
    for (int64_t j = 0; p.has_margin && j < n && first + j < P; ++j) {
      const TargetScore of_target = with_margin(dots[j], s.signs[first + j]);
      dots[j] = of_target.value;
      s.signs[first + j] = of_target.slope;
      s.radial[first + j] = of_target.radial;
    }
    if (p.bias.data != nullptr) {
      for (int64_t j = 0; j < n; ++j) dots[j] += load_scalar<A>(p.bias, s.ids[first + j], A(0));
    }
    for (int64_t j = 0; j < n; ++j) dots[j] *= scale;
    if (p.absolute) {
      for (int64_t j = 0; j < n; ++j) {
        const A value = dots[j];
        const A sign = value > 0 ? A(1) : value < 0 ? A(-1) : value;  // nan stays nan
        s.signs[first + j] = p.normalize ? sign * s.signs[first + j] : sign;
        dots[j] = value < 0 ? -value : value;
      }
    }
    for (int64_t j = 0; j < n; ++j) s.logits[first + j] += dots[j];
    for (int64_t j = 0; j < n && first + j < pull_width(); ++j) {
      if (s.shares[first + j] != 0) pulled += s.shares[first + j] * dots[j];
    }
  }

  OnlineSoftmax<A> merge_max(OnlineSoftmax<A> online, A max) {
    if (max > online.max) {
      const A shrink = shifted_exp(online.max, max);
      online.sum *= shrink;
      if (p.need_grad && online.max != kOut) Rows<T>::scale_to(s.push, s.push, shrink, p.dim);
      online.max = max;
    }
    return online;
  }

  // What to subtract before exp: where every logit so far is -inf, 0, or -inf - -inf would be nan.
  static A shift_of(OnlineSoftmax<A> online) { return online.max == kOut ? A(0) : online.max; }

  OnlineSoftmax<A> tile(int64_t b, int64_t first, int64_t n, OnlineSoftmax<A> online, A& pulled) {
    const T* rows[kTile];
    A dots[kTile], coef[kTile];
    // Four rows at a time; the last one is repeated, with coefficient 0 and without a read of its own.
    for (int64_t j = 0; j < kTile; ++j) {
      rows[j] = weight_row(s.ids[first + (j < n ? j : n - 1)]);
      coef[j] = 0;
    }
    for (int64_t j = 0; j < n; j += 4) {
      if (!p.shared) {
        for (int64_t ahead = 0; ahead < 4; ++ahead) prefetch(b, first + j + ahead + ahead_of.rows);
      }
      Rows<T>::dot4(s.h, rows + j, p.dim, dots + j);
      if (p.normalize) {
        A squares[4];
        Rows<T>::squares4(rows + j, p.dim, squares);
        for (int64_t i = 0; i < 4 && j + i < n; ++i) s.signs[first + j + i] = inverse_norm(squares[i]);
      }
    }
    score(first, n, dots, pulled);
    online = merge_max(online, Rows<T>::max_of(s.logits + first, n));
    online.sum += Rows<T>::exp_sum(s.logits + first, shift_of(online), coef, n);
    if (!p.need_grad) return online;
    if (slopes) {
      for (int64_t j = 0; j < n; ++j) coef[j] *= s.signs[first + j];
    }
    for (int64_t j = 0; j < n; j += 4) Rows<T>::axpy4(s.push, coef + j, rows + j, p.dim);
    for (int64_t j = 0; j < n && first + j < pull_width(); ++j) {
      const A share = s.shares[first + j];
      if (share != 0) Rows<T>::axpy1(s.pull, slopes ? share * s.signs[first + j] : share, rows[j], p.dim);
    }
    return online;
  }

  // Shared draws: the products come from a GEMM, and their part of d_loss and d_lse goes to one.
  OnlineSoftmax<A> shared_draws(int64_t b, OnlineSoftmax<A> online, A& pulled) {
    A* dots = static_cast<A*>(p.dots) + b * p.dots_stride;  // ours to overwrite
    A* logits = s.logits + P;
    if (p.normalize) {
      for (int64_t k = 0; k < m; ++k) s.signs[P + k] = static_cast<const A*>(p.draw_inverse)[k];
    }
    score(P, m, dots, pulled);
    online = merge_max(online, Rows<T>::max_of(logits, m));
    online.sum += Rows<T>::exp_sum(logits, shift_of(online), dots, m);
    return online;
  }
};

template <typename T>
inline void sampled_softmax_rows(const SampledSoftmaxParams& params, int64_t begin, int64_t end) {
  SampledSoftmaxRow<T> row(params);
  const int64_t entries = params.num_targets + params.num_samples;
  draw_dots(params.products, begin, end);
  for (int64_t b = begin; b < end; ++b) {
    row.run(b);
    for (void* coefs : {params.coef_loss, params.coef_lse}) clear_padding<acc_t<T>>(params.coefs, coefs, b, entries);
  }
  draw_sums(params.products, begin, end);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
