// CPU launcher of the row reduction: a parallel radix sort of (id, entry) packed in 64 bits, then segment sums.
//
// The packed key holds the entry's number, so the sorted order, and with it every sum, is the same for any number of
// threads. Work is cut into equal shares of entries, not of rows: ids from a Zipf law put most entries into few rows.
#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "update/row_reduce_cpu_rows.h"

namespace samplex::cpu {
namespace {

constexpr int kMaxDigitBits = 11;  // 2048 counters stay in the L1 cache

struct Sorter {
  int64_t num_chunks, num_keys = 0;
  uint64_t *keys, *spare;
  std::vector<int64_t> chunk_begin, chunk_size;

  // Stable counting sort of keys by the digit at `shift`; chunk c of the source is one contiguous range.
  void pass(int shift, int digit_bits) {
    const int64_t buckets = int64_t(1) << digit_bits;
    const uint64_t mask = uint64_t(buckets) - 1;
    std::vector<int64_t> place(size_t(num_chunks * buckets), 0);
    for_chunks([&](int64_t c) {
      int64_t* counts = place.data() + c * buckets;
      const uint64_t* from = keys + chunk_begin[c];
      for (int64_t i = 0; i < chunk_size[c]; ++i) ++counts[(from[i] >> shift) & mask];
    });
    int64_t at = 0;
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
      for (int64_t c = 0; c < num_chunks; ++c) {
        at += std::exchange(place[c * buckets + bucket], at);
      }
    }
    for_chunks([&](int64_t c) {
      int64_t* to = place.data() + c * buckets;
      const uint64_t* from = keys + chunk_begin[c];
      for (int64_t i = 0; i < chunk_size[c]; ++i) spare[to[(from[i] >> shift) & mask]++] = from[i];
    });
    std::swap(keys, spare);
    // From now on the keys stand without gaps.
    for (int64_t c = 0; c < num_chunks; ++c) {
      chunk_begin[c] = num_keys * c / num_chunks;
      chunk_size[c] = num_keys * (c + 1) / num_chunks - chunk_begin[c];
    }
  }

  template <typename F>
  void for_chunks(const F& body) const {
    parallel_for(num_chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) body(c);
    });
  }
};

template <typename A>
bool left_out(const RowReduceSource& source, int64_t at, int64_t num_rows) {
  // Unsigned: negative ids, and an ignore_index beyond the classes whose coefficient an inf or nan upstream made nan.
  return uint64_t(source.ids[at]) >= uint64_t(num_rows) ||
         (source.coef != nullptr && static_cast<const A*>(source.coef)[at] == A(0));
}

template <typename A>
void reduce(const RowReduceParams& p) {
  const int64_t split = p.source[0].entries, entries = split + p.source[1].entries;
  const int entry_bits = std::bit_width(uint64_t(entries));
  const int id_bits = std::max(1, int(std::bit_width(uint64_t(std::max<int64_t>(p.num_rows - 1, 1)))));
  if (entry_bits + id_bits > 64) throw std::runtime_error("row_reduce: entries x num_rows must stay below 2^64");

  const Workspace workspace(size_t(2 * entries) * sizeof(uint64_t));
  Sorter sorter;
  sorter.num_chunks = std::clamp<int64_t>(entries / 4096, 1, num_threads());
  sorter.keys = static_cast<uint64_t*>(workspace.data());
  sorter.spare = sorter.keys + entries;
  sorter.chunk_begin.resize(sorter.num_chunks);
  sorter.chunk_size.resize(sorter.num_chunks);
  sorter.for_chunks([&](int64_t c) {
    const int64_t begin = entries * c / sorter.num_chunks, end = entries * (c + 1) / sorter.num_chunks;
    uint64_t* to = sorter.keys + begin;
    for (int64_t entry = begin; entry < end; ++entry) {
      const RowReduceSource& source = p.source[entry < split ? 0 : 1];
      const int64_t at = entry < split ? entry : entry - split;
      if (!left_out<A>(source, at, p.num_rows)) *to++ = (uint64_t(source.ids[at]) << entry_bits) | uint64_t(entry);
    }
    sorter.chunk_begin[c] = begin;
    sorter.chunk_size[c] = to - (sorter.keys + begin);
  });
  for (int64_t size : sorter.chunk_size) sorter.num_keys += size;
  const int passes = (id_bits + kMaxDigitBits - 1) / kMaxDigitBits;
  for (int done = 0, left = id_bits; left > 0;) {
    const int digit = (left + passes - 1) / passes < left ? (id_bits + passes - 1) / passes : left;
    sorter.pass(entry_bits + done, digit);
    done += digit;
    left -= digit;
  }

  // Each chunk sums the rows whose first entry lies in it.
  const uint64_t* keys = sorter.keys;
  const auto begins_row = [&](int64_t i) { return i == 0 || (keys[i] >> entry_bits) != (keys[i - 1] >> entry_bits); };
  std::vector<int64_t> first_row(size_t(sorter.num_chunks) + 1, 0);
  sorter.for_chunks([&](int64_t c) {
    const int64_t begin = sorter.chunk_begin[c];
    for (int64_t i = begin; i < begin + sorter.chunk_size[c]; ++i) first_row[c + 1] += begins_row(i);
  });
  for (int64_t c = 0; c < sorter.num_chunks; ++c) first_row[c + 1] += first_row[c];
  const SimdLevel level = sizeof(A) == 4 ? simd_level() : SimdLevel::kScalar;
  sorter.for_chunks([&](int64_t c) {
    const RowReduceRange range = {
        keys,      sorter.chunk_begin[c], sorter.chunk_begin[c] + sorter.chunk_size[c], sorter.num_keys, first_row[c],
        entry_bits};
#ifdef SAMPLEX_X86_SIMD
    if (level == SimdLevel::kAvx512) return row_reduce_range_avx512(p, range);
    if (level == SimdLevel::kAvx2) return row_reduce_range_avx2(p, range);
#endif
    (void)level;
    row_reduce_range<A>(p, range);
  });
  p.count[0] = first_row[sorter.num_chunks];
  std::fill(p.row_ids + p.count[0], p.row_ids + p.capacity, int64_t(-1));
}

}  // namespace

void launch_row_reduce(const RowReduceParams& params) {
  if (params.double_acc)
    reduce<double>(params);
  else
    reduce<float>(params);
}

}  // namespace samplex::cpu
