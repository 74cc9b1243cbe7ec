// Params of the row reduction: weighted source rows are summed by class id.
//
//   row_grads[i] = sum over entries e with id_e = row_ids[i] of coef_e * rows[e / entries_per_row]
//
// Two sources, A then B (targets and draws of a loss). An entry with id < 0 or coefficient exactly 0 is left out: it
// touches no row. row_ids ascend; count of them is in count[0]; the rest of row_ids is -1 and of the others
// unspecified. Within a row the terms are added in the order of the entries: the same bits for any number of threads.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

constexpr int64_t kStreamWidth = 2048;

struct RowReduceSource {
  const int64_t* ids;  // [entries]
  const void* coef;    // A [entries], or nullptr for 1
  const void* rows;    // [entries / entries_per_row, d] in `dtype`
  int64_t entries, entries_per_row;
  DType dtype;
  const void* bias = nullptr;  // A [entries]: what the entry adds to row_bias; nullptr: its coefficient
};

struct RowReduceParams {
  RowReduceSource source[2];
  int64_t* row_ids;  // [capacity]
  void* row_grads;   // A [capacity, d]
  void* row_bias;    // A [capacity]: the entries' bias terms summed, or nullptr
  int64_t* count;    // [1]
  int64_t capacity, dim, num_rows;
  bool double_acc;  // A is double
  bool stream;      // CPU only: write rows past the cache; row_grads is 64-byte aligned, d % 16 == 0, d <= kStreamWidth
  // CUDA only, filled between the launches:
  int64_t* keys;          // [entries]: id, or num_rows for an entry left out
  const int64_t* sorted;  // [entries]: keys ascending
  const int64_t* order;   // [entries]: entry at each sorted place (stable)
  int64_t* heads;         // [entries]: 1 where a new row starts
  const int64_t* ranks;   // [entries]: inclusive sum of heads
};

namespace cpu {
void launch_row_reduce(const RowReduceParams& params);
// Sorted entries of a range of whole rows; ISA bodies for float accumulation.
struct RowReduceRange {
  const uint64_t* keys;  // (id << entry_bits) | entry, ascending
  int64_t num_keys, first_row;
  int entry_bits;
  int64_t readable;  // keys that may be looked at ahead: these and those of the ranges that follow
  bool repeats;      // of all entries of the call, an eighth and more share their row with another one before them
};
// Sorts the entries and calls body(range, context) for disjoint ranges of whole rows, from several threads. Returns the
// number of rows. Uses the sources, dim, num_rows and double_acc of `params`.
int64_t for_sorted_ranges(const RowReduceParams& params, void (*body)(const RowReduceRange&, void*), void* context);
void row_reduce_range_avx2(const RowReduceParams& params, const RowReduceRange& range);
void row_reduce_range_avx512(const RowReduceParams& params, const RowReduceRange& range);
}  // namespace cpu

SX_DECLARE_CUDA_LAUNCHER(launch_row_reduce_keys, RowReduceParams)
SX_DECLARE_CUDA_LAUNCHER(launch_row_reduce_heads, RowReduceParams)
SX_DECLARE_CUDA_LAUNCHER(launch_row_reduce_rows, RowReduceParams)

}  // namespace samplex
