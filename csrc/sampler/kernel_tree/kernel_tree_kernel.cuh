// The kernel tree on the GPU. The rules are those of kernel_tree_math.h.
//
//   kernel_tree_sample_kernel   a block has a row, whose features lie in shared memory. 64 draws (or given classes) go
//                               down together, a thread each; those at the same node form a group, kept as a mask that
//                               a ballot splits at each level. A warp reads the sums of two children once for a group.
//   kernel_tree_leaves_kernel   sums of leaves, a block each;  kernel_tree_parents_kernel  sums of one level's nodes
#pragma once

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "sampler/kernel_tree/kernel_tree_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kKernelTreeThreads = kKernelTreeWarps * 32;
constexpr int kKernelTreeDraws = 64;  // that go down together
constexpr int kKernelTreeSumThreads = 128;

// ------------------------------------------------------------------------------------------------ products
struct KernelTreePair {
  float left, right;
};

// phi . sums of both children of a node, by a warp; the same in all lanes.
SX_DEVICE inline KernelTreePair kernel_tree_values(const KernelTree& tree, const float* phi, int64_t node) {
  const int stride = int(tree.stride);
  const float* left = tree.sums + 2 * node * tree.stride;
  const float* right = left + stride;
  float a = 0.0f, b = 0.0f;
  for (int c = 4 * lane_id(); c < stride; c += 4 * kWarpSize) {
    float x[4], l[4], r[4];
    load_floats<4>(phi + c, x);
    load_floats<4>(left + c, l);
    load_floats<4>(right + c, r);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a += x[j] * l[j];
      b += x[j] * r[j];
    }
  }
  return {group_sum<kWarpSize>(a), group_sum<kWarpSize>(b)};
}

// Score of class first + lane for the 32 classes from `first` on, of which `count` exist; `Width` lanes share a class.
template <int Width>
SX_DEVICE inline float kernel_tree_tile_scores(const KernelTree& tree, const float* h, int64_t first, int count) {
  const int dim = int(tree.dim), part = lane_id() % Width, group = lane_id() / Width;
  constexpr int kGroups = kWarpSize / Width;
  const bool distance = tree.kernel == LeafKernel::kGaussian;
  float mine = 0.0f;
  for (int j = 0; j < count; j += kGroups) {
    // Lanes without a class repeat the last one: all take part in the sum.
    const int which = j + group < count ? j + group : count - 1;
    const float* row = tree.rows + (first + which) * tree.dim;
    float sum = 0.0f;
    for (int c = 4 * part; c < dim; c += 4 * Width) {
      float x[4], w[4];
      load_floats<4>(h + c, x);
      load_floats<4>(row + c, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gap = distance ? w[i] - x[i] : w[i];
        sum += gap * (distance ? gap : x[i]);
      }
    }
    sum = group_sum<Width>(sum);
    const float theirs = shuffle_from(sum, (lane_id() - j) * Width);
    mine = lane_id() >= j && lane_id() < j + kGroups ? theirs : mine;
  }
  return mine * (distance ? -0.5f * tree.scale : tree.kernel == LeafKernel::kExponential ? tree.scale : 1.0f);
}

SX_DEVICE inline float kernel_tree_tile(const KernelTree& tree, const float* h, int64_t first, int count) {
  if (tree.dim <= 32) return kernel_tree_tile_scores<8>(tree, h, first, count);
  if (tree.dim <= 64) return kernel_tree_tile_scores<16>(tree, h, first, count);
  return kernel_tree_tile_scores<32>(tree, h, first, count);
}

// Sum of x over lanes 0 .. own.
SX_DEVICE inline double kernel_tree_scan(double x) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const double before = shuffle_from(x, lane_id() - step);
    x += lane_id() >= step ? before : 0.0;
  }
  return x;
}

