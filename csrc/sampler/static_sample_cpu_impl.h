// The CPU body of static_sample, compiled once per instruction set: blocks of draws, each stage a plain loop over the
// block that the compiler vectorises, Philox by hand. Every lane does the arithmetic of static_sample_law.h.
#pragma once

#ifdef __AVX2__
// GCC 12 takes the undefined lanes of its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#include "sampler/static_sample_law.h"

#define SX_CONCAT_(a, b) a##b
#define SX_CONCAT(a, b) SX_CONCAT_(a, b)
#define SX_STATIC_NS SX_CONCAT(static_sample_, SX_ISA_NS)

namespace samplex::SX_STATIC_NS {

constexpr int kBlock = 128;  // the block's arrays, about 8 KiB, stay in the first cache

struct Block {
  int64_t first;  // flat index of the first draw
  int count;
  uint32_t row[kBlock], position[kBlock];  // Philox counter words 2 and 3 (attempt 0)
  int64_t b[kBlock];
  uint64_t bits0[kBlock], bits1[kBlock];
  double n[kBlock], log_weight[kBlock];
};

// Two Philox words are kept in each 64-bit lane's low half; what lies above is never read by the 32-bit multiply.
inline void philox_block(Block& s, PhiloxKey key) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i < s.count; i += 8) {
    __m512i c0 = _mm512_set1_epi64(int64_t(uint32_t(key.offset))), c1 = _mm512_set1_epi64(int64_t(key.offset >> 32));
    __m512i c2 = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.row + i)));
    __m512i c3 = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s.position + i)));
    uint32_t key0 = uint32_t(key.seed), key1 = uint32_t(key.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m512i p0 = _mm512_mul_epu32(c0, _mm512_set1_epi64(0xD2511F53));
      const __m512i p1 = _mm512_mul_epu32(c2, _mm512_set1_epi64(0xCD9E8D57));
      c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), c1), _mm512_set1_epi64(key0));
      c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), c3), _mm512_set1_epi64(key1));
      c1 = p1;
      c3 = p0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const __m512i low = _mm512_set1_epi64(0xFFFFFFFF);
    _mm512_storeu_si512(s.bits0 + i, _mm512_or_si512(_mm512_slli_epi64(c1, 32), _mm512_and_si512(c0, low)));
    _mm512_storeu_si512(s.bits1 + i, _mm512_or_si512(_mm512_slli_epi64(c3, 32), _mm512_and_si512(c2, low)));
  }
#elif defined(__AVX2__)
  for (; i < s.count; i += 4) {
    __m256i c0 = _mm256_set1_epi64x(int64_t(uint32_t(key.offset))), c1 = _mm256_set1_epi64x(int64_t(key.offset >> 32));
    __m256i c2 = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.row + i)));
    __m256i c3 = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.position + i)));
    uint32_t key0 = uint32_t(key.seed), key1 = uint32_t(key.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m256i p0 = _mm256_mul_epu32(c0, _mm256_set1_epi64x(0xD2511F53));
      const __m256i p1 = _mm256_mul_epu32(c2, _mm256_set1_epi64x(0xCD9E8D57));
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(key0));
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(key1));
      c1 = p1;
      c3 = p0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.bits0 + i),
                        _mm256_or_si256(_mm256_slli_epi64(c1, 32), _mm256_and_si256(c0, low)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.bits1 + i),
                        _mm256_or_si256(_mm256_slli_epi64(c3, 32), _mm256_and_si256(c2, low)));
  }
#else
  for (; i < s.count; ++i) {
    const PhiloxWords words =
        philox4x32_10({{uint32_t(key.offset), uint32_t(key.offset >> 32), s.row[i], s.position[i]}}, uint32_t(key.seed),
                      uint32_t(key.seed >> 32));
    s.bits0[i] = philox_u64(words, 0);
    s.bits1[i] = philox_u64(words, 1);
  }
#endif
}

// The product's high half by one multiply; the same integer as uniform_below.
inline int64_t below(uint64_t bits, int64_t n) {
  return int64_t(uint64_t((static_cast<unsigned __int128>(bits) * uint64_t(n)) >> 64));
}

