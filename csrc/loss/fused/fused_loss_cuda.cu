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
  const unsigned blocks = unsigned((params.width + kGatherWarps - 1) / kGatherWarps);
  if (blocks == 0) return;
  with_gather_words(params, [&](auto word, int64_t words) {
    SX_LAUNCH("gather rows", gather_rows_kernel<decltype(word)>, blocks, kGatherThreads, 0, stream, params, words);
  });
}

void launch_row_norms(const RowNormsParams& params, void* stream) {
  const unsigned blocks = unsigned((params.n + kGatherWarps - 1) / kGatherWarps);
  if (blocks == 0) return;
  dispatch_dtype("row norms", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = vector_width<T>;
    if (params.dim % kWidth == 0 && vector_aligned(params.weight))
      SX_LAUNCH("row norms", (row_norms_kernel<T, kWidth>), blocks, kGatherThreads, 0, stream, params);
    else
      SX_LAUNCH("row norms", (row_norms_kernel<T, 1>), blocks, kGatherThreads, 0, stream, params);
  });
}

void launch_loss_bwd(const LossBwdParams& params, void* stream) {
  bool wide = params.dim % 4 == 0;
  for (const void* rows : {params.d_loss, params.d_lse, params.draws_loss, params.draws_lse, params.hidden,
                           static_cast<const void*>(params.d_hidden), static_cast<const void*>(params.clean_hidden)}) {
    wide = wide && vector_aligned(rows);
  }
  const int64_t bias_blocks = params.draw_bias == nullptr ? 0 : (params.num_samples + kBiasColumns - 1) / kBiasColumns;
  dispatch_dtype("fused loss backward", params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SX_LAUNCH("fused loss backward", (loss_bwd_kernel<T>), unsigned(params.batch + bias_blocks), kBwdThreads, 0, stream,
              params, int(bias_blocks), wide);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
