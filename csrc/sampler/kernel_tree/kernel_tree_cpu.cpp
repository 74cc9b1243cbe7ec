// The kernel tree on the CPU: the choice of the SIMD level, the order of the work, the scalar bodies.
#include <algorithm>
#include <atomic>
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

void kernel_tree_climb_scalar(float* to, float* kept, const float* a, const float* b, const float* next_a,
                              const float* next_b, int64_t width) {
  kernel_tree_climb(to, kept, a, b, next_a, next_b, width);
}

void kernel_tree_change_scalar(float* to, const float* a, const float* b, int64_t width) {
  kernel_tree_change(to, a, b, width);
}

float kernel_tree_peak_scalar(const float* sums, int64_t width) { return kernel_tree_peak(sums, width); }

void kernel_tree_total_scalar(float* to, const float* rows, int64_t count, int64_t width) {
  kernel_tree_total(to, rows, count, width);
}

struct Bodies {
  decltype(&kernel_tree_top_scalar) top;
  decltype(&kernel_tree_subtree_scalar) subtree;
  decltype(&kernel_tree_add_scalar) add;
  decltype(&kernel_tree_climb_scalar) climb;
  decltype(&kernel_tree_change_scalar) change;
  decltype(&kernel_tree_peak_scalar) peak;
  decltype(&kernel_tree_total_scalar) total;
};

Bodies bodies() {
  const SimdLevel level = simd_level();
  return {SX_SIMD_BODY(level, kernel_tree_top),    SX_SIMD_BODY(level, kernel_tree_subtree),
          SX_SIMD_BODY(level, kernel_tree_add),    SX_SIMD_BODY(level, kernel_tree_climb),
          SX_SIMD_BODY(level, kernel_tree_change), SX_SIMD_BODY(level, kernel_tree_peak),
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

// ------------------------------------------------------------------------------------------------ the way up
constexpr int kUpperLevels = 7;                   // levels above the subtrees that threads share
constexpr int64_t kStreamed = int64_t(16) << 20;  // bytes of changed sums that no cache keeps until they are read
constexpr int kClimbAhead = 2;                    // additions ahead whose rows are fetched

// One addition: to = a + b. `kept` is where the next one finds the result.
struct Climb {
  float *to, *kept;
  const float *a, *b;
};

void add_children(const Bodies& body, const KernelTreeParentsParams& p, int64_t node) {
  const float* left = p.sums + 2 * node * p.stride;
  body.add(p.sums + node * p.stride, left, left + p.stride, p.stride);
}

// The additions above the leaves [begin, end), ascending and different, up to the node `levels` above all of them, each
// as soon as both children are there. `slots` [levels, 2, stride]: the last left and right result of each level, from
// where additions take them; nullptr: from the sums.
void plan_climb(const KernelTreeParentsParams& p, const int64_t* begin, const int64_t* end, int levels, float* slots,
                std::vector<Climb>& plan) {
  int64_t held[kKernelTreeMostDepth + 1][2] = {};  // nodes whose results are in the slots
  plan.clear();
  const auto place = [&](int64_t node, int level) -> const float* {
    const bool there = slots != nullptr && level > 0 && held[level][node & 1] == node;
    return there ? slots + (2 * (level - 1) + (node & 1)) * p.stride : p.sums + node * p.stride;
  };
  for (const int64_t* leaf = begin; leaf != end; ++leaf) {
    // Nodes that are above the next leaf as well wait for it.
    const int top = leaf + 1 == end ? levels : 63 - __builtin_clzll(uint64_t(leaf[0] ^ leaf[1]));
    for (int level = 1; level <= top; ++level) {
      const int64_t node = ((int64_t(1) << p.depth) + *leaf) >> level;
      const float *a = place(2 * node, level - 1), *b = place(2 * node + 1, level - 1);
      float* to = p.sums + node * p.stride;
      held[level][node & 1] = node;
      plan.push_back({to, slots != nullptr ? slots + (2 * (level - 1) + (node & 1)) * p.stride : to, a, b});
    }
  }
}

// Sums above the given leaves, each read or written once: threads share the subtrees below kUpperLevels.
void climb(const Bodies& body, const KernelTreeParentsParams& p) {
  std::vector<int64_t> leaves(std::lower_bound(p.leaves, p.leaves + p.count, int64_t(0)), p.leaves + p.count);
  leaves.erase(std::unique(leaves.begin(), leaves.end()), leaves.end());
  const int levels = std::max(0, p.depth - kUpperLevels);  // of a subtree
  std::vector<size_t> starts;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (i == 0 || leaves[i] >> levels != leaves[i - 1] >> levels) starts.push_back(i);
  }
  starts.push_back(leaves.size());
  const int64_t bytes = int64_t(leaves.size()) * p.stride * int64_t(sizeof(float)) * 2;
  const bool streamed = bytes > kStreamed && reinterpret_cast<uintptr_t>(p.sums) % 64 == 0;
  if (levels > 0) {
    parallel_for_shared(int64_t(starts.size()) - 1, 1, [&](int64_t begin, int64_t end) {
      std::vector<Climb> plan;
      std::vector<float> slots(streamed ? size_t(2 * levels * p.stride) : 0);
      for (int64_t i = begin; i < end; ++i) {
        plan_climb(p, leaves.data() + starts[size_t(i)], leaves.data() + starts[size_t(i) + 1], levels,
                   streamed ? slots.data() : nullptr, plan);
        for (size_t k = 0; k < plan.size(); ++k) {
          const Climb &now = plan[k], &soon = plan[std::min(k + kClimbAhead, plan.size() - 1)];
          if (streamed)
            body.climb(now.to, now.kept, now.a, now.b, soon.a, soon.b, p.stride);
          else
            body.add(now.to, now.a, now.b, p.stride);
        }
      }
      std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed numbers before the end of the loop
    });
  }
  std::vector<int64_t> nodes;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    nodes.push_back(((int64_t(1) << p.depth) + leaves[starts[i]]) >> levels);
  }
  while (!nodes.empty() && nodes.front() > 1) {
    for (int64_t& node : nodes) node >>= 1;
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    for (const int64_t node : nodes) add_children(body, p, node);
  }
}

// ------------------------------------------------------------------------------------------------ draws
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
        float* const peak = p.peaks + leaves + 1 + leaf;
        const float most = body.peak(sum, p.stride);
        p.peaks[leaf] = most;
        *peak = max_nan(*peak, most);
      }
    }
  });
}

void launch_kernel_tree_parents(const KernelTreeParentsParams& p) {
  const Bodies body = bodies();
  if (p.leaves != nullptr) return climb(body, p);
  const int64_t chunk = std::max<int64_t>(1, 65536 / (p.stride * int64_t(sizeof(float))));
  for (int level = p.depth - 1; level >= 0; --level) {
    const int64_t first = int64_t(1) << level;
    parallel_for_shared(first, chunk, [&](int64_t begin, int64_t end) {
      for (int64_t node = first + begin; node < first + end; ++node) add_children(body, p, node);
    });
  }
}

}  // namespace samplex::cpu
