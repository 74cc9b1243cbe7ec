// One node for all rows of a batch, compiled once per instruction set: plain loops over a tile of 64 rows, which the
// compiler vectorizes. The additions of a row are those of tree_logit.
#pragma once

#include "sampler/tree_shared/tree_shared_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTile = kTreeSharedLanes;

// z[r] = w . x_r + b of a tile. w is zero up to `width`, a multiple of 16.
inline void tree_shared_logits(const float* w, float bias, const float* __restrict__ x, int64_t width,
                               float* __restrict__ z) {
  // tree_sum written out over the lanes of a row: one loop, everything in registers.
#define SX_TREE_SUM(l)                                                      \
  ((((l(0) + l(8)) + (l(4) + l(12))) + ((l(2) + l(10)) + (l(6) + l(14)))) + \
   (((l(1) + l(9)) + (l(5) + l(13))) + ((l(3) + l(11)) + (l(7) + l(15)))))
  static_assert(kTreeLanes == 16);
  if (width == kTreeLanes) {
#define SX_LANE(j) (w[j] * x[(j) * kTile + r])
    for (int r = 0; r < kTile; ++r) z[r] = SX_TREE_SUM(SX_LANE) + bias;
#undef SX_LANE
    return;
  }
  float lanes[kTreeLanes][kTile];
  for (int j = 0; j < kTreeLanes; ++j) {
    for (int r = 0; r < kTile; ++r) lanes[j][r] = w[j] * x[j * kTile + r];
  }
  for (int64_t c = kTreeLanes; c < width; c += kTreeLanes) {
    for (int j = 0; j < kTreeLanes; ++j) {
      for (int r = 0; r < kTile; ++r) lanes[j][r] = lanes[j][r] + w[c + j] * x[(c + j) * kTile + r];
    }
  }
#define SX_LANE(j) (lanes[j][r])
  for (int r = 0; r < kTile; ++r) z[r] = SX_TREE_SUM(SX_LANE) + bias;
#undef SX_LANE
#undef SX_TREE_SUM
}

// Masses of the children of a tile of rows, and their sums by lanes; the first tile starts the sums.
template <bool kFirst, bool kKeep>
inline void tree_shared_tile(const double* __restrict__ mass, const float* __restrict__ on_right,
                             const float* __restrict__ on_left, double* __restrict__ right, double* __restrict__ left,
                             double* __restrict__ sum_right, double* __restrict__ sum_left) {
  for (int r = 0; r < kTile; ++r) {
    const double to_right = mass[r] * double(on_right[r]), to_left = mass[r] * double(on_left[r]);
    if constexpr (kKeep) {
      right[r] = to_right;
      left[r] = to_left;
    }
    sum_right[r] = kFirst ? to_right : sum_right[r] + to_right;
    sum_left[r] = kFirst ? to_left : sum_left[r] + to_left;
  }
}

template <typename T, bool kKeep>
inline void tree_shared_node(const TreeTable& tree, int64_t node, cpu::TreeSharedNode& at) {
  const T* row = tree_node<T>(tree, node);
  const float bias = to_acc(row[tree.dim]);
  float w[kTreeMostFeatures];
  for (int64_t j = 0; j < at.width; ++j) w[j] = j < tree.dim ? to_acc(row[j]) : 0.0f;
  double sum_right[kTile], sum_left[kTile];
  for (int64_t tile = 0; tile < at.tiles; ++tile) {
    float z[kTile], e[kTile], on_right[kTile], on_left[kTile];
    tree_shared_logits(w, bias, at.x + tile * at.width * kTile, at.width, z);
    // Two loops: in one, GCC takes the division once for each case of tree_exp.
    for (int r = 0; r < kTile; ++r) e[r] = tree_exp(z[r] < 0 ? -z[r] : z[r]);
    for (int r = 0; r < kTile; ++r) {
      const TreeSplit split = tree_split(z[r], e[r]);
      on_right[r] = split.right;
      on_left[r] = split.left;
    }
    const int64_t first = tile * kTile;
    double *right = kKeep ? at.right + first : nullptr, *left = kKeep ? at.left + first : nullptr;
    if (tile == 0)
      tree_shared_tile<true, kKeep>(at.mass, on_right, on_left, right, left, sum_right, sum_left);
    else
      tree_shared_tile<false, kKeep>(at.mass + first, on_right, on_left, right, left, sum_right, sum_left);
  }
  at.sum_right = tree_shared_sum(sum_right);
  at.sum_left = tree_shared_sum(sum_left);
}

template <typename T>
inline void tree_shared_node(const TreeTable& tree, int64_t node, cpu::TreeSharedNode& at) {
  if (at.tiles == 0) {
    at.sum_right = at.sum_left = 0.0;
  } else if (at.right != nullptr) {
    tree_shared_node<T, true>(tree, node, at);
  } else {
    tree_shared_node<T, false>(tree, node, at);
  }
}

inline void tree_shared_any(const TreeTable& tree, int64_t node, cpu::TreeSharedNode& at) {
  if (tree.dtype == DType::kBFloat16) return tree_shared_node<BFloat16>(tree, node, at);
  tree_shared_node<float>(tree, node, at);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
