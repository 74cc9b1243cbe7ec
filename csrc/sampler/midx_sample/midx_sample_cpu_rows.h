// The CPU bodies of midx_sample, compiled once per instruction set. Draws of a row go through their stages in blocks,
// so that the scattered reads of a block overlap.
#pragma once

#include "common/vec.h"
#include "sampler/midx_sample/midx_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {
namespace midx_rows {

constexpr int kBlock = 16;  // draws

// Running sums over the lanes.
template <typename T>
inline void running_sums(const T* lanes, double* running) {
  constexpr int kGroups = kMidxLanes / kMidxGroup;
  double group[kGroups] = {};
  for (int l = 0; l < kMidxGroup; ++l) {
    for (int g = 0; g < kGroups; ++g) {
      group[g] = group[g] + double(lanes[g * kMidxGroup + l]);
      running[g * kMidxGroup + l] = group[g];
    }
  }
  double before = 0.0;
  for (int g = 0; g < kGroups; ++g) {
    for (int l = 0; l < kMidxGroup; ++l) running[g * kMidxGroup + l] = before + running[g * kMidxGroup + l];
    before = before + group[g];
  }
}

// Running sums over the lanes of `values`, in double.
inline void double_lanes(const double* values, int64_t codes, double* running) {
  double lanes[kMidxLanes] = {};
  int64_t k = 0;
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int l = 0; l < kMidxLanes; ++l) lanes[l] = lanes[l] + values[k + l];
  }
  for (; k < codes; ++k) lanes[k % kMidxLanes] = lanes[k % kMidxLanes] + values[k];
  running_sums(lanes, running);
}

// Running sums over the lanes of x * y, in double.
inline void product_lanes(const float* x, const float* y, int64_t codes, double* running) {
  alignas(64) float lanes[kMidxLanes];
  int64_t k = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  constexpr int kVecs = kMidxLanes / Vec::kSize;
  Vec sums[kVecs];
  for (int v = 0; v < kVecs; ++v) sums[v] = Vec::zero();
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = k + v * Vec::kSize;
      sums[v] = sums[v] + Vec::load(x + at) * Vec::load(y + at);
    }
  }
  for (int v = 0; v < kVecs; ++v) sums[v].store(lanes + v * Vec::kSize);
#else
  for (int l = 0; l < kMidxLanes; ++l) lanes[l] = 0.0f;
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int l = 0; l < kMidxLanes; ++l) lanes[l] = lanes[l] + x[k + l] * y[k + l];
  }
#endif
  for (; k < codes; ++k) lanes[k % kMidxLanes] = lanes[k % kMidxLanes] + x[k] * y[k];
  running_sums(lanes, running);
}

// Rows of omega without a row's excluded ids. Most rows have one excluded id, so that one changed row of omega serves
// all of their draws.
struct Omega {
  const MidxSampleParams& p;
  const MidxList& list;
  int64_t kept = -1;
  alignas(64) float changed[kMidxMostCodes];

  Omega(const MidxSampleParams& params, const MidxList& list_) : p(params), list(list_) {}

  // Valid until the next call.
  const float* row(int64_t k1) {
    const float* omega = p.omega + k1 * p.codes;
    if (list.count == 0 || !midx_touches(p, list, k1)) return omega;
    if (kept == k1) return changed;
    for (int64_t k = 0; k < p.codes; ++k) changed[k] = omega[k];
    for (int64_t i = 0; i < list.count; ++i) {
      const MidxGone& gone = list.entries[i];
      if ((gone.first & 1) != 0 && gone.cell / p.codes == k1) changed[gone.cell % p.codes] = gone.omega;
    }
    kept = k1;
    return changed;
  }
};

// midx_walk after the choice of the lane, without branches that depend on the draw: those would be guessed wrong.
template <typename T, typename F>
inline MidxPick pick(int64_t codes, const double* running, double point, const F& value) {
  int lane = 0;
  for (int l = 0; l < kMidxLanes - 1; ++l) lane += int(running[l] <= point);
  const double before = lane > 0 ? running[lane - 1] : 0.0;
  T sum = T(0);
  double low = before, high = before;
  int64_t index = lane;
  for (int64_t k = lane; k < codes; k += kMidxLanes) {
    sum = sum + value(k);
    const double next = before + double(sum);
    const bool past = high > point;  // found already
    low = past ? low : high;
    index = past ? index : k;
    high = past ? high : next;
  }
  if (!(high > point)) return {-1, 0.0};
  return {index, midx_unit_range((point - low) / (high - low))};
}

inline void gone_rows(const MidxSampleParams& p, int64_t begin, int64_t end) {
  double running[kMidxLanes];
  for (int64_t b = begin; b < end; ++b) {
    const StaticRow row = midx_uniform_row(p, b);
    const MidxList list = midx_list(p, row);
    MidxGone* gone = p.gone + row.begin;
    for (int64_t i = 0; i < list.count; ++i) gone[i].cell = midx_gone_cell(p, row, row.begin + i);
    for (int64_t i = 0; i < list.count; ++i) gone[i] = midx_gone(p, row, list, i);
    const float* weights = p.weights + b * 2 * p.codes + p.codes;
    Omega omega(p, list);
    for (int64_t i = 0; i < list.count; ++i) {
      if ((gone[i].first & 2) == 0) continue;
      product_lanes(weights, omega.row(gone[i].cell / p.codes), p.codes, running);
      gone[i].mass = float(running[kMidxLanes - 1]);
    }
  }
}

