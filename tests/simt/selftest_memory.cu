// Self-tests of bounds, poison and by-value params. One block of 32 threads unless a kernel says otherwise.
#include "common/warp.cuh"
#include "selftest.h"

namespace samplex::simt_selftest {

constexpr int kTile = 64;

// Not in an unnamed namespace: shared memory of a template with external linkage is laid out by another path.
template <int N>
__global__ void uninitialised_kernel(SelftestParams p) {
  __shared__ unsigned fixed[N];
  __shared__ unsigned scalar;
  SX_DYN_SMEM(unsigned, dynamic);
  const int i = int(threadIdx.x);
  auto* out = reinterpret_cast<unsigned*>(p.out) + int64_t(blockIdx.x) * 3 * N;
  out[i] = fixed[i];
  out[N + i] = dynamic[i];
  out[2 * N + i] = scalar;
  __syncthreads();
  // The next block must not find these.
  fixed[i] = 1;
  dynamic[i] = 2;
  if (i == 0) scalar = 3;
}

namespace {

void uninitialised(const SelftestParams& p) {
  SX_LAUNCH("selftest_uninitialised", uninitialised_kernel<kTile>, 2, kTile, kTile * sizeof(unsigned), nullptr, p);
}

// Thread 5 reads in[arg].
__global__ void read_kernel(SelftestParams p) {
  const int64_t i = threadIdx.x == 5 ? p.arg : int64_t(threadIdx.x);
  p.out[threadIdx.x] = p.in[i];
}
void read(const SelftestParams& p) { SX_LAUNCH("selftest_read", read_kernel, 1, 32, 0, nullptr, p); }

// Thread 5 writes out[arg].
__global__ void write_kernel(SelftestParams p) {
  const int64_t i = threadIdx.x == 5 ? p.arg : int64_t(threadIdx.x);
  p.out[i] = p.in[threadIdx.x];
}
void write(const SelftestParams& p) { SX_LAUNCH("selftest_write", write_kernel, 1, 32, 0, nullptr, p); }

__global__ void write_input_kernel(SelftestParams p) {
  if (threadIdx.x == 5) const_cast<float*>(p.in)[p.arg] = 1.0f;
}
void write_input(const SelftestParams& p) {
  SX_LAUNCH("selftest_write_input", write_input_kernel, 1, 32, 0, nullptr, p);
}

// 16-byte loads and stores of four floats, from in + arg on.
__global__ void vector_kernel(SelftestParams p) {
  const auto* from = reinterpret_cast<const float4*>(p.in + p.arg);
  auto* to = reinterpret_cast<float4*>(p.out);
  to[threadIdx.x] = from[threadIdx.x];
}
void vector(const SelftestParams& p) {
  SX_LAUNCH("selftest_vector", vector_kernel, 1, unsigned(p.n_out / 4), 0, nullptr, p);
}

// Thread 5 uses element `arg` of 64 floats of dynamic shared memory.
template <bool kWrite>
__global__ void dynamic_smem_kernel(SelftestParams p) {
  SX_DYN_SMEM(float, tile);
  const int64_t i = threadIdx.x == 5 ? p.arg : int64_t(threadIdx.x);
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  if (kWrite) {
    tile[i] = 2.0f;
  } else {
    p.out[threadIdx.x] = tile[i];
  }
}
template <bool kWrite>
void dynamic_smem(const SelftestParams& p) {
  SX_LAUNCH("selftest_dynamic_smem", dynamic_smem_kernel<kWrite>, 1, 32, kTile * sizeof(float), nullptr, p);
}

// Thread 5 uses element `arg` of a static array of 64 floats.
__global__ void static_smem_kernel(SelftestParams p) {
  __shared__ float tile[kTile];
  const int64_t i = threadIdx.x == 5 ? p.arg : int64_t(threadIdx.x);
  tile[threadIdx.x] = 1.0f;
  __syncthreads();
  p.out[threadIdx.x] = tile[i];
}
void static_smem(const SelftestParams& p) {
  SX_LAUNCH("selftest_static_smem", static_smem_kernel, 1, 32, 0, nullptr, p);
}

// Thread 0 hands out the address of one of its locals; thread 1 reads through it.
__global__ void other_stack_kernel(SelftestParams p) {
  __shared__ const volatile float* address;
  volatile float mine[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  if (threadIdx.x == 0) address = mine;
  __syncthreads();
  if (threadIdx.x == 1) p.out[0] = address[1];
  __syncthreads();
}
void other_stack(const SelftestParams& p) {
  SX_LAUNCH("selftest_other_stack", other_stack_kernel, 1, 32, 0, nullptr, p);
}

// A large POD by value, a constant table and a local array that needs the stack: all legal.
struct Large {
  float values[64];
  SelftestParams p;
};
__constant__ const float kTable[4] = {0.5f, 1.5f, 2.5f, 3.5f};
__global__ void by_value_kernel(Large large, int repeats) {
  float local[kTile];
  for (int i = 0; i < kTile; ++i) local[i] = large.values[(i + int(threadIdx.x)) % kTile];
  float x = 0.0f;
  for (int i = 0; i < repeats; ++i) x += local[(i * 7) % kTile] + kTable[i % 4];
  large.p.out[threadIdx.x] = x;
}
void by_value(const SelftestParams& p) {
  Large large;
  for (int i = 0; i < 64; ++i) large.values[i] = float(i);
  large.p = p;
  SX_LAUNCH("selftest_by_value", by_value_kernel, 1, 32, 0, nullptr, large, int(p.arg));
}

}  // namespace

const Selftest kMemorySelftests[] = {
    {"uninitialised", uninitialised},
    {"read", read},
    {"write", write},
    {"write_input", write_input},
    {"vector", vector},
    {"dynamic_smem_read", dynamic_smem<false>},
    {"dynamic_smem_write", dynamic_smem<true>},
    {"static_smem", static_smem},
    {"other_stack", other_stack},
    {"by_value", by_value},
    {nullptr, nullptr},
};

}  // namespace samplex::simt_selftest
