// subset_sample: for each row k distinct classes, every k-subset of what is not excluded equally likely.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launchers.h"

namespace samplex {

struct SubsetSampleParams {
  int64_t batch, num_samples, num_classes;  // B, k, n; k <= n, and k <= n - 1 with `exclude`
  const int64_t* key;                       // [2] seed, offset
  const int64_t* exclude;                   // [B], -1 for none, or nullptr: one class that the row must not draw
  // What a row has drawn so far, one table of `slots` (a power of two, at least 2 k) for each of `tables` warps of the
  // GPU kernels; nullptr if a row is one step of a warp. The CPU kernels have their own.
  unsigned long long* table;
  int64_t slots, tables;
  int64_t* ids;  // [B, k] out
};

SX_DECLARE_LAUNCHER(launch_subset_sample, SubsetSampleParams)

namespace cpu {
// Bodies by ISA: rows [begin, end); `table` has `slots` places.
void subset_sample_rows_avx2(const SubsetSampleParams& params, int64_t begin, int64_t end, unsigned long long* table);
void subset_sample_rows_avx512(const SubsetSampleParams& params, int64_t begin, int64_t end, unsigned long long* table);
}  // namespace cpu

}  // namespace samplex
