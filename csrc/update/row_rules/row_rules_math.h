// The update rules on one number, for host and device, and stochastic rounding.
#pragma once

#include <cmath>

#include "common/philox.h"
#include "update/row_rules/row_rules_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Counts a step of `t` and returns the rule of it: what samplex_cuda/optim/rules.py computes, by the same operations.
SX_HOST_DEVICE inline RowRule live_rule(const RowTable& t) {
  RowRule r = t.rule;
  r.skip = t.live.found_inf != nullptr && *t.live.found_inf != 0.0f;
  if (t.live.lr != nullptr)
    r.lr = t.live.lr_double ? *static_cast<const double*>(t.live.lr) : double(*static_cast<const float*>(t.live.lr));
  const double step = double(*t.live.step) + 1.0;
  if (!r.skip) *t.live.step = float(step);
  if (r.kind == RowRuleKind::kAdam) {
    r.keep = 1.0 - r.lr * t.live.decay;
    r.lr = r.lr / (1.0 - ::pow(r.beta1, step));
    r.second = 1.0 / ::sqrt(1.0 - ::pow(r.beta2, step));
  } else if (r.kind == RowRuleKind::kAdagrad || r.kind == RowRuleKind::kRowAdagrad) {
    r.lr = r.lr / (1.0 + (step - 1.0) * t.live.lr_decay);
  }
  return r;
}

// The rule of this step. By value: the address of a kernel's parameter would put it into local memory.
SX_HOST_DEVICE inline RowRule rule_of(const RowTable& t) {
  RowRule r = t.rule;
  if (t.live.rule != nullptr) r = *t.live.rule;
  return r;
}

// Whether nothing may change in this step.
SX_HOST_DEVICE inline bool is_skipped(const RowTable& t) { return t.live.rule != nullptr && t.live.rule->skip; }

template <typename A>
struct RuleNumbers {
  A lr, weight_decay, keep, eps, beta1, beta2, second;
  bool nesterov;
  RuleNumbers() = default;  // for shared memory
  SX_HOST_DEVICE explicit RuleNumbers(const RowTable& table) : RuleNumbers(rule_of(table)) {}
  SX_HOST_DEVICE explicit RuleNumbers(const RowRule& r)
      : lr(A(r.lr)),
        weight_decay(A(r.weight_decay)),
        keep(A(r.keep)),
        eps(A(r.eps)),
        beta1(A(r.beta1)),
        beta2(A(r.beta2)),
        second(A(r.second)),
        nesterov(r.nesterov) {}
};

SX_HOST_DEVICE constexpr bool has_state0(RowRuleKind kind) {
  return kind == RowRuleKind::kMomentum || kind == RowRuleKind::kAdagrad || kind == RowRuleKind::kAdam;
}
SX_HOST_DEVICE constexpr bool has_state1(RowRuleKind kind) { return kind == RowRuleKind::kAdam; }

SX_HOST_DEVICE inline float sqrt_acc(float x) { return ::sqrtf(x); }
SX_HOST_DEVICE inline double sqrt_acc(double x) { return ::sqrt(x); }

// The new weight; `s0` and `s1` become the new state. kRowAdagrad comes with r.lr already over the root of its sum.
template <RowRuleKind Kind, typename A>
SX_HOST_DEVICE inline A updated(const RuleNumbers<A>& r, A w, A gradient, A& s0, A& s1) {
  const A g = r.weight_decay != A(0) ? gradient + r.weight_decay * w : gradient;  // 0 * inf is nan
  if constexpr (Kind == RowRuleKind::kMomentum) {
    s0 = r.beta1 * s0 + g;
    return w - r.lr * (r.nesterov ? g + r.beta1 * s0 : s0);
  } else if constexpr (Kind == RowRuleKind::kAdagrad) {
    s0 += g * g;
    return w - r.lr * (g / (sqrt_acc(s0) + r.eps));
  } else if constexpr (Kind == RowRuleKind::kAdam) {
    s0 += (A(1) - r.beta1) * (g - s0);
    s1 = r.beta2 * s1 + (A(1) - r.beta2) * g * g;
    return r.keep * w - r.lr * (s0 / (sqrt_acc(s1) * r.second + r.eps));
  } else {
    (void)s0, (void)s1;
    return w - r.lr * g;
  }
}

// kRowAdagrad: the rate of a row whose sum is `sum`.
template <typename A>
SX_HOST_DEVICE inline A row_rate(const RuleNumbers<A>& r, A sum) {
  return r.lr / (sqrt_acc(sum) + r.eps);
}