// ------------------------------------------------------------------------------------------------ a leaf
// What a warp knows of a leaf; lane j % 32 writes the numbers of class j.
struct KernelTreeLeaf {
  float* scores;    // [leaf_size up to 32s]
  double* running;  // the same: weights up to and with class j, 0 for excluded classes
  int64_t first;
  int count, last;  // classes; the last one of positive weight
  float most;
  double total, log_total, kept;  // weight of all classes, and without the excluded ones
};

SX_DEVICE inline void kernel_tree_score_leaf(const KernelTree& tree, const KernelTreeExcluded& out, const float* h,
                                             int64_t node, KernelTreeLeaf& leaf) {
  const int64_t number = node - (int64_t(1) << tree.depth);
  leaf.first = kernel_tree_first_class(tree, number);
  leaf.count = int(kernel_tree_first_class(tree, number + 1) - leaf.first);
  float most = negative_infinity<float>();
  for (int tile = 0; tile < leaf.count; tile += kWarpSize) {
    const int rest = leaf.count - tile < kWarpSize ? leaf.count - tile : kWarpSize;
    const float score = kernel_tree_tile(tree, h, leaf.first + tile, rest);
    leaf.scores[tile + lane_id()] = score;
    most = lane_id() < rest ? max_nan(most, score) : most;
  }
  leaf.most = group_max<kWarpSize>(most);
  double total = 0.0, kept = 0.0;
  leaf.last = leaf.count - 1;
  for (int tile = 0; tile < leaf.count; tile += kWarpSize) {
    const int j = tile + lane_id();
    const bool real = j < leaf.count;
    const double weight = kernel_tree_leaf_weight(tree, real ? leaf.scores[j] : leaf.most, leaf.most);
    const double left = out.count > 0 && kernel_tree_is_excluded(out, leaf.first + j) ? 0.0 : weight;
    const double sum = kernel_tree_scan(real ? left : 0.0);
    const unsigned positive = warp_ballot(real && left > 0.0);
    leaf.running[j] = kept + sum;
    if (positive != 0) leaf.last = tile + 31 - __clz(int(positive));
    total += group_sum<kWarpSize>(real ? weight : 0.0);
    kept += shuffle_from(sum, kWarpSize - 1);
  }
  warp_sync();  // every lane may read what the others wrote
  leaf.total = total;
  leaf.log_total = kernel_tree_log(total, 0);
  leaf.kept = kept;
}

// The class in which a lane's mass `mark` of what is left lies; by the whole warp. One after the other: running sums
// are rounded, so that they need not ascend.
SX_DEVICE inline int kernel_tree_choose(const KernelTreeLeaf& leaf, double mark) {
  int found = -1;
  for (int j = 0; j < leaf.count && warp_any(found < 0);) {
    for (const int end = j + 8 < leaf.count ? j + 8 : leaf.count; j < end; ++j) {
      if (found < 0 && mark < leaf.running[j]) found = j;
    }
  }
  return found < 0 ? leaf.last : found;  // rounding, or a nan
}

// log of class j's share of the leaf.
SX_DEVICE inline double kernel_tree_leaf_share(const KernelTree& tree, const KernelTreeLeaf& leaf, int j) {
  const float score = leaf.scores[j < 0 ? 0 : j];
  const double weight = kernel_tree_leaf_weight(tree, score, leaf.most);
  return kernel_tree_leaf_log(tree, score, leaf.most, weight) - leaf.log_total;
}

// ------------------------------------------------------------------------------------------------ one row
// What the threads of a block tell each other. The draw threads write their own entries, warps those of a group.
struct KernelTreeShared {
  int64_t node[kKernelTreeDraws];
  uint64_t group[kKernelTreeDraws];   // draws at the same node
  uint64_t number[kKernelTreeDraws];  // random number of the leaf
  int64_t target[kKernelTreeDraws];   // class to go to, -1: free
  int64_t id[kKernelTreeDraws];
  double share[kKernelTreeDraws];
  double product[kKernelTreeDraws];  // of the probabilities of the path, see kernel_tree_times
  int32_t scaled[kKernelTreeDraws];
  float left[kKernelTreeDraws], right[kKernelTreeDraws], clipped[kKernelTreeDraws];
  unsigned leaders[2], turned[2];
  KernelTreeRow row;
};

