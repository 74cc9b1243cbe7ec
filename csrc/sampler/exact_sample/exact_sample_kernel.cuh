// exact_sample on the device.
//
//   exact_mass_kernel      a warp has a row and a block of 256 classes, eight of them a lane
//   exact_blocks_kernel    a thread block has a row: sum of the weights of its blocks, running sums, then the draws
//   exact_draw_kernel      a thread block has the runs of equal (block, row) that begin in a window of the sorted
//   draws.
//                          For up to four of one block of classes, whose rows it reads once: 256 products each, running
//                          sums in shared memory, then the draws of each run
//   exact_log_prob_kernel  a warp has an id
//   exact_product_mass_kernel  a thread block has 128 rows and a block of classes; their products, on tensor cores,
//   stay
//                          in its registers, so no logit is written to memory. Softmax and absolute softmax only
#pragma once

#include "common/mma.cuh"
#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "sampler/exact_sample/exact_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kExactThreads = 256;
constexpr int kExactWarps = kExactThreads / kWarpSize;
static_assert(kExactThreads == kExactBlock, "a thread has a class of the block");
constexpr int kExactPerLane = int(kExactBlock) / kWarpSize;

// ------------------------------------------------------------------------------------------------ mass
// Column of value i of a lane: four in a row, so that they are one load.
SX_DEVICE inline int exact_column(int i) { return i / 4 * 4 * kWarpSize + 4 * lane_id() + i % 4; }

// values[0 .. 4) of columns [column, column + 4) of a row of `count`; 0 beyond.
template <bool Wide, typename A>
SX_DEVICE inline void exact_load(const A* row, int column, int count, A* values) {
  if constexpr (Wide) {
    if (column + 4 <= count) return load_floats<4>(row + column, values);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] = column + j < count ? row[column + j] : A(0);
}

// Two blocks of the double kernel, 0: the compiler's own choice. That is 64 registers for double on sm_120, which
// spill.
template <typename A, bool Wide>
__global__ void __launch_bounds__(kExactThreads, sizeof(A) == 8 ? 2 : 0) exact_mass_kernel(ExactMassParams p) {
  const ExactMap<A> map(p.law);
  const int64_t blocks = (p.count + kExactBlock - 1) / kExactBlock, groups = (blocks + kExactWarps - 1) / kExactWarps;
  for (int64_t task = blockIdx.x; task < p.batch * groups; task += gridDim.x) {
    const int64_t b = task / groups, from = (task % groups * kExactWarps + warp_id()) * kExactBlock;
    if (from >= p.count) continue;  // the whole warp
    const int count = int(p.count - from < kExactBlock ? p.count - from : kExactBlock);
    const A* dots = static_cast<const A*>(p.dots) + b * p.stride + from;
    A size[kExactPerLane];
#pragma unroll
    for (int i = 0; i < kExactPerLane; i += 4) exact_load<Wide>(dots, exact_column(i), count, size + i);
#pragma unroll
    for (int i = 0; i < kExactPerLane; i += 4) {
      A bias[4] = {};
      if (p.bias != nullptr) exact_load<Wide>(static_cast<const A*>(p.bias) + from, exact_column(i), count, bias);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        size[i + j] = exact_column(i) + j < count ? map.size(size[i + j], bias[j]) : exact_none<A>();
      }
    }
    exact_list(p.law, b).columns(p.first + from, count, [&](int column) {
#pragma unroll
      for (int i = 0; i < kExactPerLane; ++i) size[i] = exact_column(i) == column ? exact_none<A>() : size[i];
    });
    A largest = size[0];
#pragma unroll
    for (int i = 1; i < kExactPerLane; ++i) largest = max_nan(largest, size[i]);
    const ExactScale<A> scale(p.law, group_max<kWarpSize>(largest));
    A sum = 0;
    if (scale.quartic) {
#pragma unroll
      for (const A x : size) sum += scale.power_weight(x);
    } else {
#pragma unroll
      for (const A x : size) sum += scale.exp_weight(x);
    }
    sum = group_sum<kWarpSize>(sum);
    if (lane_id() == 0) p.mass[b * p.blocks + (p.first + from) / kExactBlock] = scale.log_top() + log(double(sum));
  }
}

// ------------------------------------------------------------------------------------------------ blocks
// Running sum over the threads of a block, and the sum of all. `scratch` holds kExactWarps and is free again
// afterwards.
SX_DEVICE inline uint64_t exact_running(uint64_t x, uint64_t* scratch, uint64_t& total) {
  const int lane = lane_id();
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint64_t other = shuffle_from(x, lane < step ? lane : lane - step);
    if (lane >= step) x += other;
  }
  if (lane == kWarpSize - 1) scratch[warp_id()] = x;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kExactWarps; ++w) {
    if (w == warp_id()) x += total;
    total += scratch[w];
  }
  __syncthreads();
  return x;
}

