// CPU bodies of the kernel tree, compiled once per instruction set. All draws of the batch go down together: through
// the top levels row by row, by values from one GEMM; then subtree by subtree, level by level, as a list ordered by
// node, so that the sums of two children are read once for all rows that stand at their parent.
//
// A product of features and sums has 16 partial sums whatever the number of rows that share the sums, so a value has
// the same bits in every batch and for every thread count. Here alone (of the samplers) they are made by fma.
#pragma once

#include "common/philox_many.h"
#include "common/vec.h"
#include "sampler/kernel_tree/kernel_tree_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kKernelTreeBlock = 64;  // draws whose random numbers are made at once
constexpr int kKernelTreeRuns = 3;    // rows that share one pass over two sums

// ------------------------------------------------------------------------------------------------ products
// values[r] = phi[r] . left, values[R + r] = phi[r] . (left + stride); brings `ahead` (as long) into the cache.
template <int R>
inline void kernel_tree_values(const float* left, int64_t stride, const float* const* phi, const float* ahead,
                               float* values) {
  const float* right = left + stride;
#if defined(__AVX2__)
  constexpr int kParts = kKernelTreeAlign / Vec::kSize;
  Vec on_left[R][kParts], on_right[R][kParts];
  for (int r = 0; r < R; ++r) {
    for (int u = 0; u < kParts; ++u) on_left[r][u] = on_right[r][u] = Vec::zero();
  }
  for (int64_t c = 0; c < stride; c += kKernelTreeAlign) {
    __builtin_prefetch(ahead + c);
    __builtin_prefetch(ahead + stride + c);
#pragma GCC unroll 2
    for (int u = 0; u < kParts; ++u) {
      const Vec a = Vec::load(left + c + u * Vec::kSize), b = Vec::load(right + c + u * Vec::kSize);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        const Vec x = Vec::load(phi[r] + c + u * Vec::kSize);
        on_left[r][u] = fma(x, a, on_left[r][u]);
        on_right[r][u] = fma(x, b, on_right[r][u]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    Vec a = on_left[r][0], b = on_right[r][0];
    for (int u = 1; u < kParts; ++u) {
      a = a + on_left[r][u];
      b = b + on_right[r][u];
    }
    values[r] = a.sum();
    values[R + r] = b.sum();
  }
#else
  (void)ahead;
  for (int r = 0; r < R; ++r) {
    float a[kKernelTreeAlign] = {}, b[kKernelTreeAlign] = {};
    for (int64_t c = 0; c < stride; c += kKernelTreeAlign) {
      for (int j = 0; j < kKernelTreeAlign; ++j) {
        a[j] += phi[r][c + j] * left[c + j];
        b[j] += phi[r][c + j] * right[c + j];
      }
    }
    for (int step = kKernelTreeAlign / 2; step > 0; step /= 2) {
      for (int j = 0; j < step; ++j) {
        a[j] += a[j + step];
        b[j] += b[j + step];
      }
    }
    values[r] = a[0];
    values[R + r] = b[0];
  }
#endif
}

// Score of one class: -nu/2 |c - h|^2, nu c . h, or <h, c>.
template <bool Distance>
inline float kernel_tree_product(const float* h, const float* row, int64_t dim) {
#if defined(__AVX2__)
  // Eight numbers per step on every vector width: rows are padded to eight.
  __m256 sum = _mm256_setzero_ps();
  for (int64_t c = 0; c < dim; c += 8) {
    const __m256 x = _mm256_loadu_ps(h + c), w = _mm256_loadu_ps(row + c);
    if constexpr (Distance) {
      const __m256 gap = _mm256_sub_ps(w, x);
      sum = _mm256_fmadd_ps(gap, gap, sum);
    } else {
      sum = _mm256_fmadd_ps(x, w, sum);
    }
  }
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
#else
  float sum[kKernelTreeRowAlign] = {};
  for (int64_t c = 0; c < dim; c += kKernelTreeRowAlign) {
    for (int j = 0; j < kKernelTreeRowAlign; ++j) {
      const float gap = Distance ? row[c + j] - h[c + j] : row[c + j];
      sum[j] += gap * (Distance ? gap : h[c + j]);
    }
  }
  for (int step = kKernelTreeRowAlign / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) sum[j] += sum[j + step];
  }
  return sum[0];
#endif
}

inline void kernel_tree_scores(const KernelTree& tree, const float* h, int64_t first, int64_t count, float* scores) {
  const float* rows = tree.rows + first * tree.dim;
  if (tree.kernel == LeafKernel::kGaussian) {
    const float factor = -0.5f * tree.scale;
    for (int64_t j = 0; j < count; ++j) {
      scores[j] = factor * kernel_tree_product<true>(h, rows + j * tree.dim, tree.dim);
    }
    return;
  }
  const float factor = tree.kernel == LeafKernel::kExponential ? tree.scale : 1.0f;
  for (int64_t j = 0; j < count; ++j) {
    scores[j] = factor * kernel_tree_product<false>(h, rows + j * tree.dim, tree.dim);
  }
}

// ------------------------------------------------------------------------------------------------ one level
// What a row does at a node: probabilities of the children, and their masses without the excluded classes.
struct KernelTreeChoice {
  double p_left, p_right, mass_left, mass_right;
  float clipped;
};

inline KernelTreeChoice kernel_tree_choice(const KernelTree& tree, const KernelTreeExcluded& out, int64_t node,
                                           int level, float left, float right) {
  const KernelTreeBranch branch = kernel_tree_branch(tree, node, level, left, right);
  const double total = branch.left + branch.right;
  KernelTreeChoice choice = {branch.left / total, branch.right / total, branch.left, branch.right, branch.clipped};
  if (out.count > 0) {
    double on_left, on_right;
    kernel_tree_kept(tree, out, node, level, on_left, on_right);
    choice.mass_left *= on_left;
    choice.mass_right *= on_right;
  }
  return choice;
}

inline bool kernel_tree_step(const KernelTreeChoice& choice, int shift, uint64_t bits, KernelTreeItem& item) {
  const bool right = item.target >= 0 ? (item.target >> shift) & 1
                                      : uniform53(bits) * (choice.mass_left + choice.mass_right) < choice.mass_right;
  kernel_tree_times(item.product, item.scaled, right ? choice.p_right : choice.p_left);
  item.clipped += choice.clipped;
  return right;
}

// Random numbers of Philox block `block` for the items.
inline void kernel_tree_refill(PhiloxKey key, int block, KernelTreeItem* items, int64_t count) {
  uint32_t row[kKernelTreeBlock], position[kKernelTreeBlock];
  uint64_t bits[2][kKernelTreeBlock];
  for (int64_t begin = 0; begin < count; begin += kKernelTreeBlock) {
    const int some = int(count - begin < kKernelTreeBlock ? count - begin : kKernelTreeBlock);
    for (int i = 0; i < kKernelTreeBlock; ++i) {
      const KernelTreeItem& item = items[begin + (i < some ? i : 0)];
      row[i] = item.row;
      position[i] = item.draw << 8 | uint32_t(block);
    }
    philox_many(key, row, position, some, bits[0], bits[1]);
    for (int i = 0; i < some; ++i) {
      items[begin + i].bits[0] = bits[0][i];
      items[begin + i].bits[1] = bits[1][i];
    }
  }
}

// ------------------------------------------------------------------------------------------------ top levels
// The items of rows [begin, end) down to level top_levels.
inline void kernel_tree_top(const KernelTreeWork& work, int64_t begin, int64_t end) {
  const KernelTreeSampleParams& p = *work.params;
  const KernelTree& tree = p.tree;
  const int levels = p.top_levels;
  PhiloxKey key = {0, 0};
  if (p.key != nullptr) key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  KernelTreeChoice choices[1 << kKernelTreeTopLevels];
  const int64_t width = 2 * (tree.depth + 1), first_entry = work.entries ? p.rows[work.first_row].begin : 0;
  for (int64_t b = begin; b < end; ++b) {
    const KernelTreeExcluded out = kernel_tree_excluded(p, b);
    const KernelTreeRow& row = p.rows[b];
    const int64_t count = work.entries ? out.count : p.num_samples;
    const int64_t at = work.entries ? row.begin - first_entry : (b - work.first_row) * p.num_samples;
    if (!work.entries && p.given == nullptr && row.total == 0.0) {
      // Nothing left: the first excluded class stands in, and the loss masks it.
      for (int64_t k = 0; k < count; ++k) {
        p.ids[b * p.num_samples + k] = out.ids[0];
        p.log_q[b * p.num_samples + k] = 0.0f;
        work.node[at + k] = -1;
        work.clipped[at + k] = 0.0f;
      }
      continue;
    }
    const float* top = p.top + (b << (levels + 1));
    const KernelTreeExcluded none = {nullptr, nullptr, 0};
    for (int level = 0; level < levels; ++level) {
      for (int64_t node = int64_t(1) << level; node < int64_t(2) << level; ++node) {
        choices[node] =
            kernel_tree_choice(tree, work.entries ? none : out, node, level, top[2 * node], top[2 * node + 1]);
      }
    }
    KernelTreeItem* items = work.items[0] + at;
    for (int64_t k = 0; k < count; ++k) {
      KernelTreeItem& item = items[k];
      item = {uint32_t(b), uint32_t(work.entries ? row.begin + k : k), -1, 1.0, {0, 0}, 0.0f, 0};
      work.node[at + k] = 1;
      int64_t id = -1;
      if (work.entries) {
        id = out.ids[k];
      } else if (p.given != nullptr) {
        id = p.given[b * p.num_samples + k];
      } else {
        id = kernel_tree_component(tree, out, row, key, b, k);
        p.ids[b * p.num_samples + k] = id;
      }
      if (id >= 0) item.target = id / tree.leaf_size;
    }
    for (int level = 0; level < levels; ++level) {
      if (p.key != nullptr && !work.entries && level % 2 == 0) kernel_tree_refill(key, level / 2, items, count);
      const int shift = tree.depth - 1 - level;
      for (int64_t k = 0; k < count; ++k) {
        const int64_t node = work.node[at + k];
        const KernelTreeChoice& choice = choices[node];
        if (work.entries) {
          double* seen = p.left + int64_t(items[k].draw) * width + 2 * level;
          seen[0] = choice.p_left;
          seen[1] = choice.p_right;
        }
        work.node[at + k] = 2 * node + kernel_tree_step(choice, shift, items[k].bits[level % 2], items[k]);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ leaves
// The items [begin, end), all of one row, in one leaf.
inline void kernel_tree_leaf(const KernelTreeWork& work, int64_t leaf, const KernelTreeItem* begin,
                             const KernelTreeItem* end, double* weights, float* scores) {
  const KernelTreeSampleParams& p = *work.params;
  const KernelTree& tree = p.tree;
  const int64_t b = begin->row, m = p.num_samples;
  const int64_t first = kernel_tree_first_class(tree, leaf), count = kernel_tree_first_class(tree, leaf + 1) - first;
  const KernelTreeExcluded out = kernel_tree_excluded(p, b);
  kernel_tree_scores(tree, p.h + b * tree.dim, first, count, scores);
  float most = scores[0];
  for (int64_t j = 1; j < count; ++j) most = max_nan(most, scores[j]);
  double total = 0.0;
  for (int64_t j = 0; j < count; ++j) weights[j] = kernel_tree_leaf_weight(tree, scores[j], most);
  for (int64_t j = 0; j < count; ++j) total += weights[j];
  const double log_total = kernel_tree_log(total, 0);
  const auto log_of = [&](const KernelTreeItem& item, int64_t j) {
    const double inside = kernel_tree_leaf_log(tree, scores[j], most, weights[j]) - log_total;
    return kernel_tree_log(item.product, item.scaled) + inside;
  };
  // Given classes and those of the uniform component first: they need the weights of the excluded ones.
  bool free = false;
  for (const KernelTreeItem* item = begin; item < end; ++item) {
    if (item->target < 0) {
      free = true;
    } else if (!work.entries) {
      const int64_t at = b * m + item->draw;
      const int64_t id = p.given != nullptr ? p.given[at] : p.ids[at];
      p.log_q[at] = kernel_tree_given_log_q(tree, out, p.rows[b], id, log_of(*item, id - first));
    }
  }
  double kept = total;
  int64_t last = count - 1;
  if (out.count > 0 && (free || work.entries)) {
    for (int64_t i = kernel_tree_lower(out, first); i < out.count && out.ids[i] < first + count; ++i) {
      weights[out.ids[i] - first] = 0.0;
    }
    kept = 0.0;
    for (int64_t j = 0; j < count; ++j) {
      kept += weights[j];
      if (weights[j] > 0.0) last = j;
    }
  }
  if (work.entries) {
    for (const KernelTreeItem* item = begin; item < end; ++item) {
      const double share = kept / total;
      p.left[int64_t(item->draw) * (2 * (tree.depth + 1)) + 2 * tree.depth] = share < kKernelTreeNothing ? 0.0 : share;
    }
    return;
  }
  if (!free) return;
  for (const KernelTreeItem* item = begin; item < end; ++item) {
    if (item->target >= 0) continue;
    const double mark = uniform53(item->bits[tree.depth % 2]) * kept;
    double sum = 0.0;
    int64_t j = 0;
    for (; j < last; ++j) {
      sum += weights[j];
      if (mark < sum) break;
    }
    const int64_t at = b * m + item->draw;
    p.ids[at] = first + j;
    p.log_q[at] = kernel_tree_log_q(tree, p.rows[b], log_of(*item, j));
  }
}

// ------------------------------------------------------------------------------------------------ one subtree
// How many groups ahead to fetch sums: about 32 KiB under way.
inline int64_t kernel_tree_ahead(int64_t bytes) {
  const int64_t groups = 32768 / (bytes + 1) + 1;
  return groups > 24 ? 24 : groups;
}

template <int R>
inline void kernel_tree_runs(const KernelTreeWork& work, const KernelTreeGroup& group, int level, const int32_t* bounds,
                             const float* ahead, const KernelTreeItem* from, KernelTreeItem* to, int32_t& lefts,
                             int32_t& rights) {
  const KernelTreeSampleParams& p = *work.params;
  const KernelTree& tree = p.tree;
  const float* phi[R];
  float values[2 * R];
  for (int r = 0; r < R; ++r) phi[r] = p.phi + int64_t(from[bounds[r]].row) * tree.stride;
  kernel_tree_values<R>(tree.sums + 2 * group.node * tree.stride, tree.stride, phi, ahead, values);
  const int shift = tree.depth - 1 - level, half = level % 2;
  for (int r = 0; r < R; ++r) {
    const KernelTreeExcluded none = {nullptr, nullptr, 0};
    const KernelTreeExcluded out = work.entries ? none : kernel_tree_excluded(p, from[bounds[r]].row);
    const KernelTreeChoice choice = kernel_tree_choice(tree, out, group.node, level, values[r], values[R + r]);
    for (int32_t i = bounds[r]; i < bounds[r + 1]; ++i) {
      KernelTreeItem item = from[i];
      if (work.entries) {
        double* seen = p.left + int64_t(item.draw) * (2 * (tree.depth + 1)) + 2 * level;
        seen[0] = choice.p_left;
        seen[1] = choice.p_right;
      }
      // Rows stay together on both sides, which is all the order that is needed.
      if (kernel_tree_step(choice, shift, item.bits[half], item))
        to[--rights] = item;
      else
        to[lefts++] = item;
    }
  }
}

inline void kernel_tree_subtree(const KernelTreeWork& work, KernelTreeGroup root, double* weights, float* scores) {
  const KernelTreeSampleParams& p = *work.params;
  const KernelTree& tree = p.tree;
  PhiloxKey key = {0, 0};
  const bool draws = p.key != nullptr && !work.entries;
  if (draws) key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  KernelTreeItem *from = work.items[1], *to = work.items[0];
  KernelTreeGroup *groups = work.groups[0] + root.begin, *next = work.groups[1] + root.begin;
  groups[0] = root;
  int64_t count = 1;
  const int64_t ahead = kernel_tree_ahead(2 * tree.stride * int64_t(sizeof(float)));
  for (int level = p.top_levels; level < tree.depth; ++level) {
    if (draws && (level == p.top_levels || level % 2 == 0)) {
      kernel_tree_refill(key, level / 2, from + root.begin, root.end - root.begin);
    }
    int64_t made = 0;
    for (int64_t g = 0; g < count; ++g) {
      const KernelTreeGroup group = groups[g];
      const int64_t later = g + ahead < count                                    ? groups[g + ahead].node
                            : g + ahead - count < made && level + 1 < tree.depth ? next[g + ahead - count].node
                                                                                 : group.node;
      const float* coming = tree.sums + 2 * later * tree.stride;
      int32_t lefts = group.begin, rights = group.end;
      for (int32_t i = group.begin; i < group.end;) {
        int32_t bounds[kKernelTreeRuns + 1] = {i};
        int runs = 0;
        while (runs < kKernelTreeRuns && i < group.end) {
          const uint32_t row = from[i].row;
          while (i < group.end && from[i].row == row) ++i;
          bounds[++runs] = i;
        }
        if (runs == 3)
          kernel_tree_runs<3>(work, group, level, bounds, coming, from, to, lefts, rights);
        else if (runs == 2)
          kernel_tree_runs<2>(work, group, level, bounds, coming, from, to, lefts, rights);
        else
          kernel_tree_runs<1>(work, group, level, bounds, coming, from, to, lefts, rights);
      }
      if (lefts > group.begin) next[made++] = {2 * group.node, group.begin, lefts};
      if (rights < group.end) next[made++] = {2 * group.node + 1, rights, group.end};
    }
    KernelTreeItem* const swap_items = from;
    from = to;
    to = swap_items;
    KernelTreeGroup* const swap_groups = groups;
    groups = next;
    next = swap_groups;
    count = made;
  }
  if (draws && (tree.depth == p.top_levels || tree.depth % 2 == 0)) {
    kernel_tree_refill(key, tree.depth / 2, from + root.begin, root.end - root.begin);
  }
  const int64_t leaves = int64_t(1) << tree.depth, leaf_bytes = tree.leaf_size * tree.dim * int64_t(sizeof(float));
  const int64_t leaf_ahead = kernel_tree_ahead(leaf_bytes);
  for (int64_t g = 0; g < count; ++g) {
    if (g + leaf_ahead < count) {
      const int64_t leaf = groups[g + leaf_ahead].node - leaves;
      const char* rows = reinterpret_cast<const char*>(tree.rows + leaf * tree.leaf_size * tree.dim);
      const int64_t some = leaf_bytes < 16384 ? leaf_bytes : 16384;
      for (int64_t c = 0; c < some; c += 64) __builtin_prefetch(rows + c);
    }
    for (int32_t i = groups[g].begin; i < groups[g].end;) {
      int32_t end = i + 1;
      while (end < groups[g].end && from[end].row == from[i].row) ++end;
      kernel_tree_leaf(work, groups[g].node - leaves, from + i, from + end, weights, scores);
      if (work.clipped != nullptr && !work.entries) {
        for (; i < end; ++i) {
          work.clipped[(int64_t(from[i].row) - work.first_row) * p.num_samples + from[i].draw] = from[i].clipped;
        }
      }
      i = end;
    }
  }
}

// ------------------------------------------------------------------------------------------------ sums
inline void kernel_tree_add(float* to, const float* a, const float* b, int64_t width) {
  for (int64_t c = 0; c < width; ++c) to[c] = a[c] + b[c];
}
// kept = a + b, and past the caches to = kept; brings two rows that come later into the cache. All but `kept`, which
// need not be aligned, lie at multiples of 64 bytes.
inline void kernel_tree_climb(float* to, float* kept, const float* a, const float* b, const float* next_a,
                              const float* next_b, int64_t width) {
#if defined(__AVX2__)
  for (int64_t c = 0; c < width; c += kKernelTreeAlign) {
    __builtin_prefetch(next_a + c);
    __builtin_prefetch(next_b + c);
#pragma GCC unroll 2
    for (int u = 0; u < kKernelTreeAlign; u += Vec::kSize) {
      const Vec sum = Vec::load(a + c + u) + Vec::load(b + c + u);
      sum.store(kept + c + u);
      sum.stream(to + c + u);
    }
  }
#else
  (void)next_a, (void)next_b;
  for (int64_t c = 0; c < width; ++c) to[c] = kept[c] = a[c] + b[c];
#endif
}
inline void kernel_tree_change(float* to, const float* a, const float* b, int64_t width) {
  for (int64_t c = 0; c < width; ++c) to[c] += a[c] - b[c];
}
// The largest |number|, nan if there is one: as integers, sizes are in the same order, and a nan is above infinity.
inline float kernel_tree_peak(const float* sums, int64_t width) {
  int32_t most[kKernelTreeAlign] = {};
  for (int64_t c = 0; c < width; c += kKernelTreeAlign) {
    for (int j = 0; j < kKernelTreeAlign; ++j) {
      const int32_t size = bit_copy<int32_t>(sums[c + j]) & 0x7fffffff;
      most[j] = size > most[j] ? size : most[j];
    }
  }
  int32_t result = 0;
  for (int j = 0; j < kKernelTreeAlign; ++j) result = most[j] > result ? most[j] : result;
  return bit_copy<float>(result);
}
inline void kernel_tree_total(float* to, const float* rows, int64_t count, int64_t width) {
  for (int64_t c = 0; c < width; c += kKernelTreeAlign) {
    float sum[kKernelTreeAlign] = {};
    for (int64_t i = 0; i < count; ++i) {
      for (int j = 0; j < kKernelTreeAlign; ++j) sum[j] += rows[i * width + c + j];
    }
    for (int j = 0; j < kKernelTreeAlign; ++j) to[c + j] = sum[j];
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
