// The row reduction as a step inside the glue of this stage; other stages call the op (common/calls.h).
#pragma once

#include "common/calls.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex::glue {

// Fills the outputs and scratch of `params`, whose sources and sizes are set, and runs it on the backend of `like`.
RowGradients run_row_reduce(const char* op, RowReduceParams params, const Tensor& like, bool with_bias);

// The sorted entries of a GPU, and the memory for sums of pieces of long rows: `params` points into them. Keys are
// int32 where the ids fit: torch's radix sort makes a pass per 8 bits of the key, 4 of int32 and 8 of int64. `keys` is
// what call_row_keys made, where another kernel has written them.
struct SortedEntries {
  Tensor keys, sorted, order, partial;
};
SortedEntries run_row_sort(const char* op, RowReduceParams& params, const Tensor& like,
                           const std::optional<Tensor>& keys = std::nullopt);

}  // namespace samplex::glue
