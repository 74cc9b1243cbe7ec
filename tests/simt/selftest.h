// Kernels that test the harness itself, most of them wrong on purpose. test_harness.py runs them by name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.h"

namespace samplex::simt_selftest {

struct SelftestParams {
  const float* in;  // [n], noted as an input
  float* out;       // [n_out], noted as an output
  int64_t n, n_out;
  int64_t arg;  // means what the kernel says
};

struct Selftest {
  const char* name;
  void (*launch)(const SelftestParams&);
};

extern const Selftest kBarrierSelftests[];  // both end with a null name
extern const Selftest kMemorySelftests[];

}  // namespace samplex::simt_selftest
