// The only compiler-dependent lines of csrc/: one source serves nvcc, g++ and the SIMT harness.
//
//   SX_HOST_DEVICE, SX_DEVICE   function qualifiers, empty for plain C++
//   SX_LAUNCH(op, kernel, grid, block, smem, stream, args...)   the only way to start a kernel
//   SX_DYN_SMEM(T, name)        the only way to reach dynamic shared memory (16-byte aligned)
//   SX_ISA_NS                   inline namespace of header code, one per ISA translation unit
//
// A header function compiled in an AVX-512 unit and in a baseline unit would be one symbol to the linker,
// which may keep the AVX-512 body for everybody. The inline namespace gives each unit its own symbols.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SX_HOST_DEVICE __host__ __device__
#define SX_DEVICE __device__
#else
#define SX_HOST_DEVICE
#define SX_DEVICE
#endif

#ifdef __GNUC__
#define SX_ALWAYS_INLINE inline __attribute__((always_inline))
#define SX_NOINLINE __attribute__((noinline))
#else
#define SX_ALWAYS_INLINE inline
#define SX_NOINLINE
#endif

#ifndef SX_ISA_NS
#define SX_ISA_NS baseline
#endif

// Namespace of the CUDA launchers: `cuda` under nvcc, `simt` when the harness compiles the same file.
#ifndef SX_BACKEND_NS
#define SX_BACKEND_NS cuda
#endif

#ifdef __CUDACC__

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace samplex {

inline void check_cuda(const char* op, cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) + ": CUDA launch failed: " + cudaGetErrorString(error));
  }
}

// An error that was there before this op launched anything. Reported here, since nobody has reported it yet; the call
// also clears it, unless the context is lost, so that it is reported once.
inline void check_earlier_calls(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) + ": an earlier CUDA call failed, not one of this op: " +
                             cudaGetErrorString(error) + "; set CUDA_LAUNCH_BLOCKING=1 to see which one");
  }
}

// Limits every CUDA device of compute capability >= 7.5 shares. Static shared memory comes on top of `smem`,
// so launchers keep the sum under 48 KiB, the most a kernel gets without asking for more.
inline void check_launch_limits(const char* op, dim3 grid, dim3 block, size_t smem) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024 || block.z > 64 || grid.y > 65535 ||
      grid.z > 65535 || smem > 48 * 1024) {
    throw std::runtime_error(std::string(op) + ": launch exceeds the limits: grid " + std::to_string(grid.x) + "x" +
                             std::to_string(grid.y) + "x" + std::to_string(grid.z) + ", threads " +
                             std::to_string(threads) + ", dynamic shared memory " + std::to_string(smem));
  }
}

}  // namespace samplex

#define SX_LAUNCH(op, kernel, grid, block, smem, stream, ...)                                      \
  do {                                                                                             \
    ::samplex::check_launch_limits(op, dim3(grid), dim3(block), smem);                             \
    ::samplex::check_earlier_calls(op);                                                            \
    (kernel)<<<dim3(grid), dim3(block), (smem), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__); \
    ::samplex::check_cuda(op, cudaGetLastError());                                                 \
  } while (0)

#define SX_DYN_SMEM(T, name)                                             \
  extern __shared__ __align__(16) unsigned char sx_dynamic_smem_bytes[]; \
  T* name = reinterpret_cast<T*>(sx_dynamic_smem_bytes)

#elif defined(SX_SIMT)

#include <cuda_runtime.h>  // tests/simt/include: the harness

#define SX_LAUNCH(op, kernel, grid, block, smem, stream, ...) \
  ((void)(stream), ::sx_simt::launch((op), #kernel, dim3(grid), dim3(block), (smem), [=]() { (kernel)(__VA_ARGS__); }))

#define SX_DYN_SMEM(T, name) T* name = static_cast<T*>(::sx_simt::dynamic_smem())

#endif
