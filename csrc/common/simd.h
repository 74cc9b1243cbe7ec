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

}  // namespace samplex
