// The bodies of the forward and the backward, shared by the scalar and the SIMD translation units.
//
// Both are a product with a table in panels of 16 columns, packed so that the inner loop reads it in one stream. A tile
// of kRows rows by one panel is summed in registers over the whole inner dimension and leaves through the epilogue, so
// that the products themselves never reach memory. Rows are copied (and converted) into a buffer whose stride keeps
// them out of each other's cache sets. The order of sums in a row depends on its own numbers only.
#pragma once

#include <cstdlib>

#include "common/vec.h"
#include "features/rff/rff_math.h"
#include "features/rff/rff_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

// 64-byte aligned scratch of a call.
template <typename A>
struct RffBuffer {
  A* const data;
  explicit RffBuffer(int64_t size)
      : data(static_cast<A*>(std::aligned_alloc(64, (size_t(size) * sizeof(A) + 127) / 64 * 64))) {}
  ~RffBuffer() { std::free(data); }
  RffBuffer(const RffBuffer&) = delete;
  RffBuffer& operator=(const RffBuffer&) = delete;
};

template <typename A>
struct RffTile {
  static constexpr int kPanel = int(kRffPanel);
  static constexpr int kRows = 4;

  // to[m][j] = (add ? to[m][j] : 0) + sum_k a[m * stride + k] panel[k][j]
  template <int M>
  static void product(const A* a, int64_t stride, const A* panel, int64_t size, bool add, A* to, int64_t to_stride) {
    A sum[M][kPanel];
    for (int m = 0; m < M; ++m) {
      for (int j = 0; j < kPanel; ++j) sum[m][j] = add ? to[m * to_stride + j] : A(0);
    }
    for (int64_t k = 0; k < size; ++k) {
      for (int m = 0; m < M; ++m) {
        for (int j = 0; j < kPanel; ++j) sum[m][j] += a[m * stride + k] * panel[k * kPanel + j];
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int j = 0; j < kPanel; ++j) to[m * to_stride + j] = sum[m][j];
    }
  }

  static void run(const A* a, int64_t stride, int rows, const A* panel, int64_t size, bool add, A* to, int64_t at) {
    if (rows == 4) return product<4>(a, stride, panel, size, add, to, at);
    for (int m = 0; m < rows; ++m) product<1>(a + m * stride, stride, panel, size, add, to + m * at, at);
  }
};

#if defined(__AVX2__)

// The same in registers: 6 rows by 2 vectors with AVX2, 12 rows by 1 with AVX-512.
template <>
struct RffTile<float> {
  static constexpr int kPanel = int(kRffPanel);
  static constexpr int kVectors = kPanel / Vec::kSize;
  static constexpr int kRows = 12 / kVectors;

  template <int M>
  static void product(const float* a, int64_t stride, const float* panel, int64_t size, bool add, float* to,
                      int64_t to_stride) {
    Vec sum[M][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[m][v] = add ? Vec::load(to + m * to_stride + v * Vec::kSize) : Vec::zero();
      }
    }
    for (int64_t k = 0; k < size; ++k) {
      Vec column[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) column[v] = Vec::load(panel + k * kPanel + v * Vec::kSize);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Vec x = Vec::all(a[m * stride + k]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] = fma(x, column[v], sum[m][v]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[m][v].store(to + m * to_stride + v * Vec::kSize);
    }
  }

  static void run(const float* a, int64_t stride, int rows, const float* panel, int64_t size, bool add, float* to,
                  int64_t at) {
    for (; rows >= kRows; rows -= kRows, a += kRows * stride, to += kRows * at) {
      product<kRows>(a, stride, panel, size, add, to, at);
    }
    for (; rows >= 3; rows -= 3, a += 3 * stride, to += 3 * at) product<3>(a, stride, panel, size, add, to, at);
    if (rows == 2) product<2>(a, stride, panel, size, add, to, at);
    if (rows == 1) product<1>(a, stride, panel, size, add, to, at);
  }
};

#endif

// Rows that share one pass over the table: as many as leave room for it in the L2 cache.
inline int64_t rff_block_rows(int64_t dim) {
  const int64_t rows = 12288 / (dim + 1) / 12 * 12;
  return rows < 12 ? 12 : rows > 96 ? 96 : rows;
}

