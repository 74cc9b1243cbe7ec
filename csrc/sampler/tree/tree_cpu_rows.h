// CPU bodies of the tree, compiled once per instruction set. Many draws, of one row or of several, go down together,
// level by level: their nodes are independent loads, and the choice of a child is a plain loop over the draws that the
// compiler vectorizes. The top levels, which hold no more nodes than a row has draws, are scored once for the row.
#pragma once

#include "common/philox_many.h"
#include "sampler/tree/tree_products_cpu_rows.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTreeTopLevels = 6;                                 // at most: 2^6 - 1 nodes
constexpr int kTreeTopDraws = 8;                                  // of a row: with fewer, nothing is shared
constexpr int kTreeTopRows = 2 * kTreeBlock / kTreeTopDraws + 2;  // whose draws may be under way at a time
constexpr int kLevelsAhead = 2;                                   // of a known path that are under way

// ------------------------------------------------------------------------------------------------ draws
// Draws that go down together, of one row or of several. A row has at most one excluded class here, the usual case: a
// draw is on the way to it or it is not.
struct TreeBlock {
  int64_t node[kTreeBlock];
  int64_t excluded[kTreeBlock];  // heap index of the excluded leaf, 0 for none
  const double* left[kTreeBlock];
  const float* x[kTreeBlock];
  const float* top[kTreeBlock];                              // logits of the row's first levels, by node
  int64_t at[kTreeBlock];                                    // place in the output
  uint32_t row[kTreeBlock] = {}, position[kTreeBlock] = {};  // read up to the next multiple of 8
  uint64_t bits[2][kTreeBlock];
  float z[kTreeBlock];
  double zd[kTreeBlock], ad[kTreeBlock], ed[kTreeBlock];  // z, |z| and exp(-|z|) of the level
  double minor[kTreeBlock], product[kTreeBlock], kept[kTreeBlock];
  int count = 0;
  bool excludes = false;  // some draw has an excluded class
  // With a base: the leaf (heap index) of a draw that comes from it, 0 for one from the tree; see TreeMix.
  int64_t leaf[kTreeBlock];
  uint64_t known[kTreeBlock];  // all bits where there is a leaf
  double share[kTreeBlock], log_left[kTreeBlock], units[kTreeBlock];

  void mix(const TreeMix& of_row) {
    share[count - 1] = of_row.share;
    log_left[count - 1] = of_row.log_left;
  }

  void add(const TreeSampleParams& p, const TreeExcluded& out, const float* row_top, int64_t b, int64_t draw) {
    const int g = count++;
    top[g] = row_top;
    node[g] = 1;
    minor[g] = 0;
    product[g] = 1;
    excluded[g] = out.count > 0 ? (int64_t(1) << p.tree.depth) + out.leaves[0] : 0;
    excludes |= excluded[g] > 0;
    left[g] = out.left;
    x[g] = p.x + b * p.tree.dim;
    at[g] = b * p.num_samples + draw;
    row[g] = uint32_t(b);
    position[g] = uint32_t(draw) << 8;
  }
};

inline void measure_logits(TreeBlock& s, int count) {
  for (int g = 0; g < count; ++g) {
    const float z = s.z[g], a = z < 0 ? -z : z;
    s.zd[g] = double(z);
    s.ad[g] = double(a);
    s.ed[g] = double(tree_exp(a));
  }
}

// Which draws of a block come from the base, and to which leaves those go.
inline void choose_parts(const TreeSampleParams& p, const StaticSampleParams& law, PhiloxKey key, TreeBlock& s) {
  const int count = s.count;
  const int64_t leaves = law.num_classes;
  uint32_t position[kTreeBlock] = {};
  uint64_t bits0[kTreeBlock], bits1[kTreeBlock];
  bool from_base[kTreeBlock];
  for (int g = 0; g < count; ++g) position[g] = s.position[g] + kTreeBaseChoice;
  philox_many(key, s.row, position, count, bits0, bits1);
  for (int g = 0; g < count; ++g) from_base[g] = uniform53_by_parts(bits0[g]) < s.share[g];
  philox_many(key, s.row, s.position, count, bits0, bits1);
  for (int g = 0; g < count; ++g) {
    if (from_base[g]) __builtin_prefetch(law.table + uniform_below(bits0[g], leaves));
  }
  for (int g = 0; g < count; ++g) {
    s.leaf[g] = 0;
    s.known[g] = 0;
    if (!from_base[g]) continue;
    int64_t leaf = alias_draw(law.table, leaves, bits0[g], bits1[g]).id;
    if (s.excluded[g] == leaves + leaf) {
      const int64_t b = s.row[g];
      leaf = draw_excluding(law, excluded_row(law, b), key, b, int64_t(s.position[g] >> 8), 1).id;
    }
    if (leaf < 0) s.product[g] = quiet_nan<double>();
    s.leaf[g] = leaves + (leaf < 0 ? 0 : leaf);
    s.known[g] = ~uint64_t(0);
  }
}

