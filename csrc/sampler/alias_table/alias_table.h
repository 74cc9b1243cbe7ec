// Host-side builder of the alias tables that static_sample draws from.
#pragma once

#include <cstdint>

#include "common/export.h"

namespace samplex {

// weights [C] >= 0, finite, not all zero  ->  table [C, 4] (C AliasEntry), prefix [C + 1]. O(C), no randomness.
//
// Weights become integers first: times the power of two that puts their sum just below 2^61, rounded, at least 1 where
// the weight is positive. From there everything is integer arithmetic: the table, the prefix sums, the mass left after
// an exclusion. Integer counts with a sum below 2^53 are kept exactly. Throws std::runtime_error on bad weights.
SX_EXPORT void build_alias(const double* weights, int64_t num_classes, int64_t* table, int64_t* prefix);

// One table for each row of a CSR of weights: row c owns weights, and table entries, offsets[c] .. offsets[c + 1], and
// prefix sums from offsets[c] + c on, one more than it has weights. An empty row has the one prefix sum 0. `alias`
// counts from the row's first entry. The weights of a row that is not empty must not all be zero.
SX_EXPORT void build_alias_rows(const double* weights, const int64_t* offsets, int64_t rows, int64_t* table,
                                int64_t* prefix);

}  // namespace samplex
