// static_sample on the CPU: the choice of the SIMD level, and the baseline body.
#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/static_sample/static_sample_cpu_rows.h"

namespace samplex::cpu {
namespace {

void static_sample_range_scalar(const StaticSampleParams& p, int64_t begin, int64_t end) {
  static_sample_rows::sample_range(p, begin, end);
}

}  // namespace

void launch_static_sample(const StaticSampleParams& p) {
  if (p.exclude != nullptr) {
    parallel_for(p.batch, 256, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) p.rows[b] = excluded_row(p, b);
    });
  }
  const auto body = SX_SIMD_BODY(simd_level(), static_sample_range);
  parallel_for(p.batch * p.num_samples, 4096, [&](int64_t begin, int64_t end) { body(p, begin, end); });
  if (p.num_scored == 0) return;
  const StaticRow whole = whole_row_in_kernel(p);
  parallel_for(p.num_scored, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p.scored_log_q[i] = log_q_of(p, whole, p.scored[i]);
  });
}

}  // namespace samplex::cpu
