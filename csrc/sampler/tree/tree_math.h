// The arithmetic of a walk down the tree, the same on every backend: products and sums in a fixed order, an exp of our
// own, no fused multiply-add (compile the users with -ffp-contract=off / -fmad=false).
//
// With z = w . x + b and e = exp(-|z|) the likelier child has probability 1 / (1 + e), the other e / (1 + e). A path
// has
//   log p = -sum of |z| where it takes the less likely child - log of the product of all (1 + e),
// which never forms 1 - sigmoid and takes one logarithm for the whole path.
//
// A table may come from a damaged file. A leaf or a class read from it is checked before it is used: one out of range
// gives class 0 or no class, log_q = nan, and no access.
#pragma once

#include "common/numeric.h"
#include "common/philox.h"
#include "sampler/tree/tree_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTreeLanes = 16;  // partial sums of a product

// A projected feature is the sum of sums over this many features each, both in order: many features are no chain of as
// many roundings.
constexpr int kTreeProjectChunk = 32;

// exp(-a) for a >= 0, relative error below 3e-7; 0 from 87 on, where float has no normal number left; nan for nan.
SX_HOST_DEVICE inline float tree_exp(float a) {
  const float t = a < 87.0f ? a : 87.0f;
  const float n = (t * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  float r = n * 0.693359375f - t;
  r = r + n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const float power = bit_copy<float>(uint32_t(127 - int32_t(n)) << 23);
  return a < 87.0f ? p * power : (a == a ? 0.0f : a);
}

// Lanes -> one sum, halves first: what a vector register does.
SX_HOST_DEVICE inline float tree_sum(float* lanes) {
  for (int step = kTreeLanes / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) lanes[j] = lanes[j] + lanes[j + step];
  }
  return lanes[0];
}

template <typename T>
SX_HOST_DEVICE inline const T* tree_node(const TreeTable& tree, int64_t node) {
  return static_cast<const T*>(tree.nodes) + node * tree.stride;
}

// w . x + b of one node, by the book. The vector and GPU versions do the same additions.
template <typename T>
SX_HOST_DEVICE inline float tree_logit(const TreeTable& tree, int64_t node, const float* x) {
  const T* w = tree_node<T>(tree, node);
  float lanes[kTreeLanes];
  for (int j = 0; j < kTreeLanes; ++j) lanes[j] = 0.0f;
  for (int64_t c = 0; c < tree.dim; c += kTreeLanes) {
    for (int j = 0; j < kTreeLanes; ++j) {
      if (c + j < tree.dim) lanes[j] = lanes[j] + to_acc(w[c + j]) * x[c + j];
    }
  }
  return tree_sum(lanes) + to_acc(w[tree.dim]);
}

// The leaf of a class, or -1.
SX_HOST_DEVICE inline int64_t leaf_of(const TreeTable& tree, int64_t id) {
  if (uint64_t(id) >= uint64_t(tree.num_classes)) return -1;
  const int64_t leaf = tree.class_leaf[id];
  return uint64_t(leaf) < uint64_t(1) << tree.depth ? leaf : -1;
}

// The class of a leaf, or -1: padding, which only a row with a nan comes to, a damaged table, or a leaf out of range.
SX_HOST_DEVICE inline int64_t class_at(const TreeTable& tree, int64_t leaf) {
  if (uint64_t(leaf) >= uint64_t(1) << tree.depth) return -1;
  const int64_t id = tree.leaf_class[leaf];
  return uint64_t(id) < uint64_t(tree.num_classes) ? id : -1;
}

// log p of a path from its two parts; 0 * product keeps a nan, which exact_log does not.
SX_HOST_DEVICE inline double tree_log_p(double minor, double product) {
  return (-minor - exact_log(product)) + 0.0 * product;
}

// What a path is made of so far.
struct TreePath {
  double minor = 0;    // sum of |z| over less likely children taken
  double product = 1;  // of (1 + e)
  SX_HOST_DEVICE void step(float z, float e, bool right) {
    if (right != (z >= 0)) minor += double(z < 0 ? -z : z);
    product *= 1.0 + double(e);
  }
  SX_HOST_DEVICE double log_p() const { return tree_log_p(minor, product); }
};

