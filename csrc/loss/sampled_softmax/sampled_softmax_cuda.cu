// Launchers: one block per batch row; the one-pass kernel is chosen by storage type, alignment and d. The usual widths
// have separate kernels without column checks.
#include "loss/sampled_softmax/sampled_softmax_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

template <typename T, int kWidth, int kChunks, int kGroup, bool kFull, int kRowWarps = 1, bool kUnit = false>
void launch_one_pass(const SampledSoftmaxParams& params, void* stream) {
  using Body = OnePass<T, kWidth, kChunks, kGroup, kFull, kRowWarps, kUnit>;
  SX_LAUNCH("sampled_softmax", (sampled_softmax_kernel<T, kWidth, kChunks, kGroup, kFull, kRowWarps, kUnit>),
            unsigned(params.batch), Body::kThreads, params.need_grad ? sizeof(float) * Body::kBuffer : 0, stream,
            params);
}

template <typename T, int kWidth>
void launch_wide(const SampledSoftmaxParams& params, void* stream) {
  SX_LAUNCH("sampled_softmax", (sampled_softmax_wide_kernel<T, kWidth>), unsigned(params.batch), kThreads, 0, stream,
            params);
}

// Widest rows on the sphere of one pass: several warps a row would spill on sm_86 with half precision.
template <typename T>
constexpr int64_t kUnitColumns = std::is_same_v<T, Half> ? 512 : 4096;

// Class rows on the sphere, 16 bytes at a time.
template <typename T>
void launch_unit(const SampledSoftmaxParams& params, void* stream) {
  constexpr int kWidth = vector_width<T>;
  const int64_t d = params.dim;
  if (d <= 128)
    launch_one_pass<T, kWidth, 16 / kWidth, 8, false, 1, true>(params, stream);
  else if (d <= 256)
    launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 1, true>(params, stream);
  else if (d <= 512)
    launch_one_pass<T, kWidth, 16 / kWidth, 32, false, 1, true>(params, stream);
  else if constexpr (kUnitColumns<T> > 1024) {
    if (d <= 1024)
      launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 4, true>(params, stream);
    else
      launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 16, true>(params, stream);
  }
}

template <typename T>
void launch(const SampledSoftmaxParams& params, void* stream) {
  constexpr int kWidth = vector_width<T>;
  const bool vectors = params.dim % kWidth == 0 && vector_aligned(params.hidden) && vector_aligned(params.weight);
  const int64_t d = params.dim;
  const bool seeded = params.num_targets == 1 && params.label_smoothing == 0;
  if (!params.shared && params.normalize && vectors && d > 0 && d <= kUnitColumns<T> &&
      (seeded || !params.has_margin)) {
    launch_unit<T>(params, stream);
  } else if (params.shared || params.normalize || d == 0 || d > 4096) {
    if (vectors)
      launch_wide<T, kWidth>(params, stream);
    else
      launch_wide<T, 1>(params, stream);
  } else if (!vectors) {
    if (d <= 64)
      launch_one_pass<T, 1, 8, 8, false>(params, stream);
    else if (d <= 256)
      launch_one_pass<T, 1, 8, 32, false>(params, stream);
    else if (d <= 1024)
      launch_one_pass<T, 1, 8, 32, false, 4>(params, stream);
    else
      launch_one_pass<T, 1, 16, 32, false, 8>(params, stream);
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
  } else if (d == 768) {
    launch_one_pass<T, kWidth, 24 / kWidth, 32, true>(params, stream);
  } else if (d <= 1024) {  // 32 columns a lane would spill on sm_90: several warps share a row
    launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 4>(params, stream);
  } else if (d <= 2048) {
    launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 8>(params, stream);
  } else {
    launch_one_pass<T, kWidth, 8 / kWidth, 32, false, 16>(params, stream);
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
      launch_wide<double, 1>(params, stream);
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
