// Launchers: rows are read 16 bytes at a time where their length and place allow it.
#include "loss/shard_rows/shard_rows_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

void launch_shard_logits(const ShardLogitsParams& p, void* stream) {
  dispatch_dtype("shard_logits", p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const unsigned grid = unsigned(p.batch);
    constexpr int kWidth = vector_width<T>;
    if (p.dim % kWidth == 0 && vector_aligned(p.hidden) && vector_aligned(p.weight))
      SX_LAUNCH("shard_logits", (shard_logits_kernel<T, kWidth>), grid, kShardThreads, 0, stream, p);
    else
      SX_LAUNCH("shard_logits", (shard_logits_kernel<T, 1>), grid, kShardThreads, 0, stream, p);
  });
}

void launch_shard_hidden(const ShardHiddenParams& p, void* stream) {
  dispatch_dtype("shard_hidden", p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = vector_width<T>;
    const unsigned grid = unsigned(p.batch);
    if (p.dim % kWidth == 0 && vector_aligned(p.weight))
      SX_LAUNCH("shard_hidden", (shard_hidden_kernel<T, kWidth>), grid, kShardThreads, 0, stream, p);
    else
      SX_LAUNCH("shard_hidden", (shard_hidden_kernel<T, 1>), grid, kShardThreads, 0, stream, p);
  });
}

}  // namespace samplex::SX_BACKEND_NS
