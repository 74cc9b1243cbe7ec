// The online softmax of attention pooling, for host and device: a running maximum that carries a reference value.
#pragma once

#include "common/numeric.h"
#include "loss/attention_pool/attention_pool_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Tokens so far: the largest score, the value of the token that has it, and sums of e_i = exp(a_i - max) and of
// e_i (g_i - ref). A nan score never raises the maximum; exp carries it into the sums.
template <typename A>
struct PoolState {
  A max, ref, sum, weighted;
};

template <typename A>
SX_HOST_DEVICE inline PoolState<A> pool_empty() {
  return {negative_infinity<A>(), A(0), A(0), A(0)};
}

// What a step to a new reference does to sums x = sum e_i ... and y = sum e_i (g_i - ref) ...:
//   y <- shrink (y + shift x),   x <- shrink x
template <typename A>
struct PoolStep {
  A shrink, shift;

  SX_HOST_DEVICE void apply(A& x, A& y) const {
    y = shrink * (y + shift * x);
    x = shrink * x;
  }
};

template <typename A>
SX_HOST_DEVICE inline PoolStep<A> pool_step(A max, A ref, A new_max, A new_ref) {
  // Of an empty state 0: exp(-inf - max) is that, and so is -inf - -inf of two empty ones meant to be.
  return {max == negative_infinity<A>() ? A(0) : exp_acc(max - new_max), ref - new_ref};
}

// What to subtract before exp: where every score so far is -inf, 0, or -inf - -inf would be nan.
template <typename A>
SX_HOST_DEVICE inline A pool_shift(A max) {
  return max == negative_infinity<A>() ? A(0) : max;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
