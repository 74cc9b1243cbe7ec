// Feature maps phi(u) of rows u [d], so that phi(c) . phi(h) is, or estimates without bias, a kernel of c and h:
//
//   fourier    D^(-1/2) [cos(w_1 . u) ... cos(w_D . u), sin(w_1 . u) ... sin(w_D . u)]
//   positive   D^(-1/2) [exp(w_k . u - decay |u|^2 + shift)]
//   quadratic  [sqrt(alpha) u_i^2 for all i, sqrt(2 alpha) u_i u_j for i < j in rows, 1]
//
// The backward of the first two goes through coefficients a [B, D], d_x = a W - 2 decay (sum a) x and d_W = a^T x,
// which follow from the features themselves without another sin or exp:
//
//   fourier    a = sin_grad * cos_feature - cos_grad * sin_feature
//   positive   a = grad * feature
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

enum class RffKind : int { kFourier = 0, kPositive = 1, kQuadratic = 2 };

// Of the quadratic map: what a block of the GPU keeps of a row in its backward.
constexpr int64_t kRffMostQuadratic = 1024;
// Frequencies in one panel of the packed table of the CPU kernels.
constexpr int64_t kRffPanel = 16;

inline namespace SX_ISA_NS {

// Numbers in phi(u).
SX_HOST_DEVICE constexpr int64_t rff_num_numbers(RffKind kind, int64_t dim, int64_t num_features) {
  if (kind == RffKind::kQuadratic) return dim * (dim + 1) / 2 + 1;
  return kind == RffKind::kFourier ? 2 * num_features : num_features;
}

constexpr int64_t rff_panels(int64_t columns) { return (columns + kRffPanel - 1) / kRffPanel; }
constexpr int64_t rff_packed_size(int64_t dim, int64_t num_features) {
  return rff_panels(num_features) * kRffPanel * dim;
}

}  // namespace SX_ISA_NS

// A is float, or double where the rows are.
struct RffParams {
  const void* x;      // [B, d]
  const void* omega;  // A [D, d]; nullptr for quadratic
  void* features;     // A [B, F] out
  int64_t batch, dim, num_features;
  double decay, shift;  // positive
  double alpha;         // quadratic
  RffKind kind;
  DType dtype;  // of x
  bool stream;  // CPU only: write past the cache; features is 64-byte aligned and D % 16 == 0
};

struct RffBwdParams {
  const void* grad;      // A [B, F]
  const void* features;  // A [B, F]; not read by quadratic
  const void* x;         // [B, d]
  const void* omega;     // A [D, d]
  void* d_x;             // [B, d] out, the type of x; nullptr: not asked for
  void* coefs;           // A [B, D] out; nullptr: not asked for
  int64_t batch, dim, num_features;
  double decay, alpha;
  RffKind kind;
  DType dtype;
};

// CPU kernels: rows [begin, end), and of the frequencies panels [first, last).
struct RffRange {
  int64_t begin, end, first, last;
};

SX_DECLARE_LAUNCHER(launch_rff, RffParams)
SX_DECLARE_LAUNCHER(launch_rff_bwd, RffBwdParams)

namespace cpu {

// Features of rows [begin, end) by the calling thread, for kernels that use features in passing. `packed` holds
// rff_packed_size(d, D) numbers of type A, filled once by rff_pack (quadratic: nullptr). The bits of a row do not
// depend on the rows around it.
void rff_pack(const RffParams& params, void* packed);
void rff_rows(const RffParams& params, const void* packed, int64_t begin, int64_t end);

// ISA bodies. Panels of the transposed table: `packed` is [panels, d, 16] (forward) or [panels, D, 16] (backward).
void rff_pack_avx2(const RffParams& params, void* packed, int64_t first, int64_t last);
void rff_pack_avx512(const RffParams& params, void* packed, int64_t first, int64_t last);
void rff_range_avx2(const RffParams& params, const void* packed, const RffRange& range);
void rff_range_avx512(const RffParams& params, const void* packed, const RffRange& range);
void rff_bwd_range_avx2(const RffBwdParams& params, const void* packed, int64_t begin, int64_t end);
void rff_bwd_range_avx512(const RffBwdParams& params, const void* packed, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
