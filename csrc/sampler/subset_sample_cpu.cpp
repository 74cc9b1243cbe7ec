// subset_sample on the CPU: rows in parallel, the steps of a row one after the other.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "sampler/subset_sample_law.h"

namespace samplex::cpu {

void launch_subset_sample(const SubsetSampleParams& p) {
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  const int64_t k = p.num_samples;
  parallel_for(p.batch, 1 + 2048 / (k + 1), [&](int64_t begin, int64_t end) {
    std::vector<unsigned long long> table(size_t(p.slots));
    for (int64_t b = begin; b < end; ++b) {
      const SubsetRow row(p, b);
      int64_t* ids = p.ids + b * k;
      std::fill(table.begin(), table.end(), kFreeSlot);
      PhiloxWords words = {};
      for (int64_t step = 0; step < k; ++step) {
        const int64_t last = row.left - k + step;
        if ((step & 1) == 0) words = philox_at(key, b, step >> 1, 0);  // subset_offer, without making them twice
        int64_t value = uniform_below(philox_u64(words, int(step & 1)), last + 1);
        int64_t at = find_slot(table.data(), p.slots, value);
        if (table[size_t(at)] != kFreeSlot) {
          value = last;  // larger than anything taken so far, so new
          at = find_slot(table.data(), p.slots, value);
        }
        table[size_t(at)] = (unsigned long long)(value);
        ids[step] = row.id_of(value);
      }
    }
  });
}

}  // namespace samplex::cpu
