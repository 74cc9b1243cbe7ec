// The probabilistic decision tree (Bamler & Mandt 2020): draws, log-probabilities, the most probable classes.
//
// A balanced tree over 2^depth leaves in heap order: root 1, children 2i and 2i + 1, leaf j at 2^depth + j. At node i a
// row with projected features x goes right with probability sigmoid(w_i . x + b_i). b = +inf or -inf sends every row to
// one side: the other holds padding only, which so has probability exactly 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {

constexpr int kTreeMostDepth = 40;  // levels; a level takes half of a Philox block, 256 blocks are there
constexpr int kTreeMostBeam = 512;  // what a block of the GPU sorts in shared memory
constexpr int kTreeMostFeatures = 1024;

// Node i is one aligned row: `dim` weights, the bias, zeros up to `stride` numbers (a multiple of 32 bytes).
struct TreeTable {
  const void* nodes;          // [2^depth, stride] float32 or bfloat16; row 0 is not used
  const int64_t* leaf_class;  // [2^depth], -1 for padding
  const int64_t* class_leaf;  // [C]
  int64_t num_classes, dim, stride;
  int depth;
  DType dtype;
};

// A fixed law that is mixed into the tree's (tree_base_math.h), over the leaves; table nullptr: none.
struct TreeBase {
  const AliasEntry* table = nullptr;  // [2^depth]
  const int64_t* prefix = nullptr;    // [2^depth + 1] running sums of the integer weights
  double weight = 0.0;                // w in (0, 1]
};

struct TreeSampleParams {
  TreeTable tree;
  TreeBase base;
  const float* x;                       // [B, dim]
  const int64_t* key;                   // [2] seed, offset; nullptr with `given`
  bool key_row;                         // whether a third number follows: that of the first row
  const int64_t* given;                 // [B, m] classes to give the log-probability of; nullptr to draw
  const int64_t* exclude;               // [B, P] or [nnz] leaves, rows ascending, -1 ignored; nullptr: none
  const int64_t* exclude_offsets;       // [B + 1], or nullptr for [B, P]
  int64_t exclude_width, exclude_size;  // P (0 with offsets), number of entries
  double* left;                         // [entries, depth + 1] scratch with `exclude`: see tree_left
  int64_t* ids;                         // [B, m] out, nullptr with `given`
  float* log_q;                         // [B, m] out
  int64_t batch, num_samples;
};

// z = (x - mean) projection: what the nodes see of a row of features.
struct TreeProjectParams {
  const float* x;           // [B, K]
  const float* mean;        // [K]
  const float* projection;  // [K, dim]
  float* z;                 // [B, dim] out
  int64_t batch, features, dim;
};

struct TreeAllParams {
  TreeTable tree;
  TreeBase base;
  const float* x;  // [B, dim]
  float* logits;   // [B, 2^depth] scratch of the GPU kernels: w . x + b of every node
  float* log_p;    // [B, C] out
  int64_t batch;
};

struct TreeTopkParams {
  TreeTable tree;
  const float* x;  // [B, dim]
  float* log_p;    // [B, k] out, descending; -inf behind the last class that was found
  int64_t* ids;    // [B, k] out, -1 likewise
  int64_t batch, beam, k;
};

SX_DECLARE_LAUNCHER(launch_tree_project, TreeProjectParams)
SX_DECLARE_LAUNCHER(launch_tree_sample, TreeSampleParams)
SX_DECLARE_LAUNCHER(launch_tree_log_prob_all, TreeAllParams)
SX_DECLARE_LAUNCHER(launch_tree_topk, TreeTopkParams)

// ISA bodies: rows [begin, end).
namespace cpu {
// Scratch of a beam search, one row at a time.
struct TreeBeamLevel {
  int64_t node[kTreeMostBeam];  // ascending
  double minor[kTreeMostBeam], product[kTreeMostBeam], log_p[kTreeMostBeam];
  int64_t count;
};
struct TreeBeamScratch {
  TreeBeamLevel levels[2];
  float z[kTreeMostBeam];
  double log_product[kTreeMostBeam];
  double minor[2][kTreeMostBeam];  // of the left children, of the right ones
  int64_t key[2 * kTreeMostBeam];  // of the left children, behind them of the right ones
};

void tree_project_rows_avx2(const TreeProjectParams& params, int64_t begin, int64_t end);
void tree_project_rows_avx512(const TreeProjectParams& params, int64_t begin, int64_t end);
void tree_sample_rows_avx2(const TreeSampleParams& params, int64_t begin, int64_t end);
void tree_sample_rows_avx512(const TreeSampleParams& params, int64_t begin, int64_t end);
void tree_log_prob_all_rows_avx2(const TreeAllParams& params, int64_t begin, int64_t end, double* minor,
                                 double* product);
void tree_log_prob_all_rows_avx512(const TreeAllParams& params, int64_t begin, int64_t end, double* minor,
                                   double* product);
// Returns the leaves the beam reaches from a row, inside `scratch`.
const TreeBeamLevel& tree_beam_avx2(const TreeTopkParams& params, int64_t row, TreeBeamScratch& scratch);
const TreeBeamLevel& tree_beam_avx512(const TreeTopkParams& params, int64_t row, TreeBeamScratch& scratch);
}  // namespace cpu

}  // namespace samplex
