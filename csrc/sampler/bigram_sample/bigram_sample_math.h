// The distribution of bigram_sample, shared by host and device: integer weights, IEEE double and the log of
// common/numeric.h, so that ids and log_q have the same bits everywhere.
//
//   q(k) = pair_unit * w(k | context) + unigram_unit * w(k),   log_q = log q(k) - log_mass
//
// A draw chooses one of the two parts, then a class by its alias table. Excluded ids leave the conditional
// distribution: draws are repeated under the key up to kRejections times, then one of the two parts is chosen by the
// mass left in it and its distribution function inverted over what is left. The masses left are integer sums, so
// nothing cancels.
#pragma once

#include "sampler/bigram_sample/bigram_sample_params.h"
#include "sampler/static_sample/static_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// ------------------------------------------------------------------------------------------------ a context's pairs
// Position of class `id` among the row's pairs, or -1.
SX_HOST_DEVICE inline int64_t pair_position(const BigramSampleParams& p, const BigramRow& row, int64_t id) {
  const int64_t at = lower_bound(p.pair_ids, row.begin, row.begin + row.count, id);
  return at < row.begin + row.count && p.pair_ids[at] == id ? at - row.begin : -1;
}

SX_HOST_DEVICE inline int64_t pair_weight(const BigramSampleParams& p, const BigramRow& row, int64_t position) {
  const int64_t* at = p.pair_prefix + row.prefix + position;
  return wrapped_difference(at[1], at[0]);
}

// Visits the positions of the row's excluded ids among its pairs, ascending, each once.
struct ExcludedPairs {
  const BigramSampleParams& p;
  const BigramRow& row;
  int64_t at;
  int64_t position = -1;

  SX_HOST_DEVICE ExcludedPairs(const BigramSampleParams& params, const BigramRow& row_)
      : p(params), row(row_), at(row_.unigram.begin) {}

  SX_HOST_DEVICE bool next() {
    while (at < row.unigram.end) {
      const int64_t found = pair_position(p, row, p.unigram.exclude[at++]);
      if (found > position) {  // ids ascend: an equal position is a duplicate
        position = found;
        return true;
      }
    }
    return false;
  }
};

// ------------------------------------------------------------------------------------------------ rows
SX_HOST_DEVICE inline BigramRow bigram_row(const BigramSampleParams& p, int64_t b) {
  BigramRow row = {};
  const bool excluding = p.unigram.exclude != nullptr;
  const StaticRow whole = whole_row_in_kernel(p.unigram);
  row.unigram = excluding ? excluded_row(p.unigram, b) : whole;
  row.backoff = 1.0;
  const int64_t context = p.context[b];
  if (context >= 0 && context < p.num_contexts) {
    // Clamped: on CUDA the offsets have not been checked.
    const int64_t begin = p.offsets[context], end = p.offsets[context + 1];
    row.begin = begin < 0 ? 0 : begin > p.num_pairs ? p.num_pairs : begin;
    row.count = end < row.begin ? 0 : (end > p.num_pairs ? p.num_pairs : end) - row.begin;
    row.prefix = row.begin + context;
    if (row.count > 0) {
      row.left = p.pair_prefix[row.prefix + row.count];
      row.backoff = p.backoff[context];
      row.pair_unit = (1.0 - row.backoff) / double(row.left);
    }
  }
  row.unigram_unit = row.backoff / double(whole.left);
  if (excluding) {
    ExcludedPairs gone(p, row);
    while (gone.next()) row.left = wrapped_difference(row.left, pair_weight(p, row, gone.position));
    row.pair_mass = row.pair_unit * double(row.left);
    const double mass = row.pair_mass + row.unigram_unit * double(row.unigram.left);
    row.log_mass = mass > 0.0 ? exact_log(mass) : negative_infinity<double>();
  }
  return row;
}

SX_HOST_DEVICE inline bool nothing_left(const BigramRow& row) { return row.log_mass == negative_infinity<double>(); }

// ------------------------------------------------------------------------------------------------ one draw
struct BigramDraw {
  int64_t id;        // kNoClass where a table is damaged
  int64_t position;  // among the row's pairs; -1: to be looked up
};

SX_HOST_DEVICE inline BigramDraw pair_at(const BigramSampleParams& p, const BigramRow& row, int64_t position) {
  if (!in_range(position, row.count)) return {kNoClass, -1};
  const int64_t id = p.pair_ids[row.begin + position];
  return {in_range(id, p.unigram.num_classes) ? id : kNoClass, position};
}

SX_HOST_DEVICE inline bool from_unigram(const BigramRow& row, uint64_t bits) { return uniform53(bits) < row.backoff; }

