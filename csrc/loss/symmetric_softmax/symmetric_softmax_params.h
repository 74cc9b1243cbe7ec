// Params of the symmetric softmax of a batch, each query against the keys and each key against the queries, from one
// matrix of products. A = float or double.
//
//   s_ij = scale dots_ij,  key i belongs to query i
//   a pair i != j is masked if labels_i = labels_j, or labels_j is one of the known labels of i
//   r_ij = s_ij + key_shift_j,   c_ij = s_ij + query_shift_i   for i != j;   r_ii = c_ii = s_ii
//   row_lse_i = log sum_j exp r_ij,   column_lse_j = log sum_i exp c_ij   over pairs that are not masked
//   loss_i = (row_lse_i + column_lse_i) / 2 - s_ii
// and for upstream gradients g of the losses
//   d dots_ij = scale / 2 (g_i exp(r_ij - row_lse_i) + g_j exp(c_ij - column_lse_j)) - [i = j] scale g_i
#pragma once

#include <cstdint>

#include "common/launchers.h"

namespace samplex {

struct SymmetricSoftmaxParams {
  const void* dots;              // A [B, B]
  const int64_t* labels;         // [B] or nullptr: all differ
  const int64_t* known_offsets;  // [B + 1] or nullptr, with labels
  const int64_t* known_ids;      // [known_size]
  const void* key_shift;         // A [B] or nullptr: 0
  const void* query_shift;       // A [B] or nullptr: 0
  void* row_lse;                 // A [B], read by the backward
  void* column_lse;              // A [B]
  void* loss;                    // A [B]; forward only
  void* partial;     // A [2, blocks, B]; CPU forward only: maximum and sum of each column in a block of rows
  const void* grad;  // A [B]; backward only
  void* coefs;       // A [B, B]; backward only: d dots
  int64_t batch, known_size, block_rows;
  double scale;
  bool double_acc;
};

// Blocks of rows do not depend on the number of threads, so neither do the bits.
constexpr int64_t symmetric_block_rows(int64_t batch) { return batch <= 1024 ? 16 : (batch + 63) / 64; }
constexpr int64_t symmetric_blocks(int64_t batch) {
  return (batch + symmetric_block_rows(batch) - 1) / symmetric_block_rows(batch);
}

SX_DECLARE_LAUNCHER(launch_symmetric_softmax, SymmetricSoftmaxParams)
SX_DECLARE_LAUNCHER(launch_symmetric_softmax_grad, SymmetricSoftmaxParams)

// ISA bodies, float: blocks [begin, end) of rows.
namespace cpu {
void symmetric_rows_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
void symmetric_rows_avx512(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
void symmetric_columns_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
void symmetric_columns_avx512(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
void symmetric_grad_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
void symmetric_grad_avx512(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
