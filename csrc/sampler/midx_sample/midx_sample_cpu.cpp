// midx_sample on the CPU: the choice of the SIMD level, and the baseline bodies.
#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/midx_sample/midx_sample_cpu_rows.h"

namespace samplex::cpu {
namespace {

constexpr int64_t kPart = 256;  // draws, or given ids, of a row that one thread makes: each part sums the codes again

void midx_gone_rows_scalar(const MidxSampleParams& params, int64_t begin, int64_t end) {
  midx_rows::gone_rows(params, begin, end);
}

void midx_draw_row_scalar(const MidxSampleParams& params, int64_t b, int64_t first, int64_t last) {
  midx_rows::draw_row(params, b, first, last);
}

}  // namespace

void launch_midx_sample(const MidxSampleParams& params) {
  const StaticSampleParams& u = params.uniform;
  if (u.exclude != nullptr) {
    const auto body = SX_SIMD_BODY(simd_level(), midx_gone_rows);
    parallel_for_shared(u.batch, 8, [&](int64_t begin, int64_t end) { body(params, begin, end); });
  }
  const auto body = SX_SIMD_BODY(simd_level(), midx_draw_row);
  const int64_t part = u.given != nullptr ? 64 * kPart : kPart, parts = (u.num_samples + part - 1) / part;
  parallel_for_shared(u.batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / parts, first = (i - b * parts) * part;
      body(params, b, first, std::min(first + part, u.num_samples));
    }
  });
}

}  // namespace samplex::cpu
