// Params of the passes over a chunk of exact logits: what a full softmax, its gradient and a top-k need of classes
// [first, first + count), once the products h . w of the chunk are there (from a GEMM). No pass needs all classes at
// once, so no [B, C] ever exists.
//
//   logit        s = scale * (dot + bias), |s| with `absolute`
//   predict_lse  lse = log(exp(lse) + sum exp s); target logits that lie in the chunk; sums of class_weight * s
//   predict_grad dot := d loss / d dot, where
//                loss_b = coef_b lse_b - sum over targets of target_coef s - smooth_b sum of class_weight * s;
//                on a GPU also as factors of 16 bits: `parts`
//   predict_topk the k largest of what is held and the chunk: descending, equal ones by id, a nan counts as the largest
//
//   predict_dots h . w of given classes of each row, for candidates
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "common/panel_layout.h"

namespace samplex {

// Entries that predict_topk keeps of a row.
constexpr int64_t kPredictMostK = 1024;

// How a row is cut on a GPU: `parts` blocks, each with `size` columns but the last.
struct PredictCut {
  int64_t parts, size;
};

// Columns of a part: a multiple of the first; not fewer than the second where one row could use more blocks.
constexpr int64_t kPredictLseWarp = 2048;  // columns whose sum is one number of PredictLseParams::sums
constexpr int64_t kPredictLseUnit = 8 * kPredictLseWarp, kPredictUnit = 4096;
constexpr int64_t kPredictTopkLeast = 8192;
// Blocks that fill a GPU. What is computed does not depend on it, to the bit.
constexpr int64_t kPredictBlocks = 1024;

inline PredictCut predict_cut(int64_t batch, int64_t count, int64_t unit, int64_t least) {
  constexpr int64_t kMostColumns = int64_t(1) << 30;  // a place in a part is 32 bits
  const auto ratio = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int64_t parts = ratio(kPredictBlocks, batch);
  if (parts > ratio(count, least)) parts = ratio(count, least);
  if (parts < ratio(count, kMostColumns)) parts = ratio(count, kMostColumns);
  const int64_t size = ratio(ratio(count, parts), unit) * unit;
  return {ratio(count, size), size};
}

struct PredictChunk {
  void* dots;        // A [B, count], rows `stride` numbers apart, or [count, B] with `by_class`
  const void* bias;  // A [count], or nullptr
  int64_t batch, count;
  int64_t stride;  // at least count; on the CPU equal to it
  int64_t first;   // class of the first column
  double scale;
  bool absolute;
  bool is_double;  // A is double, else float
  bool by_class;   // CPU only, predict_lse and predict_grad

  // Column of a class, -1 for classes before the chunk; no difference that could overflow.
  SX_HOST_DEVICE int64_t column_of(int64_t id) const { return id < first ? -1 : id - first; }
};

struct PredictLseParams {
  PredictChunk chunk;
  const int64_t* target;     // [B, P]; outside [0, C): no target
  const void* class_weight;  // A [count], or nullptr for 1
  double* lse;               // [B] in and out; -inf before the first chunk
  void* positive;            // A [B, P]: written where the target lies in the chunk
  double* total;             // [B] in and out: sum of class_weight * s; nullptr: not asked for
  int64_t num_targets;
  // GPU only.
  PredictCut cut;
  void* sums;  // A [B, ceil(count / kPredictLseWarp), 3] scratch: largest logit, sum of exponentials, total
};

struct PredictGradParams {
  PredictChunk chunk;
  const int64_t* target;     // [B, P]
  const void* class_weight;  // A [count], or nullptr for 1
  const double* lse;         // [B], over all classes
  const void* coef;          // A [B]
  const void* target_coef;   // A [B, P]
  const void* smooth;        // A [B], or nullptr for 0
  int64_t num_targets;
  // GPU only.
  PredictCut cut;
  void* parts;          // bf16 [2 B, parts_width] or nullptr: in place of dots; rows [B, 2 B) hold what rounding left
  int64_t parts_width;  // at least count
};

struct PredictTopkParams {
  PredictChunk chunk;
  void* values;  // A [B, k] in and out; the first min(k, first) are held
  int64_t* ids;  // [B, k] in and out
  int64_t k;
  // GPU only.
  PredictCut cut;
  void* part_values;  // A [B, parts, k] scratch, where there are several parts: the k largest of each, as in `values`
  int64_t* part_ids;  // [B, parts, k] scratch; -1 for none
};

struct PredictDotsParams {
  const void* hidden;  // [B, d]
  const void* weight;  // [C, d]
  const int64_t* ids;  // [B, n]; outside [0, C): none
  void* dots;          // A [B, n] out; -inf for none
  int64_t batch, num_ids, dim, num_classes;
  DType dtype;
};

SX_DECLARE_LAUNCHER(launch_predict_dots, PredictDotsParams)
SX_DECLARE_LAUNCHER(launch_predict_lse, PredictLseParams)
SX_DECLARE_LAUNCHER(launch_predict_grad, PredictGradParams)
SX_DECLARE_LAUNCHER(launch_predict_topk, PredictTopkParams)

namespace cpu {
// out = (or, with `add`, +=) a times b: packs b into panels, then multiplies. The bits do not depend on the threads.
void launch_predict_product(const PackPanelsParams& b, const PanelProductParams& product);
void predict_pack_units_avx2(const PackPanelsParams& params, int64_t begin, int64_t end);
void predict_pack_units_avx512(const PackPanelsParams& params, int64_t begin, int64_t end);
void predict_product_tiles_avx2(const PanelProductParams& params, int64_t begin, int64_t end);
void predict_product_tiles_avx512(const PanelProductParams& params, int64_t begin, int64_t end);

// Rows [begin, end) of the batch, float accumulation; ISA bodies.
void predict_dots_rows_avx2(const PredictDotsParams& params, int64_t begin, int64_t end);
void predict_dots_rows_avx512(const PredictDotsParams& params, int64_t begin, int64_t end);
void predict_lse_rows_avx2(const PredictLseParams& params, int64_t begin, int64_t end);
void predict_lse_rows_avx512(const PredictLseParams& params, int64_t begin, int64_t end);
void predict_grad_rows_avx2(const PredictGradParams& params, int64_t begin, int64_t end);
void predict_grad_rows_avx512(const PredictGradParams& params, int64_t begin, int64_t end);
void predict_topk_rows_avx2(const PredictTopkParams& params, int64_t begin, int64_t end);
void predict_topk_rows_avx512(const PredictTopkParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
