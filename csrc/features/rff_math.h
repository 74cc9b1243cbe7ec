// Scalar functions the feature maps add to common/numeric.h.
#pragma once

#include "common/numeric.h"

namespace samplex {
inline namespace SX_ISA_NS {

SX_HOST_DEVICE inline float sqrt_acc(float x) { return ::sqrtf(x); }
SX_HOST_DEVICE inline double sqrt_acc(double x) { return ::sqrt(x); }

SX_HOST_DEVICE inline void sincos_acc(float x, float& sin, float& cos) {
  sin = ::sinf(x);
  cos = ::cosf(x);
}
SX_HOST_DEVICE inline void sincos_acc(double x, double& sin, double& cos) {
  sin = ::sin(x);
  cos = ::cos(x);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
