// The C interface of the self-tests, exported by the op library of a test build and called through ctypes.
#include "selftest.h"

#include <cstring>
#include <exception>

#include "common/backend.h"
#include "common/export.h"

using namespace samplex;
using namespace samplex::simt_selftest;

extern "C" {

// Whether the harness itself checks each load and store (otherwise AddressSanitizer does).
SX_EXPORT int sx_simt_checked() {
#ifdef SX_SIMT_CHECKED
  return 1;
#else
  return 0;
#endif
}

// Whether misaligned accesses and indices of fixed-size arrays are checked by the harness (otherwise UBSan does).
SX_EXPORT int sx_simt_checks_types() {
#ifdef SX_SIMT_UBSAN
  return 1;
#else
  return 0;
#endif
}

// Runs self-test `name`: 0 if it went through, 1 with the text in `error` if the harness threw, 2 for an unknown name.
SX_EXPORT int sx_simt_selftest(const char* name, const float* in, int64_t n, float* out, int64_t n_out, int64_t arg,
                               char* error, size_t error_bytes) {
  for (const Selftest* list : {kBarrierSelftests, kMemorySelftests}) {
    for (; list->name != nullptr; ++list) {
      if (std::strcmp(list->name, name) != 0) continue;
      try {
        simt::forget_buffers();
        simt::note_buffer(in, size_t(n) * sizeof(float), false);
        simt::note_buffer(out, size_t(n_out) * sizeof(float), true);
        list->launch({in, out, n, n_out, arg});
        simt::forget_buffers();
        return 0;
      } catch (const std::exception& e) {
        simt::forget_buffers();
        std::strncpy(error, e.what(), error_bytes - 1);
        error[error_bytes - 1] = '\0';
        return 1;
      }
    }
  }
  return 2;
}
}
