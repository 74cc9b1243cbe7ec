// The rules of the kernel tree, for host and device: weights of two children, what excluded classes leave, the choice
// in a leaf, the mixture with the uniform distribution. Values are float (products in an order of the backend's own),
// all that follows from them is double.
#pragma once

#include "common/numeric.h"
#include "common/philox.h"
#include "sampler/kernel_tree/kernel_tree_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Less than this is nothing: its logarithm would come from a subnormal number.
constexpr double kKernelTreeNothing = 1e-290;

SX_HOST_DEVICE inline int64_t kernel_tree_leaf_begin(const KernelTree& tree, int64_t node, int level) {
  return (node << (tree.depth - level)) - (int64_t(1) << tree.depth);
}

// Classes below the first `leaf` leaves.
SX_HOST_DEVICE inline int64_t kernel_tree_first_class(const KernelTree& tree, int64_t leaf) {
  const int64_t at = leaf * tree.leaf_size;
  return at < tree.num_classes ? at : tree.num_classes;
}

// Ancestor at `level` of the leaf that holds a class.
SX_HOST_DEVICE inline int64_t kernel_tree_ancestor(const KernelTree& tree, int64_t id, int level) {
  return ((int64_t(1) << tree.depth) + id / tree.leaf_size) >> (tree.depth - level);
}

struct KernelTreeBranch {
  double left, right;  // weights of the children; their sum is positive (or nan)
  float clipped;       // share of |value| below zero
};

// Weights of the children of a node of `level` from their values: negative estimates count as 0, the quadratic kernel
// is at least 1 per class, and without classes there is no weight; if nothing is left, the number of classes. A nan
// stays.
SX_HOST_DEVICE inline KernelTreeBranch kernel_tree_branch(const KernelTree& tree, int64_t node, int level, float left,
                                                          float right) {
  const int64_t begin = kernel_tree_leaf_begin(tree, node, level), half = int64_t(1) << (tree.depth - level - 1);
  const int64_t first = kernel_tree_first_class(tree, begin), middle = kernel_tree_first_class(tree, begin + half),
                last = kernel_tree_first_class(tree, begin + 2 * half);
  const double on_left = double(middle - first), on_right = double(last - middle);
  const double floor = tree.kernel == LeafKernel::kQuadratic ? 1.0 : 0.0;
  KernelTreeBranch out;
  out.left = double(left) < floor * on_left ? floor * on_left : double(left);
  out.right = double(right) < floor * on_right ? floor * on_right : double(right);
  if (on_right == 0.0) out.right = 0.0;
  if (out.left + out.right == 0.0) {
    out.left = on_left;
    out.right = on_right;
  }
  const float size_left = left < 0 ? -left : left, size_right = right < 0 ? -right : right;
  const float lost = (left < 0 ? size_left : 0.0f) + (right < 0 ? size_right : 0.0f);
  out.clipped = lost > 0 ? lost / (size_left + size_right) : 0.0f;
  return out;
}

// ------------------------------------------------------------------------------------------------ a path
// Product of probabilities that never underflows: a factor is above 1e-90 or exactly 0.
SX_HOST_DEVICE inline void kernel_tree_times(double& product, int32_t& scaled, double p) {
  product *= p;
  if (product < 0x1.0p-512 && product > 0.0) {
    product *= 0x1.0p512;
    ++scaled;
  }
}
SX_HOST_DEVICE inline double kernel_tree_log(double product, int32_t scaled) {
  if (product == 0.0) return negative_infinity<double>();
  if (product != product) return product;
  return exact_log(product) - double(scaled) * 354.891356446692;  // 512 ln 2
}

// ------------------------------------------------------------------------------------------------ exclusion
// A row's excluded classes, ascending (a class may stand there twice), with two numbers for each level: on the way down
// the probabilities of the left and the right child, then, bottom up, in the first place P(nothing excluded | node).
struct KernelTreeExcluded {
  const int64_t* ids;
  double* left;  // [count, depth + 1, 2]
  int64_t count;
};

