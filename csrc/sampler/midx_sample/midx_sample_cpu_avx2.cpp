// midx_sample compiled for AVX2.
#include "sampler/midx_sample/midx_sample_cpu_rows.h"

namespace samplex::cpu {

void midx_gone_rows_avx2(const MidxSampleParams& params, int64_t begin, int64_t end) {
  midx_rows::gone_rows(params, begin, end);
}

void midx_draw_row_avx2(const MidxSampleParams& params, int64_t b, int64_t first, int64_t last) {
  midx_rows::draw_row(params, b, first, last);
}

}  // namespace samplex::cpu
