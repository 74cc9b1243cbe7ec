// What the passes on a GPU share: columns of a row by 16-byte loads, four of them under way in every thread, and the
// pool of a block that keeps the k largest.
#pragma once

#include <type_traits>

#include "common/warp.cuh"
#include "predict/predict/predict_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kPredictThreads = 256;
constexpr int kPredictWarps = kPredictThreads / kWarpSize;
constexpr int kPredictLoads = 4;  // of a thread, under way at once
// Columns of one load, and of all loads of a thread.
template <typename A>
constexpr int kPredictWidth = 16 / int(sizeof(A));
template <typename A>
constexpr int kPredictOwn = kPredictLoads * kPredictWidth<A>;
// Blocks on a multiprocessor, which is how many registers a thread may have: doubles take many.
template <typename A>
constexpr int kPredictResident = sizeof(A) == 4 ? 3 : 2;

// ------------------------------------------------------------------------------------------------ columns
// Which columns a thread has of a tile of `Threads` threads: load i of a thread takes kPredictWidth columns, and the
// tile's loads are consecutive. The same whether they are made in 16 bytes or in single numbers.
template <typename A, int Threads>
struct PredictTile {
  static constexpr int kColumns = Threads * kPredictOwn<A>;

  SX_DEVICE static int64_t column(int64_t tile, int i, int j) {
    return tile + (int64_t(i) * Threads + threadIdx.x % Threads) * kPredictWidth<A> + j;
  }
  // out = from[columns]; `whole`: the tile ends before `end` and `from` is aligned. 0 beyond `end`.
  SX_DEVICE static void load(const A* from, int64_t tile, int64_t end, bool whole, A (&out)[kPredictOwn<A>]) {
    constexpr int kWidth = kPredictWidth<A>;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kPredictLoads; ++i) {
        const A* at = from + column(tile, i, 0);
        if constexpr (sizeof(A) == 4) {
          const float4 x = *reinterpret_cast<const float4*>(at);
          out[i * kWidth] = x.x;
          out[i * kWidth + 1] = x.y;
          out[i * kWidth + 2] = x.z;
          out[i * kWidth + 3] = x.w;
        } else {
          const double2 x = *reinterpret_cast<const double2*>(at);
          out[i * kWidth] = x.x;
          out[i * kWidth + 1] = x.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPredictLoads; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int64_t c = column(tile, i, j);
          out[i * kWidth + j] = c < end ? from[c] : A(0);
        }
      }
    }
  }
  // to[columns] = in, as above.
  SX_DEVICE static void store(A* to, int64_t tile, int64_t end, bool whole, const A (&in)[kPredictOwn<A>]) {
    constexpr int kWidth = kPredictWidth<A>;
#pragma unroll
    for (int i = 0; i < kPredictLoads; ++i) {
      if (whole) {
        A* at = to + column(tile, i, 0);
        if constexpr (sizeof(A) == 4) {
          *reinterpret_cast<float4*>(at) =
              make_float4(in[i * kWidth], in[i * kWidth + 1], in[i * kWidth + 2], in[i * kWidth + 3]);
        } else {
          *reinterpret_cast<double2*>(at) = make_double2(in[i * kWidth], in[i * kWidth + 1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int64_t c = column(tile, i, j);
          if (c < end) to[c] = in[i * kWidth + j];
        }
      }
    }
  }
};

SX_DEVICE inline bool predict_aligned(const void* a) { return reinterpret_cast<uintptr_t>(a) % 16 == 0; }

// high[columns] + low[columns] = in, as `PredictTile::store` of a block has it.
SX_DEVICE inline void predict_store_parts(BFloat16* high, BFloat16* low, int64_t tile, int64_t end, bool whole,
                                          const float (&in)[kPredictOwn<float>]) {
  using Tile = PredictTile<float, kPredictThreads>;
  constexpr int kWidth = kPredictWidth<float>;
#pragma unroll
  for (int i = 0; i < kPredictLoads; ++i) {
    BFloat16 first[kWidth], rest[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) split16(in[i * kWidth + j], first[j], rest[j]);
    if (whole) {
      const int64_t c = Tile::column(tile, i, 0);
      const auto pair = [](BFloat16 a, BFloat16 b) { return uint32_t(a.x) | uint32_t(b.x) << 16; };
      *reinterpret_cast<uint2*>(high + c) = make_uint2(pair(first[0], first[1]), pair(first[2], first[3]));
      *reinterpret_cast<uint2*>(low + c) = make_uint2(pair(rest[0], rest[1]), pair(rest[2], rest[3]));
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int64_t c = Tile::column(tile, i, j);
        if (c >= end) continue;
        high[c] = first[j];
        low[c] = rest[j];
      }
    }
  }
}

// A row of products and what makes logits of them.
template <typename A>
struct PredictRow {
  PredictMap<A> map;
  A* dots;
  int64_t count;
  bool aligned;  // row and bias

