// Feature maps on the GPU.
//
// rff_kernel: a tiled product of rows and frequencies whose sums leave through sin/cos or exp; a block makes 8 TM rows
// by 128 frequencies. A warp owns TM rows, a lane four frequencies 32 apart: a row's numbers reach the whole warp by
// broadcast, frequencies are read as 16-byte vectors of rows 4 numbers longer than the tile (no bank conflicts), and
// features are written 128 bytes at a time.
// rff_bwd_kernel: the same tile, coefficients times frequencies; coefficients are made from gradient and features on
// their way into shared memory.
// rff_quadratic_kernel, rff_quadratic_bwd_kernel: a block per row; the gradient comes by way of shared memory.
#pragma once

#include "common/macros.h"
#include "common/warp.cuh"
#include "features/rff/rff_math.h"
#include "features/rff/rff_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kRffThreads = 256, kRffWarps = kRffThreads / kWarpSize;
constexpr int kRffColumns = 4;  // of a thread
constexpr int kRffTileColumns = kRffColumns * kWarpSize;
constexpr int kRffQuadraticBwdRows = 6;  // of d numbers in the dynamic shared memory of rff_quadratic_bwd_kernel
constexpr int kRffQuadraticThreads = 128, kRffQuadraticWarps = kRffQuadraticThreads / kWarpSize;
constexpr int kRffQuadraticTile = 2048;  // numbers

// Depth of a tile: 32 numbers, half of that for double, so that a block stays below 32 KiB.
template <typename A>
constexpr int kRffDepth = sizeof(A) == 4 ? 32 : 16;

SX_DEVICE inline void load_four(const float* from, float* to) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x;
  to[1] = x.y;
  to[2] = x.z;
  to[3] = x.w;
}
SX_DEVICE inline void load_four(const double* from, double* to) {
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// tile[r][k] = from[(row + r) * stride + k0 + k], zeros outside of [rows, size].
template <int Rows, typename A, typename T>
SX_DEVICE inline void load_tile(const T* from, int64_t row, int64_t rows, int64_t stride, int64_t k0, int64_t size,
                                A (*tile)[kRffDepth<A> + 4]) {
  constexpr int kDepth = kRffDepth<A>, kStep = kRffThreads / kDepth;
  const int k = int(threadIdx.x) % kDepth;
#pragma unroll
  for (int r = int(threadIdx.x) / kDepth; r < Rows; r += kStep) {
    const bool inside = row + r < rows && k0 + k < size;
    tile[r][k] = inside ? A(to_acc(from[(row + r) * stride + k0 + k])) : A(0);
  }
}

template <typename T, RffKind Kind, int TM>
__global__ void __launch_bounds__(kRffThreads) rff_kernel(RffParams p) {
  using A = acc_t<T>;
  constexpr int kDepth = kRffDepth<A>, kRows = TM * kRffWarps;
  alignas(16) __shared__ A rows[kRows][kDepth + 4];
  alignas(16) __shared__ A table[kRffTileColumns][kDepth + 4];
  const int64_t row0 = int64_t(blockIdx.x) * kRows, column0 = int64_t(blockIdx.y) * kRffTileColumns;
  const int lane = lane_id(), warp = warp_id();
  A sum[TM][kRffColumns], norm[TM];
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    norm[i] = 0;
#pragma unroll
    for (int j = 0; j < kRffColumns; ++j) sum[i][j] = 0;
  }
  for (int64_t k0 = 0; k0 < p.dim; k0 += kDepth) {
    load_tile<kRows>(static_cast<const T*>(p.x), row0, p.batch, p.dim, k0, p.dim, rows);
    load_tile<kRffTileColumns>(static_cast<const A*>(p.omega), column0, p.num_features, p.dim, k0, p.dim, table);
    __syncthreads();
    if (Kind == RffKind::kPositive) {
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        const A u = lane < kDepth ? rows[warp * TM + i][lane % kDepth] : A(0);
        norm[i] += u * u;
      }
    }
    const int depth = p.dim - k0 < kDepth ? int(p.dim - k0) : kDepth;
#pragma unroll 2
    for (int k = 0; k < depth; k += 4) {  // zeros behind the last number
      A w[kRffColumns][4];
#pragma unroll
      for (int j = 0; j < kRffColumns; ++j) load_four(&table[j * kWarpSize + lane][k], w[j]);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        A u[4];
        load_four(&rows[warp * TM + i][k], u);
#pragma unroll
        for (int j = 0; j < kRffColumns; ++j) {
#pragma unroll
          for (int step = 0; step < 4; ++step) sum[i][j] += u[step] * w[j][step];
        }
      }
    }
    __syncthreads();
  }
  const A scale = A(1) / sqrt_acc(A(p.num_features));
  const int64_t width = rff_num_numbers(Kind, p.dim, p.num_features);
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t row = row0 + warp * TM + i;
    if (Kind == RffKind::kPositive) norm[i] = A(p.decay) * group_sum<kWarpSize>(norm[i]) - A(p.shift);
    A* to = static_cast<A*>(p.features) + row * width;
