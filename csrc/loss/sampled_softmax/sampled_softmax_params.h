// Params of the fused sampled softmax and of its backward. A = accumulation type (float, or double for double storage).
//
// Entries of row b: its P targets (columns 0 .. P-1), then its m draws (columns P .. P+m-1).
//   s_k  = scale * (h_b . w_k + bias_k), or its absolute value
//   o_k  = s_k for a target, s_k - log_q_k - log m for a draw; a masked draw does not take part
//   lse  = log sum exp o_k,   p_k = exp(o_k - lse)
//   a_k  = (1 - eps) cw_k / #targets for a target, + eps cw_k / #entries for every entry (eps = label smoothing)
//   loss = sum_k a_k (lse - s_k),   total = sum_k a_k,   denom = mean cw over the targets
//          with target_weight t: t_k in place of 1 / #targets, and denom = 1, as F.cross_entropy of probabilities
// A row without targets (all ignore_index) is zero everywhere; a row without unmasked draws has loss 0 and total 0.
// With push_k = scale sign_k p_k and pull_k = scale sign_k a_k the gradients are
//   coef_lse  = d lse / d (h . w_k)  = push_k,                   d_lse  = sum_k push_k w_k
//   coef_loss = d loss / d (h . w_k) = total push_k - pull_k,    d_loss = sum_k coef_loss_k w_k
// so the backward is one multiplication by the upstream gradients, for entries and for h alike.
//
// With `normalize` the class rows are taken on the unit sphere, w_k / |w_k|, without a bias. A row of zeros has product
// 0. With a margin, which needs that, the product x = r cos t of a target becomes r f(t): see sampled_softmax_math.h. r
// = |h|, so that a caller who wants the sphere gives a unit h, or one times a scale. sign_k is then the slope d s_k / d
// (scale h . w_k). The coefficients are still d loss / d (h . w_k); who sums them by class takes the part along w_k out
// of the sum, which is what the derivative of the norm amounts to.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "loss/fused/fused_loss_params.h"

namespace samplex {

// The product of a target becomes cos(m1 t + m2) - m3.
struct MarginParams {
  double m1, m2, m3;
};

struct SampledSoftmaxParams {
  const void* hidden;     // [B, d]
  const void* weight;     // [C, d]
  const int64_t* target;  // [B, P]; ignore_index, and kPadding where P > 1, are skipped
  const int64_t* ids;     // [B, m], or [m] when shared
  const void* log_q;      // A, shape of ids
  void* dots;             // A [B, m], rows `dots_stride` apart: h_b . w_ids, given when shared, else nullptr;
                          // overwritten; may be the draws' columns of coef_loss
  int64_t dots_stride;
  DrawProducts products;         // CPU only: the kernel makes dots, and what shared draws add to d_loss and d_lse
  const int64_t* known_offsets;  // [B + 1] or nullptr: known positives of a row, masked where drawn; with draw_labels,
                                 // labels
  const int64_t* known_ids;      // [known_size]
  const int64_t* draw_labels;    // [m] or nullptr, when shared and P = 1: what each draw is, instead of its id
  const int64_t* row_labels;     // [B]: a draw of this label is masked in the row
  ScalarTable bias;              // [C] or absent
  const void* draw_bias;         // A [m] or nullptr, GPU only: bias of each draw when shared
  ScalarTable class_weight;      // [C] or absent
  const void* target_weight;     // A [B, P] or nullptr: shares of the targets instead of 1 / #targets
  const void* draw_inverse;      // A [m] or nullptr: 1 / |w| of each draw, when shared and normalize
  MarginParams margin;           // with has_margin
  void* loss;                    // A [B]
  void* lse;                     // A [B]
  void* denom;                   // A [B]
  void* coef_loss;               // A [B, P + m], rows `coefs.stride` apart; nullptr without gradient
  void* d_loss;                  // A [B, d]       likewise; when shared, the targets' part only
  void* coef_lse;                // A [B, P + m]   nullptr if the gradient of lse is not needed
  void* d_lse;                   // A [B, d]
  void* signs;                   // A [B, P + m]: scratch of the GPU kernels, when absolute or normalize, and need_grad
  void* radial;                  // A [B, P]: scratch of the GPU kernels, with a margin and need_grad
  DrawParts parts_loss;          // coef_loss of the draws in two parts, when shared
  DrawParts parts_lse;           // coef_lse likewise
  LossMeanParams mean;           // `arrived` set: the kernel makes the mean, too
  CoefLayout coefs;
  int64_t batch, num_targets, num_samples, dim, num_classes, ignore_index, known_size;
  double scale, label_smoothing, log_num_samples;  // log m, 0 for m = 0
  DType dtype;
  bool shared, absolute, normalize, has_margin, need_grad, debug;
};

SX_DECLARE_LAUNCHER(launch_sampled_softmax, SampledSoftmaxParams)

// ISA bodies of the forward, float/half/bfloat16 storage; rows [begin, end).
namespace cpu {
void sampled_softmax_rows_avx2(const SampledSoftmaxParams& params, int64_t begin, int64_t end);
void sampled_softmax_rows_avx512(const SampledSoftmaxParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
