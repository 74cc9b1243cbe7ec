// Sort keys of row gradients that are still (ids, coefficients, rows). Whoever makes the coefficients on a GPU can make
// the keys with them; update/row_reduce sorts them. See call_row_keys of common/calls.h.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace samplex {

// Entries of two sources, A then B. An entry left out has id < 0, an id out of range or a coefficient of exactly 0.
struct RowKeys {
  void* keys;     // [entries]: id, or num_rows for an entry left out; int32, or int64 with `wide`. nullptr: not wanted
  int* counters;  // [num_counters] of the sums that follow, set to 0 with the keys
  int64_t num_counters, num_rows;
  bool wide;  // num_rows does not fit into int32
};

inline namespace SX_ISA_NS {

SX_HOST_DEVICE inline void store_row_key(const RowKeys& x, int64_t entry, int64_t id, bool zero) {
  const int64_t key = zero || uint64_t(id) >= uint64_t(x.num_rows) ? x.num_rows : id;
  if (x.wide)
    static_cast<int64_t*>(x.keys)[entry] = key;
  else
    static_cast<int32_t*>(x.keys)[entry] = int32_t(key);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
