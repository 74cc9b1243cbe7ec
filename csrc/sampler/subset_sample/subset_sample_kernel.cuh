// subset_sample on the device: one warp a row, 32 steps at a time. The distribution, and with it every bit of the
// result, is that of subset_sample_math.h: each lane looks its offer up among what earlier rounds took, then the lanes
// tell each other in the order of the steps what they took.
#pragma once

#include "common/macros.h"
#include "common/warp.cuh"
#include "sampler/subset_sample/subset_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kSubsetBlock = 128;
constexpr int kSubsetWarps = kSubsetBlock / kWarpSize;

SX_DEVICE inline void clear_slots(unsigned long long* table, int64_t slots, int lane) {
  if (table != nullptr) {
    for (int64_t at = lane; at < slots; at += kWarpSize) table[at] = kFreeSlot;
  }
  warp_sync();
}

__global__ void __launch_bounds__(kSubsetBlock) subset_sample_kernel(SubsetSampleParams p) {
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  const int lane = lane_id();
  const int64_t k = p.num_samples, warps = int64_t(gridDim.x) * kSubsetWarps;
  const int64_t warp = int64_t(blockIdx.x) * kSubsetWarps + warp_id();
  unsigned long long* table = p.table == nullptr ? nullptr : p.table + warp * p.slots;
  clear_slots(table, p.slots, lane);
  for (int64_t b = warp; b < p.batch; b += warps) {  // the same rows for all lanes of a warp
    const SubsetRow row(p, b);
    for (int64_t first = 0; first < k; first += kWarpSize) {
      const int64_t step = first + lane, last = row.left - k + step;
      const bool active = step < k;
      const int64_t offer = active ? subset_offer(key, b, step, last) : -1;
      bool taken = active && first > 0 && table[find_slot(table, p.slots, offer)] != kFreeSlot;
      for (int source = 0; source < kWarpSize; ++source) {
        const int64_t other = shuffle_from(taken ? last : offer, source);
        taken = taken || (active && lane > source && other == offer);
      }
      const int64_t value = taken ? last : offer;
      if (active) p.ids[b * k + step] = row.id_of(value);
      warp_sync();  // everybody has looked
      if (table != nullptr && active) {
        int64_t at = first_slot(value, p.slots);
        while (atomicCAS(table + at, kFreeSlot, (unsigned long long)(value)) != kFreeSlot)
          at = (at + 1) & (p.slots - 1);
      }
      warp_sync();
    }
    // For the next row; and where a value lies depends on which lane came first, which nobody is to see.
    clear_slots(table, p.slots, lane);
  }
}

}  // namespace samplex::SX_BACKEND_NS
