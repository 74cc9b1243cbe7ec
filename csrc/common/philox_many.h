// Philox4x32-10 of many counters at once, for the CPU samplers: the bits of philox.h by the widest multiply there is.
#pragma once

#ifdef __AVX2__
// GCC 12 takes the undefined lanes of its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#include "common/philox.h"

namespace samplex {
inline namespace SX_ISA_NS {

// bits0, bits1 [count]: both halves of the words at (row, position), where position = draw << 8 | attempt. The arrays
// are read and written in steps of 8: give them room up to the next multiple.
// Two Philox words are kept in each 64-bit lane's low half; what lies above is never read by the 32-bit multiply.
inline void philox_many(PhiloxKey key, const uint32_t* row, const uint32_t* position, int count, uint64_t* bits0,
                        uint64_t* bits1) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i < count; i += 8) {
    __m512i c0 = _mm512_set1_epi64(int64_t(uint32_t(key.offset))), c1 = _mm512_set1_epi64(int64_t(key.offset >> 32));
    const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i));
    __m512i c2 = _mm512_cvtepu32_epi64(_mm256_add_epi32(rows, _mm256_set1_epi32(int32_t(key.first))));
    __m512i c3 = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(position + i)));
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
    _mm512_storeu_si512(bits0 + i, _mm512_or_si512(_mm512_slli_epi64(c1, 32), _mm512_and_si512(c0, low)));
    _mm512_storeu_si512(bits1 + i, _mm512_or_si512(_mm512_slli_epi64(c3, 32), _mm512_and_si512(c2, low)));
  }
#elif defined(__AVX2__)
  for (; i < count; i += 4) {
    __m256i c0 = _mm256_set1_epi64x(int64_t(uint32_t(key.offset))), c1 = _mm256_set1_epi64x(int64_t(key.offset >> 32));
    const __m128i rows = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i));
    __m256i c2 = _mm256_cvtepu32_epi64(_mm_add_epi32(rows, _mm_set1_epi32(int32_t(key.first))));
    __m256i c3 = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(position + i)));
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
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits0 + i),
                        _mm256_or_si256(_mm256_slli_epi64(c1, 32), _mm256_and_si256(c0, low)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits1 + i),
                        _mm256_or_si256(_mm256_slli_epi64(c3, 32), _mm256_and_si256(c2, low)));
  }
#else
  for (; i < count; ++i) {
    const PhiloxWords words =
        philox4x32_10({{uint32_t(key.offset), uint32_t(key.offset >> 32), row[i] + key.first, position[i]}},
                      uint32_t(key.seed), uint32_t(key.seed >> 32));
    bits0[i] = philox_u64(words, 0);
    bits1[i] = philox_u64(words, 1);
  }
#endif
}

}  // namespace SX_ISA_NS
}  // namespace samplex
