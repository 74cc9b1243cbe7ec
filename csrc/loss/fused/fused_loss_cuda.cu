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

void launch_gather_rows(const GatherRowsParams& params, void* stream) {
  const int64_t rows = params.copies * params.width, per_block = kGatherWarps;
  const unsigned blocks = unsigned((rows + per_block - 1) / per_block);
  if (blocks == 0 || params.dim == 0) return;
  const int64_t bytes = params.dim * int64_t(size_of(params.dtype));
  const auto run = [&](auto word) {
    using Word = decltype(word);
    SX_LAUNCH("gather rows", gather_rows_kernel<Word>, blocks, kGatherThreads, 0, stream, params,
              bytes / int64_t(sizeof(Word)));
  };
  const auto fits = [&](size_t size) {
    return bytes % int64_t(size) == 0 && reinterpret_cast<uintptr_t>(params.weight) % size == 0 &&
           reinterpret_cast<uintptr_t>(params.rows) % size == 0;
  };
  if (fits(16))
    run(uint4{});
  else if (fits(4))
    run(uint32_t{});
  else
    run(uint16_t{});
}

void launch_split(const SplitParams& params, void* stream) {
  SX_LAUNCH("split coefficients", split_kernel<BFloat16>, unsigned(params.rows), kBwdThreads, 0, stream, params);
}

void launch_loss_bwd(const LossBwdParams& params, void* stream) {
  dispatch_dtype("fused loss backward", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SX_LAUNCH("fused loss backward", (loss_bwd_kernel<T>), unsigned(params.batch), kBwdThreads, 0, stream, params);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
