// Small matrix products in registers: C [n, p] = A [n, k] times B [k, p], where B lies in panels
// (common/panel_layout.h).
//
// Numbers of A may be any two distances apart, so that A may be a transposed matrix. Every number of C is a sum over
// blocks of kBlockDepth terms, each in the order of the terms: its bits depend neither on how the rows and panels are
// shared out, nor on what else is computed. Measured on a core of Zen 4: 117 GFLOP/s with AVX-512, 109 with AVX2;
// MKL 85.
#pragma once

#include "common/panel_layout.h"
#include "common/vec.h"

namespace samplex {

inline namespace SX_ISA_NS {

struct PanelFactor {
  const float* numbers;  // A[i, t] is numbers[i * row + t * step]
  int64_t row, step;
};

#if defined(__AVX2__)

// Rows and vectors of C that are summed in registers at a time.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileVecs = 2;
#else
constexpr int kTileRows = 6, kTileVecs = 2;
#endif
constexpr int64_t kTileColumns = kTileVecs * Vec::kSize;
static_assert(kPanel % kTileColumns == 0 && kRowStep % kTileRows == 0);

// c [kRows, kTileColumns], rows `stride` apart, = (or, with `add`, +=) a times `depth` rows of a panel.
template <int kRows>
SX_ALWAYS_INLINE void panel_tile(const PanelFactor& a, const float* panel, int64_t depth, float* c, int64_t stride,
                                 int64_t columns, bool add) {
  Vec sums[kRows][kTileVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVecs; ++v) sums[i][v] = Vec::zero();
  }
  const float* at = a.numbers;
  for (int64_t t = 0; t < depth; ++t, panel += kPanel, at += a.step) {
    Vec b[kTileVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kTileVecs; ++v) b[v] = Vec::load(panel + v * Vec::kSize);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec x = Vec::all(at[i * a.row]);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVecs; ++v) sums[i][v] = fma(x, b[v], sums[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kTileVecs; ++v) {
      float* const to = c + i * stride + v * Vec::kSize;
      const int64_t rest = columns - v * Vec::kSize;
      if (rest >= Vec::kSize) {
        (add ? Vec::load(to) + sums[i][v] : sums[i][v]).store(to);
      } else if (rest > 0) {
        store_tail(add ? load_tail(to, int(rest)) + sums[i][v] : sums[i][v], to, int(rest));
      }
    }
  }
}

template <int kRows>
SX_NOINLINE void panel_rows(const PanelFactor& a, const float* panel, int64_t depth, float* c, int64_t stride,
                            int64_t columns, bool add) {
  if (a.step == 1)
    panel_tile<kRows>({a.numbers, a.row, 1}, panel, depth, c, stride, columns, add);
  else if (a.row == 1)
    panel_tile<kRows>({a.numbers, 1, a.step}, panel, depth, c, stride, columns, add);
  else
    panel_tile<kRows>(a, panel, depth, c, stride, columns, add);
}

// Fewer than kTileRows rows.
template <int kRows = kTileRows - 1>
inline void panel_rest(int64_t rows, const PanelFactor& a, const float* panel, int64_t depth, float* c, int64_t stride,
                       int64_t columns, bool add) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return panel_rows<kRows>(a, panel, depth, c, stride, columns, add);
    panel_rest<kRows - 1>(rows, a, panel, depth, c, stride, columns, add);
  }
}

// c [rows, columns], rows `stride` apart, = (or, with `add`, +=) a [rows, depth] times the panels of b.
inline void panel_product(const PanelFactor& a, int64_t rows, const float* b, int64_t depth, int64_t columns, float* c,
                          int64_t stride, bool add = false) {
  for (int64_t first = 0; first < depth; first += kBlockDepth) {
    const int64_t n = depth - first < kBlockDepth ? depth - first : kBlockDepth;
    const bool more = add || first > 0;
    for (int64_t column = 0; column < columns; column += kTileColumns) {
      const float* const panel = b + (column / kPanel * depth + first) * kPanel + column % kPanel;
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const PanelFactor part{a.numbers + i * a.row + first * a.step, a.row, a.step};
        float* const to = c + i * stride + column;
        if (rows - i >= kTileRows)
          panel_rows<kTileRows>(part, panel, n, to, stride, columns - column, more);
        else
          panel_rest(rows - i, part, panel, n, to, stride, columns - column, more);
      }
    }
  }
}

