// CPU launchers of what fused losses share: the sum over the batch, and the backward.
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

template <typename T>
void backward_rows(const LossBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t P = p.num_targets, m = p.num_samples, entries = P + m;
  for (int64_t b = begin; b < end; ++b) {
    const LossUpstream<A> up(p, b);
    combine(up, p.coef_loss, p.coef_lse, b * entries, P, static_cast<A*>(p.coef_target) + b * P);
    if (p.coef_draw != nullptr) {
      combine(up, p.coef_loss, p.coef_lse, b * entries + P, m, static_cast<A*>(p.coef_draw) + b * m);
    }
    T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
    const bool none = up.none(p, b);
    if (none)
      for (int64_t c = 0; c < p.dim; ++c) d_hidden[c] = from_acc<T>(A(0));
    else
      combine(up, p.d_loss, p.d_lse, b * p.dim, p.dim, d_hidden);
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

}  // namespace

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
