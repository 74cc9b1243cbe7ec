// Params of the products with the class rows of one shard. A = accumulation type (float, or double for double storage).
//
// Entries of row b: its P targets (columns 0 .. P-1), then its m draws (columns P .. P+m-1), as class ids. Class c is
// in slot (step * c) mod C, and this shard has the slots [start, start + rows): local row slot - start. Ids outside [0,
// C) have no slot. Entries of other shards are skipped: nothing is read for them.
//
//   shard_logits  h_b . w_k + bias_k of local entries, 0 of others; the local row of every entry, -1 for others
//   shard_hidden  sum over local entries of coef_k w_k
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

struct ShardLogitsParams {
  const void* hidden;     // [B, d]
  const void* weight;     // [rows, d]
  const void* bias;       // [rows] of bias_dtype, or nullptr
  const int64_t* target;  // [B, P]
  const int64_t* ids;     // [B, m]
  void* logits;           // A [B, P + m] out
  int64_t* target_rows;   // [B, P] out
  int64_t* id_rows;       // [B, m] out
  int64_t batch, num_targets, num_ids, dim, rows;
  int64_t num_classes, step, start;
  double inverse;  // 1 / num_classes
  DType dtype, bias_dtype;
};

struct ShardHiddenParams {
  const void* weight;          // [rows, d]
  const void* target_coef;     // A [B, P]
  const void* id_coef;         // A [B, m]
  const int64_t* target_rows;  // [B, P]; outside [0, rows): skipped
  const int64_t* id_rows;      // [B, m]
  void* hidden;                // A [B, d] out
  int64_t batch, num_targets, num_ids, dim, rows;
  DType dtype;
};

SX_DECLARE_LAUNCHER(launch_shard_logits, ShardLogitsParams)
SX_DECLARE_LAUNCHER(launch_shard_hidden, ShardHiddenParams)

namespace cpu {
// Rows [begin, end), float accumulation; ISA bodies.
void shard_logits_rows_avx2(const ShardLogitsParams& params, int64_t begin, int64_t end);
void shard_logits_rows_avx512(const ShardLogitsParams& params, int64_t begin, int64_t end);
void shard_hidden_rows_avx2(const ShardHiddenParams& params, int64_t begin, int64_t end);
void shard_hidden_rows_avx512(const ShardHiddenParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
