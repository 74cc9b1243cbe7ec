#include "predict/predict/predict_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

unsigned blocks_of(const PredictChunk& chunk, const PredictCut& cut) { return unsigned(chunk.batch * cut.parts); }

template <typename A>
void launch_lse(const PredictLseParams& p, void* stream) {
  SX_LAUNCH("predict_lse", predict_lse_kernel<A>, blocks_of(p.chunk, p.cut), kPredictThreads, 0, stream, p);
  if (p.cut.parts == 1) return;
  const unsigned blocks = unsigned((p.chunk.batch + kPredictWarps - 1) / kPredictWarps);
  SX_LAUNCH("predict_lse", predict_lse_merge_kernel<A>, blocks, kPredictThreads, 0, stream, p);
}

template <typename A>
void launch_topk(const PredictTopkParams& p, void* stream) {
  SX_LAUNCH("predict_topk", predict_topk_kernel<A>, blocks_of(p.chunk, p.cut), kPredictThreads, 0, stream, p);
  if (p.cut.parts == 1) return;
  SX_LAUNCH("predict_topk", predict_topk_merge_kernel<A>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
}

}  // namespace

void launch_predict_lse(const PredictLseParams& p, void* stream) {
  p.chunk.is_double ? launch_lse<double>(p, stream) : launch_lse<float>(p, stream);
}

void launch_predict_grad(const PredictGradParams& p, void* stream) {
  const unsigned blocks = blocks_of(p.chunk, p.cut);
  if (p.chunk.is_double)
    SX_LAUNCH("predict_grad", (predict_grad_kernel<double, false>), blocks, kPredictThreads, 0, stream, p);
  else if (p.parts != nullptr)
    SX_LAUNCH("predict_grad", (predict_grad_kernel<float, true>), blocks, kPredictThreads, 0, stream, p);
  else
    SX_LAUNCH("predict_grad", (predict_grad_kernel<float, false>), blocks, kPredictThreads, 0, stream, p);
}

void launch_predict_topk(const PredictTopkParams& p, void* stream) {
  p.chunk.is_double ? launch_topk<double>(p, stream) : launch_topk<float>(p, stream);
}

void launch_predict_dots(const PredictDotsParams& p, void* stream) {
  const int64_t blocks = (p.batch * p.num_ids + kPredictWarps - 1) / kPredictWarps;
  dispatch_dtype("predict_dots", p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const unsigned grid = unsigned(blocks < 65535 ? blocks : 65535);
    constexpr int kWidth = vector_width<T>;
    if (p.dim % kWidth == 0 && vector_aligned(p.hidden) && vector_aligned(p.weight))
      SX_LAUNCH("predict_dots", (predict_dots_kernel<T, kWidth>), grid, kPredictThreads, 0, stream, p);
    else
      SX_LAUNCH("predict_dots", (predict_dots_kernel<T, 1>), grid, kPredictThreads, 0, stream, p);
  });
}

}  // namespace samplex::SX_BACKEND_NS
