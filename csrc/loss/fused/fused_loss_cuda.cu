// Launchers of what fused losses share.
#include "loss/fused/fused_loss_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

void launch_gather_rows(const GatherRowsParams& params, void* stream) {
  dispatch_dtype("gather_rows", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = vector_width<T>;
    const unsigned grid = unsigned((params.count + kGatherWarps - 1) / kGatherWarps);
    if (params.dim % kWidth == 0 && vector_aligned(params.weight) && vector_aligned(params.rows))
      SX_LAUNCH("gather_rows", (gather_rows_kernel<T, kWidth>), grid, kGatherThreads, 0, stream, params);
    else
      SX_LAUNCH("gather_rows", (gather_rows_kernel<T, 1>), grid, kGatherThreads, 0, stream, params);
  });
}

void launch_loss_mean(const LossMeanParams& params, void* stream) {
  if (params.double_acc)
    SX_LAUNCH("fused loss mean", loss_mean_kernel<double>, 1, kMeanThreads, 0, stream, params);
  else
    SX_LAUNCH("fused loss mean", loss_mean_kernel<float>, 1, kMeanThreads, 0, stream, params);
}

void launch_loss_bwd(const LossBwdParams& params, void* stream) {
  dispatch_dtype("fused loss backward", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SX_LAUNCH("fused loss backward", (loss_bwd_kernel<T>), unsigned(params.batch), kBwdThreads, 0, stream, params);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