// packed[panel][c][j] = omega[16 panel + j][c], zeros behind the last frequency.
template <typename A>
inline void rff_pack_panels(const RffParams& p, void* packed, int64_t first, int64_t last) {
  const int64_t d = p.dim;
  for (int64_t panel = first; panel < last; ++panel) {
    A* to = static_cast<A*>(packed) + panel * kRffPanel * d;
    const A* from = static_cast<const A*>(p.omega) + panel * kRffPanel * d;
    const int64_t left = p.num_features - panel * kRffPanel, n = left < kRffPanel ? left : kRffPanel;
    int64_t c = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      for (; c + 8 <= d && n == kRffPanel; c += 8) {
        for (int64_t half = 0; half < kRffPanel; half += 8) {
          __m256 r[8], s[8];
          for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + (half + i) * d + c);
          for (int i = 0; i < 8; i += 2) {
            s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
          }
          for (int i = 0; i < 8; i += 4) {
            r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xEE);
            r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xEE);
          }
          for (int i = 0; i < 4; ++i) {
            _mm256_storeu_ps(to + (c + i) * kRffPanel + half, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            _mm256_storeu_ps(to + (c + 4 + i) * kRffPanel + half, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
          }
        }
      }
    }
#endif
    for (; c < d; ++c) {
      for (int64_t j = 0; j < kRffPanel; ++j) to[c * kRffPanel + j] = j < n ? from[j * d + c] : A(0);
    }
  }
}

// ------------------------------------------------------------------------------------------------ forward
template <typename A>
inline void rff_epilogue_scalar(const RffParams& p, const A* dots, A norm, A scale, int64_t n, A* to) {
  for (int64_t j = 0; j < n; ++j) {
    if (p.kind == RffKind::kPositive) {
      to[j] = scale * exp_acc(dots[j] - norm);
    } else {
      A sin, cos;
      sincos_acc(dots[j], sin, cos);
      to[j] = scale * cos;
      to[p.num_features + j] = scale * sin;
    }
  }
}

// One row of a tile: dots [16] to features at `to`, of which n are wanted. `norm` is decay |u|^2 - shift.
template <typename A>
inline void rff_epilogue(const RffParams& p, const A* dots, A norm, A scale, int64_t n, A* to) {
  rff_epilogue_scalar(p, dots, norm, scale, n, to);
}

#if defined(__AVX2__)
inline void rff_put(const Vec* values, bool stream, int64_t n, float* to) {
  constexpr int kVectors = int(kRffPanel) / Vec::kSize;
  if (stream) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) values[v].stream(to + v * Vec::kSize);
  } else if (n == kRffPanel) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) values[v].store(to + v * Vec::kSize);
  } else {
    float padded[kRffPanel];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) values[v].store(padded + v * Vec::kSize);
    for (int64_t j = 0; j < n; ++j) to[j] = padded[j];
  }
}

template <>
inline void rff_epilogue<float>(const RffParams& p, const float* dots, float norm, float scale, int64_t n, float* to) {
  constexpr int kVectors = int(kRffPanel) / Vec::kSize;
  const Vec factor = Vec::all(scale);
  Vec first[kVectors];
  if (p.kind == RffKind::kPositive) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) first[v] = factor * vexp(Vec::load(dots + v * Vec::kSize) - Vec::all(norm));
    return rff_put(first, p.stream, n, to);
  }
  bool far = false;
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) far |= any_above(Vec::load(dots + v * Vec::kSize), kSinCosMost);
  if (far) [[unlikely]]
    return rff_epilogue_scalar(p, dots, norm, scale, n, to);
  Vec second[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    Vec sin, cos;
    vsincos(Vec::load(dots + v * Vec::kSize), sin, cos);
    first[v] = cos * factor;
    second[v] = sin * factor;
  }
  rff_put(first, p.stream, n, to);
  rff_put(second, p.stream, n, to + p.num_features);
}
#endif

// |u|^2 in 16 interleaved sums: the same order at every vector width.
template <typename A>
inline A rff_square_norm(const A* u, int64_t d) {
  A part[16] = {};
  int64_t c = 0;
  for (; c + 16 <= d; c += 16) {
    for (int64_t i = 0; i < 16; ++i) part[i] += u[c + i] * u[c + i];
  }
  for (int64_t i = 0; c + i < d; ++i) part[i] += u[c + i] * u[c + i];
  A sum = 0;
  for (int64_t i = 0; i < 16; ++i) sum += part[i];
  return sum;
}

