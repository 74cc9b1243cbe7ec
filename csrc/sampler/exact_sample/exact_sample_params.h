// exact_sample: draws from distributions over all classes that follow the logits s = scale * (h . w + b) themselves.
//
//   kind      weight of a class
//   softmax   exp s
//   absolute  exp |s|
//   quartic   alpha s^4 + 1
//
// Classes are taken in blocks of 256. Of a row only the log weight of each block is kept, never [B, C]:
//
//   exact_mass      a chunk of products h . w -> the log weights of its blocks, without the excluded classes
//   exact_product_mass  the same of all classes from 16-bit factors, products and all: a GPU has tensor cores for it
//   exact_blocks    log of the sum over all blocks; for every draw a block, by inversion
//   exact_draw      the logits of those blocks once more -> a class in the block, by inversion
//   exact_log_prob  log-probabilities of given ids
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/launchers.h"

namespace samplex {

constexpr int64_t kExactBlock = 256;

enum class ExactKind : int { kSoftmax = 0, kAbsolute = 1, kQuartic = 2 };

struct ExactLaw {
  ExactKind kind;
  bool is_double;  // logits are double, else float: A
  double scale, alpha;
  int64_t num_classes;
  int64_t row;             // the first row of this call: the rows of `exclude` and of the random numbers begin here
  const int64_t* exclude;  // [R, P] or [nnz], rows ascending, -1 ignored; nullptr: none
  const int64_t* exclude_offsets;       // [R + 1], or nullptr for [R, P]
  int64_t exclude_width, exclude_size;  // P (0 with offsets), number of entries
};

// Rows of h and of the classes.
struct ExactTable {
  const void* hidden;  // A [B, d]
  const void* weight;  // T [C, d]
  ScalarTable bias;    // [C], or absent
  DType dtype;         // T
  int64_t batch, dim;
  bool wide;  // rows may be read 16 bytes at a time
};

struct ExactMassParams {
  ExactLaw law;
  const void* dots;      // A [B, count], rows `stride` numbers apart
  const void* bias;      // A [count], or nullptr
  int64_t batch, count;  // B, classes of the chunk
  int64_t stride;        // at least count; on the CPU equal to it
  int64_t first;         // its first class, a multiple of kExactBlock
  int64_t blocks;        // of all classes
  bool wide;             // rows of dots and the bias may be read 16 bytes at a time
  double* mass;          // [B, blocks] out, the columns of the chunk
};

// GPU only. `table`: hidden is T [B, parts d], 16 bits as weight is; its parts stand for their sum.
struct ExactProductMassParams {
  ExactLaw law;  // softmax or absolute
  ExactTable table;
  int64_t parts, blocks;
  double* mass;  // [B, blocks] out
};

struct ExactBlocksParams {
  const double* mass;  // [B, blocks]
  const int64_t* key;  // [2] seed, offset
  int64_t batch, blocks, num_samples, row;
  uint64_t* running;  // [B, blocks] scratch of the GPU kernel; the CPU has its own
  double* lse;        // [B] out
  int64_t* place;     // [B, m] out: block * B + row of the call
};

struct ExactDrawParams {
  ExactLaw law;
  ExactTable table;
  int64_t num_samples;
  const double* lse;      // [B]
  const int64_t* key;     // [2]
  const int64_t* sorted;  // [B * m] places, ascending
  const int64_t* order;   // [B * m] their positions in [B, m]
  int64_t window;         // GPU only: sorted draws of a thread block
  int64_t* ids;           // [B, m] out
};

struct ExactLogProbParams {
  ExactLaw law;
  ExactTable table;
  int64_t num_ids;
  const double* lse;   // [B]
  const int64_t* ids;  // [B, n]
  float* log_q;        // [B, n] out
};

SX_DECLARE_LAUNCHER(launch_exact_mass, ExactMassParams)
SX_DECLARE_CUDA_LAUNCHER(launch_exact_product_mass, ExactProductMassParams)
SX_DECLARE_LAUNCHER(launch_exact_blocks, ExactBlocksParams)
SX_DECLARE_LAUNCHER(launch_exact_draw, ExactDrawParams)
SX_DECLARE_LAUNCHER(launch_exact_log_prob, ExactLogProbParams)

namespace cpu {
// Bodies by ISA, float logits: rows [begin, end); sorted positions [begin, end).
void exact_mass_rows_avx2(const ExactMassParams& params, int64_t begin, int64_t end);
void exact_mass_rows_avx512(const ExactMassParams& params, int64_t begin, int64_t end);
void exact_draw_range_avx2(const ExactDrawParams& params, int64_t begin, int64_t end);
void exact_draw_range_avx512(const ExactDrawParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