// A number that stands for the uniform of a draw with a known leaf: -1 sends it right and 2 left, by the last bit of
// `way`. Plain arithmetic on bits, so that the loop is one of whole vectors.
inline double towards_leaf(double uniform, uint64_t known, uint64_t way) {
  constexpr uint64_t kLeft = 0x4000000000000000, kRight = 0xBFF0000000000000;
  const uint64_t forced = kLeft ^ ((0 - (way & 1)) & (kLeft ^ kRight));
  return bit_copy<double>((bit_copy<uint64_t>(uniform) & ~known) | (forced & known));
}

// Every draw of the block takes a child. All numbers have 64 bits, so that the loop is one of whole vectors.
template <bool kExcludes, bool kBase>
inline void choose_children(TreeBlock& s, const uint64_t* bits, int depth, int level) {
  const int count = s.count;
  measure_logits(s, count);
  if constexpr (kExcludes) {
    // What is left of the child towards the excluded class; 1 for a draw that is not on the way to it.
    for (int g = 0; g < count; ++g) {
      s.kept[g] = s.excluded[g] >> (depth - level) == s.node[g] ? s.left[g][level + 1] : 1.0;
    }
  }
  for (int g = 0; g < count; ++g) {
    const double z = s.zd[g], e = s.ed[g];
    double right_mass = z >= 0 ? 1.0 : e, left_mass = z >= 0 ? e : 1.0;
    if constexpr (kExcludes) {
      const bool to_right = (uint64_t(s.excluded[g]) >> (depth - 1 - level)) & 1;
      right_mass *= to_right ? s.kept[g] : 1.0;
      left_mass *= to_right ? 1.0 : s.kept[g];
    }
    double u = uniform53_by_parts(bits[g]);
    if constexpr (kBase) u = towards_leaf(u, s.known[g], uint64_t(s.leaf[g]) >> (depth - 1 - level));
    const bool right = u * (right_mass + left_mass) < right_mass;
    s.minor[g] += right != (z >= 0) ? s.ad[g] : 0.0;
    s.product[g] *= 1.0 + e;
    s.node[g] = 2 * s.node[g] + int64_t(right);
  }
}

// All draws of the block down one level, while the nodes that `next` looks at afterwards are asked for.
template <typename T>
inline void draw_level(const TreeSampleParams& p, PhiloxKey key, int top_levels, int level, TreeBlock& s,
                       const TreeBlock& next, int next_level) {
  const TreeTable& tree = p.tree;
  const int count = s.count;
  if (level % 2 == 0) {
    philox_many(key, s.row, s.position, count, s.bits[0], s.bits[1]);
    for (int g = 0; g < kTreeBlock; ++g) ++s.position[g];  // the next Philox block
  }
  NodesAhead<T> ahead;
  if (next_level < tree.depth && next_level >= top_levels) ahead = {next.node, next.count};
  if (level < top_levels) {
    ahead.prefetch(tree, 0, kTreeBlock);
    for (int g = 0; g < count; ++g) s.z[g] = s.top[g][s.node[g]];
  } else {
    tree_logits<T>(tree, s.node, s.x, count, s.z, ahead);
  }
  const uint64_t* bits = s.bits[level % 2];
  if (p.base.table != nullptr) {
    s.excludes ? choose_children<true, true>(s, bits, tree.depth, level)
               : choose_children<false, true>(s, bits, tree.depth, level);
  } else {
    s.excludes ? choose_children<true, false>(s, bits, tree.depth, level)
               : choose_children<false, false>(s, bits, tree.depth, level);
  }
}

// log q of a block's paths under the mixture.
inline void mix_block(const TreeSampleParams& p, const TreeMix& mix, TreeBlock& s, double* log_q) {
  const int64_t leaves = int64_t(1) << p.tree.depth;
  for (int g = 0; g < s.count; ++g) s.units[g] = mix.base * double(tree_base_units(p.base, s.node[g] - leaves));
  for (int g = 0; g < s.count; ++g) {
    log_q[g] = tree_mixed_log(mix.tree, mix.log_tree, s.minor[g], s.product[g], s.units[g]);
  }
}

