// Shared draws on the GPU: a block has a draw (or a given class) and takes it down the tree. At each level every row is
// scored, the masses of both children are added up, and the draw chooses one of them. All blocks read the same few
// thousand nodes and the same rows: they stay in the caches.
//
// A thread has the rows of one lane. With many rows several groups of 64 threads share them, and the first group adds
// up what all have found, in the order of the rows: the same bits.
#pragma once

#include "common/warp.cuh"
#include "sampler/tree/tree_device.cuh"
#include "sampler/tree_shared/tree_shared_math.h"

namespace samplex::SX_BACKEND_NS {

// Groups of 64 threads of a block where there are many rows.
constexpr int kTreeSharedGroups = 4;
template <int kGroups>
constexpr int kTreeSharedThreads = kGroups * kTreeSharedLanes;
// Warps of a multiprocessor at the least. Not asked, ptxas takes fewer registers than it needs on some architectures,
// and spills.
constexpr int kTreeSharedResident = 16;

// Both sums over the 64 threads, by halves, the same bits in every thread. Two barriers.
struct TreeSharedSums {
  double right, left;
};
SX_DEVICE inline TreeSharedSums tree_shared_sums(double right, double left, double (*scratch)[kWarpSize + 1]) {
  const int lane = lane_id();
  if (warp_id() == 1) {
    scratch[0][lane] = right;
    scratch[1][lane] = left;
  }
  __syncthreads();
  if (warp_id() == 0) {
    right = group_sum<kWarpSize>(right + scratch[0][lane]);
    left = group_sum<kWarpSize>(left + scratch[1][lane]);
    if (lane == 0) {
      scratch[0][kWarpSize] = right;
      scratch[1][kWarpSize] = left;
    }
  }
  __syncthreads();
  return {scratch[0][kWarpSize], scratch[1][kWarpSize]};
}

// The terms of a lane's sums, from the groups of a block. All threads come here; only the first group has sums.
template <int kGroups>
struct TreeSharedTile {
  double terms[2][2][kTreeSharedThreads<kGroups>];

  // Adds the terms of as many rows as the block has threads. `turn` is another one next time, so that one barrier does.
  SX_DEVICE void add(int turn, double to_right, double to_left, double& right, double& left) {
    double (*const mine)[kTreeSharedThreads<kGroups>] = terms[turn];
    mine[0][threadIdx.x] = to_right;
    mine[1][threadIdx.x] = to_left;
    __syncthreads();
    if (threadIdx.x >= kTreeSharedLanes) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      right = right + mine[0][group * kTreeSharedLanes + threadIdx.x];
      left = left + mine[1][group * kTreeSharedLanes + threadIdx.x];
    }
  }
};
template <>
struct TreeSharedTile<1> {
  SX_DEVICE void add(int, double to_right, double to_left, double& right, double& left) {
    right = right + to_right;
    left = left + to_left;
  }
};

template <typename T, bool kWideRow, bool kStrata, int kGroups, bool kBase>
__global__ void __launch_bounds__(kTreeSharedThreads<kGroups>, kTreeSharedResident / (2 * kGroups))
    tree_shared_kernel(TreeSharedParams p) {
  constexpr int kThreads = kTreeSharedThreads<kGroups>;
  __shared__ double scratch[2][kWarpSize + 1];
  __shared__ TreeSharedTile<kGroups> tile;
  SX_DYN_SMEM(double, own);
  // [2, B]: masses of the rows in the left and in the right child of a node. A thread keeps to its rows, so that only
  // the sums need barriers.
  double* const masses = kGroups > 1 ? p.masses + int64_t(blockIdx.x) * 2 * p.batch : own;
  const TreeTable& tree = p.tree;
  const int64_t leaves = int64_t(1) << tree.depth;
  PhiloxKey key = {0, 0};
  if (p.key != nullptr) key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  for (int64_t draw = blockIdx.x; draw < p.num_samples; draw += gridDim.x) {
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
      const float* x = p.x + b * tree.dim;
      float zero = 0.0f;
      for (int64_t c = 0; c < tree.dim; ++c) zero = zero + 0.0f * x[c];
      masses[b] = zero == 0.0f ? 1.0 : 0.0;
    }
    const int64_t leaf = p.given != nullptr ? leaf_of(tree, p.given[draw]) : 0;
    double q = leaf < 0 ? quiet_nan<double>() : 1.0;
    int64_t node = 1;
    bool to_right = false;
    uint64_t bits = 0, next_bits = 0;
    double place = 0.0, low = 0.0;  // of a stratified draw: where it is, and where the node's interval begins
    if constexpr (kStrata) {
      place = tree_stratum(draw, uniform53(philox_u64(philox_at(key, 0, draw, 0), 0)), p.num_samples);
    }
    for (int level = 0; level < tree.depth; ++level) {
      double right = 0.0, left = 0.0;
      const double* const at = masses + (to_right ? p.batch : 0);
      int turn = 0;
      for (int64_t first = 0; first < p.batch; first += kThreads, turn ^= 1) {
        const int64_t b = first + threadIdx.x;
        double row_right = 0.0, row_left = 0.0;
        if (b < p.batch) {
          const double here = at[b];
          if (here != 0.0) {
            const TreeSplit split = tree_split(tree_logit_vector<T, kWideRow>(tree, node, p.x + b * tree.dim));
            row_right = here * double(split.right);
            row_left = here * double(split.left);
          }
          if (level + 1 < tree.depth) {
            masses[b] = row_left;
            masses[p.batch + b] = row_right;
          }
        }
        tile.add(turn, row_right, row_left, right, left);
      }
      const TreeSharedSums sums = tree_shared_sums(right, left, scratch);
      const double total = sums.right + sums.left;
      double mass_right = sums.right, mass_left = sums.left;  // what a draw chooses by
      double q_right = 0.0, q_left = 0.0;
      if constexpr (kStrata || kBase) {
        q_right = tree_shared_step(q, sums.right, total);
        q_left = tree_shared_step(q, sums.left, total);
      }
      if constexpr (kBase) {
        mass_right = tree_shared_mixed(p, q_right, 2 * node + 1, level + 1);
        mass_left = tree_shared_mixed(p, q_left, 2 * node, level + 1);
      }
      if constexpr (kStrata) {
        const double on_left = kBase ? mass_left : q_left;
        to_right = tree_stratum_right(place, low, on_left, kBase ? mass_right : q_right);
        low = to_right ? low + on_left : low;
        q = to_right ? q_right : q_left;
      } else if (p.given != nullptr) {
        to_right = goes_right(tree, leaf, level);
      } else {
        if (level % 2 == 0) {
          const PhiloxWords words = philox_at(key, 0, draw, level / 2);
          bits = philox_u64(words, 0);
          next_bits = philox_u64(words, 1);
        } else {
          bits = next_bits;
        }
        to_right = uniform53(bits) * (mass_right + mass_left) < mass_right;
      }
      if constexpr (kBase && !kStrata) q = to_right ? q_right : q_left;
      if constexpr (!kBase && !kStrata) q = tree_shared_step(q, to_right ? sums.right : sums.left, total);
      node = 2 * node + to_right;
    }
    if (threadIdx.x == 0) {
      p.log_q[draw] = tree_shared_log(kBase ? tree_shared_mixed(p, q, node, tree.depth) : q);
      if (p.ids != nullptr) {
        const int64_t id = class_at(tree, node - leaves);
        p.ids[draw] = id < 0 ? 0 : id;
        if (id < 0) p.log_q[draw] = quiet_nan<float>();
      }
    }
  }
}

}  // namespace samplex::SX_BACKEND_NS
