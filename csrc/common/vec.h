// A vector of floats of the widest kind this translation unit is compiled for (16 with AVX-512, 8 with AVX2, 1 else),
// loaded from any storage type. Only *_cpu*.cpp files include it; no std containers here (see macros.h).
#pragma once

#include "common/numeric.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace samplex {
inline namespace SX_ISA_NS {

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kSize = 16;
  __m512 v;
  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(BFloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bfloat16_bits()); }
  void store(Half* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half_bits()); }
  // Past the cache; p is aligned to the bytes that are stored.
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  void stream(BFloat16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bfloat16_bits()); }
  void stream(Half* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), half_bits()); }
  // As 16-bit numbers, to nearest, ties to even, with the one nan of `from_acc`. Not by vcvtneps2bf16, which takes
  // subnormals for 0.
  __m256i bfloat16_bits() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
    const __m512i half = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7FFF), _mm512_set1_epi32(0x8000));
    const __m512i near = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7FC00000), number, bits, half);
    // The high halves, by one shuffle.
    const __m512i high = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21, 19,
                                          17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(high, near));
  }
  __m256i half_bits() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  float sum() const { return _mm512_reduce_add_ps(v); }
  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  friend Vec sqrt(Vec x) { return {_mm512_sqrt_ps(x.v)}; }
  // a * b + c
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  // A nan in `x` is dropped: max(x, keep) = keep.
  friend Vec max(Vec x, Vec keep) { return {_mm512_max_ps(x.v, keep.v)}; }
  friend Vec min(Vec x, Vec keep) { return {_mm512_min_ps(x.v, keep.v)}; }
  friend Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // x * 2^n for integral n
  friend Vec scale2(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
  friend Vec keep_nan(Vec result, Vec x) {
    return {_mm512_mask_mov_ps(result.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v)};
  }
  friend bool any_above(Vec x, float limit) {  // |x| > limit somewhere
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
  }
  // A bit for each lane with x > limit, or a nan in either.
  friend unsigned above(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLE_UQ); }
  // From sin and cos of r to those of r + n pi / 2, for integral n.
  friend void turn(Vec n, Vec& sin, Vec& cos) {
    const __m512i q = _mm512_cvtps_epi32(n.v), one = _mm512_set1_epi32(1);
    const __mmask16 odd = _mm512_test_epi32_mask(q, one);
    const __m512i a = _mm512_castps_si512(_mm512_mask_mov_ps(sin.v, odd, cos.v));
    const __m512i b = _mm512_castps_si512(_mm512_mask_mov_ps(cos.v, odd, sin.v));
    const __m512i sign_a = _mm512_slli_epi32(_mm512_srli_epi32(q, 1), 31);
    const __m512i sign_b = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_add_epi32(q, one), 1), 31);
    sin.v = _mm512_castsi512_ps(_mm512_xor_si512(a, sign_a));
    cos.v = _mm512_castsi512_ps(_mm512_xor_si512(b, sign_b));
  }
};

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kSize = 8;
  __m256 v;
  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(BFloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bfloat16_bits()); }
  void store(Half* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half_bits()); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  void stream(BFloat16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), bfloat16_bits()); }
  void stream(Half* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), half_bits()); }
  __m128i bfloat16_bits() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(near, 16), _mm256_set1_epi32(0x7FC0), nan);
    return narrowed(words);
  }
  __m128i half_bits() const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Eight words, each below 2^16, as 16-bit ones.
  static __m128i narrowed(__m256i words) {
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
  }
  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  friend Vec sqrt(Vec x) { return {_mm256_sqrt_ps(x.v)}; }
  friend Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  friend Vec max(Vec x, Vec keep) { return {_mm256_max_ps(x.v, keep.v)}; }
  friend Vec min(Vec x, Vec keep) { return {_mm256_min_ps(x.v, keep.v)}; }
  friend Vec round(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  friend Vec scale2(Vec x, Vec n) {
    // Two steps so that results below the smallest normal round once, and 2^n itself is always normal.
    const __m256i k = _mm256_cvtps_epi32(n.v);
    const __m256i half = _mm256_srai_epi32(k, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(k, half), bias), 23));
    return {_mm256_mul_ps(_mm256_mul_ps(x.v, a), b)};
  }
  friend Vec keep_nan(Vec result, Vec x) {
    return {_mm256_blendv_ps(result.v, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q))};
  }
  friend bool any_above(Vec x, float limit) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v);
    return _mm256_movemask_ps(_mm256_cmp_ps(size, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
  }
  friend unsigned above(Vec x, Vec limit) {
    return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_NLE_UQ)));
  }
  friend void turn(Vec n, Vec& sin, Vec& cos) {
    const __m256i q = _mm256_cvtps_epi32(n.v), one = _mm256_set1_epi32(1);
    const __m256 odd = _mm256_castsi256_ps(_mm256_slli_epi32(q, 31));  // blendv looks at the top bit
    const __m256 a = _mm256_blendv_ps(sin.v, cos.v, odd), b = _mm256_blendv_ps(cos.v, sin.v, odd);
    const __m256i sign_a = _mm256_slli_epi32(_mm256_srli_epi32(q, 1), 31);
    const __m256i sign_b = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_add_epi32(q, one), 1), 31);
    sin.v = _mm256_xor_ps(a, _mm256_castsi256_ps(sign_a));
    cos.v = _mm256_xor_ps(b, _mm256_castsi256_ps(sign_b));
  }
};

