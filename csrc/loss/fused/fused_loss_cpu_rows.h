// What fused losses share on a CPU: the body of the scalar and the SIMD translation units.
#pragma once

#include <cmath>

#include "common/panels.h"
#include "loss/fused/fused_loss_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// ------------------------------------------------------------------------------------------------ class rows of draws
constexpr int64_t kRowsAhead = 16;  // rows under way from memory

template <typename T>
SX_ALWAYS_INLINE void prefetch_draw(const GatherRowsParams& p, int64_t i) {
  if (i >= p.n) return;
  const char* row = reinterpret_cast<const char*>(static_cast<const T*>(p.weight) + p.ids[i] * p.dim);
  for (int64_t at = 0; at < p.dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(row + at, 0, 3);
}

// Groups [begin, end) of kGatherDraws draws.
template <typename T>
inline void gather_rows_of(const GatherRowsParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t first = begin * cpu::kGatherDraws, d = p.dim;
  const int64_t last = end * cpu::kGatherDraws < p.n ? end * cpu::kGatherDraws : p.n;
  for (int64_t i = first; i < first + kRowsAhead; ++i) prefetch_draw<T>(p, i);
  const T* rows[cpu::kGatherDraws];
  for (int64_t i = first; i < last; i += cpu::kGatherDraws) {
    const int64_t n = last - i < cpu::kGatherDraws ? last - i : cpu::kGatherDraws;
    for (int64_t j = 0; j < n; ++j) {
      prefetch_draw<T>(p, i + kRowsAhead + j);
      rows[j] = static_cast<const T*>(p.weight) + p.ids[i + j] * d;
    }
    if (p.rows != nullptr) {
      for (int64_t j = 0; j < n; ++j) {
        A* const to = static_cast<A*>(p.rows) + (i + j) * d;
        for (int64_t c = 0; c < d; ++c) to[c] = to_acc(rows[j][c]);
      }
    }
    if constexpr (sizeof(A) == 4) {
      if (p.across != nullptr)
        pack_across(rows, n, cpu::kGatherDraws, d, p.across + i / kPanel * kPanel * d + i % kPanel);
      if (p.along != nullptr) {
        for (int64_t j = 0; j < n; ++j) pack_row(rows[j], d, p.along + (i + j) * kPanel, p.n * kPanel, 1.0f);
      }
    }
  }
  if constexpr (sizeof(A) == 4) {
    // What is left of the last panel.
    if (p.across == nullptr || last < p.n) return;
    const T* none = nullptr;
    for (int64_t i = (p.n + cpu::kGatherDraws - 1) / cpu::kGatherDraws * cpu::kGatherDraws; i % kPanel != 0;
         i += cpu::kGatherDraws)
      pack_across(&none, 0, cpu::kGatherDraws, d, p.across + i / kPanel * kPanel * d + i % kPanel);
  }
}

// ------------------------------------------------------------------------------------------------ products
// h . w of the draws, for batch rows [begin, end)
inline void draw_dots(const DrawProducts& x, int64_t begin, int64_t end) {
  if (x.across == nullptr) return;
  panel_product({x.hidden + begin * x.dim, x.dim, 1}, end - begin, x.across, x.dim, x.draws,
                x.dots + begin * x.dots_stride, x.dots_stride);
}

// Coefficients times class rows of the draws, for batch rows [begin, end)
inline void draw_sums(const DrawProducts& x, int64_t begin, int64_t end) {
  if (x.along == nullptr) return;
  panel_product({x.coef_loss + begin * x.coef_stride, x.coef_stride, 1}, end - begin, x.along, x.draws, x.dim,
                x.draws_loss + begin * x.dim, x.dim);
  if (x.draws_lse == nullptr) return;
  panel_product({x.coef_lse + begin * x.coef_stride, x.coef_stride, 1}, end - begin, x.along, x.draws, x.dim,
                x.draws_lse + begin * x.dim, x.dim);
}

// ------------------------------------------------------------------------------------------------ backward
// out[k] = upstream gradients times the kept parts, k < n from `at` on
template <typename T, typename A>
inline void combine(const LossUpstream<A>& up, const void* loss_part, const void* lse_part, int64_t at, int64_t n,
                    T* out) {
  const A* x = static_cast<const A*>(loss_part) + at;
  const A g = up.of_loss;
  if (g == 0 || up.of_lse != 0) {
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(up.combine(loss_part, lse_part, at + k));
  } else {  // nearly always: no branch inside the loop
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(g * x[k]);
  }
}

// The gradient of h in row b, with what shared draws add to it.
template <typename T, typename A>
inline void combine_hidden(const LossUpstream<A>& up, const LossBwdParams& p, int64_t b, T* __restrict out) {
  const int64_t at = b * p.dim;
  const A g = up.of_loss;
  if (g == 0 || up.of_lse != 0) {
    for (int64_t c = 0; c < p.dim; ++c) out[c] = from_acc<T>(up.combine_hidden(p, at + c));
  } else {  // nearly always: no branch inside the loop
    const A *own = static_cast<const A*>(p.d_loss) + at, *draws = static_cast<const A*>(p.draws_loss) + at;
    for (int64_t c = 0; c < p.dim; ++c) out[c] = from_acc<T>(g * (own[c] + draws[c]));
  }
}

// Whether row b may put an inf or nan into the gradient of a class row.
template <typename T, typename A>
inline bool row_overflows(const LossBwdParams& p, const LossUpstream<A>& of_rows, int64_t b) {
  const int64_t entries = p.num_targets + p.num_samples;
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  A largest = 0, widest = 0;
  for (int64_t k = 0; k < entries; ++k)
    largest = max_nan(largest, std::fabs(of_rows.combine(p.coef_loss, p.coef_lse, b * p.coefs.stride + k)));
  for (int64_t c = 0; c < p.dim; ++c) widest = max_nan(widest, std::fabs(A(to_acc(hidden[c]))));
  return may_overflow(p, largest, widest);
}

template <typename T>
inline void loss_bwd_rows_of(const LossBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t P = p.num_targets, m = p.num_samples;
  for (int64_t b = begin; b < end; ++b) {
    const LossUpstream<A> up(p, b), of_rows = up.unscaled(p);
    if (p.coef_target != nullptr) {
      combine(of_rows, p.coef_loss, p.coef_lse, b * p.coefs.stride, P, static_cast<A*>(p.coef_target) + b * P);
    }
    if (p.coef_draw != nullptr) {
      combine(of_rows, p.coef_loss, p.coef_lse, b * p.coefs.stride + P, m, static_cast<A*>(p.coef_draw) + b * m);
    }
    const bool none = up.none(p, b);
    if (p.d_hidden != nullptr) {
      T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
      if (none)
        for (int64_t c = 0; c < p.dim; ++c) d_hidden[c] = from_acc<T>(A(0));
      else if (p.draws_loss != nullptr)
        combine_hidden(up, p, b, d_hidden);
      else
        combine(up, p.d_loss, p.d_lse, b * p.dim, p.dim, d_hidden);
    }
    if (p.found_inf != nullptr && row_overflows<T>(p, of_rows, b)) {
      const float one = 1.0f;
      __atomic_store(p.found_inf, &one, __ATOMIC_RELAXED);  // by any thread, always the same number
    }
    if (p.clean_hidden == nullptr) continue;
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    A* clean = static_cast<A*>(p.clean_hidden) + b * (p.clean_panels ? kPanel : p.dim);
    const A factor = A(p.hidden_factor);
    if constexpr (sizeof(A) == 4) {
      if (p.clean_panels) {
        pack_row(none ? nullptr : hidden, p.dim, clean, p.batch * kPanel, factor);
        continue;
      }
    }
    if (none)
      for (int64_t c = 0; c < p.dim; ++c) clean[c] = 0;
    else
      for (int64_t c = 0; c < p.dim; ++c) clean[c] = factor * A(to_acc(hidden[c]));
  }
}

// No dispatch_dtype: its error message is standard library code, which must not be compiled for one ISA. Double stays
// with the scalar unit.
template <typename F>
inline void dispatch_float(DType dtype, const F& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(TypeTag<Half>{});
    case DType::kBFloat16:
      return body(TypeTag<BFloat16>{});
    default:
      return body(TypeTag<float>{});
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
