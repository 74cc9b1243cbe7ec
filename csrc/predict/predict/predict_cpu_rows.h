// The passes over rows [begin, end) of a chunk: the body shared by the scalar and the SIMD translation units.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "predict/predict/predict_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Logits whose exponentials are summed in A before the sum goes on in double; they stay in the L1 cache meanwhile.
constexpr int64_t kPredictSegment = 2048;

template <typename A>
constexpr bool kPredictVector =
#if defined(__AVX2__)
    sizeof(A) == 4;
#else
    false;
#endif

#if defined(__AVX2__)
// s of a vector of columns, with or without the sign that `absolute` takes away.
SX_ALWAYS_INLINE Vec predict_signed(const PredictMap<float>& map, const float* dots, int64_t c) {
  const Vec dot = Vec::load(dots + c);
  return Vec::all(map.scale) * (map.bias == nullptr ? dot : dot + Vec::load(map.bias + c));
}
SX_ALWAYS_INLINE Vec predict_logit(const PredictMap<float>& map, const float* dots, int64_t c) {
  const Vec s = predict_signed(map, dots, c);
  return map.absolute ? max(s, Vec::zero() - s) : s;
}
#endif

// Largest logit of columns [begin, end), nan left out.
template <typename A>
A predict_max(const PredictMap<A>& map, const A* dots, int64_t begin, int64_t end) {
  A most = negative_infinity<A>();
  int64_t c = begin;
#if defined(__AVX2__)
  if constexpr (kPredictVector<A>) {
    Vec lanes[4];
    for (Vec& lane : lanes) lane = Vec::all(most);
    for (; c + 4 * Vec::kSize <= end; c += 4 * Vec::kSize) {
      for (int j = 0; j < 4; ++j) lanes[j] = max(predict_logit(map, dots, c + j * Vec::kSize), lanes[j]);
    }
    for (; c + Vec::kSize <= end; c += Vec::kSize) lanes[0] = max(predict_logit(map, dots, c), lanes[0]);
    float parts[Vec::kSize];
    max(max(lanes[0], lanes[1]), max(lanes[2], lanes[3])).store(parts);
    for (const float part : parts) most = part > most ? part : most;
  }
#endif
  for (; c < end; ++c) {
    const A s = map.logit(dots[c], c);
    most = s > most ? s : most;
  }
  return most;
}

// Sum of exp(s - shift) over columns [begin, end).
template <typename A>
A predict_exp_sum(const PredictMap<A>& map, const A* dots, int64_t begin, int64_t end, A shift) {
  A sum = 0;
  int64_t c = begin;
#if defined(__AVX2__)
  if constexpr (kPredictVector<A>) {
    const Vec by = Vec::all(shift);
    Vec lanes[4];
    for (Vec& lane : lanes) lane = Vec::zero();
    for (; c + 4 * Vec::kSize <= end; c += 4 * Vec::kSize) {
      for (int j = 0; j < 4; ++j) lanes[j] = lanes[j] + vexp(predict_logit(map, dots, c + j * Vec::kSize) - by);
    }
    for (; c + Vec::kSize <= end; c += Vec::kSize) lanes[0] = lanes[0] + vexp(predict_logit(map, dots, c) - by);
    sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])).sum();
  }
#endif
  for (; c < end; ++c) sum += exp_acc(map.logit(dots[c], c) - shift);
  return sum;
}

template <typename A>
bool predict_any_nan(const PredictMap<A>& map, const A* dots, int64_t begin, int64_t end) {
  bool found = false;
  for (int64_t c = begin; c < end; ++c) found |= map.logit(dots[c], c) != map.logit(dots[c], c);
  return found;
}

