// CPU launcher of the row reduction: a parallel radix sort of (id, entry) packed in 64 bits, then segment sums.
//
// Every thread lists a chunk of the entries, then sorts and later sums the ids of a range of its own: no two threads
// write to the same cache line. Ranges are cut where a histogram says that the entries halve, not the ids: those of a
// Zipf distribution put most entries into few rows. The packed key holds the entry's number, so the sorted order, and
// with it every sum, is the same for any number of threads.
#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "update/row_reduce/row_reduce_cpu_rows.h"

namespace samplex::cpu {
namespace {

constexpr int kMaxDigitBits = 11;           // 2048 counters stay in the L1 cache
constexpr int64_t kBlockNumbers = 1 << 16;  // of the rows that a thread sums at a time, at most
constexpr int64_t kLeastNumbers = 1 << 13;  // of rows that are worth a turn of a thread
constexpr int64_t kBlocksPerThread = 4;

// Stable counting sort of keys [n] by `digit_bits` bits of key - base from `shift` on, into `to`.
void sort_by_digit(const uint64_t* keys, uint64_t* to, int64_t n, uint64_t base, int shift, int digit_bits) {
  int64_t place[int64_t(1) << kMaxDigitBits] = {};
  const uint64_t mask = (uint64_t(1) << digit_bits) - 1;
  const auto digit = [&](int64_t i) { return ((keys[i] - base) >> shift) & mask; };
  for (int64_t i = 0; i < n; ++i) ++place[digit(i)];
  int64_t at = 0;
  for (uint64_t bucket = 0; bucket <= mask; ++bucket) at += std::exchange(place[bucket], at);
  for (int64_t i = 0; i < n; ++i) to[place[digit(i)]++] = keys[i];
}

// Keys [n] of [base, base + 2^(shift + bits)) ascending by their bits from `shift` on, with the help of `spare` [n];
// returns where they are.
uint64_t* sort_keys(uint64_t* keys, uint64_t* spare, int64_t n, uint64_t base, int shift, int bits) {
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  for (int pass = 0; pass < passes; ++pass) {
    const int from = bits * pass / passes, to = bits * (pass + 1) / passes;
    sort_by_digit(keys, spare, n, base, shift + from, to - from);
    std::swap(keys, spare);
  }
  return keys;
}

template <typename F>
void for_parts(int64_t parts, const F& body) {
  parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) body(part);
  });
}

template <typename A>
bool left_out(const RowReduceSource& source, int64_t at, int64_t num_rows) {
  // Unsigned: negative ids, and an ignore_index beyond the classes whose coefficient an inf or nan upstream made nan.
  return uint64_t(source.ids[at]) >= uint64_t(num_rows) ||
         (source.coef != nullptr && static_cast<const A*>(source.coef)[at] == A(0));
}

