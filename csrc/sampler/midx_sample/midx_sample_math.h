// The distribution of midx_sample, shared by host and device: IEEE double, integer units and the log of
// common/numeric.h. Sums over codes run in kMidxLanes lanes: lane l adds codes l, l + 32, … in this order, and the sums
// of the lanes are added in double, by groups of 8: in the order of the lanes in each group, then the sums of the
// groups in their order. So ids and log_q have the same bits everywhere, given the same weights and masses.
//
// Excluded ids: the units of a cell are integers, so that a cell without its excluded classes is exact, 0 if nothing is
// left of it. Its k1 is summed again. Nothing is subtracted from a sum of floating-point numbers.
//
// A table may come from a damaged file: indices read from it are checked before they are used.
#pragma once

#include "sampler/midx_sample/midx_sample_params.h"
#include "sampler/static_sample/static_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// What a row's draws and log-probabilities need besides the weights.
struct MidxRow {
  StaticRow uniform;  // what is left of the uniform part
  double unit;        // (1 - epsilon) / Z
  double floor;       // epsilon / C
  double share;       // of the uniform part in what is left
  double left;        // probability of everything that is not excluded
  double log_left;
};

// The list of a row's excluded ids; empty without `exclude`.
struct MidxList {
  const MidxGone* entries;
  int64_t count;
};

SX_HOST_DEVICE inline StaticRow midx_uniform_row(const MidxSampleParams& p, int64_t b) {
  return p.uniform.exclude != nullptr ? excluded_row(p.uniform, b) : p.uniform.whole;
}

SX_HOST_DEVICE inline MidxList midx_list(const MidxSampleParams& p, const StaticRow& row) {
  return {p.gone + row.begin, p.uniform.exclude != nullptr ? row.end - row.begin : 0};
}

// ------------------------------------------------------------------------------------------------ tables
SX_HOST_DEVICE inline int32_t midx_cell(const MidxSampleParams& p, int64_t id) {
  const int64_t cell = p.cell[id];
  return in_range(cell, p.codes * p.codes) ? int32_t(cell) : -1;
}

SX_HOST_DEVICE inline int64_t midx_start(const MidxSampleParams& p, int64_t cell) {
  const int64_t at = p.starts[cell];
  return at < 0 ? 0 : at > p.uniform.num_classes ? p.uniform.num_classes : at;
}

// Units of the members [lo, hi).
SX_HOST_DEVICE inline int64_t midx_units(const MidxSampleParams& p, int64_t lo, int64_t hi) {
  if (hi <= lo) return 0;
  return p.prefix == nullptr ? hi - lo : wrapped_difference(p.prefix[hi], p.prefix[lo]);
}

SX_HOST_DEVICE inline int64_t midx_cell_units(const MidxSampleParams& p, int64_t cell) {
  return midx_units(p, midx_start(p, cell), midx_start(p, cell + 1));
}

SX_HOST_DEVICE inline int64_t midx_class_units(const MidxSampleParams& p, int64_t id) {
  if (p.prefix == nullptr) return 1;
  const int64_t place = p.place[id];
  return in_range(place, p.uniform.num_classes) ? midx_units(p, place, place + 1) : 0;
}

// ------------------------------------------------------------------------------------------------ excluded ids
// The cell of excluded id `i` of all; -1 where it repeats the one before it or is not a class.
SX_HOST_DEVICE inline int32_t midx_gone_cell(const MidxSampleParams& p, const StaticRow& row, int64_t i) {
  const int64_t id = p.uniform.exclude[i];
  if (!in_range(id, p.uniform.num_classes) || (i > row.begin && p.uniform.exclude[i - 1] == id)) return -1;
  return midx_cell(p, id);
}

// Units of a row's excluded ids in a cell.
SX_HOST_DEVICE inline int64_t midx_gone_units(const MidxSampleParams& p, const StaticRow& row, const MidxList& list,
                                              int32_t cell) {
  int64_t units = 0;
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.entries[i].cell == cell) units = wrapped_sum(units, midx_class_units(p, p.uniform.exclude[row.begin + i]));
  }
  return units;
}

