// A cuda_runtime.h for g++: lets the project's *_cuda.cu compile as C++ and run with one fiber per CUDA thread.
//
// Model. Blocks run one after another on the calling thread; a block's threads are fibers that run until they reach a
// barrier or a warp collective, or return. A launch runs under three schedules and must leave the same bits in every
// writable buffer under all of them:
//   fair      every thread in turn, up to its next barrier or collective
//   greedy    a warp runs until all its lanes wait at a block barrier, only then the next warp starts
//   reversed  greedy, with blocks, warps and lanes in descending order
// Shared memory holds 0xCD bytes when a block starts. What some threads never reach, and what lies outside the noted
// buffers, is an error that names op, kernel, block and thread. tests/simt/README.md says what this cannot show.
//
// The standard library comes first: its headers must not see the keywords below. __noinline__ is never defined, because
// libstdc++ uses that name inside attributes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iosfwd>
#include <limits>
#include <memory>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// ------------------------------------------------------------------------------------------------ vector types
struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#define SX_SIMT_VECTOR2(name, T, alignment) \
  struct alignas(alignment) name {          \
    T x, y;                                 \
  };                                        \
  inline constexpr name make_##name(T x, T y) { return {x, y}; }
#define SX_SIMT_VECTOR4(name, T, alignment) \
  struct alignas(alignment) name {          \
    T x, y, z, w;                           \
  };                                        \
  inline constexpr name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
SX_SIMT_VECTOR2(int2, int, 8)
SX_SIMT_VECTOR2(uint2, unsigned, 8)
SX_SIMT_VECTOR2(float2, float, 8)
SX_SIMT_VECTOR2(double2, double, 16)
SX_SIMT_VECTOR2(longlong2, long long, 16)
SX_SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SX_SIMT_VECTOR2(ushort2, unsigned short, 4)
SX_SIMT_VECTOR4(int4, int, 16)
SX_SIMT_VECTOR4(uint4, unsigned, 16)
SX_SIMT_VECTOR4(float4, float, 16)
SX_SIMT_VECTOR4(ushort4, unsigned short, 8)
#undef SX_SIMT_VECTOR2
#undef SX_SIMT_VECTOR4

using cudaStream_t = struct CUstream_st*;

// ------------------------------------------------------------------------------------------------ harness
namespace sx_simt {

struct Builtins {
  uint3 thread, block, block_size, grid_size;
};
extern __thread Builtins builtins;

using Where = std::source_location;

enum class Collective : int { kSync, kShuffle, kBallot };

// Every lane of `mask` must call it, from the same place. kShuffle: the value of lane `source`; kBallot: the mask of
// lanes whose value is not zero.
uint64_t collective(const char* what, Collective kind, unsigned mask, uint64_t value, int source, const Where& where);
void barrier(const Where& where);
bool barrier_any(bool predicate, const Where& where);  // whether the predicate holds in any thread of the block
[[noreturn]] void trap(const Where& where);
int device_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
int lane();
void* dynamic_smem();

void run(const char* op, const char* kernel, dim3 grid, dim3 block, size_t smem, const void* body, size_t body_bytes,
         void (*call)(const void*));

template <typename Body>
void launch(const char* op, const char* kernel, dim3 grid, dim3 block, size_t smem, const Body& body) {
  run(op, kernel, grid, block, smem, &body, sizeof(Body),
      [](const void* object) { (*static_cast<const Body*>(object))(); });
}

template <typename T>
uint64_t to_bits(T x) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 32- and 64-bit numbers, as in CUDA");
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}
template <typename T>
T shuffle(const char* what, unsigned mask, T x, int source, const Where& where) {
  return from_bits<T>(collective(what, Collective::kShuffle, mask, to_bits(x), source, where));
}

}  // namespace sx_simt

// Kernels say printf from inside this namespace, so they find this one; its text is repeated in the error of a __trap.
namespace samplex {
using sx_simt::device_printf;
template <typename... Args>
inline int printf(const char* format, Args... args) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-security"
  return device_printf(format, args...);
#pragma GCC diagnostic pop
}
}  // namespace samplex

// ------------------------------------------------------------------------------------------------ keywords
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// __thread, not thread_local: it takes only what shared memory may hold, types without constructors. All of it lies
// between the markers of shared_begin.cpp and shared_end.cpp.
#define __shared__ static __thread