template <typename A>
int64_t sorted_ranges(const RowReduceParams& p, void (*body)(const RowReduceRange&, void*), void* context) {
  const int64_t split = p.source[0].entries, entries = split + p.source[1].entries;
  const int entry_bits = std::bit_width(uint64_t(entries));
  const int id_bits = std::max(1, int(std::bit_width(uint64_t(std::max<int64_t>(p.num_rows - 1, 1)))));
  if (entry_bits + id_bits > 64)
    throw std::runtime_error("ValueError: row_reduce: num_rows (num_classes of a loss) must stay below 2^64 / entries");

  const int64_t parts = std::clamp<int64_t>(entries / 4096, 1, num_threads());
  const int top_bits = std::min(id_bits, kMaxDigitBits), top_shift = entry_bits + id_bits - top_bits;
  const int64_t buckets = parts == 1 ? 0 : int64_t(1) << top_bits;
  const Workspace workspace(size_t(3 * entries + parts * buckets) * sizeof(uint64_t));
  uint64_t* listed = static_cast<uint64_t*>(workspace.data());
  uint64_t* const keys = listed + entries;
  uint64_t* const spare = keys + entries;
  int64_t* const counts = reinterpret_cast<int64_t*>(spare + entries);  // [parts, buckets]

  // 1. Every part lists its share of the entries, and counts them by the top bits of the id.
  std::vector<int64_t> chunk_begin(parts), chunk_size(parts);
  for_parts(parts, [&](int64_t part) {
    int64_t* count = counts + part * buckets;
    std::fill(count, count + buckets, int64_t(0));
    const int64_t begin = entries * part / parts, end = entries * (part + 1) / parts;
    uint64_t* to = listed + begin;
    for (const int which : {0, 1}) {
      const RowReduceSource& source = p.source[which];
      const int64_t first = which == 0 ? 0 : split;
      const int64_t from = std::max(begin, first) - first, until = std::min(end, first + source.entries) - first;
      for (int64_t at = from; at < until; ++at) {
        *to = (uint64_t(source.ids[at]) << entry_bits) | uint64_t(first + at);
        to += !left_out<A>(source, at, p.num_rows);
      }
    }
    chunk_begin[part] = begin;
    chunk_size[part] = to - (listed + begin);
    if (parts == 1) return;
    for (const uint64_t* key = listed + begin; key < to; ++key) ++count[*key >> top_shift];
  });
  int64_t num_keys = 0;
  for (const int64_t size : chunk_size) num_keys += size;

  // Ranges of about equal numbers of entries: [first_bucket[r], first_bucket[r + 1]) and their place among the keys.
  std::vector<int64_t> first_bucket(parts + 1, buckets), first_key(parts + 1, num_keys), first_row(parts + 1, 0);
  first_bucket[0] = first_key[0] = 0;
  for (int64_t bucket = 0, range = 1, seen = 0; bucket < buckets && range < parts; ++bucket) {
    for (int64_t part = 0; part < parts; ++part) seen += counts[part * buckets + bucket];
    for (; range < parts && seen >= num_keys * range / parts; ++range) {
      first_bucket[range] = bucket + 1;
      first_key[range] = seen;
    }
  }

  // Entries of a block: wide rows and few entries make short blocks, or a small batch would be one block and one
  // thread's work, and a larger one few blocks that the threads cannot share evenly.
  const int64_t by_width = kBlockNumbers / std::max<int64_t>(p.dim, 1);
  const int64_t by_share = num_keys / (kBlocksPerThread * num_threads());
  const int64_t least = std::max<int64_t>(kLeastNumbers / std::max<int64_t>(p.dim, 1), 16);
  const int64_t block_entries = std::clamp<int64_t>(std::min(by_width, std::max(by_share, least)), 16, 512);

  // 2. Every part takes the keys of its range, in the order of the entries, sorts them and counts the rows.
  std::vector<std::vector<RowReduceRange>> blocks(parts);
  for_parts(parts, [&](int64_t part) {
    const int64_t begin = first_key[part], n = first_key[part + 1] - begin;
    uint64_t *mine = keys + begin, base = 0;
    int bits = id_bits;
    if (parts == 1) {
      mine = listed;
    } else {
      const uint64_t low = uint64_t(first_bucket[part]), width = uint64_t(first_bucket[part + 1]) - low;
      // A range that frequent classes fill has few ids: one pass instead of two.
      base = low << top_shift;
      bits = std::bit_width(std::max<uint64_t>((width << (top_shift - entry_bits)) - 1, 1));
      int64_t taken = 0;
      for (int64_t chunk = 0; chunk < parts && taken < n; ++chunk) {
        const uint64_t* from = listed + chunk_begin[chunk];
        // No branch: a key of another range is overwritten by the next one.
        for (int64_t i = 0; i < chunk_size[chunk] && taken < n; ++i) {
          mine[taken] = from[i];
          taken += (from[i] >> top_shift) - low < width;
        }
      }
    }
    const uint64_t* const key = sort_keys(mine, spare + begin, n, base, entry_bits, bits);
    // Blocks of whole rows, to be summed by whichever thread is free. Whether an entry starts a row is added, not
    // asked: among frequent classes nobody can guess it.
    const auto starts_row = [&](int64_t i) { return i == 0 || (key[i] ^ key[i - 1]) >> entry_bits != 0; };
    int64_t rows = 0;
    for (int64_t from = 0, until; from < n; from = until) {
      until = std::min(from + block_entries, n);
      while (until < n && !starts_row(until)) ++until;
      blocks[part].push_back({key + from, until - from, rows, entry_bits, n - from, false});
      for (int64_t i = from; i < until; ++i) rows += int64_t(starts_row(i));
    }
    first_row[part + 1] = rows;
  });
  for (int64_t part = 0; part < parts; ++part) first_row[part + 1] += first_row[part];
  const bool repeats = first_row[parts] * 8 <= num_keys * 7;
  std::vector<RowReduceRange> all;
  for (int64_t part = 0; part < parts; ++part) {
    for (RowReduceRange& block : blocks[part]) {
      block.first_row += first_row[part];
      block.repeats = repeats;
      all.push_back(block);
    }
  }

  // 3. Whatever is done with them.
  parallel_for_shared(int64_t(all.size()), 1, [&](int64_t begin, int64_t end) {
    for (const RowReduceRange* range = all.data() + begin; range < all.data() + end; ++range) body(*range, context);
  });
  return first_row[parts];
}

void row_reduce_range_scalar(const RowReduceParams& p, const RowReduceRange& range) {
  p.double_acc ? row_reduce_range<double>(p, range) : row_reduce_range<float>(p, range);
}

void sum_range(const RowReduceRange& range, void* context) {
  const RowReduceParams& p = *static_cast<const RowReduceParams*>(context);
  SX_SIMD_BODY(simd_level_unless(p.double_acc), row_reduce_range)(p, range);
}

}  // namespace

int64_t for_sorted_ranges(const RowReduceParams& params, void (*body)(const RowReduceRange&, void*), void* context) {
  return params.double_acc ? sorted_ranges<double>(params, body, context) : sorted_ranges<float>(params, body, context);
}

void launch_row_reduce(const RowReduceParams& params) {
  params.count[0] = for_sorted_ranges(params, sum_range, const_cast<RowReduceParams*>(&params));
  std::fill(params.row_ids + params.count[0], params.row_ids + params.capacity, int64_t(-1));
}

}  // namespace samplex::cpu