// What excluded id `i` of the row's list says about its cell, once all cells of the list are known.
SX_HOST_DEVICE inline MidxGone midx_gone(const MidxSampleParams& p, const StaticRow& row, const MidxList& list,
                                         int64_t i) {
  MidxGone made = {list.entries[i].cell, 0, 0.0f, 0.0f};
  if (made.cell < 0) return made;
  made.first = 3;
  for (int64_t j = 0; j < i; ++j) {
    const int32_t other = list.entries[j].cell;
    if (other == made.cell) return {made.cell, 0, 0.0f, 0.0f};
    if (other >= 0 && other / int32_t(p.codes) == made.cell / int32_t(p.codes)) made.first = 1;
  }
  const int64_t units = midx_cell_units(p, made.cell),
                left = wrapped_difference(units, midx_gone_units(p, row, list, made.cell));
  if (left > 0 && units > 0) made.omega = float(double(p.omega[made.cell]) * (double(left) / double(units)));
  return made;
}

// Whether the list has a cell of this k1.
SX_HOST_DEVICE inline bool midx_touches(const MidxSampleParams& p, const MidxList& list, int64_t k1) {
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.entries[i].cell >= 0 && list.entries[i].cell / p.codes == k1) return true;
  }
  return false;
}

// omega of a cell without the row's excluded ids.
SX_HOST_DEVICE inline float midx_omega(const MidxSampleParams& p, const MidxList& list, int64_t cell) {
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.entries[i].cell == cell && (list.entries[i].first & 1) != 0) return list.entries[i].omega;
  }
  return p.omega[cell];
}

// ------------------------------------------------------------------------------------------------ rows
// `whole` is Z, `left` is Z without the excluded ids.
SX_HOST_DEVICE inline MidxRow midx_row(const MidxSampleParams& p, const StaticRow& uniform, double whole, double left) {
  MidxRow row = {uniform, 0.0, p.epsilon / double(p.uniform.num_classes), p.epsilon, 1.0, 0.0};
  if (whole != 0.0) row.unit = (1.0 - p.epsilon) / whole;
  if (p.uniform.exclude == nullptr && whole > 0.0) return row;
  const double index = row.unit * left, rest = row.floor * double(uniform.left);
  row.left = index + rest;
  if (row.left > 0.0) {
    row.share = rest / row.left;
    row.log_left = exact_log(row.left);
  }
  return row;
}

// ------------------------------------------------------------------------------------------------ one draw
struct MidxPick {
  int64_t index;  // -1: damaged
  double rest;    // where in its own part of the sum the point lies, in [0, 1)
};

SX_HOST_DEVICE inline double midx_unit_range(double x) { return x > 0.0 ? (x < 1.0 ? x : 0x1.fffffffffffffp-1) : 0.0; }

// The first code of `lane` at which the running sum, `before` in front of the lane, is above the point. A value of 0 is
// never chosen. value(k) has the type T that the lane was summed in.
template <typename T, typename F>
SX_HOST_DEVICE inline MidxPick midx_walk(int64_t codes, int lane, double before, double point, const F& value) {
  T sum = T(0);
  double low = before;
  for (int64_t k = lane; k < codes; k += kMidxLanes) {
    sum = sum + value(k);
    const double high = before + double(sum);
    if (high > point) return {k, midx_unit_range((point - low) / (high - low))};
    low = high;
  }
  return {-1, 0.0};  // not reached: the sums of the lanes were the same numbers
}

