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
// cos and sin of pi u. The device's cosf has a path for huge angles that keeps an array in local memory; these have
// not.
#ifdef __CUDA_ARCH__
SX_HOST_DEVICE inline float cos_pi(float u) { return ::cospif(u); }
SX_HOST_DEVICE inline double cos_pi(double u) { return ::cospi(u); }
SX_HOST_DEVICE inline float sin_pi(float u) { return ::sinpif(u); }
SX_HOST_DEVICE inline double sin_pi(double u) { return ::sinpi(u); }
#else
SX_HOST_DEVICE inline float cos_pi(float u) { return ::cosf(3.14159265358979323846f * u); }
SX_HOST_DEVICE inline double cos_pi(double u) { return ::cos(3.14159265358979323846 * u); }
SX_HOST_DEVICE inline float sin_pi(float u) { return ::sinf(3.14159265358979323846f * u); }
SX_HOST_DEVICE inline double sin_pi(double u) { return ::sin(3.14159265358979323846 * u); }
#endif
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
// with k = floor(angle / pi), that is the cosine of what is left of the angle. sin t in the slope stays above a number
// that rounding of c allows to tell from 0.
template <typename A>
SX_HOST_DEVICE inline MarginValue<A> margin_value(const MarginParams& m, A c) {
  const A m3 = A(m.m3);
  if (m.m1 == 1.0 && m.m2 == 0.0) return {c - m3, A(1), -m3};
  c = c > A(1) ? A(1) : c < A(-1) ? A(-1) : c;  // nan stays nan
  constexpr A kOnePi = A(0.318309886183790671538), kLeast = sizeof(A) == 4 ? A(1e-7) : A(1e-14);
  const A squared = (A(1) - c) * (A(1) + c), sine = sqrt_of(squared > kLeast ? squared : kLeast);
  const A angle = (A(m.m1) * acos_of(c) + A(m.m2)) * kOnePi, turns = floor_of(angle), rest = angle - turns;
  const A value = cos_pi(rest) - A(2) * turns - m3;
  const A slope = A(m.m1) * sin_pi(rest) / sine;
  return {value, slope, value - c * slope};
}

}  // namespace SX_ISA_NS
}  // namespace samplex
