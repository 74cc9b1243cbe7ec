// static_sample: draws from distributions that do not look at the query. Uniform, log-uniform (closed form), alias
// table.
//
// One POD serves drawing (`key` set) and the log-probability of given ids (`given` set).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gather_rows.h"
#include "common/launchers.h"

namespace samplex {

enum class StaticLaw : int { kUniform = 0, kLogUniform = 1, kAlias = 2 };

// One column of an alias table. A draw touches this and nothing else: 32 bytes, one sector of GPU memory.
struct alignas(16) AliasEntry {
  uint64_t threshold;  // the column's own class if a 64-bit uniform is below this, else `alias`
  int64_t alias;
  double log_weight;        // of the column's own class; -inf for weight zero
  double log_weight_alias;  // of `alias`
};
static_assert(sizeof(AliasEntry) == 32, "an int64 [C, 4] tensor holds C entries");

// What is left of a distribution in one row once the row's excluded ids are gone.
struct StaticRow {
  int64_t begin, end;  // the row's ids inside `exclude`, those outside [0, C) cut off at both ends
  int64_t left;        // uniform: classes left; alias: integer weight left; log-uniform: classes left
  double mass;         // log-uniform: sum of log((k+2)/(k+1)) over what is left
  double log_mass;     // log_q = log_weight - log_mass
};
static_assert(sizeof(StaticRow) == 40, "an int64 [B, 5] tensor holds B rows");

struct StaticSampleParams {
  StaticLaw law;
  int64_t batch, num_samples, num_classes;  // B, m, C
  const int64_t* key;                       // [2] seed, offset; nullptr with `given`
  bool key_row;                             // whether a third number follows: that of the first row
  const int64_t* given;                     // [B, m] ids to give the log-probability of; nullptr to draw
  const AliasEntry* table;                  // [C], alias only
  const int64_t* prefix;                    // [C + 1] running sums of the integer weights, alias only
  const int64_t* exclude;                   // [B, P] or [nnz], rows ascending, -1 ignored; nullptr: none
  const int64_t* exclude_offsets;           // [B + 1] or nullptr for [B, P]
  int64_t exclude_width, exclude_size;      // P (0 with offsets), nnz
  StaticRow* rows;                          // [B] scratch, with `exclude` only
  StaticRow whole;                          // the distribution with nothing excluded; see whole_row
  int64_t* ids;                             // [B, m] out, nullptr with `given`
  float* log_q;                             // [B, m] out
  const int64_t* scored;                    // [num_scored] further ids to give the log-probability of, without exclude
  float* scored_log_q;                      // [num_scored] out; nan of an id out of range
  int64_t num_scored;
  GatherRowsParams gather;  // GPU only, n > 0: what the one row of draws reads of a table, besides
};

SX_DECLARE_LAUNCHER(launch_static_sample, StaticSampleParams)

namespace cpu {
// Bodies by ISA: draws (or given ids) begin <= i < end of the flat [B, m] result.
void static_sample_range_avx2(const StaticSampleParams& params, int64_t begin, int64_t end);
void static_sample_range_avx512(const StaticSampleParams& params, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace samplex
