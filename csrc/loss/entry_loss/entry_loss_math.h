// One entry of the entry losses, for the CPU and the GPU side.
#pragma once

#include "common/numeric.h"
#include "loss/entry_loss/entry_loss_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Whether an entry's term needs the targets' scores.
SX_HOST_DEVICE constexpr bool is_relative(EntryLoss kind) {
  return kind == EntryLoss::kOneVsEach || kind == EntryLoss::kAugmentReduce;
}

// What a row holds besides tensors, in the accumulation type.
template <typename A>
struct EntryLossFactors {
  A scale, reg, share, log_m;  // share: of a draw's term in its row, 1/m for negative sampling

  SX_HOST_DEVICE explicit EntryLossFactors(const EntryLossParams& p)
      : scale(A(p.scale)), reg(A(p.reg)), share(A(1)), log_m(A(p.log_num_samples)) {
    if (p.kind == EntryLoss::kNegativeSampling) share = p.num_samples > 0 ? A(1) / A(p.num_samples) : A(0);
  }
};

SX_HOST_DEVICE inline bool counts_as_target(const EntryLossParams& p, int64_t id) {
  return id != p.ignore_index && !(p.num_targets > 1 && id == kPadding);
}

// -log q - log m. inf in log_q would drop a draw silently, or let it win it all: 0 * inf makes it nan, so that the bad
// row shows.
template <typename A>
SX_HOST_DEVICE inline A log_weight(A log_q, A log_m) {
  return (-log_q - log_m) + A(0) * log_q;
}

template <typename A>
struct EntryTerm {
  A value, slope;  // of the entry's term, by its score
};

// softplus(z) and its slope. exp of -|z| only: neither side overflows, and small values keep their digits.
template <typename A>
SX_HOST_DEVICE inline EntryTerm<A> softplus_term(A z) {
  const A e = exp_acc(z > A(0) ? -z : z);
  return {(z > A(0) ? z : A(0)) + log1p_acc(e), (z > A(0) ? A(1) : e) / (A(1) + e)};
}

// softplus(z) + reg (xi + log_q)^2 with z = xi of a draw and -xi of a target.
template <typename A>
SX_HOST_DEVICE inline EntryTerm<A> entry_term(A xi, bool target, A reg, A log_q) {
  EntryTerm<A> term = softplus_term(target ? -xi : xi);
  if (target) term.slope = -term.slope;
  if (reg != A(0)) {
    const A off = xi + log_q;
    term.value += reg * off * off;
    term.slope += A(2) * reg * off;
  }
  return term;
}

// log eta of the example of row b, where there are examples.
template <typename A>
SX_HOST_DEVICE inline A example_log_eta(const EntryExamples& x, const void* log_eta, int64_t b) {
  const int64_t at = x.index != nullptr ? x.index[b] : b;
  if (x.index != nullptr && uint64_t(at) >= uint64_t(x.size)) return quiet_nan<A>();
  return static_cast<const A*>(log_eta)[at];
}

// What log eta becomes; see EntryExamples.
template <typename A>
SX_HOST_DEVICE inline A moved_log_eta(const EntryExamples& x, A used, A ratio) {
  const A found = used + log_acc(ratio), most = used + A(88);
  const A log_sum = found > most ? most : found;
  A moved = used;
  if (log_sum == log_sum) {
    const A kept = used + A(x.log_keep), added = log_sum + A(x.log_rate);
    const A larger = kept > added ? kept : added, smaller = kept > added ? added : kept;
    moved = smaller == negative_infinity<A>() ? larger : larger + log1p_acc(exp_acc(smaller - larger));
  }
  return moved > A(0) || moved != moved ? moved : A(0);  // never -0
}

}  // namespace SX_ISA_NS
}  // namespace samplex