inline void write_block(const TreeSampleParams& p, const TreeMix& whole, TreeBlock& s) {
  const int count = s.count;
  const int64_t leaves = int64_t(1) << p.tree.depth;
  for (int g = 0; p.base.table != nullptr && g < count; ++g) {
    s.node[g] = s.leaf[g] > 0 ? s.leaf[g] : s.node[g];  // a row with a nan went anywhere
  }
  for (int g = 0; g < count; ++g) {
    const int64_t id = class_at(p.tree, s.node[g] - leaves);
    p.ids[s.at[g]] = id < 0 ? 0 : id;
    if (id < 0) s.product[g] = quiet_nan<double>();
  }
  if (p.base.table != nullptr) {
    mix_block(p, whole, s, s.product);
    for (int g = 0; g < count; ++g) p.log_q[s.at[g]] = float(s.product[g] - s.log_left[g]);
    s.count = 0;
    s.excludes = false;
    return;
  }
  for (int g = 0; g < count; ++g) s.product[g] = tree_log_p(s.minor[g], s.product[g]);
  for (int g = 0; g < count; ++g) {
    const double log_left = s.excluded[g] > 0 ? exact_log(s.left[g][0]) : 0.0;
    p.log_q[s.at[g]] = float(s.product[g] - log_left);
  }
  s.count = 0;
  s.excludes = false;
}

// Two blocks to their leaves, in turn: what one looks at next is on the way from memory while the other computes.
template <typename T>
inline void draw_blocks(const TreeSampleParams& p, const StaticSampleParams& law, const TreeMix& whole, PhiloxKey key,
                        int top_levels, TreeBlock& a, TreeBlock& b) {
  const bool mixed = p.base.table != nullptr;
  if (mixed) {
    choose_parts(p, law, key, a);
    choose_parts(p, law, key, b);
  }
  for (int level = 0; level < p.tree.depth; ++level) {
    draw_level<T>(p, key, top_levels, level, a, b, level);
    draw_level<T>(p, key, top_levels, level, b, a, level + 1);
  }
  for (TreeBlock* s : {&a, &b}) {
    for (int g = 0; g < s->count; ++g) {
      const int64_t leaf = s->node[g] - (int64_t(1) << p.tree.depth);
      __builtin_prefetch(p.tree.leaf_class + leaf);
      if (mixed) __builtin_prefetch(p.base.prefix + leaf);
    }
  }
  write_block(p, whole, a);
  write_block(p, whole, b);
}

// log_q of given ids [first, last) without excluded classes: the same walk, with the way known.
template <typename T>
inline void follow_block(const TreeSampleParams& p, const TreeMix& whole, int64_t first, int64_t last, TreeBlock& s) {
  const TreeTable& tree = p.tree;
  const int count = int(last - first);
  int64_t leaf[kTreeBlock];  // heap index
  for (int g = 0; g < count; ++g) {
    const int64_t at = leaf_of(tree, p.given[first + g]);
    leaf[g] = (int64_t(1) << tree.depth) + (at < 0 ? 0 : at);
    s.x[g] = p.x + (first + g) / p.num_samples * tree.dim;
    s.minor[g] = 0;
    s.product[g] = at < 0 ? quiet_nan<double>() : 1.0;
  }
  for (int level = 0; level < tree.depth; ++level) {
    for (int g = 0; g < count; ++g) s.node[g] = leaf[g] >> (tree.depth - level);
    if (level + kLevelsAhead < tree.depth) {
      const int shift = tree.depth - level - kLevelsAhead;
      for (int g = 0; g < count; ++g) prefetch_node<T>(tree, leaf[g] >> shift);
    }
    tree_logits<T>(tree, s.node, s.x, count, s.z, {});
    measure_logits(s, count);
    const int shift = tree.depth - 1 - level;
    for (int g = 0; g < count; ++g) {
      const bool right = (uint64_t(leaf[g]) >> shift) & 1;
      s.minor[g] += right != (s.zd[g] >= 0) ? s.ad[g] : 0.0;
      s.product[g] *= 1.0 + s.ed[g];
    }
  }
  if (p.base.table != nullptr) {
    for (int g = 0; g < count; ++g) s.node[g] = leaf[g];
    s.count = count;
    mix_block(p, whole, s, s.product);
    s.count = 0;
    for (int g = 0; g < count; ++g) p.log_q[first + g] = float(s.product[g]);
    return;
  }
  for (int g = 0; g < count; ++g) p.log_q[first + g] = float(tree_log_p(s.minor[g], s.product[g]));
}

