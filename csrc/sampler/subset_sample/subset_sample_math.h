// The distribution of subset_sample, shared by host and device: Floyd's algorithm (Bentley & Floyd 1987).
//
// Of the N classes left in a row, step j = 0 .. k-1 offers a uniform class t of 0 .. N-k+j and takes it, or N-k+j where
// t has been taken before. By induction every (j+1)-subset of 0 .. N-k+j is then equally likely: k random numbers and k
// look-ups for any N, and no step is ever repeated. The order of the ids is not uniform and means nothing.
#pragma once

#include "common/philox.h"
#include "sampler/subset_sample/subset_sample_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr unsigned long long kFreeSlot = ~0ull;

// What a row may draw: classes 0 .. left-1, those from `hole` on moved up by one.
struct SubsetRow {
  int64_t left, hole;

  SX_HOST_DEVICE SubsetRow(const SubsetSampleParams& p, int64_t b) : left(p.num_classes), hole(p.num_classes) {
    if (p.exclude == nullptr) return;
    const int64_t id = p.exclude[b];
    if (id < 0 || id >= p.num_classes) return;  // on CUDA it has not been checked
    hole = id;
    --left;
  }
  SX_HOST_DEVICE int64_t id_of(int64_t value) const { return value + int64_t(value >= hole); }
};

// Two steps share the four words of one Philox call.
SX_HOST_DEVICE inline int64_t subset_offer(PhiloxKey key, int64_t b, int64_t step, int64_t last) {
  return uniform_below(philox_u64(philox_at(key, b, step >> 1, 0), int(step & 1)), last + 1);
}

SX_HOST_DEVICE inline int64_t first_slot(int64_t value, int64_t slots) {
  const uint64_t mixed = uint64_t(value) * 0x9E3779B97F4A7C15ull;
  return int64_t((mixed ^ (mixed >> 32)) & uint64_t(slots - 1));
}

// The slot that holds `value`, or the free one where it would go. There is always a free one: slots >= 2 k.
SX_HOST_DEVICE inline int64_t find_slot(const unsigned long long* table, int64_t slots, int64_t value) {
  int64_t at = first_slot(value, slots);
  while (table[at] != kFreeSlot && table[at] != (unsigned long long)(value)) at = (at + 1) & (slots - 1);
  return at;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
