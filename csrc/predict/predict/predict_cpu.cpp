// CPU launchers of the passes over a chunk of logits: rows are shared out, and each keeps its own order of operations,
// so the bits do not depend on the number of threads.
#include "common/parallel.h"
#include "common/simd.h"
#include "predict/predict/predict_cpu_rows.h"

namespace samplex::cpu {
namespace {

SimdLevel level_of(const PredictChunk& chunk) {
#ifdef SAMPLEX_X86_SIMD
  return chunk.is_double ? SimdLevel::kScalar : simd_level();
#else
  (void)chunk;
  return SimdLevel::kScalar;
#endif
}

// Few rows a range: one with many insertions must not hold up the others.
template <typename F>
void for_rows(const PredictChunk& chunk, const F& body) {
  parallel_for_shared(chunk.batch, 1 + (1 << 14) / chunk.count, body);
}

}  // namespace

#ifdef SAMPLEX_X86_SIMD
#define SX_PREDICT_ROWS(name)                                                                             \
  switch (level_of(params.chunk)) {                                                                       \
    case SimdLevel::kAvx512:                                                                              \
      return name##_avx512(params, begin, end);                                                           \
    case SimdLevel::kAvx2:                                                                                \
      return name##_avx2(params, begin, end);                                                             \
    default:                                                                                              \
      return params.chunk.is_double ? name<double>(params, begin, end) : name<float>(params, begin, end); \
  }
#else
#define SX_PREDICT_ROWS(name) \
  return params.chunk.is_double ? name<double>(params, begin, end) : name<float>(params, begin, end);
#endif

void launch_predict_lse(const PredictLseParams& params) {
  for_rows(params.chunk, [&](int64_t begin, int64_t end) { SX_PREDICT_ROWS(predict_lse_rows) });
}

void launch_predict_grad(const PredictGradParams& params) {
  for_rows(params.chunk, [&](int64_t begin, int64_t end) { SX_PREDICT_ROWS(predict_grad_rows) });
}

void launch_predict_topk(const PredictTopkParams& params) {
  for_rows(params.chunk, [&](int64_t begin, int64_t end) { SX_PREDICT_ROWS(predict_topk_rows) });
}

void launch_predict_dots(const PredictDotsParams& params) {
  parallel_for_shared(params.batch, 1 + (1 << 14) / (params.num_ids * params.dim + 1), [&](int64_t begin, int64_t end) {
#ifdef SAMPLEX_X86_SIMD
    const SimdLevel level = params.dtype == DType::kFloat64 ? SimdLevel::kScalar : simd_level();
    if (level == SimdLevel::kAvx512) return predict_dots_rows_avx512(params, begin, end);
    if (level == SimdLevel::kAvx2) return predict_dots_rows_avx2(params, begin, end);
#endif
    dispatch_dtype("predict_dots", params.dtype,
                   [&](auto tag) { predict_dots_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

}  // namespace samplex::cpu
