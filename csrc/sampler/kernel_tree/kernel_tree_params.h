// The kernel tree (Blanc & Rendle 2018, Rawat et al. 2019): draws and log-probabilities, sums of leaves and of nodes.
//
// Classes lie in order in buckets of `leaf_size`; the buckets, filled up to 2^depth, are the leaves of a heap (root 1,
// children 2i and 2i + 1). Node i keeps the sum of the features of its classes. A query goes down by the products of
// its own features with the sums of both children, and chooses in the leaf by the closed form of the kernel. The
// rules are in kernel_tree_math.h, and in readable form in reference/kernel_tree.py.
#pragma once

#include <cstdint>

#include "common/launchers.h"

namespace samplex {

constexpr int kKernelTreeMostDepth = 40;      // levels; a level takes half of a Philox block
constexpr int kKernelTreeTopLevels = 7;       // levels whose values come from one GEMM over the batch
constexpr int kKernelTreeAlign = 16;          // features of a row: a multiple of this
constexpr int kKernelTreeRowAlign = 8;        // width of a class row: a multiple of this
constexpr int kKernelTreeUniformBlock = 255;  // Philox block of the epsilon-uniform component
constexpr int kKernelTreeWarps = 8;           // of a block of the GPU, which has a row
constexpr int kKernelTreeGrid = 2048;         // most blocks
constexpr int kKernelTreeSharedLeaf = 64;     // classes of a leaf that a warp keeps in shared memory

enum class LeafKernel : int { kGaussian = 0, kExponential = 1, kQuadratic = 2 };

struct KernelTree {
  const float* rows;  // [n, dim], zeros behind the true width
  const float* sums;  // [2^(depth + 1), stride], zeros behind the true number of features; row 0 is not used
  int64_t num_classes, dim, stride, leaf_size;
  int depth;
  LeafKernel kernel;
  float scale;     // nu or alpha
  double epsilon;  // share of the uniform distribution
};

// What a row's excluded classes leave.
struct KernelTreeRow {
  int64_t begin, end;  // the row's ids inside `exclude`, those below 0 cut off
  int64_t distinct;    // different ones among them
  double uniform;      // epsilon (n - distinct) / n
  double total;        // (1 - epsilon) P_tree(nothing excluded) + uniform: the mass that is left
  double log_total;
};
static_assert(sizeof(KernelTreeRow) == 48, "an int64 [B, 6] tensor holds B rows");

struct KernelTreeSampleParams {
  KernelTree tree;
  const float* h;                       // [B, dim]
  const float* phi;                     // [B, stride] features of h
  const float* top;                     // [B, 2^(top_levels + 1)] values of the nodes down to level top_levels
  const int64_t* key;                   // [2] seed, offset; nullptr with `given`
  const int64_t* given;                 // [B, m] classes to give the log-probability of; nullptr to draw
  const int64_t* exclude;               // [B, P] or [nnz] classes, rows ascending, -1 ignored; nullptr: none
  const int64_t* exclude_offsets;       // [B + 1], or nullptr for [B, P]
  int64_t exclude_width, exclude_size;  // P (0 with offsets), number of entries
  double* left;                         // [entries, depth + 1, 2] scratch with `exclude`: see kernel_tree_math.h
  KernelTreeRow* rows;                  // [B] scratch
  double* leaf;                         // [blocks, warps, leaf_size up to 32s, 1.5] scratch of the GPU for large leaves
  int64_t* ids;                         // [B, m] out, nullptr with `given`
  float* log_q;                         // [B, m] out
  float* clipped;                       // [B] out, nullptr with `given`: share of |value| below zero on the way
  int64_t batch, num_samples;
  int top_levels;
};

// Sums of leaves: leaf sums of classes [first, first + count) become the sums of their features (`old` and `ids` null),
// or those of the classes `ids`, ascending and different, grow by phi - old. An id of -1 is not a class; these come
// first.
struct KernelTreeLeavesParams {
  float* sums;         // [2^(depth + 1), stride]
  const float* phi;    // [count, stride]
  const float* old;    // [count, stride] or nullptr
  const int64_t* ids;  // [count] or nullptr
  const bool* taken;   // [count] or nullptr: entries that count; the others are left out
  const float* fresh;  // [count, dim] new class rows, or nullptr
  float* rows;         // [n, dim] where they go, with `fresh`
  float* peaks;        // [2, leaves + 1] or nullptr: largest |sum| of each changed leaf, now and ever
  int64_t first, count, stride, leaf_size, dim;
  int depth;
};

// Sums of inner nodes, bottom up: all, or those above the given leaves.
struct KernelTreeParentsParams {
  float* sums;            // [2^(depth + 1), stride]
  const int64_t* leaves;  // [count] ascending leaf numbers, -1 (no leaf) first, or nullptr for all
  int64_t count, stride;  // count: number of `leaves`, or of leaves that hold classes
  int depth;
};

SX_DECLARE_LAUNCHER(launch_kernel_tree_sample, KernelTreeSampleParams)
SX_DECLARE_LAUNCHER(launch_kernel_tree_leaves, KernelTreeLeavesParams)
SX_DECLARE_LAUNCHER(launch_kernel_tree_parents, KernelTreeParentsParams)

// ------------------------------------------------------------------------------------------------ CPU bodies
// A draw, a given class or an excluded one on its way down.
struct KernelTreeItem {
  uint32_t row, draw;  // draw: number of the draw, of the given class, or of the entry in `exclude`
  int64_t target;      // leaf it must go to, -1: free
  double product;      // of the branch probabilities so far, times 2^(512 scaled)
  uint64_t bits[2];    // random numbers of this level and the next
  float clipped;       // sum over the levels of the share of |value| below zero
  int32_t scaled;
};

// Items at one node: [begin, end) of the list.
struct KernelTreeGroup {
  int64_t node;
  int32_t begin, end;
};

// Work of one call of the CPU kernels.
struct KernelTreeWork {
  const KernelTreeSampleParams* params;
  KernelTreeItem* items[2];    // [count] each: this level and the next
  KernelTreeGroup* groups[2];  // [count] each
  int64_t* node;               // [count] node of item i of items[0] at level top_levels
  float* clipped;              // [rows, m] or nullptr
  int64_t first_row;           // of the rows in hand
  double* weights;             // [threads, leaf_size] scratch
  float* scores;               // [threads, leaf_size] scratch
  bool entries;                // the items are excluded classes: record what they see
};

namespace cpu {
// Items of rows [begin, end) through the top levels; of one subtree (a group at level top_levels) to the end.
void kernel_tree_top_avx2(const KernelTreeWork& work, int64_t begin, int64_t end);
void kernel_tree_top_avx512(const KernelTreeWork& work, int64_t begin, int64_t end);
void kernel_tree_subtree_avx2(const KernelTreeWork& work, KernelTreeGroup root, double* weights, float* scores);
void kernel_tree_subtree_avx512(const KernelTreeWork& work, KernelTreeGroup root, double* weights, float* scores);
// to = a + b, to += a - b, to = sum of `count` rows: `width` numbers.
void kernel_tree_add_avx2(float* to, const float* a, const float* b, int64_t width);
void kernel_tree_add_avx512(float* to, const float* a, const float* b, int64_t width);
// kept = to = a + b, `to` past the caches; `next_a` and `next_b` are wanted soon.
void kernel_tree_climb_avx2(float* to, float* kept, const float* a, const float* b, const float* next_a,
                            const float* next_b, int64_t width);
void kernel_tree_climb_avx512(float* to, float* kept, const float* a, const float* b, const float* next_a,
                              const float* next_b, int64_t width);
void kernel_tree_change_avx2(float* to, const float* a, const float* b, int64_t width);
void kernel_tree_change_avx512(float* to, const float* a, const float* b, int64_t width);
// Largest |number| of `width`, nan if there is one.
float kernel_tree_peak_avx2(const float* sums, int64_t width);
float kernel_tree_peak_avx512(const float* sums, int64_t width);
void kernel_tree_total_avx2(float* to, const float* rows, int64_t count, int64_t width);
void kernel_tree_total_avx512(float* to, const float* rows, int64_t count, int64_t width);
}  // namespace cpu

}  // namespace samplex
