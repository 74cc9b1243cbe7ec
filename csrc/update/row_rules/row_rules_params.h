// Row optimizers: an update rule applied to the touched rows of a [C, d] parameter and of its [C] bias.
//
// The gradient rows are given (row_ids, rows), or summed on the way: entries (ids, coefficients, source rows) of a loss
// backward as in row_reduce, sorted by id; a segment of equal ids is one row, whose sum lives in a small buffer or in
// registers; sums of pieces of long rows on a GPU are in memory. Segments are disjoint rows: the same bits for any
// number of threads. A = accumulation type.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"
#include "update/row_reduce/row_reduce_params.h"

namespace samplex {

enum class RowRuleKind : int { kSgd = 0, kMomentum = 1, kAdagrad = 2, kRowAdagrad = 3, kAdam = 4 };

// What torch.optim does with these is in row_rules_math.h.
struct RowRule {
  RowRuleKind kind;
  bool nesterov;
  double lr;            // Adagrad: after its decay; Adam: over 1 - beta1^t
  double weight_decay;  // added to the gradient, times the weight
  double keep;          // what is left of the weight before the update: 1 - lr * decoupled weight decay
  double eps;
  double beta1;   // momentum; Adam's first
  double beta2;   // Adam's second
  double second;  // Adam: 1 / sqrt(1 - beta2^t)
  bool skip;      // the update is left out: it holds an inf or nan
};

// The numbers of a step on the device, where a captured CUDA graph reads new ones in every replay: `live_rule` of
// row_rules_math.h makes the rule of the step there.
struct RowLive {
  RowRule* rule;           // where it goes; nullptr: the rule is given, and nothing below is
  float* step;             // [1], steps so far; counts this one unless it is skipped
  const void* lr;          // [1] float or double; nullptr: that of the given rule
  const float* found_inf;  // [1]: not 0: skip; nullptr: never
  double decay, lr_decay;  // decoupled weight decay; Adagrad's
  bool lr_double;
};

struct RowTable {
  void* values;  // [C, d] in `dtype`; bias: [C]; nullptr: absent
  void* state0;  // A [C, d], or [C] of kRowAdagrad; nullptr if the rule keeps none
  void* state1;  // A [C, d], kAdam
  DType dtype;
  RowRule rule;  // with live.rule: its constants
  RowLive live;
};

struct RowRulesParams {
  RowTable weight, bias;  // bias with summed gradients only; its dtype is the weight's or A
  const int64_t* key;     // [2] seed, offset of stochastic rounding; nullptr: round to nearest
  int64_t first_row;      // of a table spread over ranks: stochastic rounding goes by the row of the whole table
  int64_t num_rows, dim;  // C, d
  // Summed gradients only: takes the part along the class row out of each sum, the gradient of a row on the sphere.
  bool project;
  // Gradients given:
  const int64_t* row_ids;  // [n] distinct; nullptr: row i is class i
  const void* rows;        // [n, d] in rows_dtype: the weight's dtype or A
  const int64_t* count;    // [1]: how many of the n rows there are; nullptr: all
  int64_t n;
  DType rows_dtype;
  // Gradients summed: sources, dim, num_rows and double_acc are set. Source rows in the weight's dtype or A.
  RowReduceParams entries;
};

namespace cpu {
void launch_row_rules_entries(const RowRulesParams& params);
// Bodies by ISA. `buffer` holds kUpdateBuffer * d numbers of type A.
constexpr int64_t kUpdateBuffer = 17;
void row_rules_range_avx2(const RowRulesParams& params, const RowReduceRange& range, void* buffer);
void row_rules_range_avx512(const RowRulesParams& params, const RowReduceRange& range, void* buffer);
void row_rules_rows_avx2(const RowRulesParams& params, int64_t begin, int64_t end, void* buffer);
void row_rules_rows_avx512(const RowRulesParams& params, int64_t begin, int64_t end, void* buffer);
// to[begin, end) = fp32 of numbers in fp16 or bf16
void widen_avx2(DType dtype, const void* from, float* to, int64_t begin, int64_t end);
void widen_avx512(DType dtype, const void* from, float* to, int64_t begin, int64_t end);
}  // namespace cpu

SX_DECLARE_LAUNCHER(launch_row_rules_rows, RowRulesParams)
// Before either of them, where live.rule is set.
SX_DECLARE_LAUNCHER(launch_row_rules_live, RowRulesParams)
// After the entries were sorted: entries.sorted and entries.order are set.
SX_DECLARE_CUDA_LAUNCHER(launch_row_rules_entries, RowRulesParams)

}  // namespace samplex
