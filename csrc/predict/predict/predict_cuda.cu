#include "predict/predict/predict_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

void launch_predict_lse(const PredictLseParams& p, void* stream) {
  if (p.chunk.is_double)
    SX_LAUNCH("predict_lse", predict_lse_kernel<double>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
  else
    SX_LAUNCH("predict_lse", predict_lse_kernel<float>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
}

void launch_predict_grad(const PredictGradParams& p, void* stream) {
  if (p.chunk.is_double)
    SX_LAUNCH("predict_grad", predict_grad_kernel<double>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
  else
    SX_LAUNCH("predict_grad", predict_grad_kernel<float>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
}

void launch_predict_topk(const PredictTopkParams& p, void* stream) {
  if (p.chunk.is_double)
    SX_LAUNCH("predict_topk", predict_topk_kernel<double>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
  else
    SX_LAUNCH("predict_topk", predict_topk_kernel<float>, unsigned(p.chunk.batch), kPredictThreads, 0, stream, p);
}

void launch_predict_dots(const PredictDotsParams& p, void* stream) {
  const int64_t blocks = (p.batch * p.num_ids + kPredictWarps - 1) / kPredictWarps;
  dispatch_dtype("predict_dots", p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SX_LAUNCH("predict_dots", predict_dots_kernel<T>, unsigned(blocks < 65535 ? blocks : 65535), kPredictThreads, 0,
              stream, p);
  });
}

}  // namespace samplex::SX_BACKEND_NS
