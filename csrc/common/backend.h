// What serves CPU tensors. In a normal build that is the CPU kernels and nothing else. In a test build
// (SAMPLEX_TEST_BACKENDS=ON) the environment variable SAMPLEX_CPU_BACKEND, or set_cpu_backend, chooses
//   cpu    the CPU kernels
//   simt   the CUDA source compiled by g++, under the harness of tests/simt
//   cuda   the nvcc-compiled launchers on host pointers (only under an emulated CUDA runtime)
#pragma once

#include <cstddef>

#include "common/export.h"

namespace samplex {

enum class Backend : int { kCpu = 0, kSimt = 1, kCuda = 2 };

SX_EXPORT Backend cpu_backend();
SX_EXPORT void set_cpu_backend(const char* name);  // throws, naming the choices this build has
SX_EXPORT const char* backend_name(Backend backend);
SX_EXPORT bool built_with_cuda();
SX_EXPORT bool built_with_test_backends();

// Test builds: leave the ids of CPU tensors to the kernels of simt and cuda, as those of a CUDA device are. A range
// check in the kernels could not be tested otherwise: the host refuses a bad id first.
SX_EXPORT void set_device_ids(bool on);  // throws in a build without test backends
bool device_ids();
bool debug_checks();  // SAMPLEX_DEBUG=1: kernels check ids on the device and trap with a message

#ifdef SAMPLEX_TEST_BACKENDS
// The harness checks every memory access of a kernel against the buffers noted since the op began.
namespace simt {
void forget_buffers();
void note_buffer(const void* data, size_t bytes, bool writable);
}  // namespace simt
#endif

}  // namespace samplex
