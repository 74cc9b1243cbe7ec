// Weights of the blocks of classes straight from rows and a table of 16 bits: the products of 128 rows and the 256
// classes of a block stay in the registers of a thread block, so no logit is written to memory. Softmax and absolute
// softmax only.
#pragma once

#include "common/mma.cuh"
#include "common/vec_load.cuh"
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

struct alignas(16) ProductBiases {
  float of[kExactBlock];
};

// Eight columns [c, c + 8) of a row that repeats after `period`, 0 from `end` on.
template <bool Wide, typename T>
SX_DEVICE inline uint4 product_load(const T* row, int c, int end, int period, bool there) {
  if (!there || c >= end) return make_uint4(0u, 0u, 0u, 0u);
  int at = c;
  while (at >= period) at -= period;
  if constexpr (Wide) {
    return *reinterpret_cast<const uint4*>(row + at);
  } else {
    uint32_t words[4] = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (c + j < end) words[j / 2] |= uint32_t(bit_copy<uint16_t>(row[at])) << 16 * (j % 2);
      at = at + 1 == period ? 0 : at + 1;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// exp x, for x <= 0: half the instructions of expf, and 2^-24 |x| less exact.
SX_DEVICE inline float product_weight(float x) { return exp2f(x * 1.44269504f); }

template <typename T, bool Wide>
__global__ void __launch_bounds__(kProductThreads, 1) exact_product_mass_kernel(ExactProductMassParams p) {
  constexpr int kLoads = kProductDepth / 8, kOwn = kMmaSide / 2;  // of a row, of a row of a square
  constexpr int kClassLoads = int(kExactBlock) * kLoads / kProductThreads;
  static_assert(kProductRows * kLoads == kProductThreads);
  __shared__ ProductShared<T> shared;
  __shared__ ProductBiases biases;
  __shared__ float part_top[kProductRows][kProductAcross], part_sum[kProductRows][kProductAcross];
  const ExactMap<float> map(p.law);
  // In 32 bits, which halves the registers: the op has looked that they fit.
  const int dim = int(p.table.dim), depth = int(p.parts) * dim;
  const int64_t tiles = (p.table.batch + kProductRows - 1) / kProductRows;
  const int own = int(threadIdx.x), down = warp_id() / kProductAcross, across = warp_id() % kProductAcross;
  const int load_row = own / kLoads, load_column = own % kLoads * 8;
  // Tiles of one block of classes follow each other, so that its rows come from memory once.
  for (int64_t task = blockIdx.x; task < tiles * p.blocks; task += gridDim.x) {
    const int64_t first_row = task % tiles * kProductRows, first = task / tiles * kExactBlock;
    const int rows = int(p.table.batch - first_row < kProductRows ? p.table.batch - first_row : kProductRows);
    const int count = int(p.law.num_classes - first < kExactBlock ? p.law.num_classes - first : kExactBlock);
    const T* row_at = static_cast<const T*>(p.table.hidden) + (first_row + load_row) * depth;
    const T* class_at = static_cast<const T*>(p.table.weight) + (first + load_row) * dim;
    MmaSums<T, kProductSquaresDown, kProductSquaresAcross> sums;
    sums.clear();
    uint4 next_row, next_class[kClassLoads];
    const auto fetch = [&](int c) {
      next_row = product_load<Wide>(row_at, c, depth, depth, load_row < rows);
#pragma unroll
      for (int i = 0; i < kClassLoads; ++i) {
        const int row = i * (int(kExactBlock) / kClassLoads);
        next_class[i] = product_load<Wide>(class_at + int64_t(row) * dim, c, depth, dim, row + load_row < count);
      }
    };
    fetch(load_column);
    for (int k = 0; k < depth; k += kProductDepth) {
      __syncthreads();  // what was in shared memory is read
      *reinterpret_cast<uint4*>(shared.factors.rows + load_row * kProductStride + load_column) = next_row;
#pragma unroll
      for (int i = 0; i < kClassLoads; ++i) {
        const int row = i * (int(kExactBlock) / kClassLoads) + load_row;
        *reinterpret_cast<uint4*>(shared.factors.classes + row * kProductStride + load_column) = next_class[i];
      }
      __syncthreads();
      if (k + kProductDepth < depth) fetch(k + kProductDepth + load_column);
#pragma unroll
      for (int step = 0; step < kProductDepth; step += kMmaSide) {
        sums.add(shared.factors.rows + down * kProductWarpRows * kProductStride + step,
                 shared.factors.classes + across * kProductWarpClasses * kProductStride + step, kProductStride);
      }
    }
    if (own < kExactBlock) biases.of[own] = own < count ? load_scalar<float>(p.table.bias, first + own, 0.0f) : 0.0f;
    __syncthreads();  // the factors make room for squares of logits, one of a warp
    float* logits = shared.logits[warp_id()];
#pragma unroll
    for (int r = 0; r < kProductSquaresDown; ++r) {
      // Two lanes have a row.
      const int row = down * kProductWarpRows + r * kMmaSide + lane_id() / 2, half = lane_id() % 2 * kOwn;
      float top = std::numeric_limits<float>::lowest(), sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kProductSquaresAcross; ++c) {
        sums.store(r, c, logits, kProductScratch);
        warp_sync();
        const int column = across * kProductWarpClasses + c * kMmaSide + half;
        float size[kOwn];
        load_floats<kOwn>(logits + lane_id() / 2 * kProductScratch + half, size);
#pragma unroll
        for (int j = 0; j < kOwn; j += 4) {
          float bias[4];
          load_floats<4>(biases.of + column + j, bias);
#pragma unroll
          for (int i = 0; i < 4; ++i) size[j + i] = map.size(size[j + i], bias[i]);
        }
        if (count < kExactBlock) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) size[j] = column + j < count ? size[j] : exact_none<float>();
        }
        if (p.law.exclude != nullptr && row < rows) {
          // Made anew for every square: it takes six registers, and there are none left.
          exact_list(p.law, first_row + row).columns(first + column, kOwn, [&](int excluded) {
#pragma unroll
            for (int j = 0; j < kOwn; ++j) size[j] = j == excluded ? exact_none<float>() : size[j];
          });
        }
        float largest = top;  // of what is not nan; a nan gets into the sum
#pragma unroll
        for (const float x : size) largest = fmaxf(largest, x);
        sum *= product_weight(top - largest);
        top = largest;
#pragma unroll
        for (const float x : size) sum += product_weight(x - top);
        warp_sync();  // the square is read
      }
      const float both = group_max<2>(top);
      sum = group_sum<2>(sum * product_weight(top - both));
      if (lane_id() % 2 == 0) {
        part_top[row][across] = both;
        part_sum[row][across] = sum;
      }
    }
    __syncthreads();
    if (own < rows) {
      float top = part_top[own][0], sum = 0.0f;
#pragma unroll
      for (int i = 1; i < kProductAcross; ++i) top = max_nan(top, part_top[own][i]);
#pragma unroll
      for (int i = 0; i < kProductAcross; ++i) sum += part_sum[own][i] * product_weight(part_top[own][i] - top);
      p.mass[(first_row + own) * p.blocks + first / kExactBlock] = double(top) + log(double(sum));
    }
  }
}

}  // namespace samplex::SX_BACKEND_NS
