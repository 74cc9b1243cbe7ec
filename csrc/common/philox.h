// Stateless Philox4x32-10 (Salmon et al. 2011) for host and device, indexed by logical position.
//
// counter = offset (64 bits) | row (32) | draw (24) | attempt or level (8);  key = seed (64 bits).
// The same (seed, offset, row, draw, attempt) gives the same bits on every backend, thread count and grid.
#pragma once

#include "common/macros.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int64_t kPhiloxMaxRows = int64_t(1) << 32;
constexpr int64_t kPhiloxMaxDraws = int64_t(1) << 24;
constexpr int kPhiloxMaxAttempts = 256;

struct PhiloxWords {
  uint32_t w[4];
};

// 64 x 64 -> high 64 bits by 32-bit halves: the same integer arithmetic on every compiler.
SX_HOST_DEVICE inline uint64_t mul_high_u64(uint64_t a, uint64_t b) {
  const uint64_t a_lo = uint32_t(a), a_hi = a >> 32, b_lo = uint32_t(b), b_hi = b >> 32;
  const uint64_t low = a_lo * b_lo;
  const uint64_t mid = a_hi * b_lo + (low >> 32);
  const uint64_t mid2 = a_lo * b_hi + uint32_t(mid);
  return a_hi * b_hi + (mid >> 32) + (mid2 >> 32);
}

SX_HOST_DEVICE inline PhiloxWords philox4x32_10(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u, kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(kMul0) * counter.w[0];
    const uint64_t p1 = uint64_t(kMul1) * counter.w[2];
    counter = {{uint32_t(p1 >> 32) ^ counter.w[1] ^ key0, uint32_t(p1), uint32_t(p0 >> 32) ^ counter.w[3] ^ key1,
                uint32_t(p0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

struct PhiloxKey {
  uint64_t seed, offset;
  uint32_t first = 0;  // number of row 0: a rank of several draws some rows of a larger batch
};

// What a key tensor holds: seed, offset and, `with_row`, the number of the first row. Zeros for nullptr.
SX_HOST_DEVICE inline PhiloxKey philox_key(const int64_t* key, bool with_row) {
  if (key == nullptr) return {0, 0};
  return {uint64_t(key[0]), uint64_t(key[1]), with_row ? uint32_t(key[2]) : 0u};
}

SX_HOST_DEVICE inline PhiloxWords philox_at(PhiloxKey key, int64_t row, int64_t draw, int attempt) {
  const PhiloxWords counter = {{uint32_t(key.offset), uint32_t(key.offset >> 32), uint32_t(row) + key.first,
                                (uint32_t(draw) << 8) | (uint32_t(attempt) & 0xFFu)}};
  return philox4x32_10(counter, uint32_t(key.seed), uint32_t(key.seed >> 32));
}

// First and second half of the four words, as the two independent 64-bit numbers that a draw uses.
SX_HOST_DEVICE inline uint64_t philox_u64(const PhiloxWords& x, int half) {
  return (uint64_t(x.w[2 * half + 1]) << 32) | x.w[2 * half];
}

// Uniform in [0, 1) with 53 bits; never 1.
SX_HOST_DEVICE inline double uniform53(uint64_t bits) { return double(bits >> 11) * 0x1.0p-53; }

// The same number without a conversion from 64-bit integers, which vector units have only since AVX-512: both halves go
// into the mantissa of a power of two, and every step is exact.
inline double uniform53_by_parts(uint64_t bits) {
  const uint64_t x = bits >> 11;
  const double high = __builtin_bit_cast(double, (x >> 32) | 0x4530000000000000u) - (0x1.0p84 + 0x1.0p52);
  const double low = __builtin_bit_cast(double, (x & 0xFFFFFFFFu) | 0x4330000000000000u);
  return (high + low) * 0x1.0p-53;
}

// Uniform integer in [0, n) by multiply-high; bias at most n / 2^64.
SX_HOST_DEVICE inline int64_t uniform_below(uint64_t bits, int64_t n) {
  return int64_t(mul_high_u64(bits, uint64_t(n)));
}

}  // namespace SX_ISA_NS
}  // namespace samplex
