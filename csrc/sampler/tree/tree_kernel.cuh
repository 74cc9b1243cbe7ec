// The tree on the GPU. The arithmetic, and with it every bit of a draw, is that of tree_math.h.
//
//   tree_project_kernel   features to what the nodes see: a block has 8 rows and 16 of the projected features
//   tree_sample_kernel    a block has a row: its top levels are scored once into shared memory, then a thread takes a
//                         draw (or a given id) down the rest, one node a level: three sectors in float32, two in
//                         bfloat16
//   tree_logits_kernel    w . x + b of every node, one thread each;  tree_all_kernel walks to every class with them
//   tree_topk_kernel      beam search: a block has a row, candidates are sorted in shared memory
#pragma once

#include "sampler/tree/tree_device.cuh"

namespace samplex::SX_BACKEND_NS {

constexpr int kTreeThreads = 64;  // draws of a row that go down together
constexpr int kTreeTop = 6;       // levels in shared memory: 63 nodes, one a thread
constexpr int kTreeSortThreads = 128;

// ------------------------------------------------------------------------------------------------ projection
constexpr int kProjectRows = 8, kProjectWide = 16;
constexpr int kProjectThreads = kProjectRows * kProjectWide;

// A thread has one row and one projected feature; both sides of the product come through shared memory, a chunk of
// features at a time.
__global__ void __launch_bounds__(kProjectThreads) tree_project_kernel(TreeProjectParams p) {
  __shared__ float centred[kProjectRows][kTreeProjectChunk + 1];
  __shared__ float weights[kTreeProjectChunk][kProjectWide];
  const int row = int(threadIdx.x) / kProjectWide, column = int(threadIdx.x) % kProjectWide;
  const int64_t column_blocks = (p.dim + kProjectWide - 1) / kProjectWide;
  const int64_t tiles = (p.batch + kProjectRows - 1) / kProjectRows * column_blocks;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / column_blocks * kProjectRows, first = tile % column_blocks * kProjectWide;
    float total = 0.0f;
    for (int64_t c = 0; c < p.features; c += kTreeProjectChunk) {
      const int length = int(p.features - c < kTreeProjectChunk ? p.features - c : kTreeProjectChunk);
      __syncthreads();
      for (int i = threadIdx.x; i < kProjectRows * kTreeProjectChunk; i += kProjectThreads) {
        const int r = i / kTreeProjectChunk, at = i % kTreeProjectChunk;
        const bool there = at < length && first_row + r < p.batch;
        centred[r][at] = there ? p.x[(first_row + r) * p.features + c + at] - p.mean[c + at] : 0.0f;
      }
      for (int i = threadIdx.x; i < kTreeProjectChunk * kProjectWide; i += kProjectThreads) {
        const int at = i / kProjectWide, j = i % kProjectWide;
        const bool there = at < length && first + j < p.dim;
        weights[at][j] = there ? p.projection[(c + at) * p.dim + first + j] : 0.0f;
      }
      __syncthreads();
      float sum = 0.0f;
      for (int i = 0; i < length; ++i) sum = sum + centred[row][i] * weights[i][column];
      total = total + sum;
    }
    if (first_row + row < p.batch && first + column < p.dim) p.z[(first_row + row) * p.dim + first + column] = total;
  }
}