// Weights of the right and the left child, up to the common factor 1 / (1 + e).
SX_HOST_DEVICE inline double right_weight(float z, float e) { return z >= 0 ? 1.0 : double(e); }
SX_HOST_DEVICE inline double left_weight(float z, float e) { return z >= 0 ? double(e) : 1.0; }

// ------------------------------------------------------------------------------------------------ exclusion
// A row's excluded leaves, ascending, without those below 0.
struct TreeExcluded {
  const int64_t* leaves;
  double* left;  // [count, depth + 1]
  int64_t count;
};

SX_HOST_DEVICE inline TreeExcluded excluded_of(const TreeSampleParams& p, int64_t b) {
  if (p.exclude == nullptr) return {nullptr, nullptr, 0};
  int64_t begin = b * p.exclude_width, end = begin + p.exclude_width;
  if (p.exclude_offsets != nullptr) {
    // Clamped: on CUDA the offsets have not been checked.
    begin = p.exclude_offsets[b] < 0 ? 0 : p.exclude_offsets[b];
    begin = begin < p.exclude_size ? begin : p.exclude_size;
    end = p.exclude_offsets[b + 1] < p.exclude_size ? p.exclude_offsets[b + 1] : p.exclude_size;
  }
  while (begin < end && p.exclude[begin] < 0) ++begin;
  while (begin < end && p.exclude[end - 1] >= int64_t(1) << p.tree.depth) --end;
  if (begin >= end) return {nullptr, nullptr, 0};
  return {p.exclude + begin, p.left + begin * (p.tree.depth + 1), end - begin};
}

SX_HOST_DEVICE inline int64_t ancestor(const TreeTable& tree, int64_t leaf, int level) {
  return ((int64_t(1) << tree.depth) + leaf) >> (tree.depth - level);
}
SX_HOST_DEVICE inline bool goes_right(const TreeTable& tree, int64_t leaf, int level) {
  return (leaf >> (tree.depth - 1 - level)) & 1;
}

// left[i, t] becomes P(no excluded class | node of leaf i at level t), bottom up as p_sibling + p_toward * left_child:
// never 1 - p, so that a nearly certain target leaves the others their digits. On entry left[i, t] holds that node's z.
SX_HOST_DEVICE inline void tree_left(const TreeTable& tree, const TreeExcluded& out) {
  const int64_t width = tree.depth + 1;
  for (int64_t i = 0; i < out.count; ++i) out.left[i * width + tree.depth] = 0.0;
  for (int level = tree.depth - 1; level >= 0; --level) {
    for (int64_t i = 0; i < out.count;) {
      int64_t j = i + 1;
      const int64_t node = ancestor(tree, out.leaves[i], level);
      while (j < out.count && ancestor(tree, out.leaves[j], level) == node) ++j;
      const float z = float(out.left[i * width + level]), e = tree_exp(z < 0 ? -z : z);
      const double on_left = goes_right(tree, out.leaves[i], level) ? 1.0 : out.left[i * width + level + 1];
      const double on_right = goes_right(tree, out.leaves[j - 1], level) ? out.left[(j - 1) * width + level + 1] : 1.0;
      const double kept = (right_weight(z, e) * on_right + left_weight(z, e) * on_left) / (1.0 + double(e));
      // Less than 1e-290 is nothing: its logarithm would come from a subnormal number.
      for (; i < j; ++i) out.left[i * width + level] = kept < 1e-290 ? 0.0 : kept;
    }
  }
}

// The excluded leaves [begin, end) below the node a draw is at.
struct TreeRange {
  int64_t begin, end;
};

// Masses of both children with the excluded classes gone.
SX_HOST_DEVICE inline void children_left(const TreeTable& tree, const TreeExcluded& out, TreeRange at, int level,
                                         double& on_right, double& on_left) {
  const int64_t width = tree.depth + 1;
  on_right = on_left = 1.0;
  if (at.begin >= at.end) return;
  if (!goes_right(tree, out.leaves[at.begin], level)) on_left = out.left[at.begin * width + level + 1];
  if (goes_right(tree, out.leaves[at.end - 1], level)) on_right = out.left[(at.end - 1) * width + level + 1];
}

