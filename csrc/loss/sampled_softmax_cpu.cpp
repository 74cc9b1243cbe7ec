// CPU launchers of the fused sampled softmax: scalar body, SIMD dispatch once per range, backward.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/sampled_softmax_cpu_rows.h"

namespace samplex::cpu {

void launch_sampled_softmax(const SampledSoftmaxParams& params) {
  const SimdLevel level = params.dtype == DType::kFloat64 ? SimdLevel::kScalar : simd_level();
  const int64_t work = (params.num_targets + params.num_samples) * params.dim;
  parallel_for_shared(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
#ifdef SAMPLEX_X86_SIMD
    if (level == SimdLevel::kAvx512) return sampled_softmax_rows_avx512(params, begin, end);
    if (level == SimdLevel::kAvx2) return sampled_softmax_rows_avx2(params, begin, end);
#endif
    dispatch_dtype("sampled_softmax", params.dtype,
                   [&](auto tag) { sampled_softmax_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

namespace {

template <typename A>
void mean_of(const SampledSoftmaxMeanParams& p) {
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
void combine(const SampledSoftmaxUpstream<A>& up, const void* loss_part, const void* lse_part, int64_t at, int64_t n,
             T* out) {
  const A* x = static_cast<const A*>(loss_part) + at;
  const A g = up.of_loss;
  if (g == 0 || up.of_lse != 0) {
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(up.combine(loss_part, lse_part, at + k));
  } else {  // nearly always: no branch inside the loop
    for (int64_t k = 0; k < n; ++k) out[k] = from_acc<T>(g * x[k]);
  }
}

template <typename T>
void backward_rows(const SampledSoftmaxBwdParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t P = p.num_targets, m = p.num_samples, entries = P + m;
  for (int64_t b = begin; b < end; ++b) {
    const SampledSoftmaxUpstream<A> up(p, b);
    combine(up, p.coef_loss, p.coef_lse, b * entries, P, static_cast<A*>(p.coef_target) + b * P);
    combine(up, p.coef_loss, p.coef_lse, b * entries + P, m, static_cast<A*>(p.coef_draw) + b * m);
    combine(up, p.d_loss, p.d_lse, b * p.dim, p.dim, static_cast<T*>(p.d_hidden) + b * p.dim);
  }
}

}  // namespace

void launch_sampled_softmax_mean(const SampledSoftmaxMeanParams& params) {
  if (params.double_acc)
    mean_of<double>(params);
  else
    mean_of<float>(params);
}

void launch_sampled_softmax_bwd(const SampledSoftmaxBwdParams& params) {
  const int64_t work = params.num_targets + params.num_samples + params.dim;
  parallel_for(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
    dispatch_dtype("sampled_softmax_bwd", params.dtype,
                   [&](auto tag) { backward_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

}  // namespace samplex::cpu
