// Arithmetic on gathered class rows, and their prefetch, for the CPU bodies of all stages.
#pragma once

#include <type_traits>

#include "common/simd.h"
#include "common/vec.h"

namespace samplex {
inline namespace SX_ISA_NS {

// Row primitives on A-type buffers: scalar code for any type, and vector code for float accumulation.
template <typename T>
struct Rows {
  using A = acc_t<T>;

  // out[j] = h . w[j], four class rows at a time so that h is read once for four
  static void dot4(const A* h, const T* const* w, int64_t d, A* out) {
    int64_t c = 0;
    A tail[4] = {0, 0, 0, 0};
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      Vec s0 = Vec::zero(), s1 = Vec::zero(), s2 = Vec::zero(), s3 = Vec::zero();
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        const Vec x = Vec::load(h + c);
        s0 = fma(x, Vec::load(w[0] + c), s0);
        s1 = fma(x, Vec::load(w[1] + c), s1);
        s2 = fma(x, Vec::load(w[2] + c), s2);
        s3 = fma(x, Vec::load(w[3] + c), s3);
      }
      tail[0] = s0.sum();
      tail[1] = s1.sum();
      tail[2] = s2.sum();
      tail[3] = s3.sum();
    }
#endif
    for (; c < d; ++c) {
      for (int j = 0; j < 4; ++j) tail[j] += h[c] * to_acc(w[j][c]);
    }
    for (int j = 0; j < 4; ++j) out[j] = tail[j];
  }

  // out[j] = w[j] . w[j]
  static void squares4(const T* const* w, int64_t d, A* out) {
    int64_t c = 0;
    A tail[4] = {0, 0, 0, 0};
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      Vec s[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        for (int j = 0; j < 4; ++j) {
          const Vec x = Vec::load(w[j] + c);
          s[j] = fma(x, x, s[j]);
        }
      }
      for (int j = 0; j < 4; ++j) tail[j] = s[j].sum();
    }
#endif
    for (; c < d; ++c) {
      for (int j = 0; j < 4; ++j) tail[j] += to_acc(w[j][c]) * to_acc(w[j][c]);
    }
    for (int j = 0; j < 4; ++j) out[j] = tail[j];
  }

  // acc += sum_j coef[j] * w[j]
  static void axpy4(A* acc, const A* coef, const T* const* w, int64_t d) {
    int64_t c = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec c0 = Vec::all(coef[0]), c1 = Vec::all(coef[1]), c2 = Vec::all(coef[2]), c3 = Vec::all(coef[3]);
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        Vec x = fma(c0, Vec::load(w[0] + c), Vec::load(acc + c));
        x = fma(c1, Vec::load(w[1] + c), x);
        x = fma(c2, Vec::load(w[2] + c), x);
        fma(c3, Vec::load(w[3] + c), x).store(acc + c);
      }
    }
#endif
    for (; c < d; ++c) {
      A x = acc[c];
      for (int j = 0; j < 4; ++j) x += coef[j] * to_acc(w[j][c]);
      acc[c] = x;
    }
  }

#if defined(__AVX2__)
  // Rows in the layout of `dot8` and `axpy8`: kLoad numbers as Vecs that are cheap to make. Of bf16 these are the
  // numbers at even places, then those at odd places; of the other types one Vec in order. d % kLoad == 0 throughout.
  static constexpr bool kPairs = std::is_same_v<T, BFloat16>;
  static constexpr int kParts = kPairs ? 2 : 1, kLoad = kParts * Vec::kSize;
  SX_ALWAYS_INLINE static void load_parts(const T* p, Vec* parts) {
    if constexpr (kPairs)
      load_pairs(p, parts[0], parts[1]);
    else
      parts[0] = Vec::load(p);
  }
  // Back in order.
  SX_ALWAYS_INLINE static void store_parts(const Vec* parts, float* p) {
    if constexpr (kPairs)
      store_pairs(parts[0], parts[1], p);
    else
      parts[0].store(p);
  }

  // h . w[j] in lane j, eight rows at a time
  static Vec dot8(const float* h, const T* const* w, int64_t d) {
    Vec s[8];
    for (int j = 0; j < 8; ++j) s[j] = Vec::zero();
    for (int64_t c = 0; c < d; c += kLoad) {
      Vec x[kParts];
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) x[part] = Vec::load(h + c + part * Vec::kSize);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        Vec y[kParts];
        load_parts(w[j] + c, y);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) s[j] = fma(x[part], y[part], s[j]);
      }
    }
    return sums_of(s);
  }

  // w[j] . w[j] in lane j
  static Vec squares8(const T* const* w, int64_t d) {
    Vec s[8];
    for (int j = 0; j < 8; ++j) s[j] = Vec::zero();
    for (int64_t c = 0; c < d; c += kLoad) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        Vec y[kParts];
        load_parts(w[j] + c, y);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) s[j] = fma(y[part], y[part], s[j]);
      }
    }
    return sums_of(s);
  }

  // acc += sum_j coef[j] * w[j]
  static void axpy8(float* acc, const float* coef, const T* const* w, int64_t d) {
    Vec k[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) k[j] = Vec::all(coef[j]);
    for (int64_t c = 0; c < d; c += kLoad) {
      // Two sums: one chain of eight would wait for itself.
      Vec x[kParts], y[kParts], a[kParts], b[kParts];
      load_parts(w[0] + c, a);
      load_parts(w[1] + c, b);
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        x[part] = fma(k[0], a[part], Vec::load(acc + c + part * Vec::kSize));
        y[part] = k[1] * b[part];
      }
#pragma GCC unroll 3
      for (int j = 2; j < 8; j += 2) {
        load_parts(w[j] + c, a);
        load_parts(w[j + 1] + c, b);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          x[part] = fma(k[j], a[part], x[part]);
          y[part] = fma(k[j + 1], b[part], y[part]);
        }
      }
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) (x[part] + y[part]).store(acc + c + part * Vec::kSize);
    }
  }