inline void log_step_block(Block& s) {
  for (int i = 0; i < kBlock; ++i) s.log_weight[i] = exact_log(log_step(s.n[i]));
}

// What attempt 0 gives where nothing is excluded.
inline void first_attempt(const StaticSampleParams& p, Block& s) {
  int64_t* ids = p.ids + s.first;
  switch (p.law) {
    case StaticLaw::kUniform:
      if (p.exclude == nullptr) {
        for (int i = 0; i < s.count; ++i) ids[i] = below(s.bits0[i], p.num_classes);
      } else {
        for (int i = 0; i < s.count; ++i) {
          const StaticRow& row = p.rows[s.b[i]];
          ids[i] = row.left == 0 ? 0 : uniform_skip(p, row, below(s.bits0[i], row.left));
        }
      }
      for (int i = 0; i < s.count; ++i) s.log_weight[i] = 0.0;
      break;
    case StaticLaw::kLogUniform: {
      const double classes = double(p.num_classes), log_classes = p.whole.mass;
      for (int i = 0; i < kBlock; ++i) s.n[i] = uniform63(s.bits0[i]);
      for (int i = 0; i < kBlock; ++i) s.n[i] = log_uniform_n(s.n[i], classes, log_classes);
      for (int i = 0; i < s.count; ++i) ids[i] = int64_t(s.n[i]) - 1;
      log_step_block(s);
      break;
    }
    case StaticLaw::kAlias:
      for (int i = 0; i < s.count; ++i) {
        ids[i] = below(s.bits0[i], p.num_classes);
        __builtin_prefetch(p.table + ids[i]);
      }
      for (int i = 0; i < s.count; ++i) {
        const AliasEntry& entry = p.table[ids[i]];
        const bool own = s.bits1[i] < entry.threshold;
        s.log_weight[i] = own ? entry.log_weight : entry.log_weight_alias;
        ids[i] = own ? ids[i] : entry.alias;
      }
      break;
  }
}

inline void draw_block(const StaticSampleParams& p, const StaticRow& whole, PhiloxKey key, Block& s) {
  philox_block(s, key);
  first_attempt(p, s);
  float* log_q = p.log_q + s.first;
  if (p.exclude == nullptr) {
    const double log_mass = whole.log_mass;
    for (int i = 0; i < s.count; ++i) log_q[i] = float(s.log_weight[i] - log_mass);
    return;
  }
  int64_t* ids = p.ids + s.first;
  for (int i = 0; i < s.count; ++i) {
    const StaticRow& row = p.rows[s.b[i]];
    if (row.left == 0) {
      ids[i] = stand_in(p, row);
      log_q[i] = 0.0f;
      continue;
    }
    if (p.law != StaticLaw::kUniform && is_excluded(p, row, ids[i])) {
      const StaticDraw drawn = draw_excluding(p, row, key, s.b[i], s.first + i - s.b[i] * p.num_samples, 1);
      ids[i] = drawn.id;
      s.log_weight[i] = drawn.log_weight;
    }
    log_q[i] = float(s.log_weight[i] - row.log_mass);
  }
}

// Draws (or given ids) begin <= i < end of the flat [B, m] result.
void sample_range(const StaticSampleParams& p, int64_t begin, int64_t end) {
  const StaticRow whole = whole_row_in_kernel(p);
  if (p.given != nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / p.num_samples;
      p.log_q[i] = log_q_of(p, p.exclude != nullptr ? p.rows[b] : whole, p.given[i]);
    }
    return;
  }
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  int64_t b = begin / p.num_samples, draw = begin - b * p.num_samples;
  Block s = {};  // zeroed: stages run over whole blocks, and lanes past `count` must hold harmless numbers
  for (s.first = begin; s.first < end; s.first += s.count) {
    s.count = int(end - s.first < kBlock ? end - s.first : kBlock);
    for (int i = 0; i < s.count; ++i) {
      s.b[i] = b;
      s.row[i] = uint32_t(b);
      s.position[i] = uint32_t(draw) << 8;
      if (++draw == p.num_samples) {
        draw = 0;
        ++b;
      }
    }
    draw_block(p, whole, key, s);
  }
}

}  // namespace samplex::SX_STATIC_NS
