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

constexpr int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
constexpr int64_t product_chunks(int64_t rows) { return (rows + kProductRows - 1) / kProductRows; }

}  // namespace samplex
