// Sums over sorted entries on the GPU, for the row reduction and for updates inside a backward.
//
// A group of lanes takes a place of the sorted entries. At the first entry of a row it walks the row's entries in
// order, every lane on its own columns. A row of many entries is cut at the borders, the last places of each K = 1 <<
// chunks.log_size of them: K - 1, 2 K - 1, ... The group at the row's first place p has the slot s = p / K + 1 and
// takes the entries up to the border (s + 1) K - 1; one at each later border s K - 1 has the slot s and takes K
// entries. So slot s is that of the row which has the border s K - 1, and no warp walks more than 2 K - 1 entries. What
// they find they leave in `partial`. The same rule with K_1 = 16 K puts those slots together to sums of the next level,
// with K_2 = 256 K these, until one sum covers the row. Whoever stores the last slot of a sum continues with it: an
// integer counter per sum says who that is. Which warp it is depends on the schedule; what is added in which order does
// not.
//
// Every question about a row (where do its slots begin, is it complete) is answered by the sorted keys at the borders:
// nothing is searched for, and the host does not know how many rows there are. Rows of at most K entries are never cut.
#pragma once

#include <type_traits>

#include "common/philox.h"
#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kUpdateThreads = 128;

// ------------------------------------------------------------------------------------------------ loads
// Width numbers of a row as they are in memory: 1, or so many that a load is of 16 bytes; 4 of a 16-bit type are 8.
// Converted when they are used: as raw words, many can be under way at a time.
template <int Width, typename T>
struct Numbers {
  static constexpr int kWords = Width * int(sizeof(T)) / 4;
  uint32_t words[kWords];

  SX_DEVICE void load(const T* from) {
    if constexpr (kWords == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      words[0] = x.x;
      words[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 x = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = x.x;
        words[i + 1] = x.y;
        words[i + 2] = x.z;
        words[i + 3] = x.w;
      }
    }
  }
  SX_DEVICE acc_t<T> operator[](int i) const {
    if constexpr (sizeof(T) == 2)
      return to_acc(bit_copy<T>(uint16_t(words[i / 2] >> (i % 2 * 16))));
    else if constexpr (sizeof(T) == 4)
      return bit_copy<T>(words[i]);
    else
      return bit_copy<T>(uint64_t(words[2 * i]) | uint64_t(words[2 * i + 1]) << 32);
  }
};
template <typename T>
struct Numbers<1, T> {
  T x;
  SX_DEVICE void load(const T* from) { x = from[0]; }
  SX_DEVICE acc_t<T> operator[](int) const { return to_acc(x); }
};

template <int Width, typename T, typename A>
SX_DEVICE inline void load_numbers(const T* from, A* to) {
  Numbers<Width, T> x;
  x.load(from);
#pragma unroll
  for (int i = 0; i < Width; ++i) to[i] = A(x[i]);
}

template <int Width, typename A>
SX_DEVICE inline void store_sums(A* to, const A* from) {
  if constexpr (Width == 1) {
    to[0] = from[0];
  } else if constexpr (sizeof(A) == 8) {
    *reinterpret_cast<double2*>(to) = make_double2(from[0], from[1]);
  } else {
    store_floats<Width>(to, from);
  }
}

SX_DEVICE inline float multiply_add(float a, float b, float c) { return ::fmaf(a, b, c); }
SX_DEVICE inline double multiply_add(double a, double b, double c) { return ::fma(a, b, c); }

// Rows of any storage type.
struct AnyType {};

// body(TypeTag<S>{}) for the type of a source's rows: one of T and A, or any.
template <typename T, typename A, int Width, typename F>
SX_DEVICE inline void with_source_type(DType dtype, const F& body) {
  if constexpr (sizeof(A) == 8 && Width > 1) {
    body(TypeTag<double>{});
  } else if constexpr (std::is_same_v<T, AnyType>) {
    if (dtype == DType::kFloat32) {
      body(TypeTag<float>{});
    } else if (dtype == DType::kFloat16) {
      body(TypeTag<Half>{});
    } else if (dtype == DType::kBFloat16) {
      body(TypeTag<BFloat16>{});
    } else if constexpr (Width == 1) {
      body(TypeTag<double>{});
    }
  } else if constexpr (std::is_same_v<T, A>) {
    body(TypeTag<A>{});
  } else {
    if (dtype == (sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32))
      body(TypeTag<A>{});
    else
      body(TypeTag<T>{});
  }
}

// Rows of S whose loads are under way at a time: 64 bytes of a lane.
template <int Width, typename S>
constexpr int batch_of() {
  constexpr int rows = 64 / (Width * int(sizeof(S)));
  return rows > 4 ? 4 : rows;
}