#pragma unroll
    for (int j = 0; j < kRffColumns; ++j) {
      const int64_t column = column0 + j * kWarpSize + lane;
      if (row >= p.batch || column >= p.num_features) continue;
      if (Kind == RffKind::kPositive) {
        to[column] = scale * exp_acc(sum[i][j] - norm[i]);
      } else {
        A sin, cos;
        device_sincos(sum[i][j], sin, cos);
        to[column] = scale * cos;
        to[p.num_features + column] = scale * sin;
      }
    }
  }
}

template <typename T, RffKind Kind, int TM>
__global__ void __launch_bounds__(kRffThreads) rff_bwd_kernel(RffBwdParams p) {
  using A = acc_t<T>;
  constexpr int kDepth = kRffDepth<A>, kRows = TM * kRffWarps, kStep = kRffThreads / kDepth;
  alignas(16) __shared__ A coefs[kRows][kDepth + 4];
  __shared__ A table[kDepth][kRffTileColumns];
  const int64_t row0 = int64_t(blockIdx.x) * kRows, column0 = int64_t(blockIdx.y) * kRffTileColumns;
  const int64_t D = p.num_features, width = rff_num_numbers(Kind, p.dim, D);
  const int lane = lane_id(), warp = warp_id(), tile_k = int(threadIdx.x) % kDepth;
  A sum[TM][kRffColumns], total[TM];
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    total[i] = 0;
#pragma unroll
    for (int j = 0; j < kRffColumns; ++j) sum[i][j] = 0;
  }
  for (int64_t k0 = 0; k0 < D; k0 += kDepth) {
#pragma unroll 2  // four loads each: more of them under way would not leave registers for the sums
    for (int r = int(threadIdx.x) / kDepth; r < kRows; r += kStep) {
      const int64_t row = row0 + r, k = k0 + tile_k;
      A coef = 0;
      if (row < p.batch && k < D) {
        const A* grad = static_cast<const A*>(p.grad) + row * width + k;
        const A* feature = static_cast<const A*>(p.features) + row * width + k;
        coef = Kind == RffKind::kPositive ? grad[0] * feature[0] : grad[D] * feature[0] - grad[0] * feature[D];
        if (p.coefs != nullptr && blockIdx.y == 0) static_cast<A*>(p.coefs)[row * D + k] = coef;
      }
      coefs[r][tile_k] = coef;
    }
    if (p.d_x == nullptr) continue;  // for the whole grid: only the coefficients were asked for
#pragma unroll 4
    for (int at = int(threadIdx.x); at < kDepth * kRffTileColumns; at += kRffThreads) {
      const int k = at / kRffTileColumns, j = at % kRffTileColumns;
      const bool inside = k0 + k < D && column0 + j < p.dim;
      table[k][j] = inside ? static_cast<const A*>(p.omega)[(k0 + k) * p.dim + column0 + j] : A(0);
    }
    __syncthreads();
    if (Kind == RffKind::kPositive) {
#pragma unroll
      for (int i = 0; i < TM; ++i) total[i] += lane < kDepth ? coefs[warp * TM + i][lane % kDepth] : A(0);
    }
    const int depth = D - k0 < kDepth ? int(D - k0) : kDepth;
#pragma unroll 2
    for (int k = 0; k < depth; k += 4) {
      A w[kRffColumns][4];
#pragma unroll
      for (int j = 0; j < kRffColumns; ++j) {
#pragma unroll
        for (int step = 0; step < 4; ++step) w[j][step] = table[k + step][j * kWarpSize + lane];
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        A a[4];
        load_four(&coefs[warp * TM + i][k], a);
#pragma unroll
        for (int j = 0; j < kRffColumns; ++j) {
#pragma unroll
          for (int step = 0; step < 4; ++step) sum[i][j] += a[step] * w[j][step];
        }
      }
    }
    __syncthreads();
  }
  if (p.d_x == nullptr) return;
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t row = row0 + warp * TM + i;
    if (Kind == RffKind::kPositive) total[i] = A(2 * p.decay) * group_sum<kWarpSize>(total[i]);
