// Self-tests of barriers, collectives and schedules. Block of 128 threads = 4 warps unless a kernel says otherwise.
#include "common/warp.cuh"
#include "selftest.h"

namespace samplex::simt_selftest {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

// out[b] = sum of in[b * 128 ...]. `kFirst`, `kSecond`: whether the barrier after the write and after the read is
// there. The second one matters because the loop writes `partial` again.
template <bool kFirst, bool kSecond>
__global__ void __launch_bounds__(kThreads) reduce_kernel(SelftestParams p) {
  __shared__ float partial[kWarps];
  float total = 0.0f;
  for (int round = 0; round < 2; ++round) {
    const float x = group_sum<kWarpSize>(p.in[int64_t(blockIdx.x) * kThreads + threadIdx.x] * float(1 + round));
    if (lane_id() == 0) partial[warp_id()] = x;
    if (kFirst) __syncthreads();
    for (int w = 0; w < kWarps; ++w) total += partial[w];
    if (kSecond) __syncthreads();
  }
  p.out[int64_t(blockIdx.x) * kThreads + threadIdx.x] = total;
}

template <bool kFirst, bool kSecond>
void reduce(const SelftestParams& p) {
  SX_LAUNCH("selftest_reduce", (reduce_kernel<kFirst, kSecond>), unsigned(p.n / kThreads), kThreads, 0, nullptr, p);
}

// The same through common/warp.cuh.
__global__ void block_sum_kernel(SelftestParams p) {
  __shared__ double scratch[kWarps];
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  p.out[i] = float(block_sum<kWarps>(double(p.in[i]), scratch));
}
void block_sum_test(const SelftestParams& p) {
  SX_LAUNCH("selftest_block_sum", block_sum_kernel, unsigned(p.n / kThreads), kThreads, 0, nullptr, p);
}

// Neighbours of one warp exchange through shared memory; `kSync`: whether __syncwarp is there.
template <bool kSync>
__global__ void neighbour_kernel(SelftestParams p) {
  __shared__ float tile[kThreads];
  const int i = int(threadIdx.x);
  tile[i] = p.in[i];
  if (kSync) __syncwarp();
  p.out[i] = tile[i ^ 1];
}
template <bool kSync>
void neighbour(const SelftestParams& p) {
  SX_LAUNCH("selftest_neighbour", neighbour_kernel<kSync>, 1, kThreads, 0, nullptr, p);
}

// Threads from `arg` on return before the barrier.
__global__ void early_return_kernel(SelftestParams p) {
  if (int64_t(threadIdx.x) >= p.arg) return;
  __syncthreads();
  p.out[threadIdx.x] = p.in[threadIdx.x];
}
void early_return(const SelftestParams& p) {
  SX_LAUNCH("selftest_early_return", early_return_kernel, 2, kThreads, 0, nullptr, p);
}

// Three questions one after another: whether there is a thread `arg`, one that no thread says yes to, the first again.
__global__ void any_thread_kernel(SelftestParams p) {
  const bool mine = int64_t(threadIdx.x) == p.arg;
  const bool first = block_any(mine), second = block_any(false), third = block_any(mine);
  p.out[threadIdx.x] = float(int(first) + 2 * int(second) + 4 * int(third));
}
void any_thread(const SelftestParams& p) {
  SX_LAUNCH("selftest_any_thread", any_thread_kernel, 1, kThreads, 0, nullptr, p);
}

// Warp 0 waits at one barrier, the others at another.
__global__ void two_barriers_kernel(SelftestParams p) {
  if (warp_id() == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  p.out[threadIdx.x] = 1.0f;
}
void two_barriers(const SelftestParams& p) {
  SX_LAUNCH("selftest_two_barriers", two_barriers_kernel, 1, kThreads, 0, nullptr, p);
}

// Lanes from `arg` on of each warp skip the shuffle.
__global__ void partial_shuffle_kernel(SelftestParams p) {
  float x = p.in[threadIdx.x];
  if (lane_id() < p.arg) x = shuffle_xor(x, 1);
  p.out[threadIdx.x] = x;
}
void partial_shuffle(const SelftestParams& p) {
  SX_LAUNCH("selftest_partial_shuffle", partial_shuffle_kernel, 1, kThreads, 0, nullptr, p);
}

// Some lanes wait at a shuffle, the others at the block barrier.
__global__ void shuffle_or_barrier_kernel(SelftestParams p) {
  float x = p.in[threadIdx.x];
  if (lane_id() == 3) {
    __syncthreads();
  } else {
    x = shuffle_from(x, 0);
  }
  p.out[threadIdx.x] = x;
}
void shuffle_or_barrier(const SelftestParams& p) {
  SX_LAUNCH("selftest_shuffle_or_barrier", shuffle_or_barrier_kernel, 1, kThreads, 0, nullptr, p);
}

// A block of 40 threads: the second warp has 8 lanes, and a full mask names 24 that do not exist.
void ragged_block(const SelftestParams& p) {
  SX_LAUNCH("selftest_ragged_block", partial_shuffle_kernel, 1, 40, 0, nullptr, p);
}

// Every collective, 32 and 64 bits wide; out counts the wrong answers of each thread. The compiler cannot fold them:
// `one` is a number from memory.
__global__ void collectives_kernel(SelftestParams p) {
  const int lane = lane_id();
  const int one = int(p.in[0]);
  int wrong = 0;
  const auto expect = [&wrong](bool ok) { wrong += ok ? 0 : 1; };
  const unsigned long long wide = 0x123456789ABC0000ull + unsigned(lane) * unsigned(one);
  expect(__shfl_xor_sync(kFullMask, wide, 5) == 0x123456789ABC0000ull + unsigned(lane ^ 5));
  expect(__shfl_sync(kFullMask, -double(lane) * one - 0.1, 7) == -7.1);
  expect(__shfl_sync(kFullMask, float(lane) * one, 3, 8) == float((lane & ~7) + 3));
  expect(__shfl_sync(kFullMask, int64_t(lane) << (40 * one), 31) == int64_t(31) << 40);
  expect(__shfl_up_sync(kFullMask, lane * one, 2u) == (lane >= 2 ? lane - 2 : lane));
  expect(__shfl_up_sync(kFullMask, lane * one, 2u, 16) == (lane % 16 >= 2 ? lane - 2 : lane));
  expect(__shfl_down_sync(kFullMask, unsigned(lane * one), 4u) == unsigned(lane < 28 ? lane + 4 : lane));
  expect(__ballot_sync(kFullMask, lane % 3 == 0) == 0x49249249u);
  expect(__any_sync(kFullMask, lane == 9 * one) == 1 && __any_sync(kFullMask, lane < 0) == 0);
  expect(__all_sync(kFullMask, lane >= 0) == 1 && __all_sync(kFullMask, lane != 9 * one) == 0);
  // Half warps that go separate ways.
  const unsigned half = lane < 16 ? 0x0000FFFFu : 0xFFFF0000u;
  for (int k = 0; k < (lane < 16 ? 3 : 5); ++k) expect(__shfl_xor_sync(half, lane * one, 1) == (lane ^ 1));
  expect(__popc(0xF0F0u) == 8 && __ffs(8 * one) == 4 && __ffs(0) == 0 && __clz(one) == 31);
  expect(__int_as_float(__float_as_int(1.5f)) == 1.5f && __umulhi(0x80000000u, 4u) == 2u);
  __syncwarp();
  p.out[threadIdx.x] = float(wrong);
}
void collectives(const SelftestParams& p) {
  SX_LAUNCH("selftest_collectives", collectives_kernel, 1, kThreads, 0, nullptr, p);
}

// Integer atomics: a histogram does not depend on the order, the ticket a thread gets does (arg = 1 stores it).
__global__ void atomics_kernel(SelftestParams p) {
  auto* counts = reinterpret_cast<int*>(p.out);
  const int ticket = atomicAdd(&counts[threadIdx.x % 4], 1);
  atomicMax(&counts[4], int(blockIdx.x * kThreads + threadIdx.x));
  atomicCAS(&counts[5], 0, 77);
  auto* wide = reinterpret_cast<unsigned long long*>(counts + 6);
  atomicAdd(wide, 1ull << 32);
  if (p.arg == 1) counts[8 + threadIdx.x] = ticket;
}
void atomics(const SelftestParams& p) { SX_LAUNCH("selftest_atomics", atomics_kernel, 3, kThreads, 0, nullptr, p); }

// Where a thread is, in a three-dimensional grid and block.
__global__ void indices_kernel(SelftestParams p) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  p.out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = float(block * 1000 + thread);
}
void indices(const SelftestParams& p) {
  SX_LAUNCH("selftest_indices", indices_kernel, dim3(2, 3, 2), dim3(4, 4, 2), 0, nullptr, p);
}

// Thread `arg` traps.
__global__ void trap_kernel(SelftestParams p) {
  if (int64_t(threadIdx.x) == p.arg) {
    printf("selftest_trap: id %d is out of range\n", 12);
    __trap();
  }
}
void trap_test(const SelftestParams& p) { SX_LAUNCH("selftest_trap", trap_kernel, 1, kThreads, 0, nullptr, p); }

__global__ void throw_kernel(SelftestParams p) {
  if (int64_t(threadIdx.x) == p.arg) throw std::logic_error("thrown inside a fiber");
  __syncthreads();
}
void throw_test(const SelftestParams& p) { SX_LAUNCH("selftest_throw", throw_kernel, 1, kThreads, 0, nullptr, p); }

__global__ void empty_kernel(SelftestParams) {}
// `arg` threads per block, which may be more than a device takes.
void limits(const SelftestParams& p) { SX_LAUNCH("selftest_limits", empty_kernel, 1, unsigned(p.arg), 0, nullptr, p); }

}  // namespace

const Selftest kBarrierSelftests[] = {
    {"reduce", reduce<true, true>},
    {"reduce_without_first_barrier", reduce<false, true>},
    {"reduce_without_second_barrier", reduce<true, false>},
    {"block_sum", block_sum_test},
    {"neighbour", neighbour<true>},
    {"neighbour_without_syncwarp", neighbour<false>},
    {"any_thread", any_thread},
    {"early_return", early_return},
    {"two_barriers", two_barriers},
    {"partial_shuffle", partial_shuffle},
    {"shuffle_or_barrier", shuffle_or_barrier},
    {"ragged_block", ragged_block},
    {"collectives", collectives},
    {"atomics", atomics},
    {"indices", indices},
    {"trap", trap_test},
    {"throw", throw_test},
    {"limits", limits},
    {nullptr, nullptr},
};

}  // namespace samplex::simt_selftest