template <typename T>
inline void rff_product_range(const RffParams& p, const void* packed, const RffRange& range) {
  using A = acc_t<T>;
  using Tile = RffTile<A>;
  const int64_t d = p.dim, width = rff_num_numbers(p.kind, d, p.num_features);
  const int64_t most = rff_block_rows(d), stride = d + 16;
  const int64_t block = range.end - range.begin < most ? range.end - range.begin : most;
  const RffBuffer<A> rows(block * stride), norms(block);
  alignas(64) A dots[Tile::kRows * kRffPanel];
  const A scale = A(1) / sqrt_acc(A(p.num_features));
  for (int64_t begin = range.begin; begin < range.end; begin += block) {
    const int64_t count = range.end - begin < block ? range.end - begin : block;
    for (int64_t b = 0; b < count; ++b) {
      const T* from = static_cast<const T*>(p.x) + (begin + b) * d;
      A* to = rows.data + b * stride;
      for (int64_t c = 0; c < d; ++c) to[c] = to_acc(from[c]);
      norms.data[b] = p.kind == RffKind::kPositive ? A(p.decay) * rff_square_norm(to, d) - A(p.shift) : A(0);
    }
    for (int64_t panel = range.first; panel < range.last; ++panel) {
      const A* table = static_cast<const A*>(packed) + panel * kRffPanel * d;
      const int64_t left = p.num_features - panel * kRffPanel, n = left < kRffPanel ? left : kRffPanel;
      for (int64_t b = 0; b < count; b += Tile::kRows) {
        const int tile_rows = int(count - b < Tile::kRows ? count - b : Tile::kRows);
        Tile::run(rows.data + b * stride, stride, tile_rows, table, d, false, dots, kRffPanel);
        A* to = static_cast<A*>(p.features) + (begin + b) * width + panel * kRffPanel;
        for (int m = 0; m < tile_rows; ++m) {
          rff_epilogue<A>(p, dots + m * kRffPanel, norms.data[b + m], scale, n, to + m * width);
        }
      }
    }
  }
#if defined(__AVX2__)
  if (p.stream) _mm_sfence();  // streamed rows are visible before the thread says that it is done
#endif
}

template <typename T>
inline void rff_quadratic_range(const RffParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t d = p.dim, width = rff_num_numbers(p.kind, d, 0);
  const A one = sqrt_acc(A(p.alpha)), two = sqrt_acc(A(2) * A(p.alpha));
  const RffBuffer<A> row(d);
  A* u = row.data;
  for (int64_t b = begin; b < end; ++b) {
    const T* from = static_cast<const T*>(p.x) + b * d;
    A* to = static_cast<A*>(p.features) + b * width;
    for (int64_t c = 0; c < d; ++c) u[c] = to_acc(from[c]);
    for (int64_t c = 0; c < d; ++c) to[c] = one * u[c] * u[c];
    to += d;
    for (int64_t i = 0; i < d; ++i) {
      const A factor = two * u[i];
      for (int64_t j = i + 1; j < d; ++j) to[j - i - 1] = factor * u[j];
      to += d - 1 - i;
    }
    to[0] = A(1);
  }
}

template <typename T>
inline void rff_range(const RffParams& p, const void* packed, const RffRange& range) {
  if (p.kind == RffKind::kQuadratic) return rff_quadratic_range<T>(p, range.begin, range.end);
  rff_product_range<T>(p, packed, range);
}

// ------------------------------------------------------------------------------------------------ backward
// packed[panel][k][j] = omega[k][16 panel + j], zeros behind column d.
template <typename A>
inline void rff_bwd_pack(const RffBwdParams& p, A* packed, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t left = p.dim - panel * kRffPanel, n = left < kRffPanel ? left : kRffPanel;
    for (int64_t k = 0; k < p.num_features; ++k) {
      const A* from = static_cast<const A*>(p.omega) + k * p.dim + panel * kRffPanel;
      A* to = packed + (panel * p.num_features + k) * kRffPanel;
      for (int64_t j = 0; j < kRffPanel; ++j) to[j] = j < n ? from[j] : A(0);
    }
  }
}

// Coefficients [first, first + n) of row b, in `to` and, where it is asked for, in coefs. Returns their sum where the
// norm of x has a part in the exponent.
template <typename A>
inline A rff_bwd_coefs(const RffBwdParams& p, int64_t b, int64_t first, int64_t n, A* to) {
  const int64_t D = p.num_features, width = rff_num_numbers(p.kind, p.dim, D);
  const A* grad = static_cast<const A*>(p.grad) + b * width + first;
  const A* feature = static_cast<const A*>(p.features) + b * width + first;
  A part[16] = {}, sum = 0;
  if (p.kind == RffKind::kFourier) {
    for (int64_t k = 0; k < n; ++k) to[k] = grad[D + k] * feature[k] - grad[k] * feature[D + k];
  } else {
    for (int64_t k = 0; k < n; ++k) to[k] = grad[k] * feature[k];
    int64_t k = 0;
    for (; k + 16 <= n; k += 16) {
      for (int64_t i = 0; i < 16; ++i) part[i] += to[k + i];
    }
    for (int64_t i = 0; k + i < n; ++i) part[i] += to[k + i];
    for (int64_t i = 0; i < 16; ++i) sum += part[i];
  }
  if (p.coefs != nullptr) {
    A* copy = static_cast<A*>(p.coefs) + b * D + first;
    for (int64_t k = 0; k < n; ++k) copy[k] = to[k];
  }
  return sum;
}

