// Scalar functions the feature maps add to common/numeric.h.
#pragma once

#include "common/numeric.h"

namespace samplex {
inline namespace SX_ISA_NS {

SX_HOST_DEVICE inline float sqrt_acc(float x) { return ::sqrtf(x); }
SX_HOST_DEVICE inline double sqrt_acc(double x) { return ::sqrt(x); }

inline void sincos_acc(float x, float& sin, float& cos) {
  sin = ::sinf(x);
  cos = ::cosf(x);
}
inline void sincos_acc(double x, double& sin, double& cos) {
  sin = ::sin(x);
  cos = ::cos(x);
}

// From sin and cos of r to those of r + q pi / 2.
template <typename A>
SX_HOST_DEVICE inline void turn_quarters(int q, A& sin, A& cos) {
  const A s = sin, c = cos;
  sin = (q & 1) != 0 ? c : s;
  cos = (q & 1) != 0 ? s : c;
  if ((q & 2) != 0) sin = -sin;
  if (((q + 1) & 2) != 0) cos = -cos;
}

// sin and cos for the GPU: CUDA's own keep an array on the stack for arguments beyond any use. Here those of more than
// 2^40 quarters have a bounded but arbitrary result. x = n pi/2 + r, the first step exact; Taylor to r^17 and r^18.
SX_HOST_DEVICE inline void device_sincos(double x, double& sin, double& cos) {
  const double n = ::rint(x * 0.63661977236758134);
  double r = ::fma(n, -1.5707963267948966, x);
  r = ::fma(n, -6.123233995736766e-17, r);
  r = r > 0.8 ? 0.8 : r < -0.8 ? -0.8 : r;
  const double z = r * r;
  double s = 1.0 / 355687428096000.0;
  s = s * z - 1.0 / 1307674368000.0;
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  sin = r + r * (z * s);
  double c = -1.0 / 6402373705728000.0;
  c = c * z + 1.0 / 20922789888000.0;
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  cos = 1.0 - (0.5 * z - z * (z * c));
  // Above 2^40 (and for a nan) the quarter means nothing.
  turn_quarters(::fabs(n) < 1099511627776.0 ? int((long long)(n) & 3) : 0, sin, cos);
}

SX_HOST_DEVICE inline void device_sincos(float x, float& sin, float& cos) {
  if (::fabsf(x) > 1e5f) {
    double s, c;
    device_sincos(double(x), s, c);
    sin = float(s);
    cos = float(c);
    return;
  }
  // As vsincos of common/vec.h.
  const float n = ::rintf(x * 0.636619772367581f);
  float r = ::fmaf(n, -1.57079637050628662f, x);
  r = ::fmaf(n, 4.37113900018624283e-8f, r);
  const float z = r * r;
  float s = -1.9515295891e-4f;
  s = ::fmaf(s, z, 8.3321608736e-3f);
  s = ::fmaf(s, z, -1.6666654611e-1f);
  sin = ::fmaf(s * z, r, r);
  float c = 2.443315711809948e-5f;
  c = ::fmaf(c, z, -1.388731625493765e-3f);
  c = ::fmaf(c, z, 4.166664568298827e-2f);
  cos = ::fmaf(c * z, z, ::fmaf(z, -0.5f, 1.0f));
  turn_quarters(x == x ? int(n) : 0, sin, cos);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