template <typename A>
void predict_lse_rows(const PredictLseParams& p, int64_t begin, int64_t end) {
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  const A* class_weight = static_cast<const A*>(p.class_weight);
  for (int64_t b = begin; b < end; ++b) {
    const A* dots = static_cast<const A*>(chunk.dots) + b * chunk.count;
    OnlineSoftmax<double> row = online_empty<double>();
    for (int64_t from = 0; from < chunk.count; from += kPredictSegment) {
      const int64_t to = from + kPredictSegment < chunk.count ? from + kPredictSegment : chunk.count;
      const A most = predict_max(map, dots, from, to);
      OnlineSoftmax<double> part = {double(most), 1.0};
      if (is_finite(most)) {
        part.sum = double(predict_exp_sum(map, dots, from, to, most));
      } else if (predict_any_nan(map, dots, from, to)) {
        part.max = quiet_nan<double>();
      }
      row = online_merge(row, part);
    }
    p.lse[b] = predict_merge_lse(p.lse[b], row.max, row.sum);
    for (int64_t t = b * p.num_targets; t < (b + 1) * p.num_targets; ++t) {
      const int64_t column = chunk.column_of(p.target[t]);
      if (column >= 0 && column < chunk.count) static_cast<A*>(p.positive)[t] = map.logit(dots[column], column);
    }
    if (p.total == nullptr) continue;
    double total = 0;
    for (int64_t from = 0; from < chunk.count; from += kPredictSegment) {
      const int64_t to = from + kPredictSegment < chunk.count ? from + kPredictSegment : chunk.count;
      A lanes[8] = {};  // a fixed order that vectorises
      for (int64_t c = from; c < to; ++c) {
        lanes[c % 8] += (class_weight == nullptr ? A(1) : class_weight[c]) * map.logit(dots[c], c);
      }
      for (const A lane : lanes) total += double(lane);
    }
    p.total[b] += total;
  }
}

// The gradient but for the targets, in place.
template <typename A>
void predict_grad_row(const PredictMap<A>& map, A* dots, int64_t count, A lse, A coef, A smooth,
                      const A* class_weight) {
  int64_t c = 0;
#if defined(__AVX2__)
  if constexpr (kPredictVector<A>) {
    const Vec shift = Vec::all(lse), by = Vec::all(coef), scale = Vec::all(map.scale), less = Vec::all(smooth);
    for (; c + Vec::kSize <= count; c += Vec::kSize) {
      const Vec s = predict_signed(map, dots, c);
      Vec slope = scale, value = s;
      if (map.absolute) {
        value = max(s, Vec::zero() - s);
        // The sign, exact for every normal number; a nan stays one by way of its exponential.
        slope = scale * min(max(s * Vec::all(3e38f), Vec::all(-1.0f)), Vec::all(1.0f));
      }
      Vec grad = by * vexp(value - shift);
      if (smooth != 0.0f) grad = grad - (class_weight == nullptr ? less : less * Vec::load(class_weight + c));
      (grad * slope).store(dots + c);
    }
  }
#endif
  for (; c < count; ++c) {
    const A slope = map.slope(dots[c], c);
    A grad = coef * exp_acc(map.logit(dots[c], c) - lse);
    if (smooth != A(0)) grad -= smooth * (class_weight == nullptr ? A(1) : class_weight[c]);
    dots[c] = grad * slope;
  }
}

template <typename A>
void predict_grad_rows(const PredictGradParams& p, int64_t begin, int64_t end) {
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  const A* target_coef = static_cast<const A*>(p.target_coef);
  for (int64_t b = begin; b < end; ++b) {
    A* dots = static_cast<A*>(chunk.dots) + b * chunk.count;
    const int64_t first = b * p.num_targets, last = first + p.num_targets;
    // Slopes of the targets from the products, before those are gone.
    A slopes[8];
    const bool few = p.num_targets <= 8;
    A* const kept = few ? slopes : static_cast<A*>(std::malloc(size_t(p.num_targets) * sizeof(A)));
    for (int64_t t = first; t < last; ++t) {
      const int64_t column = chunk.column_of(p.target[t]);
      kept[t - first] = column >= 0 && column < chunk.count ? map.slope(dots[column], column) : A(0);
    }
    const A coef = static_cast<const A*>(p.coef)[b];
    const A smooth = p.smooth == nullptr ? A(0) : static_cast<const A*>(p.smooth)[b];
    if (coef == A(0) && smooth == A(0)) {
      for (int64_t c = 0; c < chunk.count; ++c) dots[c] = A(0);  // an ignored row, whatever is in it
    } else {
      const A lse = A(p.lse[b]);
      // What rounding took from lse goes into the coefficient.
      const A rest = is_finite(lse) ? A(exp_acc(double(lse) - p.lse[b])) : A(1);
      predict_grad_row(map, dots, chunk.count, lse, coef * rest, smooth, static_cast<const A*>(p.class_weight));
    }
    for (int64_t t = first; t < last; ++t) {
      const int64_t column = chunk.column_of(p.target[t]);
      if (column >= 0 && column < chunk.count && target_coef[t] != A(0)) {
        dots[column] -= target_coef[t] * kept[t - first];
      }
    }
    if (!few) std::free(kept);
  }
}