inline void draw_row(const MidxSampleParams& p, int64_t b, int64_t first, int64_t last) {
  const StaticSampleParams& u = p.uniform;
  alignas(64) double sizes[kMidxMostCodes];
  double running[kMidxLanes], inner[kBlock][kMidxLanes];
  const StaticRow uniform = midx_uniform_row(p, b);
  const MidxList list = midx_list(p, uniform);
  const float* weights = p.weights + b * 2 * p.codes;
  const float* mass = p.mass + b * p.codes;
  for (int64_t k = 0; k < p.codes; ++k) sizes[k] = double(weights[k]) * double(mass[k]);
  double_lanes(sizes, p.codes, running);
  const double whole = running[kMidxLanes - 1];
  if (list.count > 0) {
    for (int64_t i = 0; i < list.count; ++i) {
      const MidxGone& gone = list.entries[i];
      if ((gone.first & 2) == 0) continue;
      const int64_t k1 = gone.cell / p.codes;
      sizes[k1] = double(weights[k1]) * double(gone.mass);
    }
    double_lanes(sizes, p.codes, running);
  }
  const double total = running[kMidxLanes - 1];
  const MidxRow row = midx_row(p, uniform, whole, total);
  const int64_t at = b * u.num_samples;
  if (u.given != nullptr) {
    for (int64_t j = first; j < last; ++j) u.log_q[at + j] = midx_log_q_of(p, row, weights, u.given[at + j]);
    return;
  }
  if (!(row.left > 0.0)) {  // nothing left, or nan
    for (int64_t j = first; j < last; ++j) {
      u.ids[at + j] = row.left == 0.0 ? stand_in(u, uniform) : 0;
      u.log_q[at + j] = row.left == 0.0 ? 0.0f : quiet_nan<float>();
    }
    return;
  }
  const PhiloxKey key = {uint64_t(u.key[0]), uint64_t(u.key[1])};
  const float* second = weights + p.codes;
  Omega omega(p, list);
  // Stage by stage: a draw alone would wait for its own numbers most of the time.
  double uniforms[kBlock], rest[kBlock];
  int64_t cells[kBlock], ids[kBlock], first_code[kBlock];
  for (int64_t block = first; block < last; block += kBlock) {
    const int count = int(last - block < kBlock ? last - block : kBlock);
    for (int i = 0; i < count; ++i) uniforms[i] = midx_uniform(p, key, b, block + i);
    for (int i = 0; i < count; ++i) {
      const double point = midx_unit_range((uniforms[i] - row.share) / (1.0 - row.share)) * total;
      const MidxPick one = pick<double>(p.codes, running, point, [&](int64_t k) { return sizes[k]; });
      first_code[i] = one.index;
      rest[i] = one.rest;
      ids[i] = kNoClass;
      cells[i] = -1;
      if (uniforms[i] < row.share || !(total > 0.0)) {
        first_code[i] = -1;
        ids[i] = midx_from_uniform(p, row, uniforms[i]);
        __builtin_prefetch(p.cell + ids[i]);
      } else if (one.index >= 0) {
        const float* own = p.omega + one.index * p.codes;
        for (int64_t k = 0; k < p.codes; k += 16) __builtin_prefetch(own + k);
      }
    }
    for (int i = 0; i < count; ++i) {
      if (first_code[i] >= 0) product_lanes(second, omega.row(first_code[i]), p.codes, inner[i]);
    }
    for (int i = 0; i < count; ++i) {
      if (first_code[i] < 0) continue;
      const float* own = omega.row(first_code[i]);
      const MidxPick two = pick<float>(p.codes, inner[i], rest[i] * inner[i][kMidxLanes - 1],
                                       [&](int64_t k) { return second[k] * own[k]; });
      if (two.index < 0) continue;
      cells[i] = first_code[i] * p.codes + two.index;
      rest[i] = two.rest;
      __builtin_prefetch(p.starts + cells[i]);
    }
    for (int i = 0; i < count; ++i) {
      if (cells[i] >= 0) __builtin_prefetch(p.members + midx_start(p, cells[i]));
    }
    for (int i = 0; i < count; ++i) {
      if (cells[i] >= 0) ids[i] = midx_member(p, uniform, list, cells[i], rest[i]);
      if (ids[i] >= 0 && cells[i] < 0) cells[i] = midx_cell(p, ids[i]);
      u.ids[at + block + i] = ids[i] < 0 ? 0 : ids[i];
    }
    for (int i = 0; i < count; ++i) {
      u.log_q[at + block + i] =
          ids[i] < 0 ? quiet_nan<float>() : midx_log_q_in(p, row, weights, ids[i], int32_t(cells[i]));
    }
  }
}

}  // namespace midx_rows
}  // namespace SX_ISA_NS
}  // namespace samplex