#define threadIdx (::sx_simt::builtins.thread)
#define blockIdx (::sx_simt::builtins.block)
#define blockDim (::sx_simt::builtins.block_size)
#define gridDim (::sx_simt::builtins.grid_size)
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------------ barriers,
// collectives
inline void __syncthreads(const sx_simt::Where& where = sx_simt::Where::current()) { sx_simt::barrier(where); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, const sx_simt::Where& where = sx_simt::Where::current()) {
  (void)sx_simt::collective("__syncwarp", sx_simt::Collective::kSync, mask, 0, 0, where);
}
inline int __syncthreads_or(int predicate, const sx_simt::Where& where = sx_simt::Where::current()) {
  return sx_simt::barrier_any(predicate != 0, where);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, const sx_simt::Where& where = sx_simt::Where::current()) {
  const int lane = sx_simt::lane();
  return sx_simt::shuffle("__shfl_sync", mask, x, (lane & ~(width - 1)) | (source & (width - 1)), where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lane_mask, int width = 32,
                  const sx_simt::Where& where = sx_simt::Where::current()) {
  const int lane = sx_simt::lane(), source = lane ^ lane_mask;
  // As on the device: lower segments can be read, higher ones give the caller's own value.
  return sx_simt::shuffle("__shfl_xor_sync", mask, x, source < ((lane & ~(width - 1)) + width) ? source : lane, where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32,
                 const sx_simt::Where& where = sx_simt::Where::current()) {
  const int lane = sx_simt::lane(), source = lane - int(delta);
  return sx_simt::shuffle("__shfl_up_sync", mask, x, source >= (lane & ~(width - 1)) ? source : lane, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32,
                   const sx_simt::Where& where = sx_simt::Where::current()) {
  const int lane = sx_simt::lane(), source = lane + int(delta);
  return sx_simt::shuffle("__shfl_down_sync", mask, x, source < ((lane & ~(width - 1)) + width) ? source : lane, where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, const sx_simt::Where& where = sx_simt::Where::current()) {
  return unsigned(sx_simt::collective("__ballot_sync", sx_simt::Collective::kBallot, mask, predicate != 0, 0, where));
}
inline int __any_sync(unsigned mask, int predicate, const sx_simt::Where& where = sx_simt::Where::current()) {
  return sx_simt::collective("__any_sync", sx_simt::Collective::kBallot, mask, predicate != 0, 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const sx_simt::Where& where = sx_simt::Where::current()) {
  return sx_simt::collective("__all_sync", sx_simt::Collective::kBallot, mask, predicate != 0, 0, where) == mask;
}
inline unsigned __activemask() = delete;  // what it returns is not defined on the device either

[[noreturn]] inline void __trap(const sx_simt::Where& where = sx_simt::Where::current()) { sx_simt::trap(where); }

// ------------------------------------------------------------------------------------------------ atomics
// Integers only: a float sum would depend on the order, which no schedule-independent kernel may.
namespace sx_simt {
template <typename T, typename F>
inline T atomic_update(T* address, F&& next) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>,
                "atomics are for int, unsigned and unsigned long long");
  const T old = *address;  // fibers switch only at barriers: nothing comes between
  *address = next(old);
  return old;
}
}  // namespace sx_simt

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> x) {
  using U = std::make_unsigned_t<T>;  // wraps, as on the device
  return sx_simt::atomic_update(address, [x](T old) { return T(U(old) + U(x)); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [x](T old) { return old < x ? x : old; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [x](T old) { return x < old ? x : old; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [x](T old) { return T(old | x); });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [x](T old) { return T(old & x); });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [x](T) { return x; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  return sx_simt::atomic_update(address, [=](T old) { return old == expected ? x : old; });
}

// ------------------------------------------------------------------------------------------------ intrinsics
template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}
template <typename T>
inline void __stcs(T* address, T x) {
  *address = x;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
// Rounded on their own, never contracted: as here, where -ffp-contract=off holds for the whole file.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

#define SX_SIMT_MIN_MAX(T)                                   \
  inline constexpr T min(T a, T b) { return b < a ? b : a; } \
  inline constexpr T max(T a, T b) { return a < b ? b : a; }
SX_SIMT_MIN_MAX(int)
SX_SIMT_MIN_MAX(unsigned)
SX_SIMT_MIN_MAX(long)
SX_SIMT_MIN_MAX(unsigned long)
SX_SIMT_MIN_MAX(long long)
SX_SIMT_MIN_MAX(unsigned long long)
#undef SX_SIMT_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