template <typename T>
inline void rff_bwd_product_range(const RffBwdParams& p, const void* packed, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  using Tile = RffTile<A>;
  constexpr int64_t kBlock = 48, kInner = 256, kStride = kInner + 16;  // a panel of kInner rows stays in the L1 cache
  const int64_t D = p.num_features, d = p.dim, panels = rff_panels(d), wide = panels * kRffPanel + 16;
  const int64_t block = end - begin < kBlock ? end - begin : kBlock;
  const RffBuffer<A> coefs(block * kStride), sums(block), grads(block * wide);
  for (; begin < end; begin += block) {
    const int64_t count = end - begin < block ? end - begin : block;
    for (int64_t b = 0; b < count; ++b) sums.data[b] = 0;
    for (int64_t first = 0; first < D; first += kInner) {
      const int64_t n = D - first < kInner ? D - first : kInner;
      for (int64_t b = 0; b < count; ++b) {
        sums.data[b] += rff_bwd_coefs<A>(p, begin + b, first, n, coefs.data + b * kStride);
      }
      for (int64_t panel = 0; panel < panels && p.d_x != nullptr; ++panel) {
        const A* table = static_cast<const A*>(packed) + (panel * D + first) * kRffPanel;
        for (int64_t b = 0; b < count; b += Tile::kRows) {
          const int tile_rows = int(count - b < Tile::kRows ? count - b : Tile::kRows);
          Tile::run(coefs.data + b * kStride, kStride, tile_rows, table, n, first > 0,
                    grads.data + b * wide + panel * kRffPanel, wide);
        }
      }
    }
    for (int64_t b = 0; b < count && p.d_x != nullptr; ++b) {
      const T* x = static_cast<const T*>(p.x) + (begin + b) * d;
      T* to = static_cast<T*>(p.d_x) + (begin + b) * d;
      const A pull = p.kind == RffKind::kPositive ? A(2 * p.decay) * sums.data[b] : A(0);
      const A* grad = grads.data + b * wide;
      if (p.kind == RffKind::kPositive) {
        for (int64_t c = 0; c < d; ++c) to[c] = from_acc<T>(grad[c] - pull * to_acc(x[c]));
      } else {
        for (int64_t c = 0; c < d; ++c) to[c] = from_acc<T>(grad[c]);
      }
    }
  }
}

template <typename T>
inline void rff_bwd_quadratic_range(const RffBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t d = p.dim, width = rff_num_numbers(p.kind, d, 0);
  const A one = A(2) * sqrt_acc(A(p.alpha)), two = sqrt_acc(A(2) * A(p.alpha));
  const RffBuffer<A> row(d), result(d);
  A *u = row.data, *sum = result.data;
  for (int64_t b = begin; b < end; ++b) {
    const T* from = static_cast<const T*>(p.x) + b * d;
    const A* grad = static_cast<const A*>(p.grad) + b * width;
    for (int64_t c = 0; c < d; ++c) u[c] = to_acc(from[c]);
    for (int64_t c = 0; c < d; ++c) sum[c] = one * grad[c] * u[c];
    grad += d;
    for (int64_t i = 0; i < d; ++i) {
      const A factor = two * u[i];
      const int64_t n = d - 1 - i;
      A part[16] = {}, dot = 0;
      int64_t j = 0;
      for (; j + 16 <= n; j += 16) {
        for (int64_t k = 0; k < 16; ++k) part[k] += grad[j + k] * u[i + 1 + j + k];
      }
      for (int64_t k = 0; j + k < n; ++k) part[k] += grad[j + k] * u[i + 1 + j + k];
      for (int64_t k = 0; k < 16; ++k) dot += part[k];
      for (j = 0; j < n; ++j) sum[i + 1 + j] += factor * grad[j];
      sum[i] += two * dot;
      grad += n;
    }
    T* to = static_cast<T*>(p.d_x) + b * d;
    for (int64_t c = 0; c < d; ++c) to[c] = from_acc<T>(sum[c]);
  }
}

template <typename T>
inline void rff_bwd_range(const RffBwdParams& p, const void* packed, int64_t begin, int64_t end) {
  if (p.kind == RffKind::kQuadratic) return rff_bwd_quadratic_range<T>(p, begin, end);
  rff_bwd_product_range<T>(p, packed, begin, end);
}

// body(TypeTag<T>{}) for every storage type but double, which stays with the scalar unit.
template <typename F>
inline void rff_dispatch_float(DType dtype, const F& body) {
  if (dtype == DType::kFloat16) return body(TypeTag<Half>{});
  if (dtype == DType::kBFloat16) return body(TypeTag<BFloat16>{});
  body(TypeTag<float>{});
}

}  // namespace SX_ISA_NS
}  // namespace samplex
