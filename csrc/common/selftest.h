// The host-and-device headers as tests see them from Python: compiled in the op library, with its flags.
#pragma once

#include <cstdint>

#include "common/export.h"

namespace samplex {

SX_EXPORT void selftest_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

// name: exp, log or log1p (the exact_* functions of common/numeric.h). Returns false for another name.
SX_EXPORT bool selftest_exact_math(const char* name, const double* x, double* result, int64_t count);

}  // namespace samplex
