// What fused losses share: the reduction over the batch, and a backward that only scales what the forward kept.
// A = accumulation type (float, or double for double storage).
//
// A forward keeps, for every row b and entry k (its P targets, then its m draws),
//   coef_loss = d loss_b / d (h_b . w_k)   and   d_loss = d loss_b / d h_b,
// and the same of a second output, lse, where the loss has one. The backward multiplies them by the upstream gradients.
//
// A row without a loss (an ignored target) has no part in a gradient, whatever numbers its h or the class rows hold:
// its d_hidden is 0, and products over the batch read `clean_hidden`, because 0 * nan is nan.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

constexpr int64_t kPadding = -100;  // pads rows of a [B, P] target

enum class Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

struct LossMeanParams {
  const void* row_loss;  // A [B]
  const void* denom;     // A [B]
  void* loss;            // A [1]
  void* factor;          // A [1]: d loss / d row_loss
  int64_t batch;
  bool mean, double_acc;  // a mean, or a sum; A is double
};

struct LossBwdParams {
  const void* grad_loss;  // A [B], or [1] of a reduced loss
  const void* grad_lse;   // A [B] or nullptr
  const void* factor;     // A [1]: d loss / d row_loss of a reduced loss, else nullptr
  const void* coef_loss;  // A [B, P + m]
  const void* d_loss;     // A [B, d]
  const void* coef_lse;   // A [B, P + m], with grad_lse
  const void* d_lse;      // A [B, d], with grad_lse
  const void* denom;      // A [B]: 0 for a row without a loss
  const void* hidden;     // [B, d] in `dtype`, with clean_hidden
  void* coef_target;      // A [B, P]
  void* coef_draw;        // A [B, m]; the CPU side takes nullptr for "not wanted"
  void* d_hidden;         // [B, d] in `dtype`
  void* clean_hidden;     // A [B, d] or nullptr: hidden_factor * hidden, 0 in rows without any gradient
  double hidden_factor;
  int64_t batch, num_targets, num_samples, dim;
  DType dtype;
};

// Rows of shared draws. Not aten::index_select: on a device an id out of range stops the process there.
struct GatherRowsParams {
  const void* weight;  // [C, d] in `dtype`
  const int64_t* ids;  // [n]
  void* rows;          // A [n, d]; a row of nan for an id out of range, which only a device's ids can be
  int64_t count, dim, num_classes;
  DType dtype;
};

namespace cpu {
// to[i] += x[i]
void add_into(bool double_acc, const void* x, int64_t n, void* to);
// sums[j] = factor * the sum of column j of x [rows, columns], whose rows are `stride` numbers apart.
void column_sums(bool double_acc, const void* x, int64_t rows, int64_t columns, int64_t stride, double factor,
                 void* sums);
}  // namespace cpu

SX_DECLARE_LAUNCHER(launch_gather_rows, GatherRowsParams)
SX_DECLARE_LAUNCHER(launch_loss_mean, LossMeanParams)
SX_DECLARE_LAUNCHER(launch_loss_bwd, LossBwdParams)

}  // namespace samplex
