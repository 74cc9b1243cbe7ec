// CPU launchers of the fused sampled softmax: scalar body, SIMD dispatch once per range.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/sampled_softmax/sampled_softmax_cpu_rows.h"

namespace samplex::cpu {

namespace {

void sampled_softmax_rows_scalar(const SampledSoftmaxParams& params, int64_t begin, int64_t end) {
  dispatch_dtype("sampled_softmax", params.dtype,
                 [&](auto tag) { sampled_softmax_rows<typename decltype(tag)::type>(params, begin, end); });
}

}  // namespace

void launch_sampled_softmax(const SampledSoftmaxParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), sampled_softmax_rows);
  const DrawProducts& products = params.products;
  const int64_t work = (params.num_targets + params.num_samples) * params.dim;
  const int64_t at_once = products.across != nullptr ? rows_at_once(products) : 1 + (1 << 16) / (work + 1);
  if (!products_come_apart(products)) {
    return parallel_for_shared(params.batch, at_once, [&](int64_t begin, int64_t end) { body(params, begin, end); });
  }
  SampledSoftmaxParams rest = params;
  rest.products = {};
  launch_draw_dots(products);
  parallel_for_shared(params.batch, 1, [&](int64_t begin, int64_t end) { body(rest, begin, end); });
  launch_draw_sums(products);
}

}  // namespace samplex::cpu
