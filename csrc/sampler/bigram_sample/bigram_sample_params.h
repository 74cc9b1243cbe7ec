// bigram_sample: draws from P(k | context) = (1 - b) P(k after context) + b P(k), the two distributions as alias
// tables.
//
// The pairs (context, class) with a positive count lie in CSR: context c owns entries offsets[c] .. offsets[c + 1] of
// pair_ids, pair_table and, shifted by c because each context has one prefix sum more than it has pairs, pair_prefix.
// One POD serves drawing (`key` set) and the log-probability of given ids (`given` set).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launchers.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {

// The distribution of one row, once its context is looked up and its excluded ids are gone.
struct BigramRow {
  StaticRow unigram;     // what is left of the unigram distribution
  int64_t begin, count;  // the context's pairs
  int64_t prefix;        // where its prefix sums begin
  int64_t left;          // integer weight left of the context's distribution
  double backoff;        // b; 1 for a context without pairs
  double pair_unit;      // (1 - b) / sum of the context's weights
  double unigram_unit;   // b / sum of the unigram weights
  double pair_mass,
      log_mass;  // mass left of the context's part; log of the mass left of both, 0 if nothing is excluded
};
static_assert(sizeof(BigramRow) == 14 * 8, "an int64 [B, 14] tensor holds B rows");

struct BigramSampleParams {
  StaticSampleParams
      unigram;              // distribution kAlias: batch, num_samples, key, given, table, prefix, exclude, ids, log_q
  int64_t num_contexts;     // N
  int64_t num_pairs;        // nnz
  const int64_t* context;   // [B]; outside [0, N): the unigram distribution
  const int64_t* offsets;   // [N + 1]
  const int64_t* pair_ids;  // [nnz] classes, ascending in each context
  const AliasEntry* pair_table;  // [nnz], one alias table a context; `alias` counts from the context's first pair
  const int64_t* pair_prefix;    // [nnz + N] running sums of the integer weights, from 0 in each context
  const double* backoff;         // [N]
  BigramRow* rows;               // [B] scratch
};

SX_DECLARE_LAUNCHER(launch_bigram_sample, BigramSampleParams)

}  // namespace samplex
