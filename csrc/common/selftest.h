// The host-and-device headers as tests see them from Python: compiled in the op library, with its flags.
#pragma once

#include <cstdint>

#include "common/export.h"

namespace samplex {

SX_EXPORT void selftest_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

// name: exp, log or log1p (the exact_* functions of common/numeric.h). Returns false for another name.
SX_EXPORT bool selftest_exact_math(const char* name, const double* x, double* result, int64_t count);

// One loop of common/parallel.h that adds 1 to visits[i] for each i in [0, n), in ranges or in chunks (`shared`).
// The call with item `throw_at` throws, that with `sleep_at` sleeps and that with `spin_at` computes for a while; -1
// for none. With `nested` each call runs an inner loop over its items.
struct SelftestLoop {
  int64_t n, grain;
  bool shared, nested;
  int64_t throw_at, sleep_at, spin_at, microseconds;
};
SX_EXPORT void selftest_loop(const SelftestLoop& loop, int64_t* visits);

}  // namespace samplex