// body(RuleTag<Kind>{})
template <RowRuleKind Kind>
struct RuleTag {
  static constexpr RowRuleKind kind = Kind;
};
template <typename F>
SX_HOST_DEVICE inline void dispatch_rule(RowRuleKind kind, F&& body) {
  switch (kind) {
    case RowRuleKind::kSgd:
      return body(RuleTag<RowRuleKind::kSgd>{});
    case RowRuleKind::kMomentum:
      return body(RuleTag<RowRuleKind::kMomentum>{});
    case RowRuleKind::kAdagrad:
      return body(RuleTag<RowRuleKind::kAdagrad>{});
    case RowRuleKind::kRowAdagrad:
      return body(RuleTag<RowRuleKind::kRowAdagrad>{});
    default:
      return body(RuleTag<RowRuleKind::kAdam>{});
  }
}

// ------------------------------------------------------------------------------------------------ stochastic rounding
// Up with the probability of the distance to the lower neighbor, by 16 random bits. What is not finite, and what has
// no coarser type, is rounded as ever.
SX_HOST_DEVICE inline BFloat16 round_with(float x, uint32_t noise, BFloat16) {
  if (!is_finite(x)) return from_acc<BFloat16>(x);
  return bit_copy<BFloat16>(uint16_t((bit_copy<uint32_t>(x) + noise) >> 16));
}
SX_HOST_DEVICE inline Half round_with(float x, uint32_t noise, Half) {
  if (!is_finite(x)) return from_acc<Half>(x);
  if (::fabsf(x) < 0x1.0p-14f) {  // below the smallest normal number the step is 2^-24
    return from_acc<Half>(::floorf(x * 0x1.0p24f + float(noise) * 0x1.0p-16f) * 0x1.0p-24f);
  }
  return from_acc<Half>(bit_copy<float>((bit_copy<uint32_t>(x) + (noise >> 3)) & 0xFFFFE000u));
}
SX_HOST_DEVICE inline float round_with(float x, uint32_t, float) { return x; }
SX_HOST_DEVICE inline double round_with(double x, uint32_t, double) { return x; }

// Random bits of the columns: eight columns share four words at (row, column / 8); the bias is attempt 1.
constexpr int kNoiseColumns = 8;
SX_HOST_DEVICE inline uint32_t noise_of(const PhiloxWords& words, int64_t column) {
  // By selection: an index would put the words on a GPU thread's stack.
  const int word = int(column % kNoiseColumns) / 2;
  const uint32_t low = word == 0 ? words.w[0] : words.w[1], high = word == 2 ? words.w[2] : words.w[3];
  return ((word < 2 ? low : high) >> (column % 2 * 16)) & 0xFFFFu;
}

template <typename T, typename A>
SX_HOST_DEVICE inline T rounded(A x, const int64_t* key, int64_t row) {
  if (key == nullptr || sizeof(T) > 2) return from_acc<T>(x);
  const PhiloxWords words = philox_at({uint64_t(key[0]), uint64_t(key[1])}, row, 0, 1);
  return round_with(x, noise_of(words, 0), T{});
}

// One number of a bias [C], in its own type; `first_row` as in RowRulesParams.
template <typename A>
SX_HOST_DEVICE inline void update_bias(const RowTable& bias, const RuleNumbers<A>& r, const int64_t* key, int64_t row,
                                       int64_t first_row, A gradient) {
  A s0 = bias.state0 != nullptr ? static_cast<A*>(bias.state0)[row] : A(0);
  A s1 = bias.state1 != nullptr ? static_cast<A*>(bias.state1)[row] : A(0);
  const A w = load_scalar<A>({bias.values, bias.dtype}, row, A(0));
  A next = w;
  // A row of one number: row-wise Adagrad is Adagrad.
  const RowRuleKind kind = bias.rule.kind == RowRuleKind::kRowAdagrad ? RowRuleKind::kAdagrad : bias.rule.kind;
  switch (kind) {
    case RowRuleKind::kSgd:
      next = updated<RowRuleKind::kSgd>(r, w, gradient, s0, s1);
      break;
    case RowRuleKind::kMomentum:
      next = updated<RowRuleKind::kMomentum>(r, w, gradient, s0, s1);
      break;
    case RowRuleKind::kAdagrad:
      next = updated<RowRuleKind::kAdagrad>(r, w, gradient, s0, s1);
      break;
    default:
      next = updated<RowRuleKind::kAdam>(r, w, gradient, s0, s1);
  }
  if (bias.state0 != nullptr) static_cast<A*>(bias.state0)[row] = s0;
  if (bias.state1 != nullptr) static_cast<A*>(bias.state1)[row] = s1;
  switch (bias.dtype) {
    case DType::kFloat32:
      static_cast<float*>(bias.values)[row] = float(next);
      break;
    case DType::kFloat64:
      static_cast<double*>(bias.values)[row] = double(next);
      break;
    case DType::kFloat16:
      static_cast<Half*>(bias.values)[row] = rounded<Half>(float(next), key, row + first_row);
      break;
    default:
      static_cast<BFloat16*>(bias.values)[row] = rounded<BFloat16>(float(next), key, row + first_row);
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
