// The kernel tree on the CPU: the choice of the SIMD level, the order of the work, the scalar bodies.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "sampler/kernel_tree/kernel_tree_cpu_rows.h"

namespace samplex::cpu {
namespace {

constexpr int64_t kItems = int64_t(1) << 20;  // under way at a time: bounds the scratch memory
constexpr int64_t kTasks = 16;                // a subtree with more than this share of the items is cut by rows

void kernel_tree_top_scalar(const KernelTreeWork& work, int64_t begin, int64_t end) {
  kernel_tree_top(work, begin, end);
}

void kernel_tree_subtree_scalar(const KernelTreeWork& work, KernelTreeGroup root, double* weights, float* scores) {
  kernel_tree_subtree(work, root, weights, scores);
}

void kernel_tree_add_scalar(float* to, const float* a, const float* b, int64_t width) {
  kernel_tree_add(to, a, b, width);
}

void kernel_tree_change_scalar(float* to, const float* a, const float* b, int64_t width) {
  kernel_tree_change(to, a, b, width);
}

void kernel_tree_total_scalar(float* to, const float* rows, int64_t count, int64_t width) {
  kernel_tree_total(to, rows, count, width);
}

struct Bodies {
  decltype(&kernel_tree_top_scalar) top;
  decltype(&kernel_tree_subtree_scalar) subtree;
  decltype(&kernel_tree_add_scalar) add;
  decltype(&kernel_tree_change_scalar) change;
  decltype(&kernel_tree_total_scalar) total;
};

Bodies bodies() {
  const SimdLevel level = simd_level();
  return {SX_SIMD_BODY(level, kernel_tree_top), SX_SIMD_BODY(level, kernel_tree_subtree),
          SX_SIMD_BODY(level, kernel_tree_add), SX_SIMD_BODY(level, kernel_tree_change),
          SX_SIMD_BODY(level, kernel_tree_total)};
}

size_t work_bytes(const KernelTreeSampleParams& p, int64_t items) {
  const size_t per_item = 2 * (sizeof(KernelTreeItem) + sizeof(KernelTreeGroup)) + sizeof(int64_t) + sizeof(float);
  return per_item * size_t(items) + (sizeof(double) + sizeof(float)) * size_t(p.tree.leaf_size);
}

// Items in the order of their nodes at level top_levels: items[0] -> items[1], and the subtrees they stand at.
std::vector<KernelTreeGroup> subtrees(const KernelTreeWork& work, int64_t count) {
  const int levels = work.params->top_levels;
  const int64_t first = int64_t(1) << levels;
  std::vector<int32_t> begin(size_t(first) + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (work.node[i] >= 0) ++begin[size_t(work.node[i] - first) + 1];
  }
  for (size_t j = 1; j < begin.size(); ++j) begin[j] += begin[j - 1];
  std::vector<int32_t> at(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    if (work.node[i] >= 0) work.items[1][at[size_t(work.node[i] - first)]++] = work.items[0][i];
  }
  // Threads share the subtrees; one that holds most of the items would keep the others waiting.
  const int32_t most = int32_t(std::max<int64_t>(64, count / kTasks));
  std::vector<KernelTreeGroup> tasks;
  for (int64_t j = 0; j < first; ++j) {
    int32_t from = begin[size_t(j)];
    const int32_t end = begin[size_t(j) + 1];
    while (from < end) {
      int32_t to = std::min(end, from + most);
      while (to < end && work.items[1][to].row == work.items[1][to - 1].row) ++to;
      tasks.push_back({first + j, from, to});
      from = to;
    }
  }
  return tasks;
}

void descend(const Bodies& body, const KernelTreeWork& work, int64_t first_row, int64_t end_row, int64_t count) {
  if (count == 0) return;
  parallel_for_shared(end_row - first_row, 8,
                      [&](int64_t begin, int64_t end) { body.top(work, first_row + begin, first_row + end); });
  const std::vector<KernelTreeGroup> tasks = subtrees(work, count);
  const size_t leaf = size_t(work.params->tree.leaf_size);
  parallel_for_shared(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<double> weights(leaf);
    std::vector<float> scores(leaf);
    for (int64_t i = begin; i < end; ++i) body.subtree(work, tasks[size_t(i)], weights.data(), scores.data());
  });
}

}  // namespace

