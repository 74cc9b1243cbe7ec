// Arithmetic of the tree fit: blocks of examples in fp64, the sums over them that a Newton step needs, Cholesky.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/numeric.h"

namespace samplex::tree_fit {

constexpr int64_t kBlock = 64;  // examples converted to fp64 at a time: 8 KB for k = 16

using Pair = double __attribute__((vector_size(16)));  // baseline SSE2 and NEON

inline Pair load(const double* p) {
  Pair v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(double* p, Pair v) { std::memcpy(p, &v, sizeof(v)); }

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Offsets in a partial sum of the label-free part of the objective; kp = k rounded up to 4.
struct Layout {
  explicit Layout(int64_t k)
      : k(k), kp(round_up(k, 4)), softplus(0), p(1), s(2), px(4), sx(4 + kp), h(4 + 2 * kp), size(h + kp * kp) {}
  int64_t k, kp;
  int64_t softplus, p, s;  // sum of softplus, of p, of p (1 - p)
  int64_t px, sx, h;       // sum of p x, of p (1 - p) x, of p (1 - p) x x^T (tiles of the lower triangle)
  int64_t size;
};

// h[i, j] += sum over rows of a[row, i] b[row, j], tiles of the lower triangle only. a, b [rows, kp].
inline void add_gram(const double* a, const double* b, int64_t rows, int64_t kp, double* h) {
  for (int64_t i = 0; i < kp; i += 4) {
    for (int64_t j = 0; j <= i; j += 4) {
      Pair sum[4][2] = {};
      for (int64_t row = 0; row < rows; ++row) {
        const double* left = a + row * kp + i;
        const Pair low = load(b + row * kp + j), high = load(b + row * kp + j + 2);
        for (int r = 0; r < 4; ++r) {
          const Pair factor = {left[r], left[r]};
          sum[r][0] += factor * low;
          sum[r][1] += factor * high;
        }
      }
      for (int r = 0; r < 4; ++r) {
        for (int c = 0; c < 4; ++c) h[(i + r) * kp + j + c] += sum[r][c / 2][c % 2];
      }
    }
  }
}

inline void to_double(const float* rows, int64_t count, int64_t k, int64_t kp, double* out) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < k; ++i) out[row * kp + i] = double(rows[row * k + i]);
    for (int64_t i = k; i < kp; ++i) out[row * kp + i] = 0.0;
  }
}

inline double dot(const double* a, const double* b, int64_t kp) {
  Pair low = {}, high = {};
  for (int64_t i = 0; i < kp; i += 4) {
    low += load(a + i) * load(b + i);
    high += load(a + i + 2) * load(b + i + 2);
  }
  low += high;
  return low[0] + low[1];
}

// Work space of one thread.
struct Scratch {
  explicit Scratch(const Layout& layout)
      : block(kBlock * layout.kp), scaled(kBlock * layout.kp), partial(layout.size), score(kBlock) {}
  std::vector<double> block, scaled, partial, score;
};

// Adds the label-free part over `count` rows to `out` (Layout).
inline void add_rows(const float* rows, int64_t count, const Layout& at, const double* w, double b, Scratch& scratch,
                     double* out) {
  const int64_t k = at.k, kp = at.kp;
  double *x = scratch.block.data(), *sx = scratch.scaled.data(), *z = scratch.score.data();
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    to_double(rows + begin * k, n, k, kp, x);
    double positive = 0.0, product = 1.0;
    for (int64_t row = 0; row < n; ++row) {
      const double score = dot(x + row * kp, w, kp) + b;
      z[row] = score;
      positive += score > 0.0 ? score : 0.0;
    }
    double p[kBlock], s[kBlock];
    for (int64_t row = 0; row < n; ++row) {
      const double e = exact_exp(-std::min(std::fabs(z[row]), 700.0));
      const double inverse = 1.0 / (1.0 + e);
      p[row] = z[row] >= 0.0 ? inverse : e * inverse;
      s[row] = e * inverse * inverse;
      product *= 1.0 + e;  // 64 factors of at most 2: one logarithm serves a block
    }
    double sum_p = 0.0, sum_s = 0.0;
    for (int64_t row = 0; row < n; ++row) {
      sum_p += p[row];
      sum_s += s[row];
    }
    for (int64_t i = 0; i < kp; i += 4) {
      Pair px_low = {}, px_high = {}, sx_low = {}, sx_high = {};
      for (int64_t row = 0; row < n; ++row) {
        const Pair low = load(x + row * kp + i), high = load(x + row * kp + i + 2);
        const Pair weight = {p[row], p[row]}, curve = {s[row], s[row]};
        const Pair curve_low = curve * low, curve_high = curve * high;
        px_low += weight * low;
        px_high += weight * high;
        sx_low += curve_low;
        sx_high += curve_high;
        store(sx + row * kp + i, curve_low);
        store(sx + row * kp + i + 2, curve_high);
      }
      for (int c = 0; c < 2; ++c) {
        out[at.px + i + c] += px_low[c];
        out[at.px + i + 2 + c] += px_high[c];
        out[at.sx + i + c] += sx_low[c];
        out[at.sx + i + 2 + c] += sx_high[c];
      }
    }
    out[at.softplus] += positive + exact_log(product);
    out[at.p] += sum_p;
    out[at.s] += sum_s;
    add_gram(sx, x, n, kp, out + at.h);
  }
}

// Cholesky of a [d, d] (lower triangle), then a solution of a x = x. False where a is not positive definite.
inline bool solve(double* a, double* x, int64_t d) {
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = a[i * d + j];
      for (int64_t c = 0; c < j; ++c) sum -= a[i * d + c] * a[j * d + c];
      if (i == j) {
        if (!(sum > 0.0)) return false;
        a[i * d + i] = std::sqrt(sum);
      } else {
        a[i * d + j] = sum / a[j * d + j];
      }
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t c = 0; c < i; ++c) x[i] -= a[i * d + c] * x[c];
    x[i] /= a[i * d + i];
  }
  for (int64_t i = d - 1; i >= 0; --i) {
    for (int64_t c = i + 1; c < d; ++c) x[i] -= a[c * d + i] * x[c];
    x[i] /= a[i * d + i];
  }
  return true;
}

}  // namespace samplex::tree_fit
