// The row reduction as a step inside other ops' glue.
#pragma once

#include "common/glue.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex::glue {

struct RowGradients {
  Tensor row_ids, row_grads, row_bias, count;
};

// Fills the outputs and scratch of `params`, whose sources and sizes are set, and runs it on the backend of `like`.
RowGradients run_row_reduce(const char* op, RowReduceParams params, const Tensor& like, bool with_bias);

// The sorted entries of a GPU: `sorted` and `order` of `params` point into them.
struct SortedEntries {
  Tensor keys, sorted, order;
};
SortedEntries run_row_sort(const char* op, RowReduceParams& params, const Tensor& like);

}  // namespace samplex::glue
