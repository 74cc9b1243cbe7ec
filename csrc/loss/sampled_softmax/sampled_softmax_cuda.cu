// Launchers: one block per batch row; the one-pass kernel is chosen by storage type, alignment and d. The usual widths
// have kernels of their own without column checks.
#include "loss/sampled_softmax/sampled_softmax_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

template <typename T, int kWidth, int kChunks, int kGroup, bool kFull>
void launch_one_pass(const SampledSoftmaxParams& params, void* stream) {
  using Body = OnePass<T, kWidth, kChunks, kGroup, kFull>;
  constexpr size_t kBuffer = 2 * sizeof(float) * Body::kGroups * Body::kSpan;
  SX_LAUNCH("sampled_softmax", (sampled_softmax_kernel<T, kWidth, kChunks, kGroup, kFull>), unsigned(params.batch),
            kWarpSize, params.need_grad ? kBuffer : 0, stream, params);
}

template <typename T>
void launch(const SampledSoftmaxParams& params, void* stream) {
  constexpr int kWidth = vector_width<T>;
  const bool vectors = params.dim % kWidth == 0 && vector_aligned(params.hidden) && vector_aligned(params.weight);
  const int64_t d = params.dim;
  // 1024 columns would take 32 a lane, which spills on sm_90.
  const bool one_pass = vectors ? d <= 512 || d == 768 : d <= 256;
  if (params.shared || !one_pass) {
    SX_LAUNCH("sampled_softmax", (sampled_softmax_wide_kernel<T>), unsigned(params.batch), kThreads, 0, stream, params);
  } else if (!vectors) {
    if (d <= 64)
      launch_one_pass<T, 1, 8, 8, false>(params, stream);
    else
      launch_one_pass<T, 1, 8, 32, false>(params, stream);
  } else if (d == 64) {
    launch_one_pass<T, kWidth, 8 / kWidth, 8, true>(params, stream);
  } else if (d == 128) {
    launch_one_pass<T, kWidth, 16 / kWidth, 8, true>(params, stream);
  } else if (d == 256) {
    launch_one_pass<T, kWidth, 16 / kWidth, 16, true>(params, stream);
  } else if (d == 512) {
    launch_one_pass<T, kWidth, 16 / kWidth, 32, true>(params, stream);
  } else if (d <= 128) {
    launch_one_pass<T, kWidth, 16 / kWidth, 8, false>(params, stream);
  } else if (d < 512) {
    launch_one_pass<T, kWidth, 16 / kWidth, 32, false>(params, stream);
  } else {
    launch_one_pass<T, kWidth, 24 / kWidth, 32, true>(params, stream);
  }
}

}  // namespace

void launch_sampled_softmax(const SampledSoftmaxParams& params, void* stream) {
  if (params.debug) {
    const int64_t ids = params.batch * (params.num_targets + params.num_samples);
    SX_LAUNCH("sampled_softmax", sampled_softmax_check_kernel, unsigned((ids + kThreads - 1) / kThreads), kThreads, 0,
              stream, params);
  }
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, stream);
    case DType::kFloat16:
      return launch<Half>(params, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, stream);
    case DType::kFloat64:
      SX_LAUNCH("sampled_softmax", (sampled_softmax_wide_kernel<double>), unsigned(params.batch), kThreads, 0, stream,
                params);
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
