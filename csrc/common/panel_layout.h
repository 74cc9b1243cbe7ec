// Panels: how a factor of our matrix products is laid out in memory (common/panels.h).
//
// A panel is kPanel columns of a matrix [k, p]: k rows of kPanel numbers, one after the other, zeros where columns are
// missing. The panels of a matrix follow each other.
#pragma once

#include <cstdint>

namespace samplex {

constexpr int64_t kPanel = 32;        // numbers: a multiple of every vector
constexpr int64_t kBlockDepth = 128;  // terms of a sum in one go: a block of a panel is 16 KiB, half of an L1 cache
constexpr int64_t kRowStep = 24;      // rows of a result: a multiple of those in registers at every SIMD level
constexpr int64_t kProductRows = 48;  // rows of a result that use a block of a panel while it is in the L1 cache

// c [rows, columns], rows `stride` apart, = a [rows, depth] times b [depth, columns] in panels; or += with `add`. a[i,
// t] is a[i * a_row + t * a_step].
struct PanelProductParams {
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  float* c;
  int64_t rows, depth, columns, stride;
  bool add;
};

// b [depth, columns] to be packed in panels; b[t, j] is b[t * b_row + j * b_column], and one of both distances is 1.
struct PackPanelsParams {
  const float* b;
  int64_t b_row, b_column, depth, columns;
  float* panels;
};

constexpr int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
constexpr int64_t product_chunks(int64_t rows) { return (rows + kProductRows - 1) / kProductRows; }

}  // namespace samplex