// ------------------------------------------------------------------------------------------------ draws, given ids
template <typename T, bool kBase>
__global__ void __launch_bounds__(kTreeThreads, 8) tree_sample_kernel(TreeSampleParams p) {
  __shared__ float top[1 << kTreeTop];
  SX_DYN_SMEM(float, x);  // [dim]
  const TreeTable& tree = p.tree;
  const int top_levels = tree.depth < kTreeTop ? tree.depth : kTreeTop;
  const PhiloxKey key = philox_key(p.key, p.key_row);
  for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
    __syncthreads();
    for (int c = threadIdx.x; c < tree.dim; c += kTreeThreads) x[c] = p.x[b * tree.dim + c];
    __syncthreads();
    const int node = int(threadIdx.x);
    if (node >= 1 && node < 1 << top_levels) top[node] = tree_logit_vector<T>(tree, node, x);
    __syncthreads();
    const auto logit = [&](int64_t at, int level) {
      return level < top_levels ? top[at] : tree_logit_vector<T>(tree, at, x);
    };
    const TreeExcluded out = excluded_of(p, b);
    if (out.count > 0) {
      for (int64_t i = threadIdx.x; i < out.count * tree.depth; i += kTreeThreads) {
        const int64_t which = i / tree.depth;
        const int level = int(i - which * tree.depth);
        // Clamped: on CUDA the leaves have not been checked, and only the ends of the row are cut off.
        const int64_t leaf = out.leaves[which], last = (int64_t(1) << tree.depth) - 1;
        const int64_t at = ancestor(tree, leaf < 0 ? 0 : leaf > last ? last : leaf, level);
        out.left[which * (tree.depth + 1) + level] = double(logit(at, level));
      }
      __syncthreads();
      if (threadIdx.x == 0) tree_left(tree, out);
      __syncthreads();
    }
    if constexpr (kBase) {
      const StaticSampleParams law = tree_base_law(p);
      const TreeMix mix = tree_mix(p, law, out, b);
      for (int64_t k = threadIdx.x; k < p.num_samples; k += kTreeThreads) {
        const int64_t at = b * p.num_samples + k;
        if (p.given != nullptr) {
          p.log_q[at] = given_mixed_log_q(p, mix, out, p.given[at], logit);
        } else {
          const TreeDraw drawn = tree_mixed_draw(p, law, mix, out, key, b, k, logit);
          p.ids[at] = drawn.id;
          p.log_q[at] = drawn.log_q;
        }
      }
    } else {
      for (int64_t k = threadIdx.x; k < p.num_samples; k += kTreeThreads) {
        const int64_t at = b * p.num_samples + k;
        if (p.given != nullptr) {
          p.log_q[at] = given_log_q(p, out, p.given[at], logit);
        } else {
          const TreeDraw drawn = tree_draw(p, out, key, b, k, logit);
          p.ids[at] = drawn.id;
          p.log_q[at] = drawn.log_q;
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ every class
template <typename T>
__global__ void __launch_bounds__(kTreeSortThreads) tree_logits_kernel(TreeAllParams p) {
  const int64_t nodes = int64_t(1) << p.tree.depth, count = p.batch * nodes;
  const int64_t stride = int64_t(gridDim.x) * kTreeSortThreads;
  for (int64_t i = int64_t(blockIdx.x) * kTreeSortThreads + threadIdx.x; i < count; i += stride) {
    const int64_t b = i >> p.tree.depth, node = i & (nodes - 1);
    p.logits[i] = node == 0 ? 0.0f : tree_logit_vector<T>(p.tree, node, p.x + b * p.tree.dim);
  }
}

template <bool kBase>
__global__ void __launch_bounds__(kTreeSortThreads) tree_all_kernel(TreeAllParams p) {
  [[maybe_unused]] double w = 0.0, all = 1.0;
  if constexpr (kBase) {
    w = p.base.weight;
    all = double(p.base.prefix[int64_t(1) << p.tree.depth]);
  }
  const int64_t classes = p.tree.num_classes, count = p.batch * classes;
  const int64_t stride = int64_t(gridDim.x) * kTreeSortThreads;
  for (int64_t i = int64_t(blockIdx.x) * kTreeSortThreads + threadIdx.x; i < count; i += stride) {
    const int64_t b = i / classes;
    const float* logits = p.logits + (b << p.tree.depth);
    const auto logit = [&](int64_t node, int) { return logits[node]; };
    const int64_t leaf = leaf_of(p.tree, i - b * classes);
    if constexpr (kBase) {
      float log_p = quiet_nan<float>();
      if (leaf >= 0) {
        const TreePath path = tree_path(p.tree, leaf, logit);
        const double of_base = w / all * double(tree_base_units(p.base, leaf));
        log_p = float(tree_mixed_log(1.0 - w, tree_log_share(1.0 - w), path.minor, path.product, of_base));
      }
      p.log_p[i] = log_p;
    } else {
      p.log_p[i] = leaf < 0 ? quiet_nan<float>() : float(path_log_p(p.tree, leaf, logit));
    }
  }
}

// ------------------------------------------------------------------------------------------------ beam search
// Candidates as arrays in shared memory, `size` of them, a power of two.
struct TreeBeam {
  double *log_p, *minor, *product;
  int64_t* node;
  int size;

  SX_DEVICE bool before(int a, int b) const {
    return log_p[a] > log_p[b] || (log_p[a] == log_p[b] && node[a] < node[b]);
  }
  SX_DEVICE void put(int i, int64_t at, const TreePath& path, double value) const {
    log_p[i] = value;
    node[i] = at;
    minor[i] = path.minor;
    product[i] = path.product;
  }
  SX_DEVICE void swap(int a, int b) const {
    const double value = log_p[a];
    const int64_t at = node[a];
    const TreePath path = {minor[a], product[a]};
    put(a, node[b], {minor[b], product[b]}, log_p[b]);
    put(b, at, path, value);
  }
  // Bitonic: the same comparisons whatever the numbers are.
  SX_DEVICE void sort() const {
    for (int width = 2; width <= size; width *= 2) {
      for (int step = width / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += kTreeSortThreads) {
          const int other = i ^ step;
          if (other > i && before(other, i) == ((i & width) == 0)) swap(i, other);
        }
      }
    }
    __syncthreads();
  }
};

template <typename T>
__global__ void __launch_bounds__(kTreeSortThreads, 4) tree_topk_kernel(TreeTopkParams p, int size) {
  SX_DYN_SMEM(double, memory);  // four arrays of `size`
  const TreeBeam beam = {memory, memory + size, memory + 2 * size, reinterpret_cast<int64_t*>(memory + 3 * size), size};
  const TreeTable& tree = p.tree;
  constexpr double kNone = negative_infinity<double>();
  constexpr int64_t kNowhere = int64_t(1) << 62;
  const int64_t b = blockIdx.x;
  const float* x = p.x + b * tree.dim;
  const int half = size / 2;  // >= beam: parents lie in [0, half), children of i go to i and half + i
  for (int i = threadIdx.x; i < size; i += kTreeSortThreads) {
    beam.put(i, i == 0 ? 1 : kNowhere, TreePath(), i == 0 ? 0.0 : kNone);
  }
  __syncthreads();
  for (int level = 0; level < tree.depth; ++level) {
    for (int i = threadIdx.x; i < half; i += kTreeSortThreads) {
      const int64_t node = beam.node[i];
      if (i < p.beam && node != kNowhere) {
        const float z = tree_logit_vector<T>(tree, node, x), e = tree_exp(z < 0 ? -z : z);
        TreePath left = {beam.minor[i], beam.product[i]}, right = left;
        left.step(z, e, false);
        right.step(z, e, true);
        const double on_left = left.log_p(), on_right = right.log_p();
        // A nan row keeps no candidate; neither does a child that holds padding only.
        beam.put(i, on_left > kNone ? 2 * node : kNowhere, left, on_left > kNone ? on_left : kNone);
        beam.put(half + i, on_right > kNone ? 2 * node + 1 : kNowhere, right, on_right > kNone ? on_right : kNone);
      } else {
        beam.put(i, kNowhere, TreePath(), kNone);
        beam.put(half + i, kNowhere, TreePath(), kNone);
      }
    }
    beam.sort();
  }
  const int64_t leaves = int64_t(1) << tree.depth;
  for (int i = threadIdx.x; i < size; i += kTreeSortThreads) {
    const int64_t at = i < p.beam && beam.node[i] != kNowhere ? class_at(tree, beam.node[i] - leaves) : -1;
    const bool found = at >= 0;
    const int64_t id = found ? at : kNowhere;
    beam.put(i, id, TreePath(), found ? double(float(beam.log_p[i])) : kNone);
  }
  beam.sort();
  for (int k = threadIdx.x; k < p.k; k += kTreeSortThreads) {
    const bool found = beam.node[k] != kNowhere;
    p.ids[b * p.k + k] = found ? beam.node[k] : -1;
    p.log_p[b * p.k + k] = found ? float(beam.log_p[k]) : negative_infinity<float>();
  }
}

}  // namespace samplex::SX_BACKEND_NS