#pragma unroll
    for (int j = 0; j < kRffColumns; ++j) {
      const int64_t column = column0 + j * kWarpSize + lane;
      if (row >= p.batch || column >= p.dim) continue;
      const int64_t at = row * p.dim + column;
      A value = sum[i][j];
      if (Kind == RffKind::kPositive) value -= total[i] * A(to_acc(static_cast<const T*>(p.x)[at]));
      static_cast<T*>(p.d_x)[at] = from_acc<T>(value);
    }
  }
}

// Pairs of row i stand behind those of rows 0 .. i - 1, of d - 1 - i pairs each.
SX_DEVICE inline int rff_pairs_before(int d, int i) { return int(unsigned(i * (2 * d - 1 - i)) / 2); }
SX_DEVICE inline int64_t rff_pair_offset(int64_t d, int64_t i) { return d + i * (d - 1) - i * (i - 1) / 2; }

template <typename T>
__global__ void __launch_bounds__(kRffQuadraticThreads) rff_quadratic_kernel(RffParams p) {
  using A = acc_t<T>;
  SX_DYN_SMEM(A, u);  // [2 d]: the row, and zeros behind it that lanes of a second pair row may read
  const int d = int(p.dim);
  const int64_t width = rff_num_numbers(RffKind::kQuadratic, d, 0);
  const A one = sqrt_acc(A(p.alpha)), two = sqrt_acc(A(2) * A(p.alpha));
  for (int64_t row = blockIdx.x; row < p.batch; row += gridDim.x) {
    A* to = static_cast<A*>(p.features) + row * width;
    for (int c = int(threadIdx.x); c < d; c += kRffQuadraticThreads) {
      const A x = to_acc(static_cast<const T*>(p.x)[row * d + c]);
      u[c] = x;
      u[d + c] = 0;
      to[c] = one * x * x;
    }
    if (threadIdx.x == 0) to[width - 1] = 1;
    __syncthreads();
    // Pair rows i and d - 2 - i have d pairs together: lanes are busy, whatever i. Both numbers are read by all lanes,
    // so that neighbors read neighbors and no two lanes meet in a bank.
    for (int i = warp_id(); 2 * i <= d - 2; i += kRffQuadraticWarps) {
      const int other = d - 2 - i, length = d - 1 - i, end = other == i ? length : d;
      A* first = to + rff_pair_offset(d, i);
      A* second = to + rff_pair_offset(d, other) - length;
      const A factor = two * u[i], other_factor = two * u[other];
      for (int t = lane_id(); t < end; t += kWarpSize) {
        const A a = u[i + 1 + t], b = u[t];
        (t < length ? first : second)[t] = t < length ? factor * a : other_factor * b;
      }
    }
    __syncthreads();
  }
}

