// The passes over rows [begin, end) of a chunk: the body shared by the scalar and the SIMD translation units.
//
// Products come as [B, n], or as [n, B]: the GEMM that makes those need not transpose the class rows on its way, and is
// 1.6 times as fast (256 rows of 128 on a Zen 4). The passes over them then have a row of the batch in each lane.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "common/panels.h"
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

// ------------------------------------------------------------------------------------------------ dots [n, B]
// A lane of the scalar unit, with the operations of Vec.
template <typename A>
struct PredictLane {
  static constexpr int kSize = 1;
  A v;
  static PredictLane zero() { return {A(0)}; }
  static PredictLane all(A x) { return {x}; }
  static PredictLane load(const A* p) { return {*p}; }
  void store(A* p) const { *p = v; }
  friend PredictLane operator+(PredictLane a, PredictLane b) { return {a.v + b.v}; }
  friend PredictLane operator-(PredictLane a, PredictLane b) { return {a.v - b.v}; }
  friend PredictLane operator*(PredictLane a, PredictLane b) { return {a.v * b.v}; }
  friend PredictLane max(PredictLane x, PredictLane keep) { return x.v > keep.v ? x : keep; }
  friend PredictLane vexp(PredictLane x) { return {A(exp_acc(x.v))}; }
  friend PredictLane sign_of(PredictLane x) { return {A(x.v > 0) - A(x.v < 0)}; }
};
#if defined(__AVX2__)
// Exact for every normal number; not for nan.
inline Vec sign_of(Vec x) { return min(max(x * Vec::all(3e38f), Vec::all(-1.0f)), Vec::all(1.0f)); }
template <typename A>
using PredictLanes = std::conditional_t<kPredictVector<A>, Vec, PredictLane<A>>;
#else
template <typename A>
using PredictLanes = PredictLane<A>;
#endif

// N vectors of columns of dots [n, B], which are rows of the batch, from `b` on; the last one may be cut off, where N
// is 1. Nothing is summed across lanes, so the bits of a column do not depend on how columns are put together.
template <typename A, int N>
struct PredictColumns {
  using V = PredictLanes<A>;
  static constexpr int kColumns = N * V::kSize;
  const PredictMap<A> map;
  A* const dots;
  const int64_t stride;
  const int width;

  PredictColumns(const PredictChunk& chunk, int64_t b, int columns)
      : map(chunk), dots(static_cast<A*>(chunk.dots) + b), stride(chunk.batch), width(columns) {}

  SX_ALWAYS_INLINE V signed_logit(int64_t c, int k) const {
    const V dot = load(dots + c * stride + k * V::kSize);
    return V::all(map.scale) * (map.bias == nullptr ? dot : dot + V::all(map.bias[c]));
  }
  SX_ALWAYS_INLINE V logit(int64_t c, int k) const {
    const V s = signed_logit(c, k);
    return map.absolute ? max(s, V::zero() - s) : s;
  }
  SX_ALWAYS_INLINE V load(const A* p) const {
    if constexpr (N == 1 && V::kSize > 1) {
      if (width < V::kSize) return load_tail(p, width);
    }
    return V::load(p);
  }
  SX_ALWAYS_INLINE void store(V x, int64_t c, int k) const {
    A* const p = dots + c * stride + k * V::kSize;
    if constexpr (N == 1 && V::kSize > 1) {
      if (width < V::kSize) return store_tail(x, p, width);
    }
    x.store(p);
  }
  A at(int64_t c, int column) const { return dots[c * stride + column]; }
};

// The largest finite number, negative: instead of -inf, which minus itself is nan.
template <typename A>
constexpr A kPredictLeast = A(sizeof(A) == 4 ? -3.40282347e38 : -1.7976931348623157e308);