#endif

#if defined(__AVX512F__) || defined(__AVX2__)

// exp to about 1 ulp (degree-6 polynomial after x = n ln2 + r). exp(-inf) = 0, exp(nan) = nan, overflow gives inf.
inline Vec vexp(Vec x) {
  // Below -104 the result is 0 in float, above 89 it is inf: clamping there keeps 2^n in range.
  const Vec y = min(max(x, Vec::all(-104.0f)), Vec::all(89.0f));
  const Vec n = round(y * Vec::all(1.44269504088896f));
  Vec r = fma(n, Vec::all(-0.693359375f), y);
  r = fma(n, Vec::all(2.12194440e-4f), r);
  Vec p = Vec::all(1.9875691500e-4f);
  p = fma(p, r, Vec::all(1.3981999507e-3f));
  p = fma(p, r, Vec::all(8.3334519073e-3f));
  p = fma(p, r, Vec::all(4.1665795894e-2f));
  p = fma(p, r, Vec::all(1.6666665459e-1f));
  p = fma(p, r, Vec::all(5.0000001201e-1f));
  p = fma(p, r * r, r + Vec::all(1.0f));
  return keep_nan(scale2(p, n), x);
}

// sin and cos for |x| <= kSinCosMost, to 1e-7: x = n pi/2 + r in two steps, of which the first is exact (a multiple of
// 2^-24 below 1), then polynomials for |r| <= pi/4. A nan stays one.
constexpr float kSinCosMost = 1e5f;
inline void vsincos(Vec x, Vec& sin, Vec& cos) {
  const Vec n = round(x * Vec::all(0.636619772367581f));
  Vec r = fma(n, Vec::all(-1.57079637050628662f), x);
  r = fma(n, Vec::all(4.37113900018624283e-8f), r);
  const Vec z = r * r;
  Vec s = Vec::all(-1.9515295891e-4f);
  s = fma(s, z, Vec::all(8.3321608736e-3f));
  s = fma(s, z, Vec::all(-1.6666654611e-1f));
  sin = fma(s * z, r, r);
  Vec c = Vec::all(2.443315711809948e-5f);
  c = fma(c, z, Vec::all(-1.388731625493765e-3f));
  c = fma(c, z, Vec::all(4.166664568298827e-2f));
  cos = fma(c * z, z, fma(z, Vec::all(-0.5f), Vec::all(1.0f)));
  turn(n, sin, cos);
}

// log(1 + x) for x in [0, 1], to about 2 ulp down to the smallest x: 2 atanh(s) with s = x / (2 + x) <= 1/3.
inline Vec vlog1p_unit(Vec x) {
  const Vec s = x / (x + Vec::all(2.0f)), z = s * s;
  Vec p = Vec::all(2.0f / 17.0f);
  p = fma(p, z, Vec::all(2.0f / 15.0f));
  p = fma(p, z, Vec::all(2.0f / 13.0f));
  p = fma(p, z, Vec::all(2.0f / 11.0f));
  p = fma(p, z, Vec::all(2.0f / 9.0f));
  p = fma(p, z, Vec::all(2.0f / 7.0f));
  p = fma(p, z, Vec::all(2.0f / 5.0f));
  p = fma(p, z, Vec::all(2.0f / 3.0f));
  return fma(s * z, p, s + s);
}

// 2 * kSize numbers, those at even places and those at odd places: one load and an operation each, where numbers in
// their order take two loads and two operations each.
inline void load_pairs(const BFloat16* p, Vec& even, Vec& odd) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xFFFF0000u))));
#else
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd.v = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xFFFF0000u))));
#endif
}
inline void store_pairs(Vec even, Vec odd, float* p) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, low, odd.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even.v, high, odd.v));
#else
  const __m256 a = _mm256_unpacklo_ps(even.v, odd.v), b = _mm256_unpackhi_ps(even.v, odd.v);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(a, b, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(a, b, 0x31));
#endif
}

