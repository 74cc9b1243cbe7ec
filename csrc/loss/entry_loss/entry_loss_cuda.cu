// Launchers: one block per batch row; the one-pass kernel is chosen by storage type, alignment and d.
#include "loss/entry_loss/entry_loss_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

template <typename T, int kWidth, int kChunks, int kGroup, int kRows, EntryMode kMode, int kWarps = 1>
void launch_one_pass(const EntryLossParams& params, void* stream) {
  SX_LAUNCH("entry_loss", (entry_loss_kernel<T, kWidth, kChunks, kGroup, kRows, kMode, kWarps>), unsigned(params.batch),
            kWarps * kWarpSize, 0, stream, params);
}

template <typename T, int kWidth, EntryMode kMode>
void launch_wide(const EntryLossParams& params, void* stream) {
  SX_LAUNCH("entry_loss", (entry_loss_wide_kernel<T, kWidth, kMode>), unsigned(params.batch), kWarpSize, 0, stream,
            params);
}

template <typename T, EntryMode kMode>
void launch(const EntryLossParams& params, void* stream) {
  if constexpr (sizeof(T) == 8) {
    launch_wide<T, 1, kMode>(params, stream);
  } else {
    constexpr int kWidth = vector_width<T>;
    const bool vectors = params.dim % kWidth == 0 && vector_aligned(params.hidden) && vector_aligned(params.weight);
    const int64_t d = params.dim;
    if (params.shared || d == 0 || d > 4096) {
      if (vectors)
        launch_wide<T, kWidth, kMode>(params, stream);
      else
        launch_wide<T, 1, kMode>(params, stream);
    } else if (!vectors) {
      if (d <= 256)
        launch_one_pass<T, 1, 8, 32, 4, kMode>(params, stream);
      else
        launch_one_pass<T, 1, 16, 32, 4, kMode, 8>(params, stream);
    } else if (d <= 64) {
      launch_one_pass<T, kWidth, 8 / kWidth, 8, 8, kMode>(params, stream);
    } else if (d <= 128) {
      launch_one_pass<T, kWidth, 8 / kWidth, 16, 8, kMode>(params, stream);
    } else if (d <= 256) {
      launch_one_pass<T, kWidth, 8 / kWidth, 32, 8, kMode>(params, stream);
    } else {
      // Several warps share a row: more columns a lane leave registers for too few rows in flight. 128 bytes of a lane
      // are under way in each.
      constexpr int kRows = sizeof(T) == 2 ? 8 : 4;
      if (d <= 512)
        launch_one_pass<T, kWidth, 8 / kWidth, 32, kRows, kMode, 2>(params, stream);
      else if (d <= 1024)
        launch_one_pass<T, kWidth, 8 / kWidth, 32, kRows, kMode, 4>(params, stream);
      else if constexpr (kMode == EntryMode::kPlain && std::is_same_v<T, BFloat16>)  // then two blocks fit one SM
        launch_one_pass<T, kWidth, 8 / kWidth, 32, 4, kMode, 16>(params, stream);
      else
        launch_one_pass<T, kWidth, 8 / kWidth, 32, kRows, kMode, 16>(params, stream);
    }
  }
}

}  // namespace

void launch_entry_examples(const EntryExamples& params, void* stream) {
  if (params.double_acc)
    SX_LAUNCH("entry_loss", entry_examples_kernel<double>, 1, kExampleThreads, 0, stream, params);
  else
    SX_LAUNCH("entry_loss", entry_examples_kernel<float>, 1, kExampleThreads, 0, stream, params);
}

void launch_entry_loss(const EntryLossParams& params, void* stream) {
  if (params.debug) {
    const int64_t ids = params.batch * (params.num_targets + params.num_samples);
    SX_LAUNCH("entry_loss", entry_loss_check_kernel, unsigned((ids + kCheckThreads - 1) / kCheckThreads), kCheckThreads,
              0, stream, params);
  }
  const bool plain =
      params.kind == EntryLoss::kNegativeSampling && params.num_targets == 1 && params.known_offsets == nullptr;
  dispatch_dtype("entry_loss", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (plain)
      launch<T, EntryMode::kPlain>(params, stream);
    else if (is_relative(params.kind))
      launch<T, EntryMode::kRelative>(params, stream);
    else
      launch<T, EntryMode::kNoise>(params, stream);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
