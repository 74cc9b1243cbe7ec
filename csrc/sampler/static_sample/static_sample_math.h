// The distributions of static_sample, shared by host and device. Integer arithmetic and the exp and log of
// common/numeric.h only, so that ids and log_q have the same bits everywhere.
//
//   distribution          weight of class k               mass of all classes
//   uniform      1                               C
//   log-uniform  log((k+2)/(k+1))                log(C+1)
//   alias        an integer, from the table      their sum, below 2^62
//
// P(k) = weight / mass and log_q = log(weight) - log(mass), subtracted in double and rounded once.
//
// Excluded ids leave the conditional distribution over the rest. Uniform maps a smaller range past them. The others
// draw again under the key up to kRejections times, then invert the distribution function over the gaps between the
// excluded ids; both parts have the conditional distribution, so has their mixture. The mass left is summed over those
// gaps: 1 - p would lose every digit when one class holds nearly all the mass.
//
// A table may come from a damaged file. An index read from it is checked before it is used: one out of range makes
// kNoClass, a draw of class 0 with log_q = nan, and no access.
#pragma once

#include "common/numeric.h"
#include "common/philox.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kRejections = 8;
constexpr int64_t kNoClass = -1;  // what a bad entry of a table gives

SX_HOST_DEVICE inline bool in_range(int64_t index, int64_t size) { return uint64_t(index) < uint64_t(size); }

// ------------------------------------------------------------------------------------------------ excluded ids of a
// row Visits the maximal runs [lo, hi) of classes that are not excluded. Duplicates are harmless.
struct GapWalk {
  const int64_t* ids;
  int64_t position, end, num_classes;
  int64_t next_class = 0;
  int64_t lo = 0, hi = 0;

  SX_HOST_DEVICE GapWalk(const int64_t* exclude, int64_t begin_, int64_t end_, int64_t num_classes_)
      : ids(exclude), position(begin_), end(end_), num_classes(num_classes_) {}

  SX_HOST_DEVICE bool next() {
    while (position < end) {
      const int64_t id = ids[position++];
      lo = next_class;
      hi = id < num_classes ? id : num_classes;
      if (id >= next_class) next_class = id < num_classes ? id + 1 : num_classes;
      if (lo < hi) return true;
    }
    lo = next_class;
    hi = num_classes;
    next_class = num_classes;
    return lo < hi;
  }
};

// First position in [begin, end) whose id is not below `id`.
SX_HOST_DEVICE inline int64_t lower_bound(const int64_t* ids, int64_t begin, int64_t end, int64_t id) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (ids[middle] < id)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

SX_HOST_DEVICE inline bool is_excluded(const StaticSampleParams& p, const StaticRow& row, int64_t id) {
  const int64_t at = lower_bound(p.exclude, row.begin, row.end, id);
  return at < row.end && p.exclude[at] == id;
}

// ------------------------------------------------------------------------------------------------ log-uniform
// log((n+1)/n), n = k + 1 >= 1. As 2 atanh(1/(2n+1)): one rounding before the series, and no branch but n = 1, whose
// argument 1/3 is outside the series' range.
SX_HOST_DEVICE inline double log_step(double n) {
  const double value = exact_log1p_series(1.0 / (2.0 * n + 1.0));
  return n < 1.5 ? 0.6931471805599453 : value;
}

// Sum of log_step over classes [lo, hi). One class must give exactly log_step, so that a last class left has log_q = 0.
SX_HOST_DEVICE inline double log_uniform_mass(int64_t lo, int64_t hi) {
  return hi - lo == 1 ? log_step(double(hi)) : exact_log1p(double(hi - lo) / double(lo + 1));
}

// Uniform in [0, 1] with 63 bits; fine near 0, where the many rare classes are.
SX_HOST_DEVICE inline double uniform63(uint64_t bits) { return double(int64_t(bits >> 1)) * 0x1.0p-63; }

// n = k + 1 in [1, C] as a double: (C+1) exp(-w log(C+1)), w uniform. Counting from the tail keeps the rounding of w
// away from the tail, where a class is narrow: its probability is right to about C * 5e-16.
SX_HOST_DEVICE inline double log_uniform_n(double w, double classes, double log_classes_plus_one) {
  const double x = (classes + 1.0) * exact_exp(-(w * log_classes_plus_one));
  const double n = ::floor(x);
  return n < 1.0 ? 1.0 : n > classes ? classes : n;
}

