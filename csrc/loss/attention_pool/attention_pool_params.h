// Params of attention pooling and of its backward. A = accumulation type (float, or double for double storage).
//
// Row b has T tokens; one with a negative id is padding: it takes no part, and no table row is read for it.
//   a_i = E_i . p,   g_i = E_i . v,   q = softmax(a),   f_b = sum_i q_i g_i
// A row of padding alone has f = 0 and no gradient. With d_i = g_i - g_ref, the values seen from the token with the
// largest a (the reference), and F = sum_i q_i d_i:
//   f = g_ref + F
//   d f / d g_i = q_i
//   d f / d a_i = q_i (d_i - F) = sum_j q_i q_j (g_i - g_j)       =: c_i
// q_i (g_i - f) is the same number on paper, but where one token has nearly all mass, g_ref - f is a difference of
// equal numbers: the coefficient of the reference token would be rounding noise, many orders of magnitude above the
// truth. Seen from the reference every coefficient keeps its relative precision, as in the sum over pairs.
//   d E_s = sum over tokens with id s of q_i v + c_i p            (two numbers per token)
//   d v   = sum_i q_i E_i,   d p = sum_i c_i E_i                  (kept by the forward, so that no row is read again)
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

struct AttentionPoolParams {
  const void* table;   // [S, d]: E
  const int64_t* ids;  // [B, T]; negative: padding
  const void* query;   // A [d]: p
  const void* value;   // A [d]: v
  void* pooled;        // A [B]: f
  void* coefs;         // A [B, T, 2]: q_i, c_i; nullptr without gradient
  void* sums;          // A [B, 2, d]: sum q_i E_i, sum c_i E_i; nullptr if p and v need no gradient; with coefs only
  int64_t batch, length, dim, num_rows;
  DType dtype;
  bool debug;
};

// scaled[b, i] = grad[b] * coefs[b, i]; a zero gradient wins over nan.
struct AttentionPoolScaleParams {
  const void* grad;   // A [B]
  const void* coefs;  // A [B, T, 2]
  void* scaled;       // A [B, T, 2]
  int64_t batch, length;
  bool double_acc;  // A is double
};

// rows[i] = pairs[i, 0] v + pairs[i, 1] p, for i < count[0]
struct AttentionPoolRowsParams {
  const void* pairs;     // A [n, 2]
  const int64_t* count;  // [1]
  const void* query;     // A [d]
  const void* value;     // A [d]
  void* rows;            // A [n, d]
  int64_t capacity, dim;
  bool double_acc;
  bool stream;  // CPU only: write past the cache; rows is 64-byte aligned and d % 16 == 0
};

// The GPU sums the rows of a batch in parts of at least this many, and then the parts; at most kPoolParts of them.
constexpr int64_t kPoolPartRows = 32, kPoolParts = 256;

constexpr int64_t attention_pool_parts(int64_t batch) {
  const int64_t parts = (batch + kPoolPartRows - 1) / kPoolPartRows;
  return parts < 1 ? 1 : parts < kPoolParts ? parts : kPoolParts;
}

// d_value = sum_b grad[b] sums[b, 0], d_query = sum_b grad[b] sums[b, 1], in double: on the CPU in the order of the
// rows, on the GPU in that of the rows of each part, then of the parts
struct AttentionPoolVectorsParams {
  const void* grad;  // A [B]
  const void* sums;  // A [B, 2, d]
  double* partial;   // [parts, 2, d] scratch of the GPU where there are several
  void* d_query;     // A [d]
  void* d_value;     // A [d]
  int64_t batch, dim;
  bool double_acc;
};

SX_DECLARE_LAUNCHER(launch_attention_pool, AttentionPoolParams)
SX_DECLARE_LAUNCHER(launch_attention_pool_scale, AttentionPoolScaleParams)
SX_DECLARE_LAUNCHER(launch_attention_pool_rows, AttentionPoolRowsParams)
SX_DECLARE_LAUNCHER(launch_attention_pool_vectors, AttentionPoolVectorsParams)

// ISA bodies, float accumulation: batch rows, and gradient rows, [begin, end).
namespace cpu {
void attention_pool_range_avx2(const AttentionPoolParams& params, int64_t begin, int64_t end);
void attention_pool_range_avx512(const AttentionPoolParams& params, int64_t begin, int64_t end);
void attention_pool_rows_avx2(const AttentionPoolRowsParams& params, int64_t begin, int64_t end);
void attention_pool_rows_avx512(const AttentionPoolRowsParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
