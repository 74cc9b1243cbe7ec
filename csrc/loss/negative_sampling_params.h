// Params of fused negative sampling (Bamler & Mandt 2020, Eq. 2 and 6). A = accumulation type (float, or double for
// double storage).
//
// Entries of row b: its target y (column 0), then its m draws y'_j (columns 1 .. m), every one of which counts, a draw
// of the target too.
//   xi_k   = scale * (h_b . w_k + bias_k)
//   term_0 = softplus(-xi_y)     + reg * (xi_y + target_log_q)^2
//   term_j = softplus(xi_{y'_j}) + reg * (xi_{y'_j} + log_q_j)^2
//   loss   = cw_y * (term_0 + 1/m sum_j term_j),   denom = cw_y (1 without class weights)
// A row of target ignore_index is zero everywhere. The gradient of an entry needs its own xi only:
//   coef_loss_k = d loss / d (h . w_k) = cw_y * scale * (1 or 1/m) * d term_k / d xi_k,   d_loss = sum_k coef_loss_k
//   w_k
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

struct NegativeSamplingParams {
  const void* hidden;        // [B, d]
  const void* weight;        // [C, d]
  const int64_t* target;     // [B]
  const int64_t* ids;        // [B, m], or [m] when shared
  const void* log_q;         // A, shape of ids; read where reg != 0
  const void* target_log_q;  // A [B]; likewise
  void* dots;                // A [B, m]: h_b . w_ids, given when shared, else nullptr; overwritten
  ScalarTable bias;          // [C] or absent
  ScalarTable class_weight;  // [C] or absent
  void* loss;                // A [B]
  void* denom;               // A [B]
  void* coef_loss;           // A [B, 1 + m]   nullptr without gradient
  void* d_loss;              // A [B, d]       likewise; when shared, the target's part only
  int64_t batch, num_samples, dim, num_classes, ignore_index;
  double scale, reg;
  DType dtype;
  bool shared, need_grad, debug;
};

SX_DECLARE_LAUNCHER(launch_negative_sampling, NegativeSamplingParams)

// ISA bodies, float/half/bfloat16 storage; rows [begin, end).
namespace cpu {
void negative_sampling_rows_avx2(const NegativeSamplingParams& params, int64_t begin, int64_t end);
void negative_sampling_rows_avx512(const NegativeSamplingParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