template <typename T>
inline void tree_sample_rows(const TreeSampleParams& p, int64_t begin, int64_t end) {
  const TreeTable& tree = p.tree;
  TreeBlock blocks[2];
  const bool mixed = p.base.table != nullptr;
  const StaticSampleParams law = mixed ? tree_base_law(p) : StaticSampleParams{};
  const TreeMix whole = mixed ? tree_mix(p, law, {nullptr, nullptr, 0}, 0) : TreeMix{};
  if (p.given != nullptr && p.exclude == nullptr) {
    for (int64_t at = begin * p.num_samples, last = end * p.num_samples; at < last; at += kTreeBlock) {
      follow_block<T>(p, whole, at, at + kTreeBlock < last ? at + kTreeBlock : last, blocks[0]);
    }
    return;
  }
  int top_levels = 0;
  while (p.num_samples >= kTreeTopDraws && top_levels < kTreeTopLevels && top_levels < tree.depth &&
         (int64_t(1) << top_levels) <= p.num_samples) {
    ++top_levels;
  }
  float tops[kTreeTopRows][1 << kTreeTopLevels];
  int64_t top_nodes[1 << kTreeTopLevels];
  const float* top_x[1 << kTreeTopLevels];
  for (int node = 0; node < 1 << kTreeTopLevels; ++node) top_nodes[node] = node;
  const PhiloxKey key = philox_key(p.key, p.key_row);
  int full = 0, next_top = 0;  // blocks that wait for the other one; the place of the row's top
  for (int64_t b = begin; b < end; ++b) {
    const float* x = p.x + b * tree.dim;
    float* const top = tops[next_top];
    if (top_levels > 0) {
      for (const float*& each : top_x) each = x;
      tree_logits<T>(tree, top_nodes + 1, top_x, (1 << top_levels) - 1, top + 1, {});
    }
    const auto logit = [&](int64_t node, int level) {
      return level < top_levels ? top[node] : tree_logit_fast<T>(tree, node, x);
    };
    const TreeExcluded out = excluded_of(p, b);
    for (int64_t i = 0; i < out.count; ++i) {
      for (int level = top_levels; level < tree.depth; ++level) {
        prefetch_node<T>(tree, ancestor(tree, out.leaves[i], level));
      }
      for (int level = 0; level < tree.depth; ++level) {
        out.left[i * (tree.depth + 1) + level] = double(logit(ancestor(tree, out.leaves[i], level), level));
      }
    }
    if (out.count > 0) tree_left(tree, out);
    const TreeMix mix = mixed && out.count > 0 ? tree_mix(p, law, out, b) : whole;
    const int64_t first = b * p.num_samples;
    if (p.given != nullptr) {
      for (int64_t k = 0; k < p.num_samples; ++k) {
        const int64_t id = p.given[first + k];
        p.log_q[first + k] = mixed ? given_mixed_log_q(p, mix, out, id, logit) : given_log_q(p, out, id, logit);
      }
    } else if (out.count > 1 || (out.count == 1 && out.left[0] == 0.0)) {
      for (int64_t k = 0; k < p.num_samples; ++k) {
        const TreeDraw drawn =
            mixed ? tree_mixed_draw(p, law, mix, out, key, b, k, logit) : tree_draw(p, out, key, b, k, logit);
        p.ids[first + k] = drawn.id;
        p.log_q[first + k] = drawn.log_q;
      }
    } else {
      for (int64_t k = 0; k < p.num_samples; ++k) {
        TreeBlock& block = blocks[full];
        block.add(p, out, top, b, k);
        if (mixed) block.mix(mix);
        if (block.count < kTreeBlock) continue;
        if (++full == 2) {
          draw_blocks<T>(p, law, whole, key, top_levels, blocks[0], blocks[1]);
          full = 0;
        }
      }
      next_top = (next_top + 1) % kTreeTopRows;
    }
  }
  if (blocks[0].count > 0) draw_blocks<T>(p, law, whole, key, top_levels, blocks[0], blocks[1]);
}