  SX_DEVICE PredictRow(const PredictChunk& chunk, int64_t b)
      : map(chunk), dots(static_cast<A*>(chunk.dots) + b * chunk.stride), count(chunk.count) {
    aligned = predict_aligned(dots) && predict_aligned(map.bias);
  }
  // Logits of a tile, with their sign.
  template <int Threads>
  SX_DEVICE void load_signed(int64_t tile, int64_t end, A (&s)[kPredictOwn<A>]) const {
    using Tile = PredictTile<A, Threads>;
    const bool whole = aligned && tile + Tile::kColumns <= end;
    Tile::load(dots, tile, end, whole, s);
    if (map.bias != nullptr) {
      A bias[kPredictOwn<A>];
      Tile::load(map.bias, tile, end, whole, bias);
#pragma unroll
      for (int j = 0; j < kPredictOwn<A>; ++j) s[j] += bias[j];
    }
#pragma unroll
    for (int j = 0; j < kPredictOwn<A>; ++j) s[j] = map.scale * s[j];
  }
  template <int Threads>
  SX_DEVICE void load(int64_t tile, int64_t end, A (&s)[kPredictOwn<A>]) const {
    load_signed<Threads>(tile, end, s);
#pragma unroll
    for (int j = 0; j < kPredictOwn<A>; ++j) s[j] = map.size_of(s[j]);
  }
};

// ------------------------------------------------------------------------------------------------ the k largest
// An entry as two numbers that compare as it ranks: its value in the order of torch.topk (a nan is the largest, the
// zeros are equal), and 2^32 - 1 less its place in the order of ids.
template <typename A>
struct PredictKey {
  using Rank = std::conditional_t<sizeof(A) == 4, uint32_t, uint64_t>;
  static constexpr int kRankBytes = int(sizeof(Rank)), kBytes = kRankBytes + 4;
  static constexpr Rank kTop = Rank(1) << (8 * kRankBytes - 1);
  Rank rank;
  uint32_t later;

  SX_DEVICE static PredictKey of(A value, uint32_t place) {
    if (value != value) return {Rank(~Rank(0)), ~place};
    const Rank bits = bit_copy<Rank>(value + A(0));  // -0 + 0 is 0
    return {Rank((bits & kTop) != 0 ? ~bits : bits | kTop), ~place};
  }
  SX_DEVICE bool before(PredictKey other) const {
    return rank > other.rank || (rank == other.rank && later > other.later);
  }
  // A value that is larger than no value of this rank or above; a nan stays aside.
  SX_DEVICE A least_value() const {
    const A value = bit_copy<A>(Rank((rank & kTop) != 0 ? rank ^ kTop : ~rank));
    if (value == value) return value;
    return (rank & kTop) == 0 ? negative_infinity<A>() : -negative_infinity<A>();
  }
  // Byte `level` from the top, and whether all bytes above it are those of `other`.
  SX_DEVICE int byte(int level) const {
    if (level < kRankBytes) return int(rank >> (8 * (kRankBytes - 1 - level)) & 255);
    return int(later >> (8 * (kBytes - 1 - level)) & 255);
  }
  SX_DEVICE bool starts_as(PredictKey other, int level) const {
    if (level == 0) return true;
    if (level <= kRankBytes) return (rank ^ other.rank) >> (8 * (kRankBytes - level)) == 0;
    return rank == other.rank && (later ^ other.later) >> (8 * (kBytes - level)) == 0;
  }
  SX_DEVICE void append(int level, int byte) {
    if (level < kRankBytes) {
      rank |= Rank(byte) << (8 * (kRankBytes - 1 - level));
    } else {
      later |= uint32_t(byte) << (8 * (kBytes - 1 - level));
    }
  }
};

// Entries of a block in shared memory, in any order.
constexpr int kPredictPool = 3072;

template <typename A>
struct PredictShared {
  typename PredictKey<A>::Rank ranks[kPredictPool];
  uint32_t later[kPredictPool];
  int counts[256];
  int used;
  int byte, above, inside;  // found by select_byte
};

// The block's running top-k. `border` is in registers, the same in every thread: an entry that ranks behind it is not
// among the k largest. The pool takes all others, and is cut to k by a radix selection when it is crowded: that is
// rare, since few entries pass the border once it is there.
template <typename A>
struct PredictPool {
  using Key = PredictKey<A>;
  PredictShared<A>& shared;
  int k;
  Key border;

  SX_DEVICE Key at(int i) const { return {shared.ranks[i], shared.later[i]}; }
  SX_DEVICE void put(int i, Key key) {
    shared.ranks[i] = key.rank;
    shared.later[i] = key.later;
  }
  // Entries at which the pool is cut.
  SX_DEVICE int most() const { return k <= 256 ? 1024 : kPredictPool; }

