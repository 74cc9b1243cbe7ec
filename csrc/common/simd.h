// Which instruction set the CPU kernels use: detected once, lowered by SAMPLEX_SIMD_LEVEL=scalar|avx2|avx512 or at run
// time. The state lives in the op library; `_native` asks it through these functions.
#pragma once

#include <cstdint>

#include "common/export.h"

namespace samplex {

enum class SimdLevel : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

SX_EXPORT SimdLevel detected_simd_level();       // the best of what was compiled in and what this CPU has
SX_EXPORT SimdLevel simd_level();                // in use now
SX_EXPORT void set_simd_level(SimdLevel level);  // throws if this CPU or build lacks it
SX_EXPORT const char* simd_level_name(SimdLevel level);
SX_EXPORT SimdLevel parse_simd_level(const char* name);  // throws, naming the choices

// How many cache lines to have under way by prefetches into the L2 cache; 0 where such a prefetch takes one of the few
// miss buffers of the L1 all the same (AMD before Zen 4), and half a row into the L1 is better. Measured.
int64_t prefetch_lines();

// Whether class rows that several entries of a step share are written past the caches too: see row_rules_cpu_rows.h.
bool streams_repeats();

// Whether the products of common/panels.h are faster than those of the BLAS that torch brings. Measured.
SX_EXPORT bool panels_beat_blas();

// The one way to choose a body by SIMD level. SX_SIMD_BODY(level, f) is a pointer to f_scalar, f_avx2 or f_avx512,
// three functions of one signature: f_scalar in <stem>_cpu.cpp, the others in <stem>_cpu_avx2.cpp and
// <stem>_cpu_avx512.cpp. Chosen once per launch, or once per block of work, never per row.
#ifdef SAMPLEX_X86_SIMD
#define SX_SIMD_BODY(level, f) ::samplex::simd_body(level, &f##_scalar, &f##_avx2, &f##_avx512)
#else
#define SX_SIMD_BODY(level, f) ::samplex::simd_body(level, &f##_scalar, &f##_scalar, &f##_scalar)
#endif

template <typename F>
inline F* simd_body(SimdLevel level, F* scalar, F* avx2, F* avx512) {
  return level == SimdLevel::kAvx512 ? avx512 : level == SimdLevel::kAvx2 ? avx2 : scalar;
}

// The level of ops whose SIMD units leave double to the scalar body.
inline SimdLevel simd_level_unless(bool is_double) { return is_double ? SimdLevel::kScalar : simd_level(); }

}  // namespace samplex