// ------------------------------------------------------------------------------------------------ every class
// Top down over the heap: a node's exp serves both children. `minor` and `product` are scratch [2^(depth + 1)].
template <typename T>
inline void tree_log_prob_all_rows(const TreeAllParams& p, int64_t begin, int64_t end, double* minor, double* product) {
  const TreeTable& tree = p.tree;
  const int64_t leaves = int64_t(1) << tree.depth;
  for (int64_t b = begin; b < end; ++b) {
    const float* x = p.x + b * tree.dim;
    minor[1] = 0;
    product[1] = 1;
    for (int64_t node = 1; node < leaves; ++node) {
      const float z = tree_logit_fast<T>(tree, node, x), a = z < 0 ? -z : z;
      const double total = product[node] * (1.0 + double(tree_exp(a)));
      product[2 * node] = product[2 * node + 1] = total;
      minor[2 * node] = minor[node] + (z >= 0 ? double(a) : 0.0);
      minor[2 * node + 1] = minor[node] + (z >= 0 ? 0.0 : double(a));
    }
    if (p.base.table != nullptr) {
      const double all = double(p.base.prefix[leaves]), w = p.base.weight, log_tree = tree_log_share(1.0 - w);
      for (int64_t leaf = leaves; leaf < 2 * leaves; ++leaf) {
        const double of_base = w / all * double(tree_base_units(p.base, leaf - leaves));
        product[leaf] = tree_mixed_log(1.0 - w, log_tree, minor[leaf], product[leaf], of_base);
      }
    } else {
      for (int64_t leaf = leaves; leaf < 2 * leaves; ++leaf) product[leaf] = tree_log_p(minor[leaf], product[leaf]);
    }
    for (int64_t id = 0; id < tree.num_classes; ++id) {
      const int64_t leaf = leaf_of(tree, id);
      p.log_p[b * tree.num_classes + id] = leaf < 0 ? quiet_nan<float>() : float(product[leaves + leaf]);
    }
  }
}

// ------------------------------------------------------------------------------------------------ beam search
constexpr int64_t kBeamNone = 0x7FF0000000000000;  // key of -inf; a nan has a larger one

// Largest key that is kept so that `wanted` of `count` are, or more where keys tie at it. log p <= 0, so the bits of
// |log p| order candidates, the likeliest first; halving their range needs no branch on a candidate.
inline int64_t beam_border(const int64_t* key, int64_t count, int64_t wanted) {
  int64_t low = kBeamNone, high = 0;
  for (int64_t i = 0; i < count; ++i) {
    low = key[i] < low ? key[i] : low;
    high = key[i] < kBeamNone && key[i] > high ? key[i] : high;
  }
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) kept += key[i] <= middle;
    if (kept == wanted) return middle;
    if (kept > wanted)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// A level stays ascending by node, as children follow their parents. So of candidates that tie at the border the first
// ones are the lower nodes, and the set kept is the one that the total order of the other backends gives.
template <typename T>
inline const cpu::TreeBeamLevel& tree_beam(const TreeTopkParams& p, int64_t b, cpu::TreeBeamScratch& s) {
  const TreeTable& tree = p.tree;
  const float* x = p.x + b * tree.dim;
  cpu::TreeBeamLevel *from = &s.levels[0], *to = &s.levels[1];
  from->count = 1;
  from->node[0] = 1;
  from->minor[0] = 0;
  from->product[0] = 1;
  from->log_p[0] = 0;
  for (int level = 0; level < tree.depth; ++level) {
    const int64_t count = from->count;
    int64_t* key[2] = {s.key, s.key + count};
    for (int64_t i = 0; i < count; ++i) s.z[i] = tree_logit_fast<T>(tree, from->node[i], x);
    for (int64_t i = 0; i < count; ++i) {
      const float z = s.z[i], a = z < 0 ? -z : z;
      from->product[i] *= 1.0 + double(tree_exp(a));  // of either child
      s.minor[0][i] = from->minor[i] + (z >= 0 ? double(a) : 0.0);
      s.minor[1][i] = from->minor[i] + (z >= 0 ? 0.0 : double(a));
    }
    // tree_log_p, one logarithm for both children.
    for (int64_t i = 0; i < count; ++i) s.log_product[i] = exact_log(from->product[i]);
    for (int side = 0; side < 2; ++side) {
      for (int64_t i = 0; i < count; ++i) {
        const double log_p = (-s.minor[side][i] - s.log_product[i]) + 0.0 * from->product[i];
        key[side][i] = bit_copy<int64_t>(log_p) & 0x7FFFFFFFFFFFFFFF;
      }
    }
    int64_t border = kBeamNone - 1, ties = 2 * count;
    if (2 * count > p.beam) {
      border = beam_border(s.key, 2 * count, p.beam);
      ties = p.beam;
      for (int64_t i = 0; i < 2 * count; ++i) ties -= s.key[i] < border;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (int side = 0; side < 2; ++side) {
        const int64_t at = key[side][i];
        const bool tie = at == border;
        if (at > border || (tie && ties == 0)) continue;
        ties -= tie;
        to->node[kept] = 2 * from->node[i] + side;
        to->minor[kept] = s.minor[side][i];
        to->product[kept] = from->product[i];
        to->log_p[kept] = -bit_copy<double>(at);
        if (level + 1 < tree.depth) prefetch_node<T>(tree, to->node[kept]);
        ++kept;
      }
    }
    to->count = kept;
    cpu::TreeBeamLevel* const done = from;
    from = to;
    to = done;
  }
  return *from;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
