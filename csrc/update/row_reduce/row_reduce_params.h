// Params of the row reduction: weighted source rows are summed by class id.
//
//   row_grads[i] = sum over entries e with id_e = row_ids[i] of coef_e * rows[e / entries_per_row]
//
// Two sources, A then B (targets and draws of a loss). An entry with id < 0 or coefficient exactly 0 is left out: it
// touches no row. row_ids ascend; count of them is in count[0]; the rest of row_ids is -1 and of the others
// unspecified. On the CPU the terms of a row are added in the order of the entries; on a GPU too within a piece of
// them, and the pieces of a long row as a tree (row_reduce_device.cuh). The same bits for any number of threads.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "common/row_keys.h"

namespace samplex {

constexpr int64_t kStreamWidth = 2048;

struct RowReduceSource {
  const int64_t* ids;  // [entries]
  const void* coef;    // A [entries], or nullptr for 1
  const void* rows;    // [entries / entries_per_row, d] in `dtype`
  int64_t entries, entries_per_row;
  DType dtype;
  const void* bias = nullptr;  // A [entries]: what the entry adds to row_bias; nullptr: its coefficient
  // CUDA only, set by the launcher: entry / entries_per_row as the high half of entry * inverse; 0: by 1. A 64-bit
  // division is a call, for which registers are spilled.
  uint64_t inverse = 0;
};

// How a GPU cuts rows of many entries into pieces, and where their sums go. Depends on the number of entries alone.
struct RowChunks {
  int log_size;        // a piece is 1 << log_size entries
  int64_t slots;       // sums of pieces that are kept; 0: no row is cut
  void* partial;       // A [slots, d]
  void* partial_bias;  // A [slots]
  int* arrived;        // [blocks of columns, slots]: counters of RowKeys
};
constexpr int kLogChunk = 3;            // 8 entries a piece,
constexpr int kLogFan = 4;              // and 16 pieces make one of the next level
constexpr int64_t kMostChunks = 16384;  // of the first level: enough for a large GPU, and memory is bounded

// Slots of a level whose pieces are 1 << log places.
SX_HOST_DEVICE constexpr int64_t row_chunk_slots(int64_t entries, int log) { return (entries >> log) + 1; }

inline RowChunks plan_row_chunks(int64_t entries) {
  RowChunks plan{};
  plan.log_size = kLogChunk;
  while (entries >> plan.log_size > kMostChunks) ++plan.log_size;
  for (int log = plan.log_size; int64_t(2) << log <= entries; log += kLogFan)
    plan.slots += row_chunk_slots(entries, log);
  return plan;
}

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
  RowKeys keys;
  const void* sorted;    // [entries]: keys ascending
  const int64_t* order;  // [entries]: entry at each sorted place (stable)
  int* heads;            // [entries]: 1 where a new row starts
  const int64_t* ranks;  // [entries]: inclusive sum of heads
  RowChunks chunks;
};

namespace cpu {
void launch_row_reduce(const RowReduceParams& params);
// Sorted entries of a range of whole rows; ISA bodies for float accumulation.
struct RowReduceRange {
  const uint64_t* keys;  // (id << entry_bits) | entry, ascending
  int64_t num_keys, first_row;
  int entry_bits;
  int64_t readable;  // keys that may be examined ahead: these and those of the ranges that follow
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