template <typename T>
__global__ void __launch_bounds__(kRffQuadraticThreads) rff_quadratic_bwd_kernel(RffBwdParams p) {
  using A = acc_t<T>;
  SX_DYN_SMEM(A, u);  // [d] the row, [d] sums along pair rows, [d] sums down them, [3 d] gradient of some pair rows
  const int d = int(p.dim), lane = lane_id();
  A *along = u + d, *down = u + 2 * d, *tile = u + 3 * d;
  int room = (kRffQuadraticBwdRows - 3) * d;
  if constexpr (sizeof(A) == 4) {  // short rows share a longer tile; double, for gradient checks, has no room for it
    __shared__ A more[kRffQuadraticTile];
    tile = room < kRffQuadraticTile ? more : tile;
    room = room < kRffQuadraticTile ? kRffQuadraticTile : room;
  }
  const int64_t width = rff_num_numbers(RffKind::kQuadratic, d, 0);
  const A one = A(2) * sqrt_acc(A(p.alpha)), two = sqrt_acc(A(2) * A(p.alpha));
  for (int64_t row = blockIdx.x; row < p.batch; row += gridDim.x) {
    const A* grad = static_cast<const A*>(p.grad) + row * width;
    for (int c = int(threadIdx.x); c < d; c += kRffQuadraticThreads) {
      u[c] = to_acc(static_cast<const T*>(p.x)[row * d + c]);
      along[c] = 0;
      down[c] = 0;
    }
    const int shift = int((row * width + d) % 8);  // of the first pair from a sector's begin
    // As many whole pair rows as the tile holds. They are consecutive and are read as one run from a sector's
    // begin on: read one by one, nearly each would share its first and last sector with a neighbor.
    for (int first = 0, last; first < d - 1; first = last) {
      const int begin = rff_pairs_before(d, first), head = d < 8 ? 0 : (shift + begin) % 8;
      const int fit = (room - head) / (d - 1 - first);
      last = first + fit < d - 1 ? first + fit : d - 1;
      const int end = head + rff_pairs_before(d, last) - begin;
      const A* pairs = grad + d + begin - head;
#pragma unroll 4
      for (int at = int(threadIdx.x); at < end; at += kRffQuadraticThreads) {
        if (at >= head) tile[at] = pairs[at];
      }
      __syncthreads();
      // Lanes outside of the triangle repeat a neighbor's load, which no bank minds, and add nothing.
      for (int c = int(threadIdx.x); c - lane < d; c += kRffQuadraticThreads) {
        if (c - lane + kWarpSize - 1 <= first) continue;
        A sum = c < d ? down[c] : A(0);  // row after row, however they are cut into tiles
        int start = head - first - 1;    // of pair row i, from column 0 on
        for (int i = first; i < last; ++i) {
          const int low = c > i ? c : i + 1, column = low < d ? low : d - 1;
          const A product = tile[start + column] * u[i];
          sum += column == c ? product : A(0);
          start += d - 2 - i;
        }
        if (c < d) down[c] = sum;
      }
      for (int i = first + warp_id(); i < last; i += kRffQuadraticWarps) {
        const int length = d - 1 - i;
        const A *from = tile + (head - begin + rff_pairs_before(d, i)), *with = u + i + 1;
        A dot = 0;
        int t = lane;
        for (; t - lane + kWarpSize <= length; t += kWarpSize) dot += from[t] * with[t];
        const int near = t < length ? t : length - 1;
        const A product = from[near] * with[near];
        dot += t < length ? product : A(0);
        dot = group_sum<kWarpSize>(dot);
        if (lane == 0) along[i] = dot;
      }
      __syncthreads();
    }
    for (int c = int(threadIdx.x); c < d; c += kRffQuadraticThreads) {
      const A value = one * grad[c] * u[c] + two * (along[c] + down[c]);
      static_cast<T*>(p.d_x)[row * d + c] = from_acc<T>(value);
    }
    __syncthreads();
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