// Read where it is needed: held over the whole walk it would cost four registers, and with them the second block.
SX_DEVICE inline PhiloxKey kernel_tree_key(const KernelTreeSampleParams& p) {
  if (p.key == nullptr) return {0, 0};
  return {uint64_t(p.key[0]), uint64_t(p.key[1])};
}

// body(first draw of a group) for every group, each by one warp: that of the draw's number.
template <typename F>
SX_DEVICE inline void kernel_tree_each_group(const KernelTreeShared& s, const F& body) {
  static_assert(kKernelTreeWarps == 8, "every eighth draw");
  const uint64_t leaders = s.leaders[0] | uint64_t(s.leaders[1]) << 32;
  for (uint64_t rest = leaders & (0x0101010101010101ull << warp_id()); rest != 0; rest &= rest - 1) {
    body(__ffsll(static_cast<long long>(rest)) - 1);
  }
}

// put(member) in the lane of each member of a group.
template <typename F>
SX_DEVICE inline void kernel_tree_each_member(uint64_t group, const F& put) {
  if ((group >> lane_id()) & 1) put(lane_id());
  if ((group >> (32 + lane_id())) & 1) put(32 + lane_id());
}

// P(nothing excluded) of every node above the row's excluded classes.
SX_DEVICE inline void kernel_tree_exclude(const KernelTreeSampleParams& p, const KernelTreeExcluded& out, int64_t b,
                                          const float* phi, const float* h, KernelTreeLeaf& leaf) {
  const KernelTree& tree = p.tree;
  const int64_t width = 2 * (tree.depth + 1);
  const int levels = tree.depth + 1;
  for (int64_t i = warp_id(); i < out.count * levels; i += kKernelTreeWarps) {
    const int64_t entry = i / levels;
    const int level = int(i - entry * levels);
    // Clamped: on CUDA the classes have not been checked, and only the ends of the row are cut off.
    const int64_t id = out.ids[entry], last = tree.num_classes - 1;
    const int64_t node = kernel_tree_ancestor(tree, id < 0 ? 0 : id > last ? last : id, level);
    double* here = out.left + entry * width + 2 * level;
    if (level == tree.depth) {
      kernel_tree_score_leaf(tree, out, h, node, leaf);
      const double share = leaf.kept / leaf.total;
      if (lane_id() == 0) here[0] = share < kKernelTreeNothing ? 0.0 : share;
    } else {
      KernelTreePair v;
      if (level < p.top_levels) {
        const float* top = p.top + (b << (p.top_levels + 1)) + 2 * node;
        v = {top[0], top[1]};
      } else {
        v = kernel_tree_values(tree, phi, node);
      }
      const KernelTreeBranch branch = kernel_tree_branch(tree, node, level, v.left, v.right);
      const double total = branch.left + branch.right;
      if (lane_id() == 0) here[0] = branch.left / total;
      if (lane_id() == 0) here[1] = branch.right / total;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) kernel_tree_keep(tree, out);
}

// `Shared`: features and query lie in shared memory; else they are too long for it.
template <bool Shared>
__global__ void __launch_bounds__(kKernelTreeThreads, Shared ? 2 : 1)
    kernel_tree_sample_kernel(KernelTreeSampleParams p) {
  __shared__ KernelTreeShared s;
  SX_DYN_SMEM(double, memory);
  const KernelTree& tree = p.tree;
  const int tid = int(threadIdx.x), tiles = int((tree.leaf_size + 31) / 32 * 32);
  const bool small = tree.leaf_size <= kKernelTreeSharedLeaf;
  KernelTreeLeaf leaf = {};
  leaf.running = small ? memory + warp_id() * tiles
                       : p.leaf + (int64_t(blockIdx.x) * kKernelTreeWarps + warp_id()) * (tiles / 2 * 3);
  float* row_memory = reinterpret_cast<float*>(memory + (small ? kKernelTreeWarps * tiles : 0));
  leaf.scores = small ? row_memory + warp_id() * tiles : reinterpret_cast<float*>(leaf.running + tiles);
  if (small) row_memory += kKernelTreeWarps * tiles;
  for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const float* phi = p.phi + b * tree.stride;
    const float* h = p.h + b * tree.dim;
    __syncthreads();
    if constexpr (Shared) {
      float* copy = row_memory;
      for (int c = 4 * tid; c < tree.stride; c += 4 * kKernelTreeThreads) {
        float x[4];
        load_floats<4>(phi + c, x);
        store_floats<4>(copy + c, x);
      }
      for (int c = 4 * tid; c < tree.dim; c += 4 * kKernelTreeThreads) {
        float x[4];
        load_floats<4>(h + c, x);
        store_floats<4>(copy + tree.stride + c, x);
      }
      phi = copy;
      h = copy + tree.stride;
    }
    if (tid == 0) p.rows[b] = kernel_tree_find_row(p, b);
    __syncthreads();
    const KernelTreeExcluded out = kernel_tree_excluded(p, b);
    if (out.count > 0) kernel_tree_exclude(p, out, b, phi, h, leaf);
    if (tid == 0) {
      KernelTreeRow row = p.rows[b];
      kernel_tree_row_mass(tree, out, row);
      s.row = row;
    }
    __syncthreads();
    const KernelTreeRow& row = s.row;
    const bool nothing = p.given == nullptr && row.total == 0.0;
    float clipped = 0.0f;
    for (int64_t base = 0; base < p.num_samples; base += kKernelTreeDraws) {
      const int64_t k = base + tid, at = b * p.num_samples + k;
      const bool mine = tid < kKernelTreeDraws && k < p.num_samples;
      if (nothing) {
        // The first excluded class stands in, and the loss masks it.
        if (mine) {
          p.ids[at] = out.ids[0];
          p.log_q[at] = 0.0f;
        }
        continue;
      }
      // A draw thread's own.
      int64_t node = 1, target = -1;
      bool unknown = false;  // a given id is not a class: nan, and no access
      uint64_t group = 0;
      const int64_t in_hand = p.num_samples - base;
      const uint64_t everyone = in_hand >= kKernelTreeDraws ? ~uint64_t(0) : (uint64_t(1) << in_hand) - 1;
      if (mine) {
        target = p.given != nullptr ? p.given[at] : kernel_tree_component(tree, out, row, kernel_tree_key(p), b, k);
        unknown = p.given != nullptr && uint64_t(target) >= uint64_t(tree.num_classes);
        if (unknown) target = 0;
        // Excluded classes that do not ascend can push a draw behind the last class.
        if (target >= tree.num_classes) target = tree.num_classes - 1;
        group = everyone;
      }
      if (tid < kKernelTreeDraws) {
        s.product[tid] = 1.0;
        s.scaled[tid] = 0;
        s.clipped[tid] = 0.0f;
      }
      for (int level = 0; level <= tree.depth; ++level) {
        const bool in_leaf = level == tree.depth;
        if (level >= p.top_levels) {
          if (tid < kKernelTreeDraws) {
            s.node[tid] = node;
            s.group[tid] = group;
            // The lowest of its group: no bit below its own.
            const unsigned leaders = warp_ballot(mine && (group & ((uint64_t(1) << tid) - 1)) == 0);
            if (lane_id() == 0) s.leaders[warp_id()] = leaders;
            if (in_leaf) {
              s.number[tid] = kernel_tree_bits(kernel_tree_key(p), b, k, level);
              s.target[tid] = target;
            }
          }
          __syncthreads();
          kernel_tree_each_group(s, [&](int leader) {
            const uint64_t members = s.group[leader];
            const int64_t here = s.node[leader];
            if (!in_leaf) {
              const KernelTreePair v = kernel_tree_values(tree, phi, here);
              kernel_tree_each_member(members, [&](int member) {
                s.left[member] = v.left;
                s.right[member] = v.right;
              });
              return;
            }
            kernel_tree_score_leaf(tree, out, h, here, leaf);
            // The members choose together, a lane each.
            for (int member = lane_id(); member < kKernelTreeDraws; member += kWarpSize) {
              const bool is_one = (members >> member) & 1;
              if (!warp_any(is_one)) continue;
              const int64_t wanted = s.target[member];
              const bool free = is_one && wanted < 0;
              int j = is_one && wanted >= 0 ? int(wanted - leaf.first) : 0;
              if (warp_any(free)) {
                const int chosen = kernel_tree_choose(leaf, free ? uniform53(s.number[member]) * leaf.kept : -1.0);
                j = free ? chosen : j;
              }
              if (!is_one) continue;
              s.id[member] = leaf.first + j;
              s.share[member] = kernel_tree_leaf_share(tree, leaf, j);
            }
            warp_sync();  // the next group's numbers take the place of these
          });
          __syncthreads();
        }
        if (in_leaf) break;
        bool right = false;
        if (tid < kKernelTreeDraws) {
          if (mine) {
            const float* values = p.top + (b << (p.top_levels + 1)) + 2 * node;
            const float on_left = level < p.top_levels ? values[0] : s.left[tid];
            const float on_right = level < p.top_levels ? values[1] : s.right[tid];
            const KernelTreeBranch branch = kernel_tree_branch(tree, node, level, on_left, on_right);
            double kept_left, kept_right;
            kernel_tree_kept(tree, out, node, level, kept_left, kept_right);
            const double mass_left = branch.left * kept_left, mass_right = branch.right * kept_right;
            right = target >= 0
                        ? ((target / tree.leaf_size) >> (tree.depth - 1 - level)) & 1
                        : uniform53(kernel_tree_bits(kernel_tree_key(p), b, k, level)) * (mass_left + mass_right) <
                              mass_right;
            kernel_tree_times(s.product[tid], s.scaled[tid],
                              (right ? branch.right : branch.left) / (branch.left + branch.right));
            s.clipped[tid] += branch.clipped;
            node = 2 * node + right;
          }
          const unsigned turned = warp_ballot(right);
          if (lane_id() == 0) s.turned[warp_id()] = turned;
        }
        __syncthreads();
        const uint64_t turned = s.turned[0] | uint64_t(s.turned[1]) << 32;
        group &= right ? turned : ~turned;
        __syncthreads();
      }
      if (mine) {
        const double log_tree = kernel_tree_log(s.product[tid], s.scaled[tid]) + s.share[tid];
        if (p.given != nullptr) {
          const float log_q = kernel_tree_given_log_q(tree, out, row, target, log_tree);
          p.log_q[at] = unknown ? quiet_nan<float>() : log_q;
        } else {
          p.ids[at] = s.id[tid];
          p.log_q[at] = kernel_tree_log_q(tree, row, log_tree);
        }
      }
      __syncthreads();
      if (tid == 0) {
        for (int i = 0; i < kKernelTreeDraws; ++i) clipped += s.clipped[i];
      }
      __syncthreads();
    }
    if (tid == 0 && p.clipped != nullptr) {
      const int64_t steps = p.num_samples * tree.depth;
      p.clipped[b] = clipped / float(steps > 0 ? steps : 1);
    }
  }
}