// Entries held, descending; a column that comes later has the higher id, so it enters only where it is larger.
template <typename A>
struct PredictHeld {
  A* values;
  int64_t* ids;
  int64_t k, held;

  bool enters(A value) const { return held < k || predict_larger(value, values[k - 1]); }
  void insert(A value, int64_t id) {
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && predict_larger(value, values[at - 1]); --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
};

template <typename A>
void predict_topk_rows(const PredictTopkParams& p, int64_t begin, int64_t end) {
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  for (int64_t b = begin; b < end; ++b) {
    const A* dots = static_cast<const A*>(chunk.dots) + b * chunk.count;
    PredictHeld<A> best = {static_cast<A*>(p.values) + b * p.k, p.ids + b * p.k, p.k,
                           chunk.first < p.k ? chunk.first : p.k};
    int64_t c = 0;
    const auto offer = [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const A s = map.logit(dots[i], i);
        if (best.enters(s)) best.insert(s, chunk.first + i);
      }
    };
    const int64_t fill = p.k - best.held < chunk.count ? p.k - best.held : chunk.count;
    offer(0, fill);
    c = fill;
#if defined(__AVX2__)
    if constexpr (kPredictVector<A>) {
      if (best.held == p.k) {
        Vec limit = Vec::all(best.values[p.k - 1]);
        for (; c + 4 * Vec::kSize <= chunk.count; c += 4 * Vec::kSize) {
          unsigned any = 0;
          for (int j = 0; j < 4; ++j) any |= above(predict_logit(map, dots, c + j * Vec::kSize), limit);
          if (any == 0) continue;
          offer(c, c + 4 * Vec::kSize);
          limit = Vec::all(best.values[p.k - 1]);
        }
      }
    }
#endif
    offer(c, chunk.count);
  }
}

// Class rows are scored four at a time, with those behind them under way.
template <typename T>
void predict_dots_rows(const PredictDotsParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const RowPrefetch ahead = row_prefetch<T>(p.dim);
  const int64_t last = p.batch * p.num_ids;
  A* const h = static_cast<A*>(std::aligned_alloc(64, (size_t(p.dim) * sizeof(A) + 64) / 64 * 64));
  const auto known = [&](int64_t at) { return uint64_t(p.ids[at]) < uint64_t(p.num_classes); };
  const auto row_of = [&](int64_t at) { return static_cast<const T*>(p.weight) + (known(at) ? p.ids[at] : 0) * p.dim; };
  for (int64_t b = begin; b < end; ++b) {
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) h[c] = to_acc(hidden[c]);
    for (int64_t first = 0; first < p.num_ids; first += 4) {
      const int64_t n = p.num_ids - first < 4 ? p.num_ids - first : 4, at = b * p.num_ids + first;
      const T* rows[4];
      A values[4];
      for (int64_t j = 0; j < 4; ++j) {
        rows[j] = row_of(at + (j < n ? j : n - 1));
        if (at + j + ahead.rows < last) prefetch_row(row_of(at + j + ahead.rows), ahead);
      }
      Rows<T>::dot4(h, rows, p.dim, values);
      for (int64_t j = 0; j < n; ++j) {
        static_cast<A*>(p.dots)[at + j] = known(at + j) ? values[j] : negative_infinity<A>();
      }
    }
  }
  std::free(h);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
