// midx_sample: draws from an inverted multi-index (Babenko & Lempitsky 2012; Chen et al. 2021).
//
// Every class is in one of K x K cells, (k1, k2). With weights a, b [K] of a query, weights omega [K, K] of the cells
// and integer units of the classes, a class y of cell (k1, k2) has
//
//   w(y) = a[k1] b[k2] omega[k1, k2] units(y) / units(cell)        Z = sum of w = sum over k1 of a[k1] mass[k1]
//   q(y) = (1 - epsilon) w(y) / Z + epsilon / C                    mass[k1] = sum over k2 of omega[k1, k2] b[k2]
//
// A draw takes one uniform number through four inversions: the uniform part or the index, k1, k2, the class.
// One POD serves drawing (`key` set) and the log-probability of given ids (`given` set).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launchers.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {

constexpr int64_t kMidxMostCodes = 2048;
constexpr int64_t kMidxMostUnits = int64_t(1) << 62;  // of all classes
constexpr int kMidxLanes = 32;                        // sums over codes run in so many lanes, on every backend
constexpr int kMidxGroup = 8;                         // lanes whose sums are added one after another

// One excluded id of a row.
struct MidxGone {
  int32_t cell;   // its cell; -1: repeated, or not a class
  int32_t first;  // bit 0: the first of its cell in this row's list; bit 1: the first of its k1
  float omega;    // weight of the cell without the row's excluded ids; with bit 0
  float mass;     // mass[k1] without them; with bit 1
};
static_assert(sizeof(MidxGone) == 16, "an int64 [nnz, 2] tensor holds nnz entries");

struct MidxSampleParams {
  StaticSampleParams
      uniform;             // distribution kUniform: batch, num_samples, num_classes, key, given, exclude, ids, log_q
  int64_t codes;           // K
  const float* weights;    // [B, 2, K] a and b
  const float* mass;       // [B, K]
  const float* omega;      // [K, K]
  const int32_t* cell;     // [C] k1 * K + k2 of each class
  const int32_t* place;    // [C] of each class in `members`
  const int32_t* members;  // [C] classes, ordered by cell
  const int32_t* starts;   // [K * K + 1] where the members of each cell begin
  const int64_t* prefix;   // [C + 1] running sums of the units of the members; nullptr: one unit each
  double epsilon;
  bool stratified;  // draw j takes its uniform number from part j of m equal parts of [0, 1)
  MidxGone* gone;   // [nnz] scratch, with `exclude` only
};

SX_DECLARE_LAUNCHER(launch_midx_sample, MidxSampleParams)

namespace cpu {
// Bodies by ISA: the entries of `gone` of rows [begin, end); draws, or given ids, [first, last) of row b.
void midx_gone_rows_avx2(const MidxSampleParams& params, int64_t begin, int64_t end);
void midx_gone_rows_avx512(const MidxSampleParams& params, int64_t begin, int64_t end);
void midx_draw_row_avx2(const MidxSampleParams& params, int64_t b, int64_t first, int64_t last);
void midx_draw_row_avx512(const MidxSampleParams& params, int64_t b, int64_t first, int64_t last);
}  // namespace cpu

}  // namespace samplex
