// Numerics for host and device: storage <-> accumulation casts, the online-softmax pair, log-space helpers, and an exp
// and log of our own whose bits do not depend on the libm, compiler or backend (for samplers that must be bit-equal).
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "common/macros.h"

namespace samplex {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

// fp32 accumulation for every storage type but double, which keeps itself (gradcheck).
template <typename T>
struct AccumulateIn {
  using type = float;
};
template <>
struct AccumulateIn<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccumulateIn<T>::type;

inline namespace SX_ISA_NS {

template <typename To, typename From>
SX_HOST_DEVICE inline To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// ------------------------------------------------------------------------------------------------ storage casts
SX_HOST_DEVICE inline float to_acc(float x) { return x; }
SX_HOST_DEVICE inline double to_acc(double x) { return x; }
SX_HOST_DEVICE inline float to_acc(BFloat16 x) { return bit_copy<float>(uint32_t(x.x) << 16); }
SX_HOST_DEVICE inline float to_acc(Half x) { return static_cast<float>(x); }

template <typename T>
SX_HOST_DEVICE inline T from_acc(acc_t<T> x) {
  return static_cast<T>(x);
}

template <typename A>
SX_HOST_DEVICE constexpr A negative_infinity() {
  return -std::numeric_limits<A>::infinity();
}
template <typename A>
SX_HOST_DEVICE constexpr A quiet_nan() {
  return std::numeric_limits<A>::quiet_NaN();
}

// By exponent bits: a compiler may assume std::isfinite away under some flags, and nvcc has no std::isfinite(float).
SX_HOST_DEVICE inline bool is_finite(float x) { return (bit_copy<uint32_t>(x) & 0x7F800000u) != 0x7F800000u; }
SX_HOST_DEVICE inline bool is_finite(double x) {
  return (bit_copy<uint64_t>(x) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull;
}

// Modulo 2^64: sums of a damaged table are wrong numbers, and no overflow.
SX_HOST_DEVICE inline int64_t wrapped_sum(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
SX_HOST_DEVICE inline int64_t wrapped_difference(int64_t a, int64_t b) { return int64_t(uint64_t(a) - uint64_t(b)); }

// x as high + low of 16 bits each. An infinity has no rest, or inf - inf would be nan.
template <typename T>
SX_HOST_DEVICE inline void split16(float x, T& high, T& low) {
  high = from_acc<T>(x);
  const float kept = to_acc(high);
  low = from_acc<T>(is_finite(kept) ? x - kept : 0.0f);
}

SX_HOST_DEVICE inline float exp_acc(float x) { return ::expf(x); }
SX_HOST_DEVICE inline double exp_acc(double x) { return ::exp(x); }
SX_HOST_DEVICE inline float log_acc(float x) { return ::logf(x); }
SX_HOST_DEVICE inline double log_acc(double x) { return ::log(x); }
SX_HOST_DEVICE inline float log1p_acc(float x) { return ::log1pf(x); }
SX_HOST_DEVICE inline double log1p_acc(double x) { return ::log1p(x); }

// ------------------------------------------------------------------------------------------------ online softmax
// Running log-sum-exp of a stream: max so far and sum of exp(x - max). Empty is (-inf, 0). A nan sticks.
template <typename A>
struct OnlineSoftmax {
  A max, sum;
};

template <typename A>
SX_HOST_DEVICE inline OnlineSoftmax<A> online_empty() {
  return {negative_infinity<A>(), A(0)};
}

// exp(x - max) with exp(-inf - -inf) = 0: an empty stream or a masked entry has no mass.
template <typename A>
SX_HOST_DEVICE inline A shifted_exp(A x, A max) {
  return x == negative_infinity<A>() ? A(0) : exp_acc(x - max);
}

// fmax drops a nan; here the nan must win, or one bad row would look fine.
template <typename A>
SX_HOST_DEVICE inline A max_nan(A a, A b) {
  return (a > b || a != a) ? a : b;
}

template <typename A>
SX_HOST_DEVICE inline OnlineSoftmax<A> online_merge(OnlineSoftmax<A> a, OnlineSoftmax<A> b) {
  const A max = max_nan(a.max, b.max);
  return {max, a.sum * shifted_exp(a.max, max) + b.sum * shifted_exp(b.max, max)};
}

template <typename A>
SX_HOST_DEVICE inline A online_lse(OnlineSoftmax<A> s) {
  return s.max + log_acc(s.sum);
}

// ------------------------------------------------------------------------------------------------ log-space helpers
template <typename A>
SX_HOST_DEVICE inline A logaddexp(A a, A b) {
  const A max = max_nan(a, b);
  if (max == negative_infinity<A>() || !is_finite(max)) return max;
  return max + log1p(exp_acc(-fabs(a - b)));
}

// log(1 - exp(x)) for x <= 0; the branch at log 2 keeps full relative precision on both sides (Maechler 2012).
template <typename A>
SX_HOST_DEVICE inline A log1mexp(A x) {
  return x > A(-0.6931471805599453) ? log_acc(-expm1(x)) : log1p(-exp_acc(x));
}

template <typename A>
SX_HOST_DEVICE inline A log_sigmoid(A x) {
  return x < A(0) ? x - log1p(exp_acc(x)) : -log1p(exp_acc(-x));
}

// ------------------------------------------------------------------------------------------------ reproducible exp,
// log Plain IEEE multiplies and adds in a fixed order; compile the users with -ffp-contract=off / -fmad=false. Relative
// error below 4e-16 on the ranges stated; tests/ops/test_common.py measures it.

// exp for |x| <= 700: x = k ln2 + r, |r| <= ln2 / 2, Taylor to r^13.
SX_HOST_DEVICE inline double exact_exp(double x) {
  const double k = ::floor(x * 1.4426950408889634 + 0.5);
  // ln2 in two parts: k * hi is exact for |k| < 2^11.
  const double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r * r + r;
  // 32-bit integers between floating point and int64: AVX2 converts those and nothing wider.
  return (1.0 + p) * bit_copy<double>(uint64_t(int64_t(int32_t(k) + 1023)) << 52);
}

// 2 atanh(s) = log((1 + s) / (1 - s)) for |s| <= 0.2: 2 s + s^3 (2/3 + ...).
SX_HOST_DEVICE inline double exact_log1p_series(double s) {
  const double z = s * s;
  double p = 2.0 / 23.0;
  p = p * z + 2.0 / 21.0;
  p = p * z + 2.0 / 19.0;
  p = p * z + 2.0 / 17.0;
  p = p * z + 2.0 / 15.0;
  p = p * z + 2.0 / 13.0;
  p = p * z + 2.0 / 11.0;
  p = p * z + 2.0 / 9.0;
  p = p * z + 2.0 / 7.0;
  p = p * z + 2.0 / 5.0;
  p = p * z + 2.0 / 3.0;
  return 2.0 * s + s * (z * p);
}

// log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]. `f` is passed by itself so that log(1 + 1/n) keeps its digits.
SX_HOST_DEVICE inline double exact_log1p_core(double f) { return exact_log1p_series(f / (2.0 + f)); }

// log for positive normal x.
SX_HOST_DEVICE inline double exact_log(double x) {
  const uint64_t bits = bit_copy<uint64_t>(x);
  int32_t k = int32_t(bits >> 52) - 1023;
  double m = bit_copy<double>((bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    k += 1;
  }
  return double(k) * 6.93147180369123816490e-01 + (exact_log1p_core(m - 1.0) + double(k) * 1.90821492927058770002e-10);
}

// log(1 + f) for f >= 0. `lost` is what the sum 1 + f rounded away; without it the error is 4.5e-16 near f = 0.42.
SX_HOST_DEVICE inline double exact_log1p(double f) {
  if (f < 0.4142135623730950) return exact_log1p_core(f);
  const double sum = 1.0 + f;
  const double lost = f < 1.0 ? f - (sum - 1.0) : 1.0 - (sum - f);
  return exact_log(sum) + lost / sum;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