// The class of a cell at `rest` of its units that are left.
SX_HOST_DEVICE inline int64_t midx_member(const MidxSampleParams& p, const StaticRow& row, const MidxList& list,
                                          int64_t cell, double rest) {
  int64_t begin = midx_start(p, cell);
  const int64_t end = midx_start(p, cell + 1);
  const int64_t units = midx_units(p, begin, end);
  const int64_t gone = list.count == 0 ? 0 : midx_gone_units(p, row, list, int32_t(cell));
  const int64_t left = wrapped_difference(units, gone);
  if (left <= 0 || left > kMidxMostUnits) return kNoClass;
  int64_t at = int64_t(rest * double(left));
  if (at >= left) at = left - 1;
  while (left < units) {  // past the excluded members, in their order
    int64_t next = end;
    for (int64_t i = 0; i < list.count; ++i) {
      if (list.entries[i].cell != cell) continue;
      const int64_t place = p.place[p.uniform.exclude[row.begin + i]];
      if (place >= begin && place < next) next = place;
    }
    const int64_t before = midx_units(p, begin, next);
    if (at < before || next >= end) break;
    at = wrapped_difference(at, before);
    begin = next + 1;
  }
  int64_t place = wrapped_sum(begin, at);
  if (p.prefix != nullptr) {
    const int64_t beyond = wrapped_sum(wrapped_sum(p.prefix[begin], at), 1);
    place = lower_bound(p.prefix, begin + 1, end, beyond) - 1;
  }
  if (!in_range(place, p.uniform.num_classes)) return kNoClass;
  const int64_t id = p.members[place];
  return in_range(id, p.uniform.num_classes) ? id : kNoClass;
}

// The uniform number of draw j.
SX_HOST_DEVICE inline double midx_uniform(const MidxSampleParams& p, PhiloxKey key, int64_t b, int64_t j) {
  const double u = uniform53(philox_u64(philox_at(key, b, j, 0), 0));
  return p.stratified ? midx_unit_range((double(j) + u) / double(p.uniform.num_samples)) : u;
}

// The class at `u` < row.share of the uniform part.
SX_HOST_DEVICE inline int64_t midx_from_uniform(const MidxSampleParams& p, const MidxRow& row, double u) {
  if (row.uniform.left <= 0) return kNoClass;
  int64_t at = int64_t(midx_unit_range(u / row.share) * double(row.uniform.left));
  if (at >= row.uniform.left) at = row.uniform.left - 1;
  return p.uniform.exclude == nullptr ? at : uniform_skip(p.uniform, row.uniform, at);
}

// ------------------------------------------------------------------------------------------------ log q
// q of a class in its cell before exclusion; nan where there is no class or no cell.
SX_HOST_DEVICE inline double midx_q(const MidxSampleParams& p, const MidxRow& row, const float* weights, int64_t id,
                                    int32_t cell) {
  if (cell < 0 || id < 0) return quiet_nan<double>();
  const int32_t codes = int32_t(p.codes), k1 = cell / codes, k2 = cell - k1 * codes;
  const double product = double(weights[k1]) * double(weights[codes + k2]) * double(p.omega[cell]);
  const int64_t units = midx_cell_units(p, cell);
  const double w = units > 0 ? product * (double(midx_class_units(p, id)) / double(units)) : 0.0;
  return row.unit * w + row.floor;
}

// log q where q is not above 0.
SX_HOST_DEVICE inline float midx_no_log(double q) { return q == 0.0 ? negative_infinity<float>() : quiet_nan<float>(); }

SX_HOST_DEVICE inline float midx_log_q_in(const MidxSampleParams& p, const MidxRow& row, const float* weights,
                                          int64_t id, int32_t cell) {
  const double q = midx_q(p, row, weights, id, cell);
  return q > 0.0 ? float(exact_log(q) - row.log_left) : midx_no_log(q);
}

// Of an id that is not excluded; nan outside [0, C).
SX_HOST_DEVICE inline float midx_log_q(const MidxSampleParams& p, const MidxRow& row, const float* weights,
                                       int64_t id) {
  if (!in_range(id, p.uniform.num_classes)) return quiet_nan<float>();
  return midx_log_q_in(p, row, weights, id, midx_cell(p, id));
}

SX_HOST_DEVICE inline float midx_log_q_of(const MidxSampleParams& p, const MidxRow& row, const float* weights,
                                          int64_t id) {
  if (!in_range(id, p.uniform.num_classes) || row.left != row.left) return quiet_nan<float>();
  if (p.uniform.exclude != nullptr) {
    if (row.left == 0.0) return id == stand_in(p.uniform, row.uniform) ? 0.0f : negative_infinity<float>();
    if (is_excluded(p.uniform, row.uniform, id)) return negative_infinity<float>();
  }
  return midx_log_q(p, row, weights, id);
}

}  // namespace SX_ISA_NS
}  // namespace samplex