// ------------------------------------------------------------------------------------------------ the walk
// Places, entries and slots are int: torch's sort takes no more than that.

// Entries that a group of lanes adds up.
struct EntriesPart {
  int64_t id;
  int place, stop;  // the first entry, and where the walk ends at the latest
  int slot;         // where the sum goes if the row is not complete
  bool here;        // there is something to add
  bool complete;    // it is the whole row
  int entry;        // of the place at this lane, for the first places
  int matches;      // how many of these are the row's
  int lane;         // which of the part's columns the lane takes
};

// Slots of level - 1 that a warp adds up: each group of its lanes takes some of them, and the first one has the sum.
struct SlotsPart {
  int64_t id;
  int place;  // one of the row's
  int slot;
  bool complete;
  int level;
  int first, count;  // what to add
  bool here;         // a lane of the first group
  int lane;
};

// Every lane of a warp calls every function below. T: type of the source rows, beside A; Width columns a lane.
template <typename T, typename A, int Width>
struct EntryWalk {
  const RowReduceParams& p;
  int log_group;
  int entries;

  SX_DEVICE EntryWalk(const RowReduceParams& params, int log)
      : p(params), log_group(log), entries(int(params.source[0].entries + params.source[1].entries)) {}

  SX_DEVICE int lane_mask() const { return (1 << log_group) - 1; }
  SX_DEVICE int leader() const { return lane_id() & ~lane_mask(); }  // the group's first lane
  // How many lanes of the group say yes.
  SX_DEVICE int group_count(bool yes) const {
    return __popc(warp_ballot(yes) >> leader() & kFullMask >> (kWarpSize - 1 - lane_mask()));
  }

  // -1: there is no such place.
  SX_DEVICE int64_t key(int64_t place) const {
    if (uint64_t(place) >= uint64_t(entries)) return -1;
    return p.keys.wide ? static_cast<const int64_t*>(p.sorted)[place]
                       : int64_t(static_cast<const int32_t*>(p.sorted)[place]);
  }

  SX_DEVICE int64_t place_of(int thread) const { return (int64_t(blockIdx.x) * kUpdateThreads + thread) >> log_group; }

  // The part at the place of this thread's group.
  SX_DEVICE EntriesPart begin() const {
    const int64_t place = place_of(int(threadIdx.x));
    const int log = p.chunks.log_size;
    const int64_t chunk = place >> log, size = int64_t(1) << log;
    EntriesPart part{};
    part.lane = lane_id() & lane_mask();
    // All at once: what is needed of them is known later.
    const int64_t mine = key(place + part.lane), before = key(place - 1);
    const int64_t far = ((place + 1) & (size - 1)) == 0 ? key(place - size) : -1;
    if (part.lane == 0 && place < entries) part.entry = int(p.order[place]);
    part.id = shuffle_from(mine, leader());
    const bool head = before != part.id;
    part.here = part.id >= 0 && part.id < p.num_rows && (head || far == part.id);
    if (!warp_any(part.here)) return part;
    part.place = int(place);
    part.slot = int(chunk + 1);  // a border is the last place of its chunk
    const int64_t end = ((chunk + 2) << log) - 1;
    part.stop = int(end < entries ? end : entries);
    const bool matches = part.here && mine == part.id && place + part.lane < part.stop;
    if (matches && part.lane > 0) part.entry = int(p.order[place + part.lane]);
    part.matches = group_count(matches);
    part.complete = head;
    // Whether the row goes on behind the last place: only if all places that were examined are the row's.
    if (part.matches > lane_mask() || part.place + part.matches == part.stop)
      part.complete = head && key(end) != part.id;
    return part;
  }