// Four blocks: with its own choice of registers the compiler spills on sm_80.
__global__ void __launch_bounds__(kExactThreads, 4) exact_blocks_kernel(ExactBlocksParams p) {
  __shared__ double parts[kExactWarps];
  __shared__ uint64_t sums[kExactWarps];
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  for (int64_t b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const double* mass = p.mass + b * p.blocks;
    uint64_t* running = p.running + b * p.blocks;
    double top = negative_infinity<double>(), sum = 0.0;
    for (int64_t k = threadIdx.x; k < p.blocks; k += kExactThreads) top = max_nan(top, mass[k]);
    top = block_max<kExactWarps>(top, parts);
    const bool lawful = is_finite(top);
    for (int64_t k = threadIdx.x; k < p.blocks; k += kExactThreads) {
      const double weight = lawful ? exp(mass[k] - top) : 0.0;
      running[k] = bit_copy<uint64_t>(weight);  // read again by this thread
      sum += weight;
    }
    sum = block_sum<kExactWarps>(sum, parts);
    if (threadIdx.x == 0) p.lse[b] = lawful ? top + log(sum) : top;
    uint64_t before = 0;
    for (int64_t from = 0; from < p.blocks; from += kExactThreads) {
      const int64_t k = from + threadIdx.x;
      uint64_t units = 0, total;
      if (lawful && k < p.blocks) units = exact_block_units(bit_copy<double>(running[k]), sum);
      units = exact_running(units, sums, total);
      if (k < p.blocks) running[k] = before + units;
      before += total;
    }
    __syncthreads();  // the running sums of all threads
    for (int64_t j = threadIdx.x; j < p.num_samples; j += kExactThreads) {
      const int64_t block = exact_locate(running, p.blocks, exact_point(key, p.row + b, j, 0, before));
      p.place[b * p.num_samples + j] = block * p.batch + b;
    }
  }
}

// ------------------------------------------------------------------------------------------------ products
// Class rows that a warp has under way.
constexpr int kExactRows = 4;
constexpr int kExactLanes = kWarpSize / kExactRows;

// Sums over the warp of kExactRows values a lane: lane l gets that of value l / kExactLanes, by 6 shuffles instead of
// 20.
template <typename A>
SX_DEVICE inline A exact_sums(A* x) {
#pragma unroll
  for (int width = kExactRows / 2; width > 0; width /= 2) {
    const bool upper = (lane_id() & (kExactLanes * width)) != 0;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const A sent = upper ? x[j] : x[j + width], kept = upper ? x[j + width] : x[j];
      x[j] = kept + shuffle_xor(sent, kExactLanes * width);
    }
  }
  return group_sum<kExactLanes>(x[0]);
}

// Width values of a row, as A.
template <int Width, typename A, typename H>
SX_DEVICE inline void exact_load_row(const H* row, A* out) {
  if constexpr (Width == 1) {
    out[0] = A(to_acc(row[0]));
  } else {
    float values[Width];
    if constexpr (sizeof(H) == 4)
      load_floats<Width>(row, values);
    else
      load_values<Width>(row, values);
#pragma unroll
    for (int i = 0; i < Width; ++i) out[i] = A(values[i]);
  }
}

// This lane's parts of h[q] . rows[j] for Queries rows of h and Count class rows, summed in A.
template <int Width, int Queries, int Count, typename A, typename T, typename H>
SX_DEVICE inline void exact_parts(const H* const* h, const T* const* rows, int64_t dim, A (&parts)[Queries][Count]) {
#pragma unroll
  for (int q = 0; q < Queries; ++q) {
#pragma unroll
    for (int j = 0; j < Count; ++j) parts[q][j] = A(0);
  }
#pragma unroll 1
  for (int64_t c = lane_id() * Width; c < dim; c += kWarpSize * Width) {
    A row[Count][Width];
#pragma unroll
    for (int j = 0; j < Count; ++j) exact_load_row<Width>(rows[j] + c, row[j]);
#pragma unroll
    for (int q = 0; q < Queries; ++q) {
      A query[Width];
      exact_load_row<Width>(h[q] + c, query);
#pragma unroll
      for (int j = 0; j < Count; ++j) {
#pragma unroll
        for (int i = 0; i < Width; ++i) parts[q][j] += query[i] * row[j][i];
      }
    }
  }
}

// The products of a block of classes, from `first` on, with Queries rows of h: into sizes[q][class].
template <int Width, int Queries, typename A, typename T>
SX_DEVICE inline void exact_block_products(const ExactDrawParams& p, const int64_t* order, const int* begins,
                                           int64_t first, int count, A (*sizes)[kExactBlock]) {
  const int64_t dim = p.table.dim;
  const T* weight = static_cast<const T*>(p.table.weight) + first * dim;
  const A* h[Queries];
#pragma unroll
  for (int q = 0; q < Queries; ++q)
    h[q] = static_cast<const A*>(p.table.hidden) + order[begins[q]] / p.num_samples * dim;
  for (int c = warp_id() * kWarpSize; c < (warp_id() + 1) * kWarpSize; c += kExactRows) {
    const T* rows[kExactRows];
#pragma unroll
    for (int j = 0; j < kExactRows; ++j) rows[j] = weight + (c + j < count ? c + j : count - 1) * dim;
    A dots[Queries][kExactRows];
    exact_parts<Width, Queries, kExactRows>(h, rows, dim, dots);
#pragma unroll
    for (int q = 0; q < Queries; ++q) {
      const A dot = exact_sums(dots[q]);
      if (lane_id() % kExactLanes == 0) sizes[q][c + lane_id() / kExactLanes] = dot;
    }
  }
}

