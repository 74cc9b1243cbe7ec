// Weights of the blocks of classes straight from rows and a table of 16 bits: the products of 128 rows and the 256
// classes of a block stay in the registers of a thread block, so no logit is written to memory. Softmax and absolute
// softmax only.
#pragma once

#include "common/mma.cuh"
#include "common/warp.cuh"
#include "sampler/exact_sample/exact_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kProductThreads = 512;
constexpr int kProductRows = 128;  // of h in a thread block
constexpr int kProductDepth = 32;  // columns of the factors in shared memory
// Columns between two rows there: 16 rows of a square lie in different banks.
constexpr int kProductStride = kProductDepth + 8;
// A warp has 32 rows and 64 classes.
constexpr int kProductSquaresDown = 2, kProductSquaresAcross = 4;
constexpr int kProductWarpRows = kProductSquaresDown * kMmaSide, kProductWarpClasses = kProductSquaresAcross * kMmaSide;
constexpr int kProductAcross = int(kExactBlock) / kProductWarpClasses;
static_assert(kProductRows / kProductWarpRows * kProductAcross * kWarpSize == kProductThreads);
constexpr int kProductScratch = kMmaSide + 4;  // columns between two rows of a square of logits

template <typename T>
union alignas(32) ProductShared {
  struct {
    T rows[kProductRows * kProductStride], classes[kExactBlock * kProductStride];
  } factors;
  float logits[kProductThreads / kWarpSize][kMmaSide * kProductScratch];
};

// Column of a class row for column c of a row of h in parts.
SX_DEVICE inline int64_t product_column(int64_t c, int64_t period) {
  while (c >= period) c -= period;
  return c;
}

// Eight columns [c, c + 8) of a row that repeats after `period`, 0 from `end` on.
template <bool Wide, typename T>
SX_DEVICE inline uint4 product_load(const T* row, int64_t c, int64_t end, int64_t period, bool there) {
  uint4 found = make_uint4(0u, 0u, 0u, 0u);
  if (!there || c >= end) return found;
  if constexpr (Wide) {
    return *reinterpret_cast<const uint4*>(row + product_column(c, period));
  } else {
    uint32_t words[4] = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (c + j < end) words[j / 2] |= uint32_t(bit_copy<uint16_t>(row[product_column(c + j, period)])) << 16 * (j % 2);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename T, bool Wide>
__global__ void __launch_bounds__(kProductThreads, 1) exact_product_mass_kernel(ExactProductMassParams p) {
  constexpr int kLoads = kProductDepth / 8;  // of a row
  constexpr int kClassLoads = int(kExactBlock) * kLoads / kProductThreads;
  static_assert(kProductRows * kLoads == kProductThreads);
  __shared__ ProductShared<T> shared;
  __shared__ float part_top[kProductRows][kProductAcross], part_sum[kProductRows][kProductAcross];
  const ExactMap<float> map(p.law);
  const T* hidden = static_cast<const T*>(p.table.hidden);
  const T* weight = static_cast<const T*>(p.table.weight);
  const int64_t batch = p.table.batch, dim = p.table.dim, depth = p.parts * dim, classes = p.law.num_classes;
  const int64_t tiles = (batch + kProductRows - 1) / kProductRows;
  const int own = int(threadIdx.x), down = warp_id() / kProductAcross, across = warp_id() % kProductAcross;
  const int load_row = own / kLoads, load_column = own % kLoads * 8;
  // Tiles of one block of classes follow each other, so that its rows come from memory once.
  for (int64_t task = blockIdx.x; task < tiles * p.blocks; task += gridDim.x) {
    const int64_t first_row = task % tiles * kProductRows, block = task / tiles, first = block * kExactBlock;
    MmaSums<T, kProductSquaresDown, kProductSquaresAcross> sums;
    sums.clear();
    uint4 next_row, next_class[kClassLoads];
    const auto fetch = [&](int64_t k) {
      const int64_t c = k + load_column, b = first_row + load_row;
      next_row = product_load<Wide>(hidden + b * depth, c, depth, depth, b < batch);
#pragma unroll
      for (int i = 0; i < kClassLoads; ++i) {
        const int64_t id = first + i * (kExactBlock / kClassLoads) + load_row;
        next_class[i] = product_load<Wide>(weight + id * dim, c, depth, dim, id < classes);
      }
    };
    fetch(0);
    for (int64_t k = 0; k < depth; k += kProductDepth) {
      __syncthreads();  // what was in shared memory is read
      *reinterpret_cast<uint4*>(shared.factors.rows + load_row * kProductStride + load_column) = next_row;
#pragma unroll
      for (int i = 0; i < kClassLoads; ++i) {
        const int row = i * (int(kExactBlock) / kClassLoads) + load_row;
        *reinterpret_cast<uint4*>(shared.factors.classes + row * kProductStride + load_column) = next_class[i];
      }
      __syncthreads();
      if (k + kProductDepth < depth) fetch(k + kProductDepth);
#pragma unroll
      for (int step = 0; step < kProductDepth; step += kMmaSide) {
        sums.add(shared.factors.rows + down * kProductWarpRows * kProductStride + step,
                 shared.factors.classes + across * kProductWarpClasses * kProductStride + step, kProductStride);
      }
    }
    __syncthreads();  // the factors make room for squares of logits, one of a warp
    float* logits = shared.logits[warp_id()];
#pragma unroll
    for (int r = 0; r < kProductSquaresDown; ++r) {
      // Two lanes have a row.
      const int row = down * kProductWarpRows + r * kMmaSide + lane_id() / 2;
      const bool there = first_row + row < batch;
      const ExactList list = exact_list(p.law, there ? first_row + row : 0);
      float top = std::numeric_limits<float>::lowest(), sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kProductSquaresAcross; ++c) {
        sums.store(r, c, logits, kProductScratch);
        warp_sync();
        const int column = lane_id() % 2 * 8;
        const int64_t id = first + across * kProductWarpClasses + c * kMmaSide + column;
        float size[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float dot = logits[lane_id() / 2 * kProductScratch + column + j];
          const bool known = id + j < classes;
          size[j] = known ? map.size(dot, load_scalar<float>(p.table.bias, id + j, 0.0f)) : exact_none<float>();
        }
        list.columns(id, 8, [&](int excluded) {
#pragma unroll
          for (int j = 0; j < 8; ++j) size[j] = j == excluded ? exact_none<float>() : size[j];
        });
        float largest = top;
#pragma unroll
        for (const float x : size) largest = max_nan(largest, x);
        sum *= exp_acc(top - largest);
        top = largest;
#pragma unroll
        for (const float x : size) sum += exp_acc(x - top);
        warp_sync();  // the square is read
      }
      const float both = group_max<2>(top);
      sum = group_sum<2>(sum * exp_acc(top - both));
      if (lane_id() % 2 == 0) {
        part_top[row][across] = both;
        part_sum[row][across] = sum;
      }
    }
    __syncthreads();
    if (own < kProductRows && first_row + own < batch) {
      float top = part_top[own][0], sum = 0.0f;
#pragma unroll
      for (int i = 1; i < kProductAcross; ++i) top = max_nan(top, part_top[own][i]);
#pragma unroll
      for (int i = 0; i < kProductAcross; ++i) sum += part_sum[own][i] * exp_acc(part_top[own][i] - top);
      p.mass[(first_row + own) * p.blocks + block] = double(top) + log(double(sum));
    }
  }
}

}  // namespace samplex::SX_BACKEND_NS