  // sums[0 .. Width) = the part's sums of the columns from c on, those of part.lane, in the lanes that are `here`.
  // `bias`: that of the bias terms, if requested; the same in all lanes of the part.
  SX_DEVICE void add(const EntriesPart& part, int c, A* sums, bool with_bias, A& bias) const {
#pragma unroll
    for (int i = 0; i < Width; ++i) sums[i] = 0;
    bias = 0;
    const bool inside = part.here && c < p.dim;
    const int entries_a = int(p.source[0].entries);
    int base = part.place, entry = part.entry, count = part.matches;
    for (;;) {
      const bool from_a = entry < entries_a, mine = part.lane < count;
      int row = 0;
      A coef = 0, term = 0;
      if (mine) {
        const RowReduceSource& source = p.source[from_a ? 0 : 1];
        const int at = from_a ? entry : entry - entries_a;
        row = source.inverse == 0 ? at : int(mul_high_u64(uint64_t(at), source.inverse));
        coef = source.coef != nullptr ? static_cast<const A*>(source.coef)[at] : A(1);
        term = with_bias && source.bias != nullptr ? static_cast<const A*>(source.bias)[at] : coef;
      }
      const int split = group_count(mine && from_a);  // sorted stably: those of A come first
      const Staged staged{row, coef, term};
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        add_source(p.source[i], staged, i == 0 ? 0 : split, i == 0 ? split : count, c, inside, sums, with_bias, bias);
      }
      // As many as the group has lanes: there may be more.
      base += 1 << log_group;
      const bool more = count > lane_mask() && base < part.stop;
      if (!warp_any(more)) return;
      const bool next = more && base + part.lane < part.stop && key(base + part.lane) == part.id;
      if (next) entry = int(p.order[base + part.lane]);
      count = group_count(next);
    }
  }

  SX_DEVICE void add(const SlotsPart& part, int c, A* sums, bool with_bias, A& bias) const {
    constexpr int kBatch = batch_of<Width, A>();
#pragma unroll
    for (int i = 0; i < Width; ++i) sums[i] = 0;
    const int group = lane_id() >> log_group, groups = kWarpSize >> log_group;
    if (c < p.dim) {
      const A* from = static_cast<const A*>(p.chunks.partial) + int64_t(part.first + group) * p.dim + c;
      const int step = int(p.dim) * groups;
      int rest = part.count - group;
#pragma unroll 1
      for (; rest > (kBatch - 1) * groups; rest -= kBatch * groups) {
        Numbers<Width, A> x[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u, from += step) x[u].load(from);
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
#pragma unroll
          for (int i = 0; i < Width; ++i) sums[i] += x[u][i];
        }
      }
#pragma unroll 1
      for (; rest > 0; rest -= groups, from += step) {
        Numbers<Width, A> x;
        x.load(from);
#pragma unroll
        for (int i = 0; i < Width; ++i) sums[i] += x[i];
      }
    }
#pragma unroll 1
    for (int lanes = 1 << log_group; lanes < kWarpSize; lanes *= 2) {
#pragma unroll
      for (int i = 0; i < Width; ++i) sums[i] += shuffle_xor(sums[i], lanes);
    }
    bias = 0;
    if (with_bias) {
      if (lane_id() < part.count) bias = static_cast<const A*>(p.chunks.partial_bias)[part.first + lane_id()];
      bias = group_sum<kWarpSize>(bias);
    }
  }

  // Leaves the sums of a part that is not complete; bias: in the part's first lane.
  template <typename Part>
  SX_DEVICE void store(const Part& part, int c, const A* sums) const {
    store_sums<Width>(static_cast<A*>(p.chunks.partial) + int64_t(slot_of(part)) * p.dim + c, sums);
  }
  template <typename Part>
  SX_DEVICE void store_bias(const Part& part, A bias) const {
    static_cast<A*>(p.chunks.partial_bias)[slot_of(part)] = bias;
  }

  // visit(part) for each part that falls to this warp: the entries of its groups, and the slots of each sum for which
  // it stores the last one. visit stores the sums of a part that is not complete. `counters`: of the block of columns.
  template <typename F>
  SX_DEVICE void for_parts(int* counters, const F& visit) const {
    const EntriesPart own = begin();
    if (!warp_any(own.here)) return;
    visit(own);
    for (unsigned waiting = warp_ballot(own.here && !own.complete && own.lane == 0); waiting != 0;
         waiting &= waiting - 1) {
      const int from = __ffs(int(waiting)) - 1;
      SlotsPart part{};
      part.lane = lane_id() & lane_mask();
      part.here = lane_id() == part.lane;
      // As in `begin`: kept since then, they would take registers that the visits need.
      const int64_t place = place_of(warp_id() * kWarpSize + from);
      part.id = key(place);
      part.slot = int(place >> p.chunks.log_size) + 1;
      while (!part.complete && climb(part, counters)) visit(part);
    }
  }

 private:
  SX_DEVICE static int slot_of(const EntriesPart& part) { return part.slot; }
  SX_DEVICE int slot_of(const SlotsPart& part) const { return level_begin(part.level) + part.slot; }

  // The first slot of a level. Kept in a part, it would take a register that the visits need.
  SX_DEVICE int level_begin(int level) const {
    int begin = level;  // row_chunk_slots of each level below: one more than its pieces
#pragma unroll 1
    for (int pieces = entries >> p.chunks.log_size; level > 0; --level, pieces >>= kLogFan) begin += pieces;
    return begin;
  }

  // An entry in each lane of a group: its row in the source, its coefficient, what it adds to the bias.
  struct Staged {
    int row;
    A coef, term;
  };

  // Adds the entries [begin, end) of those that the group's lanes hold. A shuffle takes the lane modulo 32: past the
  // end it gets a number that is not used.
  SX_DEVICE void add_source(const RowReduceSource& source, const Staged& staged, int begin, int end, int c, bool inside,
                            A* sums, bool with_bias, A& bias) const {
    if (!warp_any(begin < end)) return;
    with_source_type<T, A, Width>(source.dtype, [&](auto tag) {
      using S = typename decltype(tag)::type;
      constexpr int kBatch = batch_of<Width, S>();
      const S* const rows = static_cast<const S*>(source.rows) + c;
      const int dim = int(p.dim);
      int from = leader() + begin;
      const int last = leader() + end;
      while (warp_any(from + kBatch <= last)) {
        const bool full = from + kBatch <= last;
        int row[kBatch];
        A factor[kBatch];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          row[u] = shuffle_from(staged.row, from + u);
          factor[u] = shuffle_from(staged.coef, from + u);
        }
        if (with_bias) {
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            const A term = source.bias != nullptr ? shuffle_from(staged.term, from + u) : factor[u];
            if (full) bias += term;
          }
        }
        if (full && inside) {
          Numbers<Width, S> x[kBatch];
#pragma unroll
          for (int u = 0; u < kBatch; ++u) x[u].load(rows + int64_t(row[u]) * dim);
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
#pragma unroll
            for (int i = 0; i < Width; ++i) sums[i] = multiply_add(factor[u], A(x[u][i]), sums[i]);
          }
        }
        from += full ? kBatch : 0;
      }