SX_HOST_DEVICE inline int64_t log_uniform_from_gaps(const StaticSampleParams& p, const StaticRow& row, uint64_t bits) {
  double t = uniform53(bits) * row.mass;
  GapWalk gaps(p.exclude, row.begin, row.end, p.num_classes);
  int64_t lo = 0, hi = 1;
  while (gaps.next()) {
    lo = gaps.lo;
    hi = gaps.hi;
    const double mass = log_uniform_mass(lo, hi);
    if (t < mass) break;
    t -= mass;  // rounding may carry t past the last gap; the clamp below keeps it there
  }
  const int64_t id = int64_t(double(lo + 1) * exact_exp(t)) - 1;
  return id < lo ? lo : id >= hi ? hi - 1 : id;
}

// ------------------------------------------------------------------------------------------------ uniform
// The r-th class that is not excluded.
SX_HOST_DEVICE inline int64_t uniform_skip(const StaticSampleParams& p, const StaticRow& row, int64_t r) {
  const int64_t count = row.end - row.begin;
  // The target alone, nearly always. No branch: on a CPU every other draw would be guessed wrong.
  if (count == 1) return r + int64_t(r >= p.exclude[row.begin]);
  if (p.num_classes - row.left == count) {
    // No duplicates: ids[i] - i never falls, so the number of excluded ids to step over is found by bisection.
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (p.exclude[row.begin + middle] - middle <= r)
        low = middle + 1;
      else
        high = middle;
    }
    return r + low;
  }
  GapWalk gaps(p.exclude, row.begin, row.end, p.num_classes);
  while (gaps.next()) {
    if (r < gaps.hi - gaps.lo) return gaps.lo + r;
    r -= gaps.hi - gaps.lo;
  }
  return p.num_classes - 1;  // not reached: r < row.left
}

// ------------------------------------------------------------------------------------------------ alias
// Weight units of the classes [lo, hi).
SX_HOST_DEVICE inline int64_t alias_units(const StaticSampleParams& p, int64_t lo, int64_t hi) {
  return wrapped_difference(p.prefix[hi], p.prefix[lo]);
}

// The class of weight unit r of what is left: integers throughout, so exact.
SX_HOST_DEVICE inline int64_t alias_from_gaps(const StaticSampleParams& p, const StaticRow& row, uint64_t bits) {
  int64_t r = uniform_below(bits, row.left);
  GapWalk gaps(p.exclude, row.begin, row.end, p.num_classes);
  while (gaps.next()) {
    const int64_t mass = alias_units(p, gaps.lo, gaps.hi);
    if (r < mass) break;
    r = wrapped_difference(r, mass);
  }
  // Last class with prefix <= r': a class of weight zero shares its prefix with its successor and is never last.
  const int64_t beyond = wrapped_sum(wrapped_sum(p.prefix[gaps.lo], r), 1);
  return lower_bound(p.prefix, gaps.lo + 1, gaps.hi, beyond) - 1;
}

// ------------------------------------------------------------------------------------------------ rows
// What the host knows of the distribution with nothing excluded. For alias the sum of the weights lies in device
// memory; the kernels add it by whole_row_in_kernel.
SX_HOST_DEVICE inline StaticRow whole_row(StaticLaw law, int64_t num_classes) {
  StaticRow row = {0, 0, num_classes, 0.0, 0.0};
  if (law == StaticLaw::kUniform) row.log_mass = exact_log(double(num_classes));
  if (law == StaticLaw::kLogUniform) {
    row.mass = log_uniform_mass(0, num_classes);
    row.log_mass = exact_log(row.mass);
  }
  return row;
}

SX_HOST_DEVICE inline StaticRow whole_row_in_kernel(const StaticSampleParams& p) {
  StaticRow row = p.whole;
  if (p.law == StaticLaw::kAlias) {
    row.left = p.prefix[p.num_classes];
    row.log_mass = exact_log(double(row.left));
  }
  return row;
}

SX_HOST_DEVICE inline StaticRow excluded_row(const StaticSampleParams& p, int64_t b) {
  StaticRow row = {b * p.exclude_width, (b + 1) * p.exclude_width, 0, 0.0, 0.0};
  if (p.exclude_offsets != nullptr) {
    // Clamped: on CUDA the offsets have not been checked.
    const int64_t begin = p.exclude_offsets[b], end = p.exclude_offsets[b + 1];
    row.begin = begin < 0 ? 0 : begin > p.exclude_size ? p.exclude_size : begin;
    row.end = end < row.begin ? row.begin : end > p.exclude_size ? p.exclude_size : end;
  }
  while (row.begin < row.end && p.exclude[row.begin] < 0) ++row.begin;
  while (row.begin < row.end && p.exclude[row.end - 1] >= p.num_classes) --row.end;
  GapWalk gaps(p.exclude, row.begin, row.end, p.num_classes);
  while (gaps.next()) {
    if (p.law == StaticLaw::kAlias) {
      row.left = wrapped_sum(row.left, alias_units(p, gaps.lo, gaps.hi));
    } else {
      row.left += gaps.hi - gaps.lo;
      if (p.law == StaticLaw::kLogUniform) row.mass += log_uniform_mass(gaps.lo, gaps.hi);
    }
  }
  if (row.left > 0) row.log_mass = exact_log(p.law == StaticLaw::kLogUniform ? row.mass : double(row.left));
  return row;
}

