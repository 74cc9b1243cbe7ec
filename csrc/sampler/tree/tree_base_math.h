// A fixed law mixed into that of a tree: q = (1 - w) tree + w base.
//
// Everything is in the order of the leaves: the base is an alias table over them with the running sums of their integer
// weights, so that the draws, gaps and excluded entries of static_sample are leaves as well.
//
//   A draw     chooses the base or the tree by a separate Philox block, draws a leaf of the base by blocks 0 to 8, or
//              walks down by blocks 0, 1, ...: only one of the two looks at them. In both cases it walks: log_q needs
//              the tree's part and the base's.
//   w = 1      is the base alone: what a tree that fits worse than class frequencies falls back to.
//   Exclusion  weighs the parts by what the excluded classes leave of them, L_tree and L_base, neither of them formed
//   as
//              1 - p. Each part is drawn from its own law without them.
//   log_q      log((1 - w) p_tree + w p_base) - log((1 - w) L_tree + w L_base)
#pragma once

#include "sampler/static_sample/static_sample_math.h"
#include "sampler/tree/tree_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTreeBaseChoice = 128;  // the Philox block that chooses

// The base as a static law over the leaves; also the excluded ones of `p`.
SX_HOST_DEVICE inline StaticSampleParams tree_base_law(const TreeSampleParams& p) {
  StaticSampleParams law{};
  law.law = StaticLaw::kAlias;
  law.batch = p.batch;
  law.num_classes = int64_t(1) << p.tree.depth;
  law.table = p.base.table;
  law.prefix = p.base.prefix;
  law.exclude = p.exclude;
  law.exclude_offsets = p.exclude_offsets;
  law.exclude_width = p.exclude_width;
  law.exclude_size = p.exclude_size;
  return law;
}

// What a row's mixture is, with its excluded classes gone.
struct TreeMix {
  StaticRow row;      // of the base
  double left;        // (1 - w) L_tree + w L_base
  double log_left;    // its logarithm
  double share;       // probability that a draw comes from the base
  double tree, base;  // 1 - w, and w for each unit of weight
  double log_tree;    // log(1 - w)
};

SX_HOST_DEVICE inline double tree_log_share(double tree) {
  return tree > 0.0 ? exact_log(tree) : negative_infinity<double>();
}

SX_HOST_DEVICE inline TreeMix tree_mix(const TreeSampleParams& p, const StaticSampleParams& law,
                                       const TreeExcluded& out, int64_t b) {
  TreeMix mix{};
  const int64_t all = law.prefix[law.num_classes];
  const double w = p.base.weight;
  mix.tree = 1.0 - w;
  mix.base = w / double(all);
  mix.log_tree = tree_log_share(mix.tree);
  mix.row.left = all;
  mix.left = 1.0;
  mix.share = w;
  if (out.count == 0) return mix;
  mix.row = excluded_row(law, b);
  const double of_base = mix.base * double(mix.row.left);
  mix.left = mix.tree * out.left[0] + of_base;
  mix.share = mix.left > 0.0 ? of_base / mix.left : 0.0;
  mix.log_left = mix.left > 0.0 ? exact_log(mix.left) : 0.0 * mix.left;  // 0 or nan
  return mix;
}

// Weight units of a leaf in the base.
SX_HOST_DEVICE inline int64_t tree_base_units(const TreeBase& base, int64_t leaf) {
  return wrapped_difference(base.prefix[leaf + 1], base.prefix[leaf]);
}

// log of (1 - w) p_tree + w p_base. Where the base has nothing a path may be less likely than any double.
SX_HOST_DEVICE inline double tree_mixed_log(double tree, double log_tree, double minor, double product,
                                            double of_base) {
  const double power = exact_exp(-(minor < 700.0 ? minor : 700.0));
  const double of_tree = minor < 700.0 ? tree * power / product : 0.0;
  const bool alone = of_base == 0.0;
  const double log = exact_log(alone ? product : of_tree + of_base);
  return (alone ? (log_tree - minor) - log : log) + 0.0 * product;
}

SX_HOST_DEVICE inline float tree_mixed_log_q(const TreeSampleParams& p, const TreeMix& mix, const TreePath& path,
                                             int64_t leaf) {
  const double of_base = mix.base * double(tree_base_units(p.base, leaf));
  return float(tree_mixed_log(mix.tree, mix.log_tree, path.minor, path.product, of_base) - mix.log_left);
}

// Log-probability of a class under the mixture without the excluded ones.
template <typename Logit>
SX_HOST_DEVICE inline float given_mixed_log_q(const TreeSampleParams& p, const TreeMix& mix, const TreeExcluded& out,
                                              int64_t id, const Logit& logit) {
  const int64_t leaf = leaf_of(p.tree, id);
  if (leaf < 0) return quiet_nan<float>();
  for (int64_t i = 0; i < out.count; ++i) {
    if (out.leaves[i] == leaf) return mix.left == 0.0 && i == 0 ? 0.0f : negative_infinity<float>();
  }
  if (mix.left == 0.0) return negative_infinity<float>();
  return tree_mixed_log_q(p, mix, tree_path(p.tree, leaf, logit), leaf);
}

template <typename Logit>
SX_HOST_DEVICE inline TreeDraw tree_mixed_draw(const TreeSampleParams& p, const StaticSampleParams& law,
                                               const TreeMix& mix, const TreeExcluded& out, PhiloxKey key, int64_t b,
                                               int64_t draw, const Logit& logit) {
  const TreeTable& tree = p.tree;
  TreePath path;
  int64_t leaf = 0;
  if (out.count > 0 && mix.left == 0.0) {  // as in tree_draw
    const int64_t id = class_at(tree, out.leaves[0]);
    return {id < 0 ? 0 : id, id < 0 ? quiet_nan<float>() : 0.0f};
  }
  if (uniform53(philox_u64(philox_at(key, b, draw, kTreeBaseChoice), 0)) < mix.share) {
    leaf = draw_excluding(law, mix.row, key, b, draw, 0).id;
    const bool bad = leaf < 0;
    leaf = bad ? 0 : leaf;
    path = tree_path(tree, leaf, logit);
    if (bad) path.product = quiet_nan<double>();
  } else {
    leaf = tree_walk(tree, out, key, b, draw, path, logit);
  }
  const int64_t id = class_at(tree, leaf);
  return {id < 0 ? 0 : id, id < 0 ? quiet_nan<float>() : tree_mixed_log_q(p, mix, path, leaf)};
}

}  // namespace SX_ISA_NS
}  // namespace samplex
