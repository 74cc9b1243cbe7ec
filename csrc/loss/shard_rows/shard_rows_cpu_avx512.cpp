// The products with the rows of a shard compiled for AVX-512; double stays with the scalar unit.
#include "loss/shard_rows/shard_rows_cpu_rows.h"

namespace samplex::cpu {

void shard_logits_rows_avx512(const ShardLogitsParams& params, int64_t begin, int64_t end) {
  shard_logits_rows_by_type(params, begin, end);
}

void shard_hidden_rows_avx512(const ShardHiddenParams& params, int64_t begin, int64_t end) {
  shard_hidden_rows_by_type(params, begin, end);
}

}  // namespace samplex::cpu
