// Matrix products of 16-bit factors in shared memory on tensor cores, sums in float, by nvcc's mma.h. Before sm_80,
// which has none for bf16, and in the test harness every lane computes its numbers itself.
#pragma once

#include <type_traits>

#include "common/macros.h"
#include "common/numeric.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#endif

namespace samplex {

constexpr int kMmaSide = 16;  // of the squares that products are made of

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kTensorCores = true;
#else
constexpr bool kTensorCores = false;
#endif

// A warp's sums [16 Rows, 16 Columns].
template <typename T, int Rows, int Columns, bool OnTensorCores = kTensorCores>
struct MmaSums {
  // Of a square a lane has half a row.
  static constexpr int kOwn = kMmaSide / 2;
  float own[Rows][Columns][kOwn];

  static SX_DEVICE int row() { return int(threadIdx.x) % 32 / 2; }
  static SX_DEVICE int column() { return int(threadIdx.x) % 2 * kOwn; }

  SX_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[r][c][i] = 0.0f;
      }
    }
  }
  // += a [16 Rows, 16] times the transpose of b [16 Columns, 16], both in shared memory, rows `stride` apart, which is
  // a multiple of 8; squares begin at multiples of 32 bytes.
  SX_DEVICE void add(const T* a, const T* b, int stride) {
#pragma unroll 1
    for (int k = 0; k < kMmaSide; ++k) {
      float left[Rows];
#pragma unroll
      for (int r = 0; r < Rows; ++r) left[r] = to_acc(a[(r * kMmaSide + row()) * stride + k]);
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float right = to_acc(b[(c * kMmaSide + column() + i) * stride + k]);
#pragma unroll
          for (int r = 0; r < Rows; ++r) own[r][c][i] += left[r] * right;
        }
      }
    }
  }
  // The square at (r, c) into memory whose rows are `stride` apart, a multiple of 4. The warp must be synchronized
  // before anybody reads it.
  SX_DEVICE void store(int r, int c, float* to, int stride) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[row() * stride + column() + i] = own[r][c][i];
  }
};

#ifdef __CUDACC__
template <typename T, int Rows, int Columns>
struct MmaSums<T, Rows, Columns, true> {
  using Number = std::conditional_t<std::is_same_v<T, Half>, __half, __nv_bfloat16>;
  template <typename Use, typename... Order>
  using Square = nvcuda::wmma::fragment<Use, kMmaSide, kMmaSide, kMmaSide, Order...>;
  Square<nvcuda::wmma::accumulator, float> own[Rows][Columns];

  SX_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int c = 0; c < Columns; ++c) nvcuda::wmma::fill_fragment(own[r][c], 0.0f);
    }
  }
  SX_DEVICE void add(const T* a, const T* b, int stride) {
    Square<nvcuda::wmma::matrix_a, Number, nvcuda::wmma::row_major> left[Rows];
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      nvcuda::wmma::load_matrix_sync(left[r], reinterpret_cast<const Number*>(a + r * kMmaSide * stride), stride);
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      Square<nvcuda::wmma::matrix_b, Number, nvcuda::wmma::col_major> right;
      nvcuda::wmma::load_matrix_sync(right, reinterpret_cast<const Number*>(b + c * kMmaSide * stride), stride);
#pragma unroll
      for (int r = 0; r < Rows; ++r) nvcuda::wmma::mma_sync(own[r][c], left[r], right, own[r][c]);
    }
  }
  SX_DEVICE void store(int r, int c, float* to, int stride) const {
    nvcuda::wmma::store_matrix_sync(to, own[r][c], stride, nvcuda::wmma::mem_row_major);
  }
};
#endif

}  // namespace samplex