SX_HOST_DEVICE inline KernelTreeExcluded kernel_tree_excluded(const KernelTreeSampleParams& p, int64_t b) {
  if (p.exclude == nullptr) return {nullptr, nullptr, 0};
  const KernelTreeRow& row = p.rows[b];
  return {p.exclude + row.begin, p.left + row.begin * (2 * (p.tree.depth + 1)), row.end - row.begin};
}

// Where the row's classes lie in `exclude`, and how many are different.
SX_HOST_DEVICE inline KernelTreeRow kernel_tree_find_row(const KernelTreeSampleParams& p, int64_t b) {
  KernelTreeRow row = {0, 0, 0, p.tree.epsilon, 1.0, 0.0};
  if (p.exclude == nullptr) return row;
  row.begin = b * p.exclude_width;
  row.end = row.begin + p.exclude_width;
  if (p.exclude_offsets != nullptr) {
    // Clamped: on CUDA the offsets have not been checked.
    const int64_t begin = p.exclude_offsets[b], end = p.exclude_offsets[b + 1];
    row.begin = begin < 0 ? 0 : begin < p.exclude_size ? begin : p.exclude_size;
    row.end = end < row.begin ? row.begin : end < p.exclude_size ? end : p.exclude_size;
  }
  while (row.begin < row.end && p.exclude[row.begin] < 0) ++row.begin;
  while (row.begin < row.end && p.exclude[row.end - 1] >= p.tree.num_classes) --row.end;
  for (int64_t i = row.begin; i < row.end; ++i) row.distinct += i == row.begin || p.exclude[i] != p.exclude[i - 1];
  return row;
}

