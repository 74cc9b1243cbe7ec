// CPU launchers of the products with the rows of a shard: rows of the batch are shared out, and each keeps its own
// order of operations, so the bits do not depend on the number of threads.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/shard_rows/shard_rows_cpu_rows.h"

namespace samplex::cpu {
namespace {

void shard_logits_rows_scalar(const ShardLogitsParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kFloat64) return shard_logits_rows<double>(params, begin, end);
  shard_logits_rows_by_type(params, begin, end);
}

void shard_hidden_rows_scalar(const ShardHiddenParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kFloat64) return shard_hidden_rows<double>(params, begin, end);
  shard_hidden_rows_by_type(params, begin, end);
}

// Enough rows for their class rows to be prefetched, few enough to balance rows with more local entries.
template <typename Params>
void for_rows(const Params& params, void (*body)(const Params&, int64_t, int64_t)) {
  const int64_t numbers = (params.num_targets + params.num_ids) * params.dim;
  parallel_for_shared(params.batch, 1 + (1 << 16) / (numbers + 1),
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

}  // namespace

void launch_shard_logits(const ShardLogitsParams& params) {
  for_rows(params, SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), shard_logits_rows));
}

void launch_shard_hidden(const ShardHiddenParams& params) {
  for_rows(params, SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), shard_hidden_rows));
}

}  // namespace samplex::cpu
