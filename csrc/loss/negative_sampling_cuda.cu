// Launchers: one warp per batch row; the one-pass kernel is chosen by storage type, alignment and d.
#include "loss/negative_sampling_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

template <typename T, int kWidth, int kChunks, int kGroup, int kRows>
void launch_one_pass(const NegativeSamplingParams& params, void* stream) {
  SX_LAUNCH("negative_sampling", (negative_sampling_kernel<T, kWidth, kChunks, kGroup, kRows>), unsigned(params.batch),
            kWarpSize, 0, stream, params);
}

template <typename T>
void launch(const NegativeSamplingParams& params, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool vectors = params.dim % kWidth == 0 && aligned(params.hidden) && aligned(params.weight);
  const int64_t d = params.dim;
  if (params.shared || d == 0 || d > (vectors ? 1024 : 256)) {
    if (vectors)
      SX_LAUNCH("negative_sampling", (negative_sampling_wide_kernel<T, kWidth>), unsigned(params.batch), kWarpSize, 0,
                stream, params);
    else
      SX_LAUNCH("negative_sampling", (negative_sampling_wide_kernel<T, 1>), unsigned(params.batch), kWarpSize, 0,
                stream, params);
  } else if (!vectors) {
    launch_one_pass<T, 1, 8, 32, 4>(params, stream);
  } else if (d <= 64) {
    launch_one_pass<T, kWidth, 8 / kWidth, 8, 8>(params, stream);
  } else if (d <= 128) {
    launch_one_pass<T, kWidth, 8 / kWidth, 16, 8>(params, stream);
  } else if (d <= 256) {
    launch_one_pass<T, kWidth, 8 / kWidth, 32, 8>(params, stream);
  } else if (d <= 512) {
    // Four rows of 16-bit numbers at a time spill on sm_120.
    launch_one_pass<T, kWidth, 16 / kWidth, 32, sizeof(T) == 2 ? 2 : 4>(params, stream);
  } else {
    launch_one_pass<T, kWidth, 32 / kWidth, 32, 2>(params, stream);
  }
}

}  // namespace

void launch_negative_sampling(const NegativeSamplingParams& params, void* stream) {
  if (params.debug) {
    const int64_t ids = params.batch * (1 + params.num_samples);
    SX_LAUNCH("negative_sampling", negative_sampling_check_kernel, unsigned((ids + kCheckThreads - 1) / kCheckThreads),
              kCheckThreads, 0, stream, params);
  }
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, stream);
    case DType::kFloat16:
      return launch<Half>(params, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, stream);
    case DType::kFloat64:
      SX_LAUNCH("negative_sampling", (negative_sampling_wide_kernel<double, 1>), unsigned(params.batch), kWarpSize, 0,
                stream, params);
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
