// Shared draws on the GPU: a block has a draw (or a given class) and takes it down the tree; a thread has the rows of
// one lane. At each level every row is scored, the masses of both children are added up, and the draw chooses one of
// them. All blocks read the same few thousand nodes and the same rows: they stay in the caches.
#pragma once

#include "common/warp.cuh"
#include "sampler/tree/tree_device.cuh"
#include "sampler/tree_shared/tree_shared_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kTreeSharedThreads = kTreeSharedLanes;
// Blocks of a multiprocessor at the least. Not asked, ptxas takes fewer registers than it needs on some architectures,
// and spills.
constexpr int kTreeSharedResident = 8;

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

// Where the rows of a block are: their masses [B], and behind them P(right) and P(left) of the node it is at, [B, 2].
struct TreeSharedRows {
  double* mass;
  float* split;
};

template <typename T, bool kWideRow, bool kStrata>
__global__ void __launch_bounds__(kTreeSharedThreads, kTreeSharedResident) tree_shared_kernel(TreeSharedParams p) {
  __shared__ double scratch[2][kWarpSize + 1];
  SX_DYN_SMEM(double, own);  // [2 B] where it fits
  TreeSharedRows rows;
  rows.mass = p.masses != nullptr ? p.masses + int64_t(blockIdx.x) * 2 * p.batch : own;
  rows.split = reinterpret_cast<float*>(rows.mass + p.batch);
  const TreeTable& tree = p.tree;
  const int64_t leaves = int64_t(1) << tree.depth;
  PhiloxKey key = {0, 0};
  if (p.key != nullptr) key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  // Every thread keeps to the rows of its lane, so that only the sums need barriers.
  for (int64_t draw = blockIdx.x; draw < p.num_samples; draw += gridDim.x) {
    for (int64_t b = threadIdx.x; b < p.batch; b += kTreeSharedThreads) {
      const float* x = p.x + b * tree.dim;
      float zero = 0.0f;
      for (int64_t c = 0; c < tree.dim; ++c) zero = zero + 0.0f * x[c];
      rows.mass[b] = zero == 0.0f ? 1.0 : 0.0;
    }
    const int64_t leaf = p.given != nullptr ? leaf_of(tree, p.given[draw]) : 0;
    double q = leaf < 0 ? quiet_nan<double>() : 1.0;
    int64_t node = 1;
    uint64_t bits = 0, next_bits = 0;
    double place = 0.0, low = 0.0;  // of a draw in strata: where it is, and where the node's interval begins
    if constexpr (kStrata) {
      place = tree_stratum(draw, uniform53(philox_u64(philox_at(key, 0, draw, 0), 0)), p.num_samples);
    }
    for (int level = 0; level < tree.depth; ++level) {
      double right = 0.0, left = 0.0;
      for (int64_t b = threadIdx.x; b < p.batch; b += kTreeSharedThreads) {
        const double here = rows.mass[b];
        if (here == 0.0) continue;
        const TreeSplit split = tree_split(tree_logit_vector<T, kWideRow>(tree, node, p.x + b * tree.dim));
        rows.split[2 * b] = split.right;
        rows.split[2 * b + 1] = split.left;
        right = right + here * double(split.right);
        left = left + here * double(split.left);
      }
      const TreeSharedSums sums = tree_shared_sums(right, left, scratch);
      const double total = sums.right + sums.left;
      bool to_right;
      if constexpr (kStrata) {
        const double q_right = tree_shared_step(q, sums.right, total), q_left = tree_shared_step(q, sums.left, total);
        to_right = tree_stratum_right(place, low, q_left, q_right);
        low = to_right ? low + q_left : low;
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
        to_right = uniform53(bits) * total < sums.right;
      }
      if constexpr (!kStrata) q = tree_shared_step(q, to_right ? sums.right : sums.left, total);
      for (int64_t b = threadIdx.x; level + 1 < tree.depth && b < p.batch; b += kTreeSharedThreads) {
        const double here = rows.mass[b];
        if (here != 0.0) rows.mass[b] = here * double(rows.split[2 * b + (to_right ? 0 : 1)]);
      }
      node = 2 * node + to_right;
    }
    if (threadIdx.x == 0) {
      p.log_q[draw] = tree_shared_log(q);
      if (p.ids != nullptr) {
        const int64_t id = class_at(tree, node - leaves);
        p.ids[draw] = id < 0 ? 0 : id;
        if (id < 0) p.log_q[draw] = quiet_nan<float>();
      }
    }
  }
}

}  // namespace samplex::SX_BACKEND_NS
