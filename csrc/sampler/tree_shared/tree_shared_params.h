// Draws that a whole batch shares, from the mean of its rows' distributions: q(y) = 1/B sum over b of p(y | x_b).
//
// That mixture is a tree distribution itself. With mass_b(i) the probability that row b comes to node i, a shared draw
// at node i goes right with probability
//   R / (R + L),   R = sum over b of mass_b(i) P(right | i, x_b),   L the same of the left child,
// and log q of a class is the sum of the logarithms along its path: the distribution that is drawn from, to the last
// bit. A node is scored once for all rows and all draws that pass it, so that m draws cost O(B k) for each node they
// visit, not for each draw and level.
//
// Stratified draws are not independent: draw i is the class at the place (i + u_i) / m of [0, 1), where every class has
// an interval of length q in the order of the leaves. A class still comes m q times in expectation, and never two more
// or two fewer than that; no sum over the draws has a larger variance than with independent ones. One random number
// takes a draw all the way, and draws that pass a node are adjacent.
#pragma once

#include <cstdint>

#include "common/launchers.h"
#include "sampler/tree/tree_params.h"

namespace samplex {

// Rows are added up in this many lanes, row b in lane b mod 64 in ascending order, and the lanes by halves: the same
// bits on every backend.
constexpr int kTreeSharedLanes = 64;
// Rows whose masses a block of the GPU keeps in shared memory; with more it takes `masses`. It then has more threads,
// and there are fewer blocks: as many as are resident at a time on a large GPU, so that their masses stay in its L2
// cache.
constexpr int64_t kTreeSharedRows = 2048;
constexpr int64_t tree_shared_blocks(int64_t batch, int64_t num_samples) {
  const int64_t most = batch > kTreeSharedRows ? 320 : 1024;
  return num_samples < most ? num_samples : most;
}

struct TreeSharedParams {
  TreeTable tree;
  TreeBase base;         // its table is not used: a node has the running sums of the leaves below it
  const float* x;        // [B, dim]; a row with a nan or inf has no part in the distribution
  const int64_t* key;    // [2] seed, offset; nullptr with `given`
  const int64_t* given;  // [m] classes to give the log-probability of; nullptr to draw
  double* masses;        // [blocks, 2 B] scratch of the GPU kernel where B > kTreeSharedRows, else nullptr
  int64_t* ids;          // [m] out, nullptr with `given`
  float* log_q;          // [m] out
  int64_t batch, num_samples;
  bool stratified;  // stratified draws, in the order of the leaves
};

SX_DECLARE_LAUNCHER(launch_tree_shared, TreeSharedParams)

namespace cpu {

// All rows at one node. `x` holds them in tiles: [tiles, width, 64], zeros behind dim and behind the last row.
struct TreeSharedNode {
  const float* x;
  const double* mass;    // [tiles * 64] of the rows at the node
  double *right, *left;  // [tiles * 64] out: those of the children; nullptr if not requested
  int64_t tiles, width;
  double sum_right, sum_left;  // out
};

void tree_shared_node_avx2(const TreeTable& tree, int64_t node, TreeSharedNode& at);
void tree_shared_node_avx512(const TreeTable& tree, int64_t node, TreeSharedNode& at);

}  // namespace cpu
}  // namespace samplex
