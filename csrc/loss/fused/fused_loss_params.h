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
#include "common/gather_rows.h"
#include "common/launchers.h"
#include "common/panel_layout.h"
#include "common/row_keys.h"

namespace samplex {

constexpr int64_t kPadding = -100;  // pads rows of a [B, P] target

enum class Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

// Rows of coefficients, `stride` numbers apart. Those of shared draws begin at multiples of 64 bytes: `gap` numbers
// before each row and what is left behind it belong to no entry, and are 0.
struct CoefLayout {
  int64_t stride, gap;
};

struct LossMeanParams {
  const void* row_loss;  // A [B]
  const void* denom;     // A [B]
  void* loss;            // A [1]
  void* factor;          // A [1]: d loss / d row_loss
  int64_t batch;
  bool mean, double_acc;  // a mean, or a sum; A is double
  // GPU only, [1]: blocks of the loss that are done, 0 before its kernel; the last one makes the mean. nullptr: a
  // kernel of its own makes it
  int* arrived;
};

// GPU only: coefficients of shared draws as sums of two numbers of type bf16, so that a GEMM on tensor cores takes them
// with 16 of their 24 digits: the number rounded, and the rest rounded. Columns from m to `width` are 0.
struct DrawParts {
  void* parts;  // bf16 [B, 2, width]; nullptr: not wanted
  int64_t width;
};

// CPU only: the products of shared draws with h and with their coefficients, as far as the loss makes them itself.
struct DrawProducts {
  const float* across;  // class rows of the draws as in GatherRowsParams; nullptr: torch makes the products
  const float* along;   // nullptr: no gradient of h is wanted
  const float* hidden;  // [B, d]
  float* dots;          // [B, m], rows `dots_stride` apart: h . w of the draws
  int64_t dots_stride;
  const float *coef_loss, *coef_lse;  // [B, m], rows `coef_stride` apart; those of the draws
  int64_t coef_stride;
  float *draws_loss, *draws_lse;  // [B, d]: coefficients times class rows; draws_lse may be nullptr
  int64_t batch, draws, dim;
};

// 1 / |w| of class rows; see inverse_norm in fused_loss_math.h.
struct RowNormsParams {
  const void* weight;  // [C, d]
  const int64_t* ids;  // [n]
  void* inverse;       // A [n]; nan for an id out of range
  int64_t n, dim, num_classes;
  DType dtype;
};

struct LossBwdParams {
  const void* grad_loss;  // A [B], or [1] of a reduced loss
  const void* grad_lse;   // A [B] or nullptr
  const void* factor;     // A [1]: d loss / d row_loss of a reduced loss, else nullptr
  const void* coef_loss;  // A [B, P + m], rows `coefs.stride` apart
  const void* d_loss;     // A [B, d]
  const void* coef_lse;   // A [B, P + m], with grad_lse
  const void* d_lse;      // A [B, d], with grad_lse
  // A [B, d] or nullptr: what shared draws add to d_loss and d_lse
  const void* draws_loss;
  const void* draws_lse;
  const void* denom;     // A [B]: 0 for a row without a loss
  const void* hidden;    // [B, d] in `dtype`, with clean_hidden
  void* coef_target;     // A [B, P]; nullptr, on a CPU: not wanted
  void* coef_draw;       // A [B, m]; nullptr: not wanted
  void* d_hidden;        // [B, d] in `dtype`; nullptr, on a CPU: not wanted
  void* clean_hidden;    // A [B, d] or nullptr: hidden_factor * hidden, 0 in rows without any gradient
  DrawParts draw_parts;  // GPU only: coef_draw in two parts; then clean_hidden is bf16 [B, 2, d], each row twice
  double hidden_factor;
  bool clean_panels;  // CPU only: clean_hidden is in panels (common/panels.h), 0 in columns from d on
  CoefLayout coefs;
  // Under a loss scale, else nullptr:
  const float* grad_scale;  // [1]: coefficients are divided by it; d_hidden is not
  float* found_inf;         // [1]: becomes 1 where the gradient of a class row may hold an inf or nan
  // GPU only:
  void* draw_coef;  // A [m] or nullptr: what the row of each shared draw is multiplied by after the sum over the
                    // batch. The upstream factor where coefficients go into the product as the forward left them
                    // (unit_coefs), else 1
  bool unit_coefs;
  void* draw_bias;        // A [m] or nullptr: coefficients of shared draws, summed over the batch
  RowKeys keys;           // of the targets, then of the draws; one for each of them if they are shared
  const int64_t* target;  // [B, P], with keys
  const int64_t* ids;     // [B, m] or [m], with keys
  bool shared;
  int64_t batch, num_targets, num_samples, dim;
  DType dtype;
};

namespace cpu {
// sums[j] = factor * the sum of column j of x [rows, columns], whose rows are `stride` numbers apart.
void column_sums(bool double_acc, const void* x, int64_t rows, int64_t columns, int64_t stride, double factor,
                 void* sums);

// Whether products of shared draws are made by kernels of ours, from panels: of floats, where there are vectors for
// them, or where calling torch would take longer than the product.
bool takes_panels(DType dtype, int64_t batch, int64_t draws, int64_t dim);
void launch_panel_product(const PanelProductParams& params);
// A loss makes the products for the batch rows that it works on. If these are too few for the threads, all products
// `come_apart`: draw_dots before the loss, draw_sums after it.
bool products_come_apart(const DrawProducts& x);
void launch_draw_dots(const DrawProducts& x);
void launch_draw_sums(const DrawProducts& x);
int64_t rows_at_once(const DrawProducts& x);  // batch rows that a thread takes at a time

// ISA bodies; float, half and bfloat16 storage
constexpr int64_t kGatherDraws = 16;  // draws that are gathered together: whole cache lines of `across`
void gather_rows_avx2(const GatherRowsParams& params, int64_t begin, int64_t end);  // groups of draws
void gather_rows_avx512(const GatherRowsParams& params, int64_t begin, int64_t end);
void loss_bwd_rows_avx2(const LossBwdParams& params, int64_t begin, int64_t end);
void loss_bwd_rows_avx512(const LossBwdParams& params, int64_t begin, int64_t end);
void panel_product_tiles_avx2(const PanelProductParams& params, int64_t begin, int64_t end);
void panel_product_tiles_avx512(const PanelProductParams& params, int64_t begin, int64_t end);
}  // namespace cpu

SX_DECLARE_LAUNCHER(launch_gather_rows, GatherRowsParams)
SX_DECLARE_LAUNCHER(launch_row_norms, RowNormsParams)
SX_DECLARE_LAUNCHER(launch_loss_mean, LossMeanParams)
SX_DECLARE_LAUNCHER(launch_loss_bwd, LossBwdParams)

}  // namespace samplex
