// CPU launchers of the passes over a chunk of logits: rows are shared out, and each keeps its own order of operations,
// so the bits do not depend on the number of threads.
#include <algorithm>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "predict/predict/predict_cpu_rows.h"

namespace samplex::cpu {
namespace {

void predict_lse_rows_scalar(const PredictLseParams& params, int64_t begin, int64_t end) {
  params.chunk.is_double ? predict_lse_rows<double>(params, begin, end) : predict_lse_rows<float>(params, begin, end);
}

void predict_grad_rows_scalar(const PredictGradParams& params, int64_t begin, int64_t end) {
  params.chunk.is_double ? predict_grad_rows<double>(params, begin, end) : predict_grad_rows<float>(params, begin, end);
}

void predict_topk_rows_scalar(const PredictTopkParams& params, int64_t begin, int64_t end) {
  params.chunk.is_double ? predict_topk_rows<double>(params, begin, end) : predict_topk_rows<float>(params, begin, end);
}

void predict_dots_rows_scalar(const PredictDotsParams& params, int64_t begin, int64_t end) {
  dispatch_dtype("predict_dots", params.dtype,
                 [&](auto tag) { predict_dots_rows<typename decltype(tag)::type>(params, begin, end); });
}

void predict_pack_units_scalar(const PackPanelsParams& params, int64_t begin, int64_t end) {
  pack_panels_of(params, begin, end);
}

void predict_product_tiles_scalar(const PanelProductParams& params, int64_t begin, int64_t end) {
  panel_product_tiles_of(params, begin, end);
}

// Few rows per range: one with many insertions must not hold up the others.
template <typename Params>
void for_rows(const Params& params, void (*body)(const Params&, int64_t, int64_t)) {
  if (params.chunk.by_class) {
    // Whole cache lines of the batch to a thread.
    constexpr int64_t kUnit = 16;
    const int64_t batch = params.chunk.batch, units = (batch + kUnit - 1) / kUnit;
    return parallel_for_shared(
        units, std::clamp<int64_t>(units / num_threads(), 1, 4),
        [&](int64_t begin, int64_t end) { body(params, begin * kUnit, std::min(end * kUnit, batch)); });
  }
  parallel_for_shared(params.chunk.batch, 1 + (1 << 14) / params.chunk.count,
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

}  // namespace

void launch_predict_product(const PackPanelsParams& b, const PanelProductParams& product) {
  const int64_t panels = panels_of(b.columns);
  const Workspace workspace(size_t(panels * kPanel * b.depth) * sizeof(float));
  PackPanelsParams packed = b;
  PanelProductParams p = product;
  packed.panels = static_cast<float*>(workspace.data());
  p.b = packed.panels;
  const auto pack = SX_SIMD_BODY(simd_level(), predict_pack_units);
  const auto tiles = SX_SIMD_BODY(simd_level(), predict_product_tiles);
  parallel_for(panels * ((b.depth + kBlockDepth - 1) / kBlockDepth), 4,
               [&](int64_t begin, int64_t end) { pack(packed, begin, end); });
  const int64_t of_tile = p.depth * kPanel * std::min(p.rows, kProductRows);
  parallel_for_shared(product_chunks(p.rows) * panels, 1 + (1 << 18) / (of_tile + 1),
                      [&](int64_t begin, int64_t end) { tiles(p, begin, end); });
}

void launch_predict_lse(const PredictLseParams& params) {
  for_rows(params, SX_SIMD_BODY(simd_level_unless(params.chunk.is_double), predict_lse_rows));
}

void launch_predict_grad(const PredictGradParams& params) {
  for_rows(params, SX_SIMD_BODY(simd_level_unless(params.chunk.is_double), predict_grad_rows));
}

void launch_predict_topk(const PredictTopkParams& params) {
  for_rows(params, SX_SIMD_BODY(simd_level_unless(params.chunk.is_double), predict_topk_rows));
}

void launch_predict_dots(const PredictDotsParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), predict_dots_rows);
  parallel_for_shared(params.batch, 1 + (1 << 14) / (params.num_ids * params.dim + 1),
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

}  // namespace samplex::cpu
