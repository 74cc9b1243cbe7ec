// Params of the losses that are sums over entries: negative sampling (Bamler & Mandt 2020, Eq. 2 and 6), noise
// contrastive estimation (Gutmann & Hyvarinen 2010), one-vs-each (Titsias 2016), augment and reduce (Ruiz et al. 2018).
// A = accumulation type (float, or double for double storage).
//
// Entries of row b: its P targets (columns 0 .. P-1), then its m draws (columns P .. P+m-1).
//   s_k = scale * (h_b . w_k + bias_k),   v_k = 1 / (m q_k) of a draw
//   a_y = cw_y / #targets (cw = 1 without class weights),   a = sum_y a_y,   denom = a
// A padded target takes no part, nor does a masked draw: one of the row's known positives, and for the last two losses
// one of its targets. A row without targets is zero everywhere.
//   negative_sampling  sum_y a_y (softplus(-s_y) + reg (s_y + log q_y)^2) + a/m sum_k (softplus(s_k) + reg (s_k + log
//                      q_k)^2)
//   nce                sum_y a_y softplus(-(s_y - log m - log q_y)) + a sum_k softplus(s_k - log m - log q_k)
//   one_vs_each        sum_y a_y sum_k v_k softplus(s_k - s_y)
//   augment_reduce     a (log eta - 1 + ratio),   ratio = (sum_y exp(s_y - t) + sum_k v_k exp(s_k - t)) / eta, where
//                      t = sum_y a_y s_y / a is the target's score: with one target sum_y exp(s_y - t) = 1
// The first two need an entry's own score only; the last two need the targets' scores first, and give the targets their
// coefficients after the draws:
//   coef_loss_k = d loss / d (h . w_k),   d_loss = sum_k coef_loss_k w_k
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "loss/fused/fused_loss_params.h"

namespace samplex {

enum class EntryLoss : int64_t { kNegativeSampling = 0, kNce = 1, kOneVsEach = 2, kAugmentReduce = 3 };

// Augment and reduce: what a step makes of the numbers kept per example. log eta of those in `index` becomes
//   max(0, log((1 - rate) eta + rate R)),   R = eta * ratio
// A sum that overflowed counts as the largest that does not; nan leaves eta as it is. Where an index occurs twice, the
// larger result stays, whatever the order.
struct EntryExamples {
  const int64_t* index;       // [B], or nullptr if the loss has one `log_eta` per row, [B]
  void* log_eta;              // A [size], changed in place
  void* ratio;                // A [B]: of the loss; overwritten
  int64_t batch, size;        // one out of range makes the loss of its row nan, and changes nothing
  double log_keep, log_rate;  // log(1 - rate), log rate
  bool double_acc;            // A is double
};

struct EntryLossParams {
  const void* hidden;        // [B, d]
  const void* weight;        // [C, d]
  const int64_t* target;     // [B, P]; ignore_index, and kPadding where P > 1, are skipped
  const int64_t* ids;        // [B, m], or [m] when shared
  const void* log_q;         // A, shape of ids; negative_sampling reads it where reg != 0
  const void* target_log_q;  // A [B, P]; nce, and negative_sampling where reg != 0
  const void* log_eta;       // A [B], or [examples.size] with examples; augment_reduce
  EntryExamples examples;
  void* dots;                    // A [B, m], rows `dots_stride` apart: h_b . w_ids when shared, or nullptr; overwritten
  DrawProducts products;         // CPU only: the kernel makes dots, and what shared draws add to d_loss
  const int64_t* known_offsets;  // [B + 1] or nullptr: known positives of a row, masked where drawn
  const int64_t* known_ids;      // [known_size]
  ScalarTable bias;              // [C] or absent
  const void* draw_bias;         // A [m] or nullptr, GPU only: bias of each draw when shared
  ScalarTable class_weight;      // [C] or absent
  void* loss;                    // A [B]
  void* denom;                   // A [B]
  void* ratio;                   // A [B]: of augment_reduce, 1 for a row without targets
  void* coef_loss;               // A [B, P + m], rows `coefs.stride` apart; nullptr without gradient
  void* d_loss;                  // A [B, d]       likewise; when shared, the targets' part only
  void* scratch;                 // A [B, 2, P]: of the GPU kernels, for the losses that need the targets' scores first
  DrawParts parts;               // coef_loss of the draws in two parts, when shared
  LossMeanParams mean;           // of a reduced loss
  CoefLayout coefs;
  int64_t dots_stride;
  int64_t batch, num_targets, num_samples, dim, num_classes, ignore_index, known_size;
  double scale, reg, log_num_samples;  // log m, 0 for m = 0
  EntryLoss kind;
  DType dtype;
  bool shared, need_grad, debug;
};

SX_DECLARE_LAUNCHER(launch_entry_loss, EntryLossParams)
// After the loss; not where its last block has done it (mean.arrived).
SX_DECLARE_LAUNCHER(launch_entry_examples, EntryExamples)

// ISA bodies, float/half/bfloat16 storage; rows [begin, end).
namespace cpu {
void entry_loss_rows_avx2(const EntryLossParams& params, int64_t begin, int64_t end);
void entry_loss_rows_avx512(const EntryLossParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
