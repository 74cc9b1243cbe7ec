// Norms of class rows and margins of targets, for host and device.
#pragma once

#include <cmath>

#include "common/numeric.h"
#include "loss/fused/fused_loss_math.h"
#include "loss/sampled_softmax/sampled_softmax_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

SX_HOST_DEVICE inline float acos_of(float x) { return ::acosf(x); }
SX_HOST_DEVICE inline double acos_of(double x) { return ::acos(x); }
SX_HOST_DEVICE inline float cos_of(float x) { return ::cosf(x); }
SX_HOST_DEVICE inline double cos_of(double x) { return ::cos(x); }
SX_HOST_DEVICE inline float sin_of(float x) { return ::sinf(x); }
SX_HOST_DEVICE inline double sin_of(double x) { return ::sin(x); }
SX_HOST_DEVICE inline float floor_of(float x) { return ::floorf(x); }
SX_HOST_DEVICE inline double floor_of(double x) { return ::floor(x); }

// What the product x = |h| cos t of a target becomes: |h| f(t), with c = cos t.
template <typename A>
struct MarginValue {
  A value;   // f
  A slope;   // df / dc
  A radial;  // f - c df / dc: what is left for the direction of h
};

// f(t) = cos(m1 t + m2) - m3 while the angle is at most pi, and goes on falling beyond: (-1)^k cos(angle) - 2k - m3
// with k = floor(angle / pi). sin t in the slope stays above a number that rounding of c allows to tell from 0.
template <typename A>
SX_HOST_DEVICE inline MarginValue<A> margin_value(const MarginParams& m, A c) {
  const A m3 = A(m.m3);
  if (m.m1 == 1.0 && m.m2 == 0.0) return {c - m3, A(1), -m3};
  c = c > A(1) ? A(1) : c < A(-1) ? A(-1) : c;  // nan stays nan
  constexpr A kPi = A(3.14159265358979323846), kLeast = sizeof(A) == 4 ? A(1e-7) : A(1e-14);
  const A squared = (A(1) - c) * (A(1) + c), sine = sqrt_of(squared > kLeast ? squared : kLeast);
  const A angle = A(m.m1) * acos_of(c) + A(m.m2), turns = floor_of(angle / kPi);
  const A sign = turns - A(2) * floor_of(turns / A(2)) == A(1) ? A(-1) : A(1);
  const A value = sign * cos_of(angle) - A(2) * turns - m3;
  const A slope = A(m.m1) * sign * sin_of(angle) / sine;
  return {value, slope, value - c * slope};
}

}  // namespace SX_ISA_NS
}  // namespace samplex