// Two blocks: four queries of double take many registers.
template <typename T, typename A, int Width>
__global__ void __launch_bounds__(kExactThreads, 2) exact_draw_kernel(ExactDrawParams p) {
  constexpr int kTogether = sizeof(A) == 8 ? 1 : Width == 8 ? 3 : 4;  // runs; as many as the registers hold
  __shared__ A sizes[kTogether][kExactBlock];
  __shared__ uint64_t running[kExactBlock];
  __shared__ A parts[kExactWarps];
  __shared__ uint64_t sums[kExactWarps];
  const ExactMap<A> map(p.law);
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  const int64_t total = p.table.batch * p.num_samples, windows = (total + p.window - 1) / p.window;
  const int own = threadIdx.x;
  for (int64_t w = blockIdx.x; w < windows; w += gridDim.x) {
    const int64_t start = w * p.window, *sorted = p.sorted + start, *order = p.order + start;
    const int end = int(p.window < total - start ? p.window : total - start);
    int next = 0;
    while (next < end) {
      // The next runs of one block of classes; the same in every thread.
      int64_t first = -1;
      int begins[kTogether], found = 0;
      for (; next < end && found < kTogether; ++next) {
        const int64_t place = sorted[next];
        if (start + next > 0 && sorted[next - 1] == place) continue;
        const int64_t from = exact_first_class(place, p.table.batch, p.law.num_classes);
        if (found > 0 && from != first) break;
        first = from;
#pragma unroll
        for (int q = 0; q < kTogether; ++q) {  // no index that is known at run time only
          begins[q] = q == found || found == 0 ? next : begins[q];
        }
        ++found;
      }
      if (found == 0) break;
      const int count = int(p.law.num_classes - first < kExactBlock ? p.law.num_classes - first : kExactBlock);
      __syncthreads();  // the runs before are done with the shared memory
      if (found == 1)
        exact_block_products<Width, 1, A, T>(p, order, begins, first, count, sizes);
      else
        exact_block_products<Width, kTogether, A, T>(p, order, begins, first, count, sizes);
      __syncthreads();
      const A bias = own < count ? load_scalar<A>(p.table.bias, first + own, A(0)) : A(0);
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        if (q >= found) break;
        const int64_t b = order[begins[q]] / p.num_samples, place = sorted[begins[q]];
        A mine = own < count ? map.size(sizes[q][own], bias) : exact_none<A>();
        const ExactList list = exact_list(p.law, b);
        list.columns(first, count, [&](int column) { mine = column == own ? exact_none<A>() : mine; });
        const ExactScale<A> scale(p.law, block_max<kExactWarps>(mine, parts));
        uint64_t sum;
        running[own] = exact_running(exact_units(scale.weight(mine)), sums, sum);
        __syncthreads();
        // Nothing left of the row: the first excluded class stands in.
        const int64_t alone = p.lse[b] == negative_infinity<double>() ? list.first(p.law.num_classes) : -1;
        for (int64_t j = start + begins[q] + own; j < total && p.sorted[j] == place; j += kExactThreads) {
          const uint64_t point = exact_point(key, p.law.row + b, p.order[j] % p.num_samples, 1, sum);
          p.ids[p.order[j]] = alone >= 0 ? alone : first + exact_locate(running, count, point);
        }
        __syncthreads();  // the running sums are read
      }
    }
  }
}

// Sums in double, so that the product adds no rounding error to log_q.
template <typename T, typename H, int Width>
__global__ void __launch_bounds__(kExactThreads) exact_log_prob_kernel(ExactLogProbParams p) {
  const ExactMap<double> map(p.law);
  const int64_t count = p.table.batch * p.num_ids, stride = int64_t(gridDim.x) * kExactWarps;
  for (int64_t at = int64_t(blockIdx.x) * kExactWarps + warp_id(); at < count; at += stride) {
    const int64_t b = at / p.num_ids, id = p.ids[at];
    const bool known = in_range(id, p.law.num_classes);
    const T* row = static_cast<const T*>(p.table.weight) + (known ? id : 0) * p.table.dim;
    const H* h = static_cast<const H*>(p.table.hidden) + b * p.table.dim;
    double parts[1][1];
    exact_parts<Width, 1, 1>(&h, &row, p.table.dim, parts);
    const double dot = group_sum<kWarpSize>(parts[0][0]);
    if (lane_id() != 0) continue;
    const double size = map.size(dot, load_scalar<double>(p.table.bias, known ? id : 0, 0.0));
    p.log_q[at] = known ? exact_given(p.law, exact_list(p.law, b), id, size, p.lse[b]) : quiet_nan<float>();
  }
}

// ------------------------------------------------------------------------------------------------ products and mass
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
          // Recomputed for every square: keeping it would take six registers, and all are in use.
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