// kSize 16-bit words, each in a lane of 32 bits.
#if defined(__AVX512F__)
using Words = __m512i;
inline Words load_words(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
using Words = __m256i;
inline Words load_words(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#endif

// x rounded up or down to a number of the type of `p` by 16 random bits a lane, as `round_with` does it: storing it
// there is exact. What is not finite stays unchanged.
inline Vec rounded_by_chance(Vec x, Words noise, const BFloat16* p) {
  (void)p;
#if defined(__AVX512F__)
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(3.40282347e38f), _CMP_LE_OQ);
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i moved = _mm512_and_si512(_mm512_add_epi32(bits, noise), _mm512_set1_epi32(int(0xFFFF0000u)));
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, finite, moved))};
#else
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v);
  const __m256 finite = _mm256_cmp_ps(size, _mm256_set1_ps(3.40282347e38f), _CMP_LE_OQ);
  const __m256i moved =
      _mm256_and_si256(_mm256_add_epi32(_mm256_castps_si256(x.v), noise), _mm256_set1_epi32(int(0xFFFF0000u)));
  return {_mm256_blendv_ps(x.v, _mm256_castsi256_ps(moved), finite)};
#endif
}
inline Vec rounded_by_chance(Vec x, Words noise, const Half* p) {
  (void)p;
#if defined(__AVX512F__)
  const __m512 size = _mm512_abs_ps(x.v);
  const __mmask16 finite = _mm512_cmp_ps_mask(size, _mm512_set1_ps(3.40282347e38f), _CMP_LE_OQ);
  const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1.0p-14f), _CMP_LT_OQ);
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i sum = _mm512_add_epi32(bits, _mm512_srli_epi32(noise, 3));
  const __m512i moved = _mm512_mask_and_epi32(bits, finite, sum, _mm512_set1_epi32(int(0xFFFFE000u)));
  const __m512 steps = _mm512_add_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(0x1.0p24f)),
                                     _mm512_mul_ps(_mm512_cvtepi32_ps(noise), _mm512_set1_ps(0x1.0p-16f)));
  const __m512 below = _mm512_roundscale_ps(steps, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return {_mm512_mask_mul_ps(_mm512_castsi512_ps(moved), small, below, _mm512_set1_ps(0x1.0p-24f))};
#else
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v);
  const __m256 finite = _mm256_cmp_ps(size, _mm256_set1_ps(3.40282347e38f), _CMP_LE_OQ);
  const __m256 small = _mm256_cmp_ps(size, _mm256_set1_ps(0x1.0p-14f), _CMP_LT_OQ);
  const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(x.v), _mm256_srli_epi32(noise, 3));
  const __m256i moved = _mm256_and_si256(sum, _mm256_set1_epi32(int(0xFFFFE000u)));
  const __m256 steps = _mm256_add_ps(_mm256_mul_ps(x.v, _mm256_set1_ps(0x1.0p24f)),
                                     _mm256_mul_ps(_mm256_cvtepi32_ps(noise), _mm256_set1_ps(0x1.0p-16f)));
  const __m256 below = _mm256_mul_ps(_mm256_floor_ps(steps), _mm256_set1_ps(0x1.0p-24f));
  return {_mm256_blendv_ps(_mm256_blendv_ps(x.v, _mm256_castsi256_ps(moved), finite), below, small)};
#endif
}

// The first `n` < kSize elements, zeros behind: for the tail of a row.
template <typename T>
inline Vec load_tail(const T* p, int n) {
  T padded[Vec::kSize];
  for (int i = 0; i < Vec::kSize; ++i) padded[i] = i < n ? p[i] : T(0.0f);
  return Vec::load(padded);
}

// The sums of eight vectors in lanes 0 .. 7 (the rest: 0), by 26 additions and shuffles instead of eight times 7.
inline Vec sums_of(const Vec* x) {
#if defined(__AVX512F__)
  __m256 y[8];
  for (int j = 0; j < 8; ++j) y[j] = _mm256_add_ps(_mm512_castps512_ps256(x[j].v), _mm512_extractf32x8_ps(x[j].v, 1));
#else
  __m256 y[8];
  for (int j = 0; j < 8; ++j) y[j] = x[j].v;
#endif
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
  const __m256 sums = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#if defined(__AVX512F__)
  return {_mm512_zextps256_ps512(sums)};
#else
  return {sums};
#endif
}

// Eight numbers in lanes 0 .. 7, and what is above them.
inline Vec load8(const float* p, float above) {
#if defined(__AVX512F__)
  return {_mm512_insertf32x8(_mm512_set1_ps(above), _mm256_loadu_ps(p), 0)};
#else
  (void)above;
  return Vec::load(p);
#endif
}
inline void store8(Vec x, float* p) {
#if defined(__AVX512F__)
  _mm256_storeu_ps(p, _mm512_castps512_ps256(x.v));
#else
  x.store(p);
#endif
}

inline void store_tail(Vec x, float* p, int n) {
  float padded[Vec::kSize];
  x.store(padded);
  for (int i = 0; i < n; ++i) p[i] = padded[i];
}

#endif

}  // namespace SX_ISA_NS
}  // namespace samplex