#endif

  static void axpy1(A* acc, A coef, const T* w, int64_t d) {
    for (int64_t c = 0; c < d; ++c) acc[c] += coef * to_acc(w[c]);
  }

  // out = coef * w
  static void scale_row(A* out, A coef, const T* w, int64_t d) {
    for (int64_t c = 0; c < d; ++c) out[c] = coef * to_acc(w[c]);
  }

  static void scale_to(A* out, const A* acc, A factor, int64_t d) {
    for (int64_t c = 0; c < d; ++c) out[c] = acc[c] * factor;
  }

  // out[k] = factor * exp(x[k] - shift)
  static void exp_to(const A* x, A shift, A factor, A* out, int64_t n) {
    int64_t k = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec s = Vec::all(shift), f = Vec::all(factor);
      for (; k + Vec::kSize <= n; k += Vec::kSize) (f * vexp(Vec::load(x + k) - s)).store(out + k);
      if (k < n) store_tail(f * vexp(load_tail(x + k, int(n - k)) - s), out + k, int(n - k));
      return;
    }
#endif
    for (; k < n; ++k) out[k] = factor * exp_acc(x[k] - shift);
  }

  // nan is passed over
  static A max_of(const A* x, int64_t n) {
    A most = negative_infinity<A>();
    int64_t k = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      if (n >= 2 * Vec::kSize) {
        Vec m0 = Vec::all(most), m1 = m0;
        for (; k + 2 * Vec::kSize <= n; k += 2 * Vec::kSize) {
          m0 = max(Vec::load(x + k), m0);
          m1 = max(Vec::load(x + k + Vec::kSize), m1);
        }
        A lanes[Vec::kSize];
        max(m0, m1).store(lanes);
        for (const A lane : lanes) most = lane > most ? lane : most;
      }
    }
#endif
    for (; k < n; ++k) most = x[k] > most ? x[k] : most;
    return most;
  }

  // out[k] = exp(x[k] - shift); returns the sum
  static A exp_sum(const A* x, A shift, A* out, int64_t n) {
    int64_t k = 0;
    A sum = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec s = Vec::all(shift);
      Vec total = Vec::zero();
      for (; k + Vec::kSize <= n; k += Vec::kSize) {
        const Vec e = vexp(Vec::load(x + k) - s);
        e.store(out + k);
        total = total + e;
      }
      if (k < n) {
        const int rest = int(n - k);
        const Vec e = vexp(load_tail(x + k, rest) - s);
        store_tail(e, out + k, rest);
        for (; k < n; ++k) sum += out[k];
      }
      return total.sum() + sum;
    }
#endif
    for (; k < n; ++k) {
      out[k] = exp_acc(x[k] - shift);
      sum += out[k];
    }
    return sum;
  }
};

// Class rows that are scored and then added up together: they are read twice, so they must stay in the L1 cache.
constexpr int kTile = 16;  // at most
template <typename T>
inline int64_t rows_of_tile(int64_t d) {
  const int64_t rows = 16384 / (d * int64_t(sizeof(T)) + 1) + 1;
  return rows < 4 ? 4 : rows > kTile ? kTile : rows / 4 * 4;
}

// How class rows are prefetched: how many rows ahead (a multiple of 4, the rows that are scored together), and how much
// of each. Measured. On Intel and on AMD since Zen 4 whole rows into the L2 cache, as many lines under way as
// `prefetch_lines` says: the L1 takes 16 or 24 misses at a time, the L2 twice as many and more (Zen 4: 0.24 ms instead
// of 0.48 for 16,640 rows of 512 bytes). On older AMD every prefetch takes a miss buffer of the L1, so the first half
// of a row is asked for, and the stream prefetcher, which has buffers of its own, brings the rest: 12 to 17 % faster
// than whole rows. A loop that walks several tables at once has `other_bytes` of the others under way with each row.
constexpr int64_t kMostAhead = 32;
struct RowPrefetch {
  int64_t rows, bytes;
  bool into_l1;
};
template <typename T>
inline RowPrefetch row_prefetch(int64_t d, int64_t other_bytes = 0) {
  const int64_t bytes = d * int64_t(sizeof(T)), lines = prefetch_lines();
  if (lines == 0) return {bytes <= 1024 ? 8 : 16, bytes <= 256 ? bytes : 256, true};
  const int64_t rows = lines * 64 / (bytes + other_bytes + 1) + 1;
  return {rows > kMostAhead ? kMostAhead : (rows + 3) / 4 * 4, bytes, false};
}

// SX_ALWAYS_INLINE, here and in the callers: GCC takes a function that only prefetches for one without effect, and
// drops the call.
template <typename T>
SX_ALWAYS_INLINE void prefetch_row(const T* row, const RowPrefetch& how) {
  const char* bytes = reinterpret_cast<const char*>(row);
  if (how.into_l1) {
    for (int64_t at = 0; at < how.bytes; at += 64) __builtin_prefetch(bytes + at, 0, 3);
    return;
  }
  // Four lines a turn: these instructions are a tenth of a loop over rows.
  int64_t at = 0;
  for (; at + 256 <= how.bytes; at += 256) {
    __builtin_prefetch(bytes + at, 0, 2);
    __builtin_prefetch(bytes + at + 64, 0, 2);
    __builtin_prefetch(bytes + at + 128, 0, 2);
    __builtin_prefetch(bytes + at + 192, 0, 2);
  }
  for (; at < how.bytes; at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