// ------------------------------------------------------------------------------------------------ sums
__global__ void __launch_bounds__(kKernelTreeSumThreads, 4) kernel_tree_leaves_kernel(KernelTreeLeavesParams p) {
  __shared__ float scratch[kKernelTreeSumThreads / kWarpSize];
  const int64_t leaves = int64_t(1) << p.depth;
  const int64_t count = p.ids != nullptr ? p.count : (p.count + p.leaf_size - 1) / p.leaf_size;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    int64_t leaf, begin, end;
    if (p.ids != nullptr) {
      const int64_t id = p.ids[i], before = i > 0 ? p.ids[i - 1] : -1;
      if (id < 0 || id / p.leaf_size >= leaves) continue;  // none, or no class: on CUDA the ids have not been checked
      leaf = id / p.leaf_size;
      if (before >= 0 && before / p.leaf_size == leaf) continue;  // the block of the leaf's first class does it
      begin = i;
      end = i + 1;
      while (end < p.count && p.ids[end] / p.leaf_size == leaf) ++end;
    } else {
      leaf = p.first / p.leaf_size + i;
      begin = i * p.leaf_size;
      end = begin + p.leaf_size < p.count ? begin + p.leaf_size : p.count;
    }
    float* to = p.sums + (leaves + leaf) * p.stride;
    float most = 0.0f;
    for (int64_t c = 4 * threadIdx.x; c < p.stride; c += 4 * kKernelTreeSumThreads) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (p.ids != nullptr) load_floats<4>(to + c, sum);
      for (int64_t j = begin; j < end; ++j) {
        if (p.taken != nullptr && !p.taken[j]) continue;
        float x[4], old[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        load_floats<4>(p.phi + j * p.stride + c, x);
        if (p.ids != nullptr) load_floats<4>(p.old + j * p.stride + c, old);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += x[k] - old[k];
      }
      store_floats<4>(to + c, sum);
#pragma unroll
      for (int k = 0; k < 4; ++k) most = max_nan(most, sum[k] < 0.0f ? -sum[k] : sum[k]);
    }
    for (int64_t j = begin; p.fresh != nullptr && j < end; ++j) {
      if (p.taken != nullptr && !p.taken[j]) continue;
      for (int64_t c = 4 * threadIdx.x; c < p.dim; c += 4 * kKernelTreeSumThreads) {
        float x[4];
        load_floats<4>(p.fresh + j * p.dim + c, x);
        store_floats<4>(p.rows + p.ids[j] * p.dim + c, x);
      }
    }
    if (p.peaks != nullptr) {  // the same in every thread
      most = block_max<kKernelTreeSumThreads / kWarpSize>(most, scratch);
      if (threadIdx.x == 0) {
        float* peak = p.peaks + leaves + 1 + leaf;
        p.peaks[leaf] = most;
        *peak = max_nan(*peak, most);
      }
    }
  }
}

// Nodes of one level: above the given leaves, or the first `count`.
__global__ void __launch_bounds__(kKernelTreeSumThreads)
    kernel_tree_parents_kernel(KernelTreeParentsParams p, int level, int64_t count) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    int64_t node = (int64_t(1) << level) + i;
    if (p.leaves != nullptr) {
      const int shift = p.depth - level;
      const int64_t leaf = p.leaves[i], before = i > 0 ? p.leaves[i - 1] : -1;
      if (uint64_t(leaf) >= uint64_t(1) << p.depth) continue;  // the same for leaves
      node = ((int64_t(1) << p.depth) + leaf) >> shift;
      if (before >= 0 && ((int64_t(1) << p.depth) + before) >> shift == node) continue;
    }
    const float* left = p.sums + 2 * node * p.stride;
    float* to = p.sums + node * p.stride;
    for (int64_t c = 4 * threadIdx.x; c < p.stride; c += 4 * kKernelTreeSumThreads) {
      float a[4], b[4];
      load_floats<4>(left + c, a);
      load_floats<4>(left + p.stride + c, b);
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k] += b[k];
      store_floats<4>(to + c, a);
    }
  }
}

}  // namespace samplex::SX_BACKEND_NS
