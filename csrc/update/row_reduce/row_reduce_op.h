// The row reduction as a step inside the glue of this stage; other stages call the op (common/calls.h).
#pragma once

#include "common/calls.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex::glue {

// Fills the outputs and scratch of `params`, whose sources and sizes are set, and runs it on the backend of `like`.
RowGradients run_row_reduce(const char* op, RowReduceParams params, const Tensor& like, bool with_bias);

// The sorted entries of a GPU: `sorted` and `order` of `params` point into them.
struct SortedEntries {
  Tensor keys, sorted, order;
};
SortedEntries run_row_sort(const char* op, RowReduceParams& params, const Tensor& like);

}  // namespace samplex::glue
