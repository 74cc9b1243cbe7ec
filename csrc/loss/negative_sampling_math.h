// One entry of negative sampling, for the CPU and the GPU side.
#pragma once

#include "common/numeric.h"
#include "loss/negative_sampling_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// What a row holds besides tensors, in the accumulation type.
template <typename A>
struct NegativeSamplingFactors {
  A scale, reg, share;  // share: 1/m

  SX_HOST_DEVICE explicit NegativeSamplingFactors(const NegativeSamplingParams& p)
      : scale(A(p.scale)), reg(A(p.reg)), share(p.num_samples > 0 ? A(1) / A(p.num_samples) : A(0)) {}
};

template <typename A>
struct EntryTerm {
  A value, slope;  // of the entry's term, by its xi
};

// softplus(z) + reg (xi + log_q)^2 with z = xi of a draw and -xi of a target. exp of -|z| only: neither side overflows,
// and small values keep their digits.
template <typename A>
SX_HOST_DEVICE inline EntryTerm<A> entry_term(A xi, bool target, A reg, A log_q) {
  const A z = target ? -xi : xi;
  const A e = exp_acc(z > A(0) ? -z : z);
  EntryTerm<A> term;
  term.value = (z > A(0) ? z : A(0)) + log1p_acc(e);
  const A sigmoid = (z > A(0) ? A(1) : e) / (A(1) + e);
  term.slope = target ? -sigmoid : sigmoid;
  if (reg != A(0)) {
    const A off = xi + log_q;
    term.value += reg * off * off;
    term.slope += A(2) * reg * off;
  }
  return term;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