SX_HOST_DEVICE inline TreeRange below(const TreeTable& tree, const TreeExcluded& out, TreeRange at, int level,
                                      bool right) {
  int64_t low = at.begin, high = at.end;  // first leaf that goes right
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (goes_right(tree, out.leaves[middle], level))
      high = middle;
    else
      low = middle + 1;
  }
  return right ? TreeRange{low, at.end} : TreeRange{at.begin, low};
}

// ------------------------------------------------------------------------------------------------ one draw, one id
// logit(node, level) gives w . x + b.
template <typename Logit>
SX_HOST_DEVICE inline TreePath tree_path(const TreeTable& tree, int64_t leaf, const Logit& logit) {
  TreePath path;
  for (int level = 0; level < tree.depth; ++level) {
    const float z = logit(ancestor(tree, leaf, level), level);
    path.step(z, tree_exp(z < 0 ? -z : z), goes_right(tree, leaf, level));
  }
  return path;
}

template <typename Logit>
SX_HOST_DEVICE inline double path_log_p(const TreeTable& tree, int64_t leaf, const Logit& logit) {
  return tree_path(tree, leaf, logit).log_p();
}

// Log-probability of a class under the distribution without the excluded ones.
template <typename Logit>
SX_HOST_DEVICE inline float given_log_q(const TreeSampleParams& p, const TreeExcluded& out, int64_t id,
                                        const Logit& logit) {
  const int64_t leaf = leaf_of(p.tree, id);
  if (leaf < 0) return quiet_nan<float>();
  if (out.count == 0) return float(path_log_p(p.tree, leaf, logit));
  for (int64_t i = 0; i < out.count; ++i) {
    if (out.leaves[i] == leaf) return out.left[0] == 0.0 && i == 0 ? 0.0f : negative_infinity<float>();
  }
  if (out.left[0] == 0.0) return negative_infinity<float>();
  return float(path_log_p(p.tree, leaf, logit) - exact_log(out.left[0]));
}

struct TreeDraw {
  int64_t id;
  float log_q;
};

// Down to a leaf that is not excluded; `path` is the way there.
template <typename Logit>
SX_HOST_DEVICE inline int64_t tree_walk(const TreeTable& tree, const TreeExcluded& out, PhiloxKey key, int64_t b,
                                        int64_t draw, TreePath& path, const Logit& logit) {
  TreeRange at = {0, out.count};
  int64_t node = 1;
  uint64_t bits = 0, next_bits = 0;  // two levels a Philox block
  for (int level = 0; level < tree.depth; ++level) {
    if (level % 2 == 0) {
      const PhiloxWords words = philox_at(key, b, draw, level / 2);
      bits = philox_u64(words, 0);
      next_bits = philox_u64(words, 1);
    } else {
      bits = next_bits;
    }
    const float z = logit(node, level), e = tree_exp(z < 0 ? -z : z);
    double on_right, on_left;
    children_left(tree, out, at, level, on_right, on_left);
    const double right_mass = right_weight(z, e) * on_right;
    const bool right = uniform53(bits) * (right_mass + left_weight(z, e) * on_left) < right_mass;
    path.step(z, e, right);
    at = below(tree, out, at, level, right);
    node = 2 * node + right;
  }
  return node - (int64_t(1) << tree.depth);
}

template <typename Logit>
SX_HOST_DEVICE inline TreeDraw tree_draw(const TreeSampleParams& p, const TreeExcluded& out, PhiloxKey key, int64_t b,
                                         int64_t draw, const Logit& logit) {
  const TreeTable& tree = p.tree;
  // Nothing left: the first excluded class stands in, and the loss masks it.
  if (out.count > 0 && out.left[0] == 0.0) {
    const int64_t id = class_at(tree, out.leaves[0]);
    return {id < 0 ? 0 : id, id < 0 ? quiet_nan<float>() : 0.0f};
  }
  TreePath path;
  const int64_t id = class_at(tree, tree_walk(tree, out, key, b, draw, path, logit));
  const double log_left = out.count > 0 ? exact_log(out.left[0]) : 0.0;
  // A row with a nan goes anywhere, padding too: the id stays a class, the nan is in log_q.
  return {id < 0 ? 0 : id, id < 0 ? quiet_nan<float>() : float(path.log_p() - log_left)};
}

}  // namespace SX_ISA_NS
}  // namespace samplex
