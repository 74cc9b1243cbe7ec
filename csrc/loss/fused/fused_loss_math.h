// Formulas of the reduction and the backward that the CPU and the GPU side share.
#pragma once

#include <cmath>

#include "common/numeric.h"
#include "loss/fused/fused_loss_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// 1 / denom; 0 if no row is left (B = 0, or all ignored), so that no upstream gradient makes a nan of it.
template <typename A>
SX_HOST_DEVICE inline A mean_factor(A denom) {
  if (denom == A(0)) return A(0);
  return A(1) / (denom > std::numeric_limits<A>::min() ? denom : std::numeric_limits<A>::min());
}

SX_HOST_DEVICE inline float sqrt_of(float x) { return ::sqrtf(x); }
SX_HOST_DEVICE inline double sqrt_of(double x) { return ::sqrt(x); }

// 1 / |w| from |w|^2: 0 for a row of zeros, whose products are then 0. A nan comes back through the product.
template <typename A>
SX_HOST_DEVICE inline A inverse_norm(A squares) {
  return squares > A(0) ? A(1) / sqrt_of(squares) : A(0);
}

// Zeros in the numbers around row b of coefficients that no entry has; by `threads` threads, of which this is one.
template <typename A>
SX_HOST_DEVICE inline void clear_padding(const CoefLayout& coefs, void* part, int64_t b, int64_t entries,
                                         int64_t thread = 0, int64_t threads = 1) {
  if (part == nullptr) return;
  A* row = static_cast<A*>(part) + b * coefs.stride;
  for (int64_t k = thread - coefs.gap; k < 0; k += threads) row[k] = A(0);
  for (int64_t k = thread + entries; k < coefs.stride - coefs.gap; k += threads) row[k] = A(0);
}

// Upstream gradients of row b.
template <typename A>
struct LossUpstream {
  A of_loss, of_lse;

  SX_HOST_DEVICE LossUpstream(const LossBwdParams& p, int64_t b)
      : of_loss(p.factor == nullptr ? static_cast<const A*>(p.grad_loss)[b]
                                    : *static_cast<const A*>(p.grad_loss) * *static_cast<const A*>(p.factor)),
        of_lse(p.grad_lse == nullptr ? A(0) : static_cast<const A*>(p.grad_lse)[b]) {}

  // Those of the class rows, from which a loss scale is taken out. What is zero stays it under a scale of zero, too: a
  // factor of lse that is not zero means that there is a gradient of lse to read.
  SX_HOST_DEVICE LossUpstream unscaled(const LossBwdParams& p) const {
    LossUpstream x = *this;
    if (p.grad_scale != nullptr) {
      const A inverse = A(1.0 / double(*p.grad_scale));
      if (x.of_loss != A(0)) x.of_loss *= inverse;
      if (x.of_lse != A(0)) x.of_lse *= inverse;
    }
    return x;
  }

  // A zero factor wins over a nan: a row nobody asked a gradient of has none.
  SX_HOST_DEVICE A combine(const void* loss_part, const void* lse_part, int64_t at) const {
    A x = of_loss == A(0) ? A(0) : of_loss * static_cast<const A*>(loss_part)[at];
    if (of_lse != A(0)) x += of_lse * static_cast<const A*>(lse_part)[at];
    return x;
  }

  // The same of the gradient of h, with what shared draws add to it.
  SX_HOST_DEVICE A combine_hidden(const LossBwdParams& p, int64_t at) const {
    if (p.draws_loss == nullptr) return combine(p.d_loss, p.d_lse, at);
    const auto sum = [at](const void* own, const void* draws) {
      return static_cast<const A*>(own)[at] + static_cast<const A*>(draws)[at];
    };
    A x = of_loss == A(0) ? A(0) : of_loss * sum(p.d_loss, p.draws_loss);
    if (of_lse != A(0)) x += of_lse * sum(p.d_lse, p.draws_lse);
    return x;
  }

  // Whether row b has no gradient at all. A class weight of 0 leaves the gradient of lse, so that all is examined.
  SX_HOST_DEVICE bool none(const LossBwdParams& p, int64_t b) const {
    if (static_cast<const A*>(p.denom)[b] != A(0)) return false;
    if (of_lse == A(0)) return true;
    const int64_t entries = p.num_targets + p.num_samples;
    for (int64_t k = 0; k < entries; ++k) {
      if (!(static_cast<const A*>(p.coef_lse)[b * p.coefs.stride + k] == A(0))) return false;
    }
    return true;
  }
};

// Whether sums of coefficient * h over the batch may hold an inf or nan, from the largest sizes in one row: an upper
// bound. A row without coefficients has no part in them, whatever its h is.
template <typename A>
SX_HOST_DEVICE inline bool may_overflow(const LossBwdParams& p, A largest_coef, A largest_hidden) {
  if (largest_coef == A(0)) return false;
  return !is_finite(largest_coef * largest_hidden * A(p.batch * (p.num_targets + p.num_samples)));
}

}  // namespace SX_ISA_NS

}  // namespace samplex
