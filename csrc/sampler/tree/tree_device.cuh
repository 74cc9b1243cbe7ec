// A node of the tree on the GPU, for the kernels of tree_kernel.cuh and tree_shared_kernel.cuh.
#pragma once

#include "common/vec_load.cuh"
#include "sampler/tree/tree_base_math.h"

namespace samplex::SX_BACKEND_NS {

// w . x + b with the weights of a node in 16-byte loads; with kWideRow those of x too, which must be aligned for it.
template <typename T, bool kWideRow = false>
SX_DEVICE inline float tree_logit_vector(const TreeTable& tree, int64_t node, const float* x) {
  constexpr int kWidth = 16 / sizeof(T);
  const T* w = tree_node<T>(tree, node);
  const int dim = int(tree.dim);
  float lanes[kTreeLanes];
#pragma unroll
  for (int j = 0; j < kTreeLanes; ++j) lanes[j] = 0.0f;
  int c = 0;
  for (; c + kTreeLanes <= dim; c += kTreeLanes) {
    float weights[kTreeLanes];
#pragma unroll
    for (int j = 0; j < kTreeLanes; j += kWidth) load_values<kWidth>(w + c + j, weights + j);
    if constexpr (kWideRow) {
      float row[kTreeLanes];
#pragma unroll
      for (int j = 0; j < kTreeLanes; j += 4) load_values<4>(x + c + j, row + j);
#pragma unroll
      for (int j = 0; j < kTreeLanes; ++j) lanes[j] = lanes[j] + weights[j] * row[j];
    } else {
#pragma unroll
      for (int j = 0; j < kTreeLanes; ++j) lanes[j] = lanes[j] + weights[j] * x[c + j];
    }
  }
#pragma unroll
  for (int j = 0; j < kTreeLanes; ++j) {
    if (c + j < dim) lanes[j] = lanes[j] + to_acc(w[c + j]) * x[c + j];
  }
  // tree_sum written out: a loop over the steps would keep the lanes in memory.
#pragma unroll
  for (int j = 0; j < 8; ++j) lanes[j] = lanes[j] + lanes[j + 8];
#pragma unroll
  for (int j = 0; j < 4; ++j) lanes[j] = lanes[j] + lanes[j + 4];
  lanes[0] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  return lanes[0] + to_acc(w[dim]);
}

}  // namespace samplex::SX_BACKEND_NS
