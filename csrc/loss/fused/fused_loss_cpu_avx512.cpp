// What fused losses share, compiled for AVX512; double storage stays with the scalar unit.
#include "loss/fused/fused_loss_cpu_rows.h"

namespace samplex::cpu {

void gather_rows_avx512(const GatherRowsParams& params, int64_t begin, int64_t end) {
  dispatch_float(params.dtype, [&](auto tag) { gather_rows_of<typename decltype(tag)::type>(params, begin, end); });
}

void loss_bwd_rows_avx512(const LossBwdParams& params, int64_t begin, int64_t end) {
  dispatch_float(params.dtype, [&](auto tag) { loss_bwd_rows_of<typename decltype(tag)::type>(params, begin, end); });
}

void panel_product_tiles_avx512(const PanelProductParams& params, int64_t begin, int64_t end) {
  panel_product_tiles_of(params, begin, end);
}

}  // namespace samplex::cpu