  // The largest byte such that at least `need` of the counted entries have it or a larger one. Warp 0.
  SX_DEVICE void select_byte(int need) {
    const int lane = lane_id();
    int own = 0;
    for (int i = 0; i < 8; ++i) own += shared.counts[255 - 8 * lane - i];
    int reached = own;
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = shuffle_from(reached, (lane - step) & (kWarpSize - 1));
      if (lane >= step) reached += other;
    }
    int above = reached - own;
    if (above >= need || reached < need) return;
    for (int byte = 255 - 8 * lane;; --byte) {
      const int inside = shared.counts[byte];
      if (above + inside >= need) {
        shared.byte = byte;
        shared.above = above;
        shared.inside = inside;
        return;
      }
      above += inside;
    }
  }

  // Cuts the pool, which holds more than k, to the k largest. All threads, after a barrier; ends with one.
  SX_DEVICE void cut() {
    const int tid = int(threadIdx.x), n = shared.used < kPredictPool ? shared.used : kPredictPool;
    int need = k;
    border = {0, 0};
#pragma unroll 1
    for (int level = 0; level < Key::kBytes; ++level) {
      shared.counts[tid] = 0;
      __syncthreads();
#pragma unroll 1
      for (int i = tid; i < n; i += kPredictThreads) {
        const Key key = at(i);
        if (key.starts_as(border, level)) atomicAdd(&shared.counts[key.byte(level)], 1);
      }
      __syncthreads();
      if (warp_id() == 0) select_byte(need);
      __syncthreads();
      border.append(level, shared.byte);
      need -= shared.above;
      if (shared.inside == need) break;  // all that begin as the border does are among the k
    }
    if (tid == 0) shared.used = 0;
#pragma unroll 1
    for (int from = 0; from < n; from += kPredictThreads) {
      const int i = from + tid;
      const Key key = i < n ? at(i) : Key{0, 0};
      // What is written from here on lies below from + kPredictThreads, and that is read.
      __syncthreads();
      if (i < n && !border.before(key)) put(atomicAdd(&shared.used, 1), key);
    }
    __syncthreads();
  }

  // Offers a thread's columns of a tile. `exists(column)`: whether there is such an entry.
  template <typename Source>
  SX_DEVICE void offer(const Source& source, int64_t tile, uint32_t held) {
    using Tile = PredictTile<A, kPredictThreads>;
    constexpr int kOwn = kPredictOwn<A>, kWidth = kPredictWidth<A>;
    A s[kOwn];
    source.load(tile, s);
    unsigned mask = 0;
    const A least = border.least_value();
#pragma unroll
    for (int j = 0; j < kOwn; ++j) mask |= unsigned(!(s[j] < least)) << j;
    // Counted from the source's first column: 32 bits.
    const uint32_t own = uint32_t(Tile::column(tile, 0, 0) - source.begin),
                   length = uint32_t(source.end - source.begin);
    const auto column = [&](int j) { return own + uint32_t(j / kWidth * kPredictThreads * kWidth + j % kWidth); };
    const auto key = [&](int j) { return Key::of(s[j], held + column(j)); };
    const auto drop_those_behind = [&] {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if ((mask >> j & 1) != 0 && border.before(key(j))) mask &= ~(1u << j);
      }
    };
    if (mask != 0) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if ((mask >> j & 1) != 0 && !(column(j) < length && source.exists(source.begin + column(j))))
          mask &= ~(1u << j);
      }
      drop_those_behind();
    }
    for (;;) {
      bool crowded = false;
      if (mask != 0) {
        const int n = __popc(mask);
        int to = atomicAdd(&shared.used, n);
        crowded = to + n > most();
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          if ((mask >> j & 1) != 0 && to < kPredictPool) {
            put(to++, key(j));
            mask &= ~(1u << j);
          }
        }
      }
      if (!block_any(crowded)) return;
      const bool all_in = shared.used <= kPredictPool;
      cut();
      if (all_in) return;
      drop_those_behind();
    }
  }

  // Descending. All threads, after a barrier; ends with one. Returns how many there are, at most k.
  SX_DEVICE int sort() {
    if (shared.used > k) cut();
    const int n = shared.used;
    int width = 1;
    while (width < n) width *= 2;
    for (int i = n + int(threadIdx.x); i < width; i += kPredictThreads) put(i, {0, 0});
    for (int run = 2; run <= width; run *= 2) {
      for (int step = run / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = int(threadIdx.x); i < width; i += kPredictThreads) {
          const int other = i ^ step;
          if (other < i) continue;
          const Key a = at(i), b = at(other);
          if (b.before(a) == ((i & run) == 0)) {
            put(i, b);
            put(other, a);
          }
        }
      }
    }
    __syncthreads();
    return n;
  }
};

}  // namespace samplex::SX_BACKEND_NS