template <typename A, int N>
void predict_lse_block(const PredictLseParams& p, int64_t b, int width) {
  using Columns = PredictColumns<A, N>;
  using V = typename Columns::V;
  constexpr int64_t kNear = 64;  // classes whose logits stay in the L1 cache between two passes
  const Columns x(p.chunk, b, width);
  OnlineSoftmax<double> rows[Columns::kColumns];
  for (auto& row : rows) row = online_empty<double>();
  A highest[Columns::kColumns], sums[Columns::kColumns];
  const int64_t count = p.chunk.count;
  for (int64_t from = 0; from < count; from += kPredictSegment) {
    const int64_t to = from + kPredictSegment < count ? from + kPredictSegment : count;
    V most[N], sum[N];
    for (int k = 0; k < N; ++k) most[k] = V::all(kPredictLeast<A>), sum[k] = V::zero();
    for (int64_t near = from; near < to; near += kNear) {
      const int64_t end = near + kNear < to ? near + kNear : to;
      V high[N];
      for (int k = 0; k < N; ++k) high[k] = most[k];
      for (int64_t c = near; c < end; ++c) {
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) high[k] = max(x.logit(c, k), high[k]);
      }
      for (int k = 0; k < N; ++k) {
        sum[k] = sum[k] * vexp(most[k] - high[k]);
        most[k] = high[k];
      }
      for (int64_t c = near; c < end; ++c) {
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) sum[k] = sum[k] + vexp(x.logit(c, k) - most[k]);
      }
    }
    for (int k = 0; k < N; ++k) {
      most[k].store(highest + k * V::kSize);
      sum[k].store(sums + k * V::kSize);
    }
    for (int j = 0; j < width; ++j) {
      OnlineSoftmax<double> part = {double(highest[j]), double(sums[j])};
      if (highest[j] == -negative_infinity<A>()) {
        part.sum = 1.0;
        for (int64_t c = from; c < to; ++c) {
          const A s = x.map.logit(x.at(c, j), c);
          if (s != s) part.max = quiet_nan<double>();
        }
      } else if (sums[j] != sums[j]) {
        part.max = quiet_nan<double>();
      } else if (sums[j] == A(0)) {
        part = {negative_infinity<double>(), 1.0};
      }
      rows[j] = from == 0 ? part : online_merge(rows[j], part);
    }
  }
  for (int j = 0; j < width; ++j) {
    p.lse[b + j] = predict_merge_lse(p.lse[b + j], rows[j].max, rows[j].sum);
    for (int64_t t = (b + j) * p.num_targets; t < (b + j + 1) * p.num_targets; ++t) {
      const int64_t c = p.chunk.column_of(p.target[t]);
      if (c >= 0 && c < count) static_cast<A*>(p.positive)[t] = x.map.logit(x.at(c, j), c);
    }
  }
  if (p.total == nullptr) return;
  const A* class_weight = static_cast<const A*>(p.class_weight);
  for (int64_t near = 0; near < count; near += kNear) {
    const int64_t end = near + kNear < count ? near + kNear : count;
    V sum[N];
    for (int k = 0; k < N; ++k) sum[k] = V::zero();
    for (int64_t c = near; c < end; ++c) {
      const V by = V::all(class_weight == nullptr ? A(1) : class_weight[c]);
      for (int k = 0; k < N; ++k) sum[k] = sum[k] + by * x.logit(c, k);
    }
    for (int k = 0; k < N; ++k) sum[k].store(sums + k * V::kSize);
    for (int j = 0; j < width; ++j) p.total[b + j] += double(sums[j]);
  }
}