// Eight numbers as floats.
inline __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 eight(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256 eight(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Columns c .. c + 7 of eight rows become eight pieces of panel rows, kPanel apart.
template <typename T>
inline void pack_eight(const T* const* rows, int64_t c, float* to) {
  __m256 x[8], y[8];
  for (int j = 0; j < 8; ++j) x[j] = eight(rows[j] + c);
  for (int j = 0; j < 8; j += 2) {
    y[j] = _mm256_unpacklo_ps(x[j], x[j + 1]);
    y[j + 1] = _mm256_unpackhi_ps(x[j], x[j + 1]);
  }
  for (int j = 0; j < 8; j += 4) {
    x[j] = _mm256_shuffle_ps(y[j], y[j + 2], 0x44);
    x[j + 1] = _mm256_shuffle_ps(y[j], y[j + 2], 0xEE);
    x[j + 2] = _mm256_shuffle_ps(y[j + 1], y[j + 3], 0x44);
    x[j + 3] = _mm256_shuffle_ps(y[j + 1], y[j + 3], 0xEE);
  }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(to + j * kPanel, _mm256_permute2f128_ps(x[j], x[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * kPanel, _mm256_permute2f128_ps(x[j], x[j + 4], 0x31));
  }
}

#else

inline void panel_product(const PanelFactor& a, int64_t rows, const float* b, int64_t depth, int64_t columns, float* c,
                          int64_t stride, bool add = false) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    const float* const panel = b + column * depth;
    const int64_t width = columns - column < kPanel ? columns - column : kPanel;
    for (int64_t i = 0; i < rows; ++i) {
      float* const to = c + i * stride + column;
      for (int64_t j = 0; j < width && !add; ++j) to[j] = 0;
      for (int64_t first = 0; first < depth; first += kBlockDepth) {
        const int64_t end = depth - first < kBlockDepth ? depth : first + kBlockDepth;
        float sums[kPanel] = {};
        for (int64_t t = first; t < end; ++t) {
          const float x = a.numbers[i * a.row + t * a.step];
          for (int64_t j = 0; j < kPanel; ++j) sums[j] += x * panel[t * kPanel + j];
        }
        for (int64_t j = 0; j < width; ++j) to[j] += sums[j];
      }
    }
  }
}

#endif

// Rows [n, d] become columns of the panel `to`: `width` of them, zeros from n on.
template <typename T>
inline void pack_across(const T* const* rows, int64_t n, int64_t width, int64_t d, float* to) {
  int64_t j = 0;
#if defined(__AVX2__)
  for (; j + 8 <= n; j += 8) {
    int64_t c = 0;
    for (; c + 8 <= d; c += 8) pack_eight(rows + j, c, to + c * kPanel + j);
    for (; c < d; ++c) {
      for (int64_t i = j; i < j + 8; ++i) to[c * kPanel + i] = to_acc(rows[i][c]);
    }
  }
#endif
  for (int64_t c = 0; c < d; ++c) {
    for (int64_t i = j; i < width; ++i) to[c * kPanel + i] = i < n ? to_acc(rows[i][c]) : 0.0f;
  }
}

// `factor` * row [d], or zeros of a nullptr, becomes a row of each of d / kPanel panels, `distance` numbers apart.
template <typename T>
inline void pack_row(const T* row, int64_t d, float* to, int64_t distance, float factor) {
  for (int64_t first = 0; first < d; first += kPanel, to += distance) {
    const int64_t n = row == nullptr ? 0 : d - first < kPanel ? d - first : kPanel;
    if (n == kPanel) {
      for (int64_t c = 0; c < kPanel; ++c) to[c] = factor * to_acc(row[first + c]);
    } else {
      for (int64_t c = 0; c < kPanel; ++c) to[c] = c < n ? factor * to_acc(row[first + c]) : 0.0f;
    }
  }
}

// Tiles [begin, end) of kProductRows rows and one panel each.
inline void panel_product_tiles_of(const PanelProductParams& p, int64_t begin, int64_t end) {
  const int64_t panels = panels_of(p.columns);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t row = tile / panels * kProductRows, panel = tile % panels, column = panel * kPanel;
    const int64_t rows = p.rows - row < kProductRows ? p.rows - row : kProductRows;
    const int64_t columns = p.columns - column < kPanel ? p.columns - column : kPanel;
    panel_product({p.a + row * p.a_row, p.a_row, p.a_step}, rows, p.b + panel * p.depth * kPanel, p.depth, columns,
                  p.c + row * p.stride + column, p.stride, p.add);
  }
}

// Units [begin, end) of one panel and kBlockDepth of its rows each.
inline void pack_panels_of(const PackPanelsParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = (p.depth + kBlockDepth - 1) / kBlockDepth;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t panel = unit / blocks, first = unit % blocks * kBlockDepth, column = panel * kPanel;
    const int64_t depth = p.depth - first < kBlockDepth ? p.depth - first : kBlockDepth;
    const int64_t width = p.columns - column < kPanel ? p.columns - column : kPanel;
    const float* const from = p.b + first * p.b_row + column * p.b_column;
    float* const to = p.panels + (panel * p.depth + first) * kPanel;
    if (p.b_row == 1) {
      const float* columns[kPanel];
      for (int64_t j = 0; j < width; ++j) columns[j] = from + j * p.b_column;
      pack_across(columns, width, kPanel, depth, to);
    } else {
      for (int64_t t = 0; t < depth; ++t) {
        for (int64_t j = 0; j < kPanel; ++j) to[t * kPanel + j] = j < width ? from[t * p.b_row + j] : 0.0f;
      }
    }
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
