// What the passes share on every backend: the logit of a product, and which of two entries ranks first.
#pragma once

#include "common/numeric.h"
#include "predict/predict/predict_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename A>
struct PredictMap {
  A scale;
  bool absolute;
  const A* bias;

  SX_HOST_DEVICE explicit PredictMap(const PredictChunk& chunk)
      : scale(A(chunk.scale)), absolute(chunk.absolute), bias(static_cast<const A*>(chunk.bias)) {}

  SX_HOST_DEVICE A signed_logit(A dot, int64_t column) const {
    return scale * (bias == nullptr ? dot : dot + bias[column]);
  }
  // What `absolute` makes of s.
  SX_HOST_DEVICE A size_of(A s) const { return absolute && s < A(0) ? -s : s; }
  SX_HOST_DEVICE A logit(A dot, int64_t column) const { return size_of(signed_logit(dot, column)); }
  // d logit / d dot where s is the logit with its sign.
  SX_HOST_DEVICE A slope_at(A s) const { return !absolute || s > A(0) ? scale : s < A(0) ? -scale : A(0); }
  SX_HOST_DEVICE A slope(A dot, int64_t column) const { return slope_at(signed_logit(dot, column)); }
};

// Whether `a` is larger than `b` in the order of torch.topk, where a nan is the largest. Equal values are neither.
template <typename A>
SX_HOST_DEVICE inline bool predict_larger(A a, A b) {
  return a > b || (a != a && b == b);
}

// lse of what was there and of a stream of this chunk, in double: thousands of chunks add no rounding of their own. A
// largest logit of -inf has no mass, one of +inf all of it.
SX_HOST_DEVICE inline double predict_merge_lse(double lse, double max, double sum) {
  const double added = max == negative_infinity<double>() || max == -negative_infinity<double>() ? max : max + log(sum);
  // Here, not by logaddexp: that lets the larger of a nan and a number win by its place.
  if (lse != lse || added != added) return quiet_nan<double>();
  if (lse == negative_infinity<double>()) return added;  // the first chunk
  return logaddexp(lse, added);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