template <typename A, int N>
void predict_grad_block(const PredictGradParams& p, int64_t b, int width) {
  using Columns = PredictColumns<A, N>;
  using V = typename Columns::V;
  const Columns x(p.chunk, b, width);
  const int64_t count = p.chunk.count, P = p.num_targets;
  A shifts[Columns::kColumns] = {}, coefs[Columns::kColumns] = {}, smooths[Columns::kColumns] = {};
  bool smoothed = false;
  for (int j = 0; j < width; ++j) {
    const A lse = A(p.lse[b + j]);
    // What rounding took from lse goes into the coefficient.
    const A rest = is_finite(lse) ? A(exp_acc(double(lse) - p.lse[b + j])) : A(1);
    shifts[j] = lse;
    coefs[j] = static_cast<const A*>(p.coef)[b + j] * rest;
    smooths[j] = p.smooth == nullptr ? A(0) : static_cast<const A*>(p.smooth)[b + j];
    smoothed |= smooths[j] != A(0);
  }
  // Slopes of the targets from the products, before those are gone.
  constexpr int64_t kFew = 256;
  A slopes[kFew];
  A* const kept = width * P <= kFew ? slopes : static_cast<A*>(std::malloc(size_t(width * P) * sizeof(A)));
  const auto for_targets = [&](const auto& body) {
    for (int j = 0; j < width; ++j) {
      for (int64_t t = 0; t < P; ++t) {
        const int64_t c = p.chunk.column_of(p.target[(b + j) * P + t]);
        if (c >= 0 && c < count) body(c, j, j * P + t);
      }
    }
  };
  for_targets([&](int64_t c, int j, int64_t t) { kept[t] = x.map.slope(x.at(c, j), c); });

  V shift[N], coef[N], smooth[N];
  for (int k = 0; k < N; ++k) {
    shift[k] = V::load(shifts + k * V::kSize);
    coef[k] = V::load(coefs + k * V::kSize);
    smooth[k] = V::load(smooths + k * V::kSize);
  }
  const A* class_weight = static_cast<const A*>(p.class_weight);
  const V scale = V::all(x.map.scale);
  for (int64_t c = 0; c < count; ++c) {
    const V by = V::all(class_weight == nullptr ? A(1) : class_weight[c]);
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k) {
      const V s = x.signed_logit(c, k);
      V slope = scale, value = s;
      if (x.map.absolute) {
        value = max(s, V::zero() - s);
        slope = scale * sign_of(s);  // a nan stays one by way of its exponential
      }
      V grad = coef[k] * vexp(value - shift[k]);
      if (smoothed) grad = grad - smooth[k] * by;
      x.store(grad * slope, c, k);
    }
  }
  for (int j = 0; j < width; ++j) {
    if (static_cast<const A*>(p.coef)[b + j] != A(0) || smooths[j] != A(0)) continue;
    for (int64_t c = 0; c < count; ++c) x.dots[c * x.stride + j] = A(0);  // an ignored row, whatever is in it
  }
  const A* target_coef = static_cast<const A*>(p.target_coef) + b * P;
  for_targets([&](int64_t c, int j, int64_t t) {
    if (target_coef[t] != A(0)) x.dots[c * x.stride + j] -= target_coef[t] * kept[t];
  });
  if (kept != slopes) std::free(kept);
}

// block(constant with the number of vectors, first row, number of rows)
template <typename A, typename F>
inline void for_column_blocks(int64_t begin, int64_t end, const F& block) {
  constexpr int kSize = PredictLanes<A>::kSize, kMany = kSize == 1 ? 16 : 4;
  int64_t b = begin;
  for (; b + kMany * kSize <= end; b += kMany * kSize) block(std::integral_constant<int, kMany>{}, b, kMany * kSize);
  for (; b < end; b += kSize) {
    block(std::integral_constant<int, 1>{}, b, int(end - b < kSize ? end - b : kSize));
  }
}

template <typename A>
void predict_lse_rows(const PredictLseParams& p, int64_t begin, int64_t end) {
  if (p.chunk.by_class) {
    return for_column_blocks<A>(begin, end, [&](auto vectors, int64_t b, int width) {
      predict_lse_block<A, decltype(vectors)::value>(p, b, width);
    });
  }
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
      A lanes[8] = {};  // a fixed order that vectorizes
      for (int64_t c = from; c < to; ++c) {
        lanes[c % 8] += (class_weight == nullptr ? A(1) : class_weight[c]) * map.logit(dots[c], c);
      }
      for (const A lane : lanes) total += double(lane);
    }
    p.total[b] += total;
  }
}

// The gradient except for the targets, in place.
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
        slope = scale * sign_of(s);  // a nan stays one by way of its exponential
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
  if (p.chunk.by_class) {
    return for_column_blocks<A>(begin, end, [&](auto vectors, int64_t b, int width) {
      predict_grad_block<A, decltype(vectors)::value>(p, b, width);
    });
  }
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