// One attempt: two Philox blocks, one for the choice of the part, one for the class.
SX_HOST_DEVICE inline BigramDraw bigram_draw_at(const BigramSampleParams& p, const BigramRow& row, PhiloxKey key,
                                                int64_t b, int64_t draw, int attempt) {
  const PhiloxWords choice = philox_at(key, b, draw, 2 * attempt), words = philox_at(key, b, draw, 2 * attempt + 1);
  const uint64_t bits0 = philox_u64(words, 0), bits1 = philox_u64(words, 1);
  if (from_unigram(row, philox_u64(choice, 0))) {
    return {alias_draw(p.unigram.table, p.unigram.num_classes, bits0, bits1).id, -1};
  }
  return pair_at(p, row, alias_draw(p.pair_table + row.begin, row.count, bits0, bits1).id);
}

// The pair of weight unit r of what is left of the context.
SX_HOST_DEVICE inline BigramDraw pair_from_gaps(const BigramSampleParams& p, const BigramRow& row, uint64_t bits) {
  const int64_t* prefix = p.pair_prefix + row.prefix;
  int64_t r = uniform_below(bits, row.left), lo = 0;
  ExcludedPairs gone(p, row);
  while (gone.next()) {
    const int64_t mass = wrapped_difference(prefix[gone.position], prefix[lo]);
    if (r < mass) break;
    r = wrapped_difference(r, mass);
    lo = gone.position + 1;
  }
  const int64_t beyond = wrapped_sum(wrapped_sum(prefix[lo], r), 1);
  return pair_at(p, row, lower_bound(prefix, lo + 1, row.count, beyond) - 1);
}

SX_HOST_DEVICE inline BigramDraw bigram_draw(const BigramSampleParams& p, const BigramRow& row, PhiloxKey key,
                                             int64_t b, int64_t draw) {
  if (p.unigram.exclude == nullptr) return bigram_draw_at(p, row, key, b, draw, 0);
  for (int attempt = 0; attempt < kRejections; ++attempt) {
    const BigramDraw drawn = bigram_draw_at(p, row, key, b, draw, attempt);
    if (!is_excluded(p.unigram, row.unigram, drawn.id)) return drawn;
  }
  const PhiloxWords words = philox_at(key, b, draw, 2 * kRejections);
  const double mass = row.pair_mass + row.unigram_unit * double(row.unigram.left);
  // The product may round up to the mass; a part with nothing left must not be chosen then.
  const bool rare = row.unigram.left == 0 || row.unigram_unit == 0.0;
  if (rare || (row.left > 0 && uniform53(philox_u64(words, 0)) * mass < row.pair_mass)) {
    return pair_from_gaps(p, row, philox_u64(words, 1));
  }
  const int64_t id = alias_from_gaps(p.unigram, row.unigram, philox_u64(words, 1));
  return {in_range(id, p.unigram.num_classes) ? id : kNoClass, -1};
}

// ------------------------------------------------------------------------------------------------ log q
// For an id that is not excluded; nan outside [0, C).
SX_HOST_DEVICE inline float bigram_log_q(const BigramSampleParams& p, const BigramRow& row, int64_t id,
                                         int64_t position) {
  if (!in_range(id, p.unigram.num_classes)) return quiet_nan<float>();
  const int64_t* prefix = p.unigram.prefix;
  double q = row.unigram_unit * double(prefix[id + 1] - prefix[id]);
  if (position >= 0) q = row.pair_unit * double(pair_weight(p, row, position)) + q;
  return q > 0.0 ? float(exact_log(q) - row.log_mass) : negative_infinity<float>();
}

SX_HOST_DEVICE inline float bigram_log_q_of(const BigramSampleParams& p, const BigramRow& row, int64_t id) {
  if (id < 0 || id >= p.unigram.num_classes) return quiet_nan<float>();
  if (p.unigram.exclude != nullptr) {
    if (nothing_left(row)) return id == stand_in(p.unigram, row.unigram) ? 0.0f : negative_infinity<float>();
    if (is_excluded(p.unigram, row.unigram, id)) return negative_infinity<float>();
  }
  return bigram_log_q(p, row, id, pair_position(p, row, id));
}

// Draw (or given id) i of the flat [B, m] result.
SX_HOST_DEVICE inline void bigram_one(const BigramSampleParams& p, PhiloxKey key, int64_t i) {
  const StaticSampleParams& u = p.unigram;
  const int64_t b = i / u.num_samples, draw = i - b * u.num_samples;
  const BigramRow& row = p.rows[b];
  if (u.given != nullptr) {
    u.log_q[i] = bigram_log_q_of(p, row, u.given[i]);
  } else if (nothing_left(row)) {
    u.ids[i] = stand_in(u, row.unigram);
    u.log_q[i] = 0.0f;
  } else {
    const BigramDraw drawn = bigram_draw(p, row, key, b, draw);
    u.ids[i] = drawn.id < 0 ? 0 : drawn.id;
    const int64_t position = drawn.position >= 0 ? drawn.position : pair_position(p, row, drawn.id);
    u.log_q[i] = bigram_log_q(p, row, drawn.id, position);
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
