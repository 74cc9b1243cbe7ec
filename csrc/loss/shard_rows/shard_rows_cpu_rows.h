// Products of queries with the rows of a shard: the body shared by the scalar and the SIMD translation units. Local
// entries are listed first, so that foreign ones cost a look at their id and no more.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/shard_rows/shard_rows_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

inline void* shard_memory(int64_t bytes) { return std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64 + 64); }

// The result of an entry does not depend on the entries that it is computed with.
template <typename T>
void shard_logits_rows(const ShardLogitsParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t entries = p.num_targets + p.num_ids, count = (end - begin) * entries;
  const RowPrefetch ahead = row_prefetch<T>(p.dim);
  // Local rows of the range, and their places in it.
  int64_t* const rows = static_cast<int64_t*>(shard_memory(2 * count * int64_t(sizeof(int64_t))));
  int64_t* const places = rows + count;
  A* const h = static_cast<A*>(shard_memory(p.dim * int64_t(sizeof(A))));
  A* const logits = static_cast<A*>(p.logits) + begin * entries;
  int64_t local = 0;
  for (int64_t b = begin; b < end; ++b) {
    const auto list = [&](const int64_t* from, int64_t* to, int64_t n, int64_t first) {
      for (int64_t j = 0; j < n; ++j) {
        to[j] = shard_row(p, from[j]);
        rows[local] = to[j];
        places[local] = first + j;
        logits[first + j] = A(0);
        local += to[j] >= 0;
      }
    };
    const int64_t first = (b - begin) * entries;
    list(p.target + b * p.num_targets, p.target_rows + b * p.num_targets, p.num_targets, first);
    list(p.ids + b * p.num_ids, p.id_rows + b * p.num_ids, p.num_ids, first + p.num_targets);
  }
  const auto row_at = [&](int64_t i) { return static_cast<const T*>(p.weight) + rows[i] * p.dim; };
  for (int64_t i = 0; i < local && i < ahead.rows; ++i) prefetch_row(row_at(i), ahead);
  for (int64_t b = begin, i = 0; b < end; ++b) {
    const int64_t behind = (b - begin + 1) * entries;
    if (i == local || places[i] >= behind) continue;
    const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) h[c] = to_acc(hidden[c]);
    while (i < local && places[i] < behind) {
      int64_t n = 1;
      while (n < 4 && i + n < local && places[i + n] < behind) ++n;
      const T* four[4];
      A values[4];
      for (int64_t j = 0; j < 4; ++j) four[j] = row_at(i + (j < n ? j : n - 1));
      for (int64_t j = 0; j < n; ++j) {
        if (i + j + ahead.rows < local) prefetch_row(row_at(i + j + ahead.rows), ahead);
      }
      Rows<T>::dot4(h, four, p.dim, values);
      for (int64_t j = 0; j < n; ++j) logits[places[i + j]] = values[j] + shard_bias<A>(p, rows[i + j]);
      i += n;
    }
  }
  std::free(h);
  std::free(rows);
}

template <typename T>
void shard_hidden_rows(const ShardHiddenParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const RowPrefetch ahead = row_prefetch<T>(p.dim);
  const int64_t entries = p.num_targets + p.num_ids;
  int64_t* const rows = static_cast<int64_t*>(shard_memory(entries * int64_t(sizeof(int64_t))));
  A* const coefs = static_cast<A*>(shard_memory(entries * int64_t(sizeof(A))));
  const auto row_at = [&](int64_t i) { return static_cast<const T*>(p.weight) + rows[i] * p.dim; };
  for (int64_t b = begin; b < end; ++b) {
    int64_t local = 0;
    const auto list = [&](const int64_t* from, const void* coef, int64_t n) {
      const A* const given = static_cast<const A*>(coef) + b * n;
      for (int64_t j = 0; j < n; ++j) {
        rows[local] = from[b * n + j];
        coefs[local] = given[j];
        local += uint64_t(rows[local]) < uint64_t(p.rows) && given[j] != A(0);
      }
    };
    list(p.target_rows, p.target_coef, p.num_targets);
    list(p.id_rows, p.id_coef, p.num_ids);
    A* const out = static_cast<A*>(p.hidden) + b * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) out[c] = A(0);
    for (int64_t i = 0; i < local && i < ahead.rows; ++i) prefetch_row(row_at(i), ahead);
    for (int64_t i = 0; i < local; i += 4) {
      const int64_t n = local - i < 4 ? local - i : 4;
      const T* four[4];
      A factors[4];
      for (int64_t j = 0; j < 4; ++j) {
        four[j] = row_at(i + (j < n ? j : n - 1));
        factors[j] = j < n ? coefs[i + j] : A(0);
        if (i + j + ahead.rows < local) prefetch_row(row_at(i + j + ahead.rows), ahead);
      }
      Rows<T>::axpy4(out, factors, four, p.dim);
    }
  }
  std::free(coefs);
  std::free(rows);
}

// Storage types of float accumulation: what the SIMD units are for.
inline void shard_logits_rows_by_type(const ShardLogitsParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kFloat16)
    shard_logits_rows<Half>(params, begin, end);
  else if (params.dtype == DType::kBFloat16)
    shard_logits_rows<BFloat16>(params, begin, end);
  else
    shard_logits_rows<float>(params, begin, end);
}

inline void shard_hidden_rows_by_type(const ShardHiddenParams& params, int64_t begin, int64_t end) {
  if (params.dtype == DType::kFloat16)
    shard_hidden_rows<Half>(params, begin, end);
  else if (params.dtype == DType::kBFloat16)
    shard_hidden_rows<BFloat16>(params, begin, end);
  else
    shard_hidden_rows<float>(params, begin, end);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
