// CPU launchers of what fused losses share: the sum over the batch, and the backward.
#include <algorithm>
#include <cmath>

#include "common/parallel.h"
#include "loss/fused/fused_loss_math.h"

namespace samplex::cpu {
namespace {

template <typename A>
void mean_of(const LossMeanParams& p) {
  double loss = 0, denom = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    loss += static_cast<const A*>(p.row_loss)[b];
    denom += static_cast<const A*>(p.denom)[b];
  }
  const A factor = p.mean ? mean_factor(A(denom)) : A(1);
  *static_cast<A*>(p.loss) = A(loss * factor);
  *static_cast<A*>(p.factor) = factor;
}

// out[k] = upstream gradients times the kept parts, k < n from `at` on
template <typename T, typename A>
void combine(const LossUpstream<A>& up, const void* loss_part, const void* lse_part, int64_t at, int64_t n, T* out) {
  const A* x = static_cast<const A*>(loss_part) + at;
  const A g = up.of_loss;
  if (g == 0 || up.of_lse != 0) {
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(up.combine(loss_part, lse_part, at + k));
  } else {  // nearly always: no branch inside the loop
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(g * x[k]);
  }
}

// Whether row b may put an inf or nan into the gradient of a class row.
template <typename T, typename A>
bool row_overflows(const LossBwdParams& p, const LossUpstream<A>& of_rows, int64_t b) {
  const int64_t entries = p.num_targets + p.num_samples;
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  A largest = 0, widest = 0;
  for (int64_t k = 0; k < entries; ++k)
    largest = max_nan(largest, std::fabs(of_rows.combine(p.coef_loss, p.coef_lse, b * p.coefs.stride + k)));
  for (int64_t c = 0; c < p.dim; ++c) widest = max_nan(widest, std::fabs(A(to_acc(hidden[c]))));
  return may_overflow(p, largest, widest);
}

template <typename T>
void backward_rows(const LossBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t P = p.num_targets, m = p.num_samples;
  for (int64_t b = begin; b < end; ++b) {
    const LossUpstream<A> up(p, b), of_rows = up.unscaled(p);
    combine(of_rows, p.coef_loss, p.coef_lse, b * p.coefs.stride, P, static_cast<A*>(p.coef_target) + b * P);
    if (p.coef_draw != nullptr) {
      combine(of_rows, p.coef_loss, p.coef_lse, b * p.coefs.stride + P, m, static_cast<A*>(p.coef_draw) + b * m);
    }
    T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
    const bool none = up.none(p, b);
    if (none)
      for (int64_t c = 0; c < p.dim; ++c) d_hidden[c] = from_acc<T>(A(0));
    else if (p.draws_loss != nullptr)
      for (int64_t c = 0; c < p.dim; ++c) d_hidden[c] = from_acc<T>(up.combine_hidden(p, b * p.dim + c));
    else
      combine(up, p.d_loss, p.d_lse, b * p.dim, p.dim, d_hidden);
    if (p.found_inf != nullptr && row_overflows<T>(p, of_rows, b)) {
      const float one = 1.0f;
      __atomic_store(p.found_inf, &one, __ATOMIC_RELAXED);  // by any thread, always the same number
    }
    if (p.clean_hidden == nullptr) continue;
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    A* clean = static_cast<A*>(p.clean_hidden) + b * p.dim;
    const A factor = A(p.hidden_factor);
    if (none)
      for (int64_t c = 0; c < p.dim; ++c) clean[c] = 0;
    else
      for (int64_t c = 0; c < p.dim; ++c) clean[c] = factor * A(to_acc(hidden[c]));
  }
}

template <typename T>
void gather(const T* weight, const int64_t* ids, int64_t begin, int64_t end, int64_t d, acc_t<T>* rows) {
  constexpr int64_t kAhead = 8;  // rows under way from memory
  const auto fetch = [&](int64_t i) {
    const char* row = reinterpret_cast<const char*>(weight + ids[i] * d);
    for (int64_t at = 0; at < d * int64_t(sizeof(T)); at += 64) __builtin_prefetch(row + at, 0, 3);
  };
  for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) fetch(i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) fetch(i + kAhead);
    const T* from = weight + ids[i] * d;
    acc_t<T>* to = rows + i * d;
    for (int64_t c = 0; c < d; ++c) to[c] = to_acc(from[c]);
  }
}

template <typename A>
void sum_columns(const A* x, int64_t rows, int64_t begin, int64_t end, int64_t stride, A factor, A* sums) {
  for (int64_t j = begin; j < end; ++j) sums[j] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = begin; j < end; ++j) sums[j] += x[i * stride + j];
  }
  for (int64_t j = begin; j < end; ++j) sums[j] *= factor;
}

}  // namespace

void launch_gather_rows(const GatherRowsParams& p) {
  parallel_for(p.n, 1 + (1 << 14) / (p.dim + 1), [&](int64_t begin, int64_t end) {
    dispatch_dtype("gather_rows", p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      gather(static_cast<const T*>(p.weight), p.ids, begin, end, p.dim, static_cast<acc_t<T>*>(p.rows));
    });
  });
}

void column_sums(bool double_acc, const void* x, int64_t rows, int64_t columns, int64_t stride, double factor,
                 void* sums) {
  parallel_for(columns, 1 + (1 << 16) / (rows + 1), [&](int64_t begin, int64_t end) {
    if (double_acc)
      sum_columns(static_cast<const double*>(x), rows, begin, end, stride, factor, static_cast<double*>(sums));
    else
      sum_columns(static_cast<const float*>(x), rows, begin, end, stride, float(factor), static_cast<float*>(sums));
  });
}

void launch_loss_mean(const LossMeanParams& params) {
  if (params.double_acc)
    mean_of<double>(params);
  else
    mean_of<float>(params);
}

void launch_loss_bwd(const LossBwdParams& params) {
  const int64_t work = params.num_targets + params.num_samples + params.dim;
  parallel_for(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
    dispatch_dtype("fused loss backward", params.dtype,
                   [&](auto tag) { backward_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

}  // namespace samplex::cpu