// First excluded class that is not below `id`.
SX_HOST_DEVICE inline int64_t kernel_tree_lower(const KernelTreeExcluded& out, int64_t id) {
  int64_t low = 0, high = out.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (out.ids[middle] < id)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
SX_HOST_DEVICE inline bool kernel_tree_is_excluded(const KernelTreeExcluded& out, int64_t id) {
  if (out.count == 0) return false;
  const int64_t at = kernel_tree_lower(out, id);
  return at < out.count && out.ids[at] == id;
}

// P(nothing excluded | child) for the children of a node of `level`.
SX_HOST_DEVICE inline void kernel_tree_kept(const KernelTree& tree, const KernelTreeExcluded& out, int64_t node,
                                            int level, double& on_left, double& on_right) {
  on_left = on_right = 1.0;
  if (out.count == 0) return;
  const int64_t begin = kernel_tree_leaf_begin(tree, node, level), half = int64_t(1) << (tree.depth - level - 1);
  const int64_t width = 2 * (tree.depth + 1), at = 2 * (level + 1);
  const int64_t i = kernel_tree_lower(out, begin * tree.leaf_size);
  const int64_t middle = (begin + half) * tree.leaf_size, last = (begin + 2 * half) * tree.leaf_size;
  if (i < out.count && out.ids[i] < middle) on_left = out.left[i * width + at];
  const int64_t j = kernel_tree_lower(out, middle);
  if (j < out.count && out.ids[j] < last) on_right = out.left[j * width + at];
}

// From the leaves, where left[i, depth, 0] is known, to the root: p_left * kept_left + p_right * kept_right, never
// 1 - p, so that a nearly certain target leaves the others their digits.
SX_HOST_DEVICE inline void kernel_tree_keep(const KernelTree& tree, const KernelTreeExcluded& out) {
  const int64_t width = 2 * (tree.depth + 1);
  for (int level = tree.depth - 1; level >= 0; --level) {
    for (int64_t i = 0; i < out.count; ++i) {
      const int64_t node = kernel_tree_ancestor(tree, out.ids[i], level);
      double* here = out.left + i * width + 2 * level;
      if (i > 0 && kernel_tree_ancestor(tree, out.ids[i - 1], level) == node) {
        here[0] = *(here - width);
        continue;
      }
      double on_left, on_right;
      kernel_tree_kept(tree, out, node, level, on_left, on_right);
      const double kept = here[0] * on_left + here[1] * on_right;
      here[0] = kept < kKernelTreeNothing ? 0.0 : kept;
    }
  }
}

// Masses of the row's distribution once left[0, 0, 0] is known.
SX_HOST_DEVICE inline void kernel_tree_row_mass(const KernelTree& tree, const KernelTreeExcluded& out,
                                                KernelTreeRow& row) {
  const double kept = out.count > 0 ? out.left[0] : 1.0;
  row.uniform = tree.epsilon * (double(tree.num_classes - row.distinct) / double(tree.num_classes));
  row.total = row.distinct == tree.num_classes ? 0.0 : (1.0 - tree.epsilon) * kept + row.uniform;
  row.log_total = row.total > 0.0 ? exact_log(row.total) : row.total;  // nan stays; 0: nothing is left
}

// The k-th class that is not excluded.
SX_HOST_DEVICE inline int64_t kernel_tree_kth_left(const KernelTreeExcluded& out, int64_t k) {
  for (int64_t i = 0; i < out.count; ++i) {
    if (i > 0 && out.ids[i] == out.ids[i - 1]) continue;
    if (out.ids[i] > k) break;
    ++k;
  }
  return k;
}

// Random number of a level: two levels a Philox block. By choice and not by index: an array that is indexed at run time
// would lie in the memory of a GPU thread, not in registers.
SX_HOST_DEVICE inline uint64_t kernel_tree_bits(PhiloxKey key, int64_t b, int64_t draw, int level) {
  const PhiloxWords words = philox_at(key, b, draw, level / 2);
  return level % 2 == 0 ? philox_u64(words, 0) : philox_u64(words, 1);
}

// Where a draw must go: a class of the uniform component, or -1: down the tree.
SX_HOST_DEVICE inline int64_t kernel_tree_component(const KernelTree& tree, const KernelTreeExcluded& out,
                                                    const KernelTreeRow& row, PhiloxKey key, int64_t b, int64_t draw) {
  if (!(tree.epsilon > 0.0)) return -1;
  const PhiloxWords words = philox_at(key, b, draw, kKernelTreeUniformBlock);
  if (!(uniform53(philox_u64(words, 0)) * row.total < row.uniform)) return -1;
  return kernel_tree_kth_left(out, uniform_below(philox_u64(words, 1), tree.num_classes - row.distinct));
}

// ------------------------------------------------------------------------------------------------ result
// log q of a class from log q_tree.
SX_HOST_DEVICE inline float kernel_tree_log_q(const KernelTree& tree, const KernelTreeRow& row, double log_tree) {
  if (!(tree.epsilon > 0.0)) return float(log_tree - row.log_total);
  if (log_tree != log_tree || row.log_total != row.log_total) return quiet_nan<float>();
  const double q_tree = log_tree < -690.0 ? 0.0 : exact_exp(log_tree);
  return float(exact_log((1.0 - tree.epsilon) * q_tree + tree.epsilon / double(tree.num_classes)) - row.log_total);
}

// log q of a given class. Excluded: never; but with nothing left the first one stands in.
SX_HOST_DEVICE inline float kernel_tree_given_log_q(const KernelTree& tree, const KernelTreeExcluded& out,
                                                    const KernelTreeRow& row, int64_t id, double log_tree) {
  const bool nothing = row.total == 0.0;
  if (out.count > 0 && nothing) return id == out.ids[0] ? 0.0f : negative_infinity<float>();
  if (kernel_tree_is_excluded(out, id)) return negative_infinity<float>();
  return kernel_tree_log_q(tree, row, log_tree);
}

// ------------------------------------------------------------------------------------------------ leaf
// Weight of a class in its leaf, up to a factor; `most` is the largest score of the leaf. Scores are log K, but <h, c>
// for the quadratic kernel.
SX_HOST_DEVICE inline double kernel_tree_leaf_weight(const KernelTree& tree, float score, float most) {
  if (tree.kernel == LeafKernel::kQuadratic) return double(tree.scale) * (double(score) * double(score)) + 1.0;
  const double x = double(score) - double(most);
  if (x != x) return x;
  return x < -690.0 ? 0.0 : exact_exp(x);
}

// Its logarithm, which stays finite where the weight does not.
SX_HOST_DEVICE inline double kernel_tree_leaf_log(const KernelTree& tree, float score, float most, double weight) {
  return tree.kernel == LeafKernel::kQuadratic ? kernel_tree_log(weight, 0) : double(score) - double(most);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
