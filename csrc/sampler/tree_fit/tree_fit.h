// Host-side fit of the adversarial decision tree: a balanced binary tree over the classes with a logistic model
// sigmoid(w.x + b) = P(right | node, x) in every inner node.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/export.h"

namespace samplex {

struct TreeFitOptions {
  double reg = 0.1;         // > 0; the penalty is reg (|w|^2 + b^2)
  int64_t max_rounds = 15;  // discrete steps per node, at most
  bool discrete = true;     // false: the median split along the first eigenvector stays, only (w, b) is fitted
};

// What was fitted at one level. `nodes` are those with examples and classes on both sides; the means and maxima below
// are over them. `log_likelihood` and `objective` are sums over all examples.
struct TreeFitLevel {
  int64_t level = 0;
  int64_t nodes = 0;
  double log_likelihood = 0.0;
  double objective = 0.0;
  int64_t rounds = 0;         // sum over nodes of discrete steps that changed the split
  int64_t most_rounds = 0;    // of one node
  int64_t newton_steps = 0;   // sum over nodes
  double gradient_ratio = 0;  // largest |gradient| / max(1, sum of |x|) at a final (w, b)
  int64_t unfinished = 0;     // nodes whose split still changed at max_rounds
};

// Objective of a node after its round-th step; odd rounds are Newton steps, even ones discrete steps.
struct TreeFitTrace {
  int64_t node;
  int64_t round;
  double objective;
};

// Number of leaves: the power of two that holds `num_classes`.
SX_EXPORT int64_t tree_num_leaves(int64_t num_classes);

// The discrete step, Eq. 9: the subset to the right that maximizes sum over right of delta - sum over left of delta,
// with between `least` and `most` classes on the right. Ranked by falling delta, then by rising id. Classes of delta 0
// are free and bring the count as near to half as they can. Writes right [m] (0 or 1), returns how many are 1.
SX_EXPORT int64_t tree_split(const double* delta, const int32_t* ids, int64_t m, int64_t least, int64_t most,
                             uint8_t* right);

// x [n, k] fp32, y [n] in [0, C)  ->  weights [L, k], bias [L], leaf_class [L], in heap order (root 1, row 0 zero).
// `exact` [L, k + 1], where not null, gets w and b before they are rounded to fp32. `progress` is called by the calling
// thread after each level; what it throws ends the fit. `trace`, where not null, makes the fit serial.
//
// fp64 arithmetic. Sums run over blocks of examples whose size depends on nothing but the node, in a fixed order: the
// same bits for any number of threads. Memory beside the arguments: at most one more copy of x (for the root) and about
// 20 bytes per class and an example. Throws std::invalid_argument, before anything is written.
SX_EXPORT void fit_tree(const float* x, const int64_t* y, int64_t n, int64_t k, int64_t num_classes,
                        const TreeFitOptions& options, float* weights, float* bias, int64_t* leaf_class, double* exact,
                        const std::function<void(const TreeFitLevel&)>& progress, std::vector<TreeFitTrace>* trace);

}  // namespace samplex