// ------------------------------------------------------------------------------------------------ one draw
struct StaticDraw {
  int64_t id;
  double log_weight;
};

SX_HOST_DEVICE inline StaticDraw alias_draw(const AliasEntry* table, int64_t num_classes, uint64_t bits0,
                                            uint64_t bits1) {
  const int64_t column = uniform_below(bits0, num_classes);
  const AliasEntry entry = table[column];
  // Strictly below: threshold 0 never takes the column's own class.
  const bool own = bits1 < entry.threshold;
  if (!own && !in_range(entry.alias, num_classes)) return {kNoClass, quiet_nan<double>()};
  return {own ? column : entry.alias, own ? entry.log_weight : entry.log_weight_alias};
}

SX_HOST_DEVICE inline double log_weight_of(const StaticSampleParams& p, int64_t id) {
  if (p.law == StaticLaw::kUniform) return 0.0;
  if (p.law == StaticLaw::kLogUniform) return exact_log(log_step(double(id + 1)));
  return p.table[id].log_weight;
}

SX_HOST_DEVICE inline StaticDraw draw_at(const StaticSampleParams& p, const StaticRow& row, PhiloxKey key, int64_t b,
                                         int64_t draw, int attempt) {
  const PhiloxWords words = philox_at(key, b, draw, attempt);
  const uint64_t bits0 = philox_u64(words, 0), bits1 = philox_u64(words, 1);
  if (p.law == StaticLaw::kAlias) return alias_draw(p.table, p.num_classes, bits0, bits1);
  if (p.law == StaticLaw::kUniform) return {uniform_skip(p, row, uniform_below(bits0, row.left)), 0.0};
  const double n = log_uniform_n(uniform63(bits0), double(p.num_classes), p.whole.mass);
  return {int64_t(n) - 1, exact_log(log_step(n))};
}

// The draw of a row with excluded ids, from attempt `first` on.
SX_HOST_DEVICE inline StaticDraw draw_excluding(const StaticSampleParams& p, const StaticRow& row, PhiloxKey key,
                                                int64_t b, int64_t draw, int first) {
  if (p.law == StaticLaw::kUniform) return draw_at(p, row, key, b, draw, first);
  for (int attempt = first; attempt < kRejections; ++attempt) {
    const StaticDraw drawn = draw_at(p, row, key, b, draw, attempt);
    if (!is_excluded(p, row, drawn.id)) return drawn;
  }
  const uint64_t bits = philox_u64(philox_at(key, b, draw, kRejections), 0);
  const int64_t id = p.law == StaticLaw::kAlias ? alias_from_gaps(p, row, bits) : log_uniform_from_gaps(p, row, bits);
  if (!in_range(id, p.num_classes)) return {kNoClass, quiet_nan<double>()};
  return {id, log_weight_of(p, id)};
}

// What the caller sees of a draw: a class in any case.
SX_HOST_DEVICE inline int64_t class_of(const StaticDraw& drawn) { return drawn.id < 0 ? 0 : drawn.id; }

// Nothing left: the row's first excluded id stands in with log_q = 0, and the loss masks it.
SX_HOST_DEVICE inline int64_t stand_in(const StaticSampleParams& p, const StaticRow& row) {
  return row.begin < row.end ? p.exclude[row.begin] : 0;
}

// log P(id | not excluded). Outside [0, C): nan (the CPU glue has refused it before).
SX_HOST_DEVICE inline float log_q_of(const StaticSampleParams& p, const StaticRow& row, int64_t id) {
  if (id < 0 || id >= p.num_classes) return quiet_nan<float>();
  if (p.exclude != nullptr) {
    if (row.left == 0) return id == stand_in(p, row) ? 0.0f : negative_infinity<float>();
    if (is_excluded(p, row, id)) return negative_infinity<float>();
  }
  return float(log_weight_of(p, id) - row.log_mass);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
