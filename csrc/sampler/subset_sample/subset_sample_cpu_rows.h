// The CPU body of subset_sample, compiled once per instruction set: rows [begin, end), the steps of
// subset_sample_math.h.
//
// Nearly always the offers of a row differ, and Floyd's algorithm takes them all as they are. So they are made at once,
// by vectors, and looked through for a repetition without a branch; only a row that may have one goes step by step.
#pragma once

#include "common/philox_many.h"
#include "sampler/subset_sample/subset_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {
namespace subset_sample_rows {

constexpr int kSteps = 512;    // the most that are made at once: with more, repetitions are usual
constexpr int kSeenBits = 16;  // the set of what has been seen, by 16 bits of a hash: 8 KiB
constexpr int kWords = 1 << (kSeenBits - 6);

// The distribution, step by step. `table` has p.slots places.
inline void step_by_step(const SubsetSampleParams& p, PhiloxKey key, int64_t b, unsigned long long* table) {
  const SubsetRow row(p, b);
  const int64_t k = p.num_samples;
  for (int64_t at = 0; at < p.slots; ++at) table[at] = kFreeSlot;
  PhiloxWords words = {};
  for (int64_t step = 0; step < k; ++step) {
    const int64_t last = row.left - k + step;
    if ((step & 1) == 0) words = philox_at(key, b, step >> 1, 0);  // subset_offer, without making them twice
    int64_t value = uniform_below(philox_u64(words, int(step & 1)), last + 1);
    int64_t at = find_slot(table, p.slots, value);
    if (table[at] != kFreeSlot) {
      value = last;  // larger than anything taken so far, so new
      at = find_slot(table, p.slots, value);
    }
    table[at] = (unsigned long long)(value);
    p.ids[b * k + step] = row.id_of(value);
  }
}

inline void subset_rows(const SubsetSampleParams& p, int64_t begin, int64_t end, unsigned long long* table) {
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  const int64_t k = p.num_samples;
  if (k > kSteps) {
    for (int64_t b = begin; b < end; ++b) step_by_step(p, key, b, table);
    return;
  }
  uint64_t seen[kWords] = {};
  uint32_t rows[kSteps / 2 + 8], positions[kSteps / 2 + 8];
  uint64_t bits[2][kSteps / 2 + 8];
  uint32_t places[kSteps];
  const int calls = int(k + 1) / 2;
  for (int i = 0; i < calls + 7; ++i) positions[i] = uint32_t(i) << 8;
  for (int64_t b = begin; b < end; ++b) {
    const SubsetRow row(p, b);
    int64_t* const ids = p.ids + b * k;
    for (int i = 0; i < calls + 7; ++i) rows[i] = uint32_t(b);
    philox_many(key, rows, positions, calls, bits[0], bits[1]);
    uint64_t again = 0;
    for (int step = 0; step < int(k); ++step) {
      const uint64_t offered = uint64_t(row.left - k + step + 1), random = bits[step & 1][step >> 1];
      const uint64_t value = uint64_t((static_cast<unsigned __int128>(random) * offered) >> 64);  // uniform_below
      const uint64_t mixed = value * 0x9E3779B97F4A7C15ull;
      places[step] = uint32_t(mixed >> (64 - kSeenBits));
      uint64_t& word = seen[places[step] >> 6];
      const uint64_t bit = uint64_t(1) << (places[step] & 63);
      again |= word & bit;
      word |= bit;
      ids[step] = row.id_of(int64_t(value));
    }
    for (int step = 0; step < int(k); ++step) seen[places[step] >> 6] = 0;
    if (again != 0) step_by_step(p, key, b, table);
  }
}

}  // namespace subset_sample_rows
}  // namespace SX_ISA_NS
}  // namespace samplex