#pragma unroll 1
      for (; warp_any(from < last); ++from) {
        const int r = shuffle_from(staged.row, from);
        const A factor = shuffle_from(staged.coef, from), term = shuffle_from(staged.term, from);
        if (from >= last) continue;
        bias += term;
        if (inside) {
          Numbers<Width, S> x;
          x.load(rows + int64_t(r) * dim);
#pragma unroll
          for (int i = 0; i < Width; ++i) sums[i] = multiply_add(factor, A(x[i]), sums[i]);
        }
      }
    });
  }

  // The sum of `part` was stored. Makes it the sum of the next level that it belongs to; whether the warp is the last
  // one of those whose sums are needed for that.
  SX_DEVICE bool climb(SlotsPart& part, int* counters) const {
    constexpr int kFan = 1 << kLogFan;
    static_assert(2 * kFan == kWarpSize);
    const int low = p.chunks.log_size + kLogFan * part.level;
    const int node = part.slot >> kLogFan, before = (node - 1) * kFan;
    // Which slots are the row's: of the node in front of this one and of this one, and of the two that follow.
    const int64_t border = (int64_t(before + lane_id()) << low) - 1;
    const int64_t here = key(border), behind = key(border + (int64_t(kWarpSize) << low));
    const unsigned low_mask = warp_ballot(here == part.id), high_mask = warp_ballot(behind == part.id);
    const bool inner = (low_mask & 1) != 0;  // the row begins before the node in front of this one
    const bool earlier = !inner && (low_mask >> kFan & 1) != 0;
    unsigned mask = low_mask;
    if (!earlier) mask = mask >> kFan | (inner ? 0u : high_mask << kFan);
    const int slot = (earlier ? before : before + kFan) + __ffs(int(mask)) - 1;
    part.first = level_begin(part.level) + slot;
    part.count = __popc(mask);
    part.place = int((int64_t(slot) << low) - 1);
    part.complete = !inner && (high_mask >> (earlier ? 0 : kFan) & 1) == 0;
    part.slot = inner || earlier ? node : node + 1;
    part.level += 1;
    // Counted at the first of the slots that are added: no other sum has it.
    return warp_arrives_last(counters + part.first, part.count);
  }
};

// ------------------------------------------------------------------------------------------------ launches
inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Lanes that share a row: the least power of two, `least` and more, that covers it in one go, at most a warp. Its
// logarithm.
inline int log_group_of(int64_t dim, int width, int least) {
  int log = 0;
  while ((1 << log) < kWarpSize && ((int64_t(width) << log) < dim || (1 << log) < least)) ++log;
  return log;
}

// The entries of a row are handed round in a group of lanes: with four of them, four at a time.
constexpr int kLeastWalkers = 4;

inline unsigned group_blocks(int64_t rows, int log_group) {
  return unsigned(((rows << log_group) + kUpdateThreads - 1) / kUpdateThreads);
}

// Blocks of columns: a warp has one of them at a time.
inline int64_t column_blocks(int64_t dim, int width) {
  const int64_t columns = int64_t(kWarpSize) * width;
  return dim > columns ? (dim + columns - 1) / columns : 1;
}

inline void set_inverses(RowReduceParams& params) {
  for (RowReduceSource& source : params.source) {
    const uint64_t k = uint64_t(source.entries_per_row);
    source.inverse = k == 1 ? 0 : ~uint64_t(0) / k + 1;
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
