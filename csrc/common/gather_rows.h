// What shared draws read of a class table, gathered once for the batch.
//
// rows[i] = weight[ids[i % width]] for i < copies * width, zeros where i % width >= n. Not aten::index_select: on a
// device an id out of range stops the process there. Here it gives a row of nan; ids of a CPU are checked before.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace samplex {

struct GatherRowsParams {
  const void* weight;  // [C, d] in `dtype`
  const int64_t* ids;  // [n]
  // [copies * width, d] in `dtype`; on a CPU [n, d] in the accumulation type. nullptr: not wanted
  void* rows;
  int64_t n, width, copies, num_classes, dim;
  DType dtype;
  // CPU only, instead of rows: as panels (common/panels.h), which products of ours take.
  float* across;  // of the transposed rows [d, n]; nullptr: not wanted
  float* along;   // of the rows [n, d]; nullptr: not wanted
  // GPU only:
  ScalarTable bias;  // [C] or absent
  void* biases;      // A [n] or nullptr: bias of each draw, 0 if absent, nan of an id out of range
  int* arrived;      // [1] or nullptr: set to 0, for the kernel that comes next
};

}  // namespace samplex
