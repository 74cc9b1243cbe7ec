// The arithmetic of a shared draw, the same on every backend (see tree_math.h for what that takes).
#pragma once

#include "sampler/tree/tree_math.h"
#include "sampler/tree_shared/tree_shared_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// P(right) and P(left) of a node with z = w . x + b: the likelier child has 1 / (1 + e), the other e / (1 + e).
struct TreeSplit {
  float right, left;
};
SX_HOST_DEVICE inline TreeSplit tree_split(float z, float e) {  // e = exp(-|z|)
  const float likely = 1.0f / (1.0f + e), other = e * likely;
  const bool up = z >= 0;
  return {up ? likely : other, up ? other : likely};
}

SX_HOST_DEVICE inline TreeSplit tree_split(float z) { return tree_split(z, tree_exp(z < 0 ? -z : z)); }

// Sum of 64 lanes, by halves.
SX_HOST_DEVICE inline double tree_shared_sum(double* lanes) {
  for (int step = kTreeSharedLanes / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) lanes[j] = lanes[j] + lanes[j + step];
  }
  return lanes[0];
}

// Less than this is nothing: its logarithm would come from a subnormal number.
constexpr double kTreeSharedLeast = 1e-290;

// Probability of the way to a child, from that of the way to its parent. Below a child with probability 0 every mass is
// 0, and the path stays impossible instead of 0 / 0; nan stays nan.
SX_HOST_DEVICE inline double tree_shared_step(double q, double part, double total) {
  return q < kTreeSharedLeast ? 0.0 : q * (part / total);
}

// Stratified draws. Where draw i of m is in [0, 1), from its uniform number:
SX_HOST_DEVICE inline double tree_stratum(int64_t i, double u, int64_t m) { return (double(i) + u) / double(m); }

// Whether a draw at `place` goes right in a node whose interval begins at `low`. Rounding never sends it to a child
// with probability 0; without a row that has a distribution it goes left, as an independent one.
SX_HOST_DEVICE inline bool tree_stratum_right(double place, double low, double q_left, double q_right) {
  return q_right >= kTreeSharedLeast && (q_left < kTreeSharedLeast || place >= low + q_left);
}

// Probability of the way to a node under the mixture with a base, from that of the tree: the mixture of tree
// distributions is one too.
SX_HOST_DEVICE inline double tree_shared_mixed(const TreeSharedParams& p, double q, int64_t node, int level) {
  const int64_t leaves = int64_t(1) << p.tree.depth, width = leaves >> level, first = node * width - leaves;
  const double units = double(wrapped_difference(p.base.prefix[first + width], p.base.prefix[first]));
  return (1.0 - p.base.weight) * q + p.base.weight * (units / double(p.base.prefix[leaves]));
}

// log of the product of the branch probabilities of a path: -inf where one is 0, nan without a row that has a
// distribution.
SX_HOST_DEVICE inline float tree_shared_log(double q) {
  if (q < kTreeSharedLeast) return negative_infinity<float>();
  return float(exact_log(q) + 0.0 * q);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
