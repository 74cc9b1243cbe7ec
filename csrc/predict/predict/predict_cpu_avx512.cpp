// The passes over a chunk of logits compiled for AVX-512; double stays with the scalar unit.
#include "predict/predict/predict_cpu_rows.h"

namespace samplex::cpu {

void predict_lse_rows_avx512(const PredictLseParams& params, int64_t begin, int64_t end) {
  predict_lse_rows<float>(params, begin, end);
}

void predict_grad_rows_avx512(const PredictGradParams& params, int64_t begin, int64_t end) {
  predict_grad_rows<float>(params, begin, end);
}

void predict_topk_rows_avx512(const PredictTopkParams& params, int64_t begin, int64_t end) {
  predict_topk_rows<float>(params, begin, end);
}

void predict_pack_units_avx512(const PackPanelsParams& params, int64_t begin, int64_t end) {
  pack_panels_of(params, begin, end);
}

void predict_product_tiles_avx512(const PanelProductParams& params, int64_t begin, int64_t end) {
  panel_product_tiles_of(params, begin, end);
}

void predict_dots_rows_avx512(const PredictDotsParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kFloat16)
    predict_dots_rows<Half>(params, begin, end);
  else if (params.dtype == DType::kBFloat16)
    predict_dots_rows<BFloat16>(params, begin, end);
  else
    predict_dots_rows<float>(params, begin, end);
}

}  // namespace samplex::cpu