void launch_kernel_tree_sample(const KernelTreeSampleParams& p) {
  const Bodies body = bodies();
  const int64_t m = p.num_samples, rows_at_once = std::max<int64_t>(1, kItems / std::max<int64_t>(1, m));
  for (int64_t b = 0; b < p.batch; ++b) p.rows[b] = kernel_tree_find_row(p, b);
  for (int64_t first = 0; first < p.batch; first += rows_at_once) {
    const int64_t end = std::min(p.batch, first + rows_at_once);
    const int64_t entries = p.exclude != nullptr ? p.rows[end - 1].end - p.rows[first].begin : 0;
    const int64_t count = std::max((end - first) * m, entries);
    Workspace memory(work_bytes(p, count));
    KernelTreeWork work = {};
    work.params = &p;
    work.first_row = first;
    work.items[0] = static_cast<KernelTreeItem*>(memory.data());
    work.items[1] = work.items[0] + count;
    work.groups[0] = reinterpret_cast<KernelTreeGroup*>(work.items[1] + count);
    work.groups[1] = work.groups[0] + count;
    work.node = reinterpret_cast<int64_t*>(work.groups[1] + count);
    work.clipped = reinterpret_cast<float*>(work.node + count);
    if (entries > 0) {
      // Entries below 0 lie between the rows and belong to none.
      std::fill(work.node, work.node + entries, -1);
      work.entries = true;
      descend(body, work, first, end, entries);
      work.entries = false;
    }
    parallel_for(end - first, 64, [&](int64_t from, int64_t to) {
      for (int64_t b = first + from; b < first + to; ++b) {
        const KernelTreeExcluded out = kernel_tree_excluded(p, b);
        if (out.count > 0) kernel_tree_keep(p.tree, out);
        kernel_tree_row_mass(p.tree, out, p.rows[b]);
      }
    });
    descend(body, work, first, end, (end - first) * m);
    if (p.clipped == nullptr) continue;
    for (int64_t b = first; b < end; ++b) {
      float sum = 0.0f;
      for (int64_t k = 0; k < m; ++k) sum += work.clipped[(b - first) * m + k];
      p.clipped[b] = sum / float(std::max<int64_t>(1, m * p.tree.depth));
    }
  }
}

void launch_kernel_tree_leaves(const KernelTreeLeavesParams& p) {
  const Bodies body = bodies();
  const int64_t leaves = int64_t(1) << p.depth, bytes = p.stride * int64_t(sizeof(float));
  const int64_t chunk = std::max<int64_t>(1, 262144 / std::max<int64_t>(1, bytes));
  if (p.ids == nullptr) {
    const int64_t first_leaf = p.first / p.leaf_size, count = (p.count + p.leaf_size - 1) / p.leaf_size;
    parallel_for_shared(count, std::max<int64_t>(1, chunk / p.leaf_size), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t rows = std::min(p.leaf_size, p.count - i * p.leaf_size);
        body.total(p.sums + (leaves + first_leaf + i) * p.stride, p.phi + i * p.leaf_size * p.stride, rows, p.stride);
      }
    });
    return;
  }
  // A range takes the leaves that begin in it. Entries of -1, which are no class, come first.
  const int64_t none = std::lower_bound(p.ids, p.ids + p.count, int64_t(0)) - p.ids;
  const auto leaf_of = [&](int64_t i) { return p.ids[i] / p.leaf_size; };
  parallel_for_shared(p.count - none, chunk, [&](int64_t begin, int64_t end) {
    int64_t i = none + begin;
    end += none;
    while (i > none && i < end && leaf_of(i) == leaf_of(i - 1)) ++i;
    if (i == end) return;
    for (; i < p.count && (i < end || leaf_of(i) == leaf_of(i - 1)); ++i) {
      const int64_t leaf = leaf_of(i);
      float* sum = p.sums + (leaves + leaf) * p.stride;
      if (p.taken == nullptr || p.taken[i]) {
        body.change(sum, p.phi + i * p.stride, p.old + i * p.stride, p.stride);
        if (p.fresh != nullptr) std::copy_n(p.fresh + i * p.dim, p.dim, p.rows + p.ids[i] * p.dim);
      }
      if (p.peaks != nullptr && (i + 1 == p.count || leaf_of(i + 1) != leaf)) {
        float most = 0.0f, *peak = p.peaks + leaves + 1 + leaf;
        for (int64_t c = 0; c < p.stride; ++c) most = max_nan(most, sum[c] < 0.0f ? -sum[c] : sum[c]);
        p.peaks[leaf] = most;
        *peak = max_nan(*peak, most);
      }
    }
  });
}

void launch_kernel_tree_parents(const KernelTreeParentsParams& p) {
  const Bodies body = bodies();
  const int64_t chunk = std::max<int64_t>(1, 65536 / (p.stride * int64_t(sizeof(float))));
  std::vector<int64_t> nodes;
  int64_t count = p.count;
  if (p.leaves != nullptr) {
    const int64_t* from = std::lower_bound(p.leaves, p.leaves + count, int64_t(0));  // -1 is no leaf
    count -= from - p.leaves;
    nodes.resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) nodes[size_t(i)] = (int64_t(1) << p.depth) + from[i];
  }
  for (int level = p.depth - 1; level >= 0; --level) {
    const int64_t first = int64_t(1) << level;
    if (p.leaves != nullptr) {
      size_t kept = 0;
      for (size_t i = 0; i < size_t(count); ++i) {
        const int64_t parent = nodes[i] >> 1;
        if (kept == 0 || nodes[kept - 1] != parent) nodes[kept++] = parent;
      }
      count = int64_t(kept);
    } else {
      count = (count + 1) / 2;
    }
    parallel_for_shared(count, chunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t node = p.leaves != nullptr ? nodes[size_t(i)] : first + i;
        const float* left = p.sums + 2 * node * p.stride;
        body.add(p.sums + node * p.stride, left, left + p.stride, p.stride);
      }
    });
  }
}

}  // namespace samplex::cpu
