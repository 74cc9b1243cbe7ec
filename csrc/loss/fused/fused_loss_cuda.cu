// Launchers of what fused losses share.
#include "loss/fused/fused_loss_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

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
