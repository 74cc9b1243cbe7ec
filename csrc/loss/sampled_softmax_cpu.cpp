// CPU launchers of the fused sampled softmax: scalar body, SIMD dispatch once per range, backward.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/sampled_softmax_cpu_rows.h"

namespace samplex::cpu {

void launch_sampled_softmax(const SampledSoftmaxParams& params) {
  const SimdLevel level = params.dtype == DType::kFloat64 ? SimdLevel::kScalar : simd_level();
  const int64_t work = (params.num_targets + params.num_samples) * params.dim;
  parallel_for(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
#ifdef SAMPLEX_X86_SIMD
    if (level == SimdLevel::kAvx512) return sampled_softmax_rows_avx512(params, begin, end);
    if (level == SimdLevel::kAvx2) return sampled_softmax_rows_avx2(params, begin, end);
#endif
    dispatch_dtype("sampled_softmax", params.dtype,
                   [&](auto tag) { sampled_softmax_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

namespace {

template <typename T>
void backward_rows(const SampledSoftmaxBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t P = p.num_targets, m = p.num_samples, entries = P + m;
  for (int64_t b = begin; b < end; ++b) {
    const A g = static_cast<const A*>(p.grad_loss)[b];
    const A alpha = g * static_cast<const A*>(p.total)[b] + (p.grad_lse ? static_cast<const A*>(p.grad_lse)[b] : A(0));
    // A zero factor wins over a nan coefficient: a row nobody asked a gradient of has none.
    const auto combine = [&](A push, A pull) {
      return (alpha == 0 ? A(0) : alpha * push) - (g == 0 ? A(0) : g * pull);
    };
    const A* push = static_cast<const A*>(p.push) + b * entries;
    const A* pull = static_cast<const A*>(p.pull) + b * p.pull_width;
    A* coef_target = static_cast<A*>(p.coef_target) + b * P;
    A* coef_draw = static_cast<A*>(p.coef_draw) + b * m;
    for (int64_t k = 0; k < P; ++k) coef_target[k] = combine(push[k], pull[k]);
    if (p.pull_width == entries) {
      for (int64_t k = 0; k < m; ++k) coef_draw[k] = combine(push[P + k], pull[P + k]);
    } else {
      for (int64_t k = 0; k < m; ++k) coef_draw[k] = alpha == 0 ? A(0) : alpha * push[P + k];
    }
    const A* d_push = static_cast<const A*>(p.d_push) + b * p.dim;
    const A* d_pull = static_cast<const A*>(p.d_pull) + b * p.dim;
    T* d_hidden = static_cast<T*>(p.d_hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) d_hidden[c] = from_acc<T>(combine(d_push[c], d_pull[c]));
  }
}

}  // namespace

void launch_sampled_softmax_bwd(const SampledSoftmaxBwdParams& params) {
  const int64_t work = params.num_targets + params.num_samples + params.dim;
  parallel_for(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
    dispatch_dtype("sampled_softmax_bwd", params.dtype,
                   [&](auto tag) { backward_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

}  // namespace samplex::cpu
