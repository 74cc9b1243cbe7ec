// The CPU bodies of midx_sample, compiled once per instruction set. Draws of a row go through their stages in blocks,
// so that the scattered reads of a block overlap.
#pragma once

#include "common/vec.h"
#include "sampler/midx_sample/midx_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {
namespace midx_rows {

constexpr int kBlock = 16;  // draws

// Running sums over the lanes of `values`, in double.
inline void double_lanes(const double* values, int64_t codes, double* running) {
  double lanes[kMidxLanes] = {};
  int64_t k = 0;
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int l = 0; l < kMidxLanes; ++l) lanes[l] = lanes[l] + values[k + l];
  }
  for (; k < codes; ++k) lanes[k % kMidxLanes] = lanes[k % kMidxLanes] + values[k];
  double sum = 0.0;
  for (int l = 0; l < kMidxLanes; ++l) running[l] = sum = sum + lanes[l];
}

// values = x * y, and the running sums over their lanes.
inline void product_lanes(const float* x, const float* y, int64_t codes, float* values, double* running) {
  alignas(64) float lanes[kMidxLanes];
  int64_t k = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  constexpr int kVecs = kMidxLanes / Vec::kSize;
  Vec sums[kVecs];
  for (int v = 0; v < kVecs; ++v) sums[v] = Vec::zero();
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = k + v * Vec::kSize;
      const Vec product = Vec::load(x + at) * Vec::load(y + at);
      product.store(values + at);
      sums[v] = sums[v] + product;
    }
  }
  for (int v = 0; v < kVecs; ++v) sums[v].store(lanes + v * Vec::kSize);
#else
  for (int l = 0; l < kMidxLanes; ++l) lanes[l] = 0.0f;
  for (; k + kMidxLanes <= codes; k += kMidxLanes) {
    for (int l = 0; l < kMidxLanes; ++l) {
      values[k + l] = x[k + l] * y[k + l];
      lanes[l] = lanes[l] + values[k + l];
    }
  }
#endif
  for (; k < codes; ++k) {
    values[k] = x[k] * y[k];
    lanes[k % kMidxLanes] = lanes[k % kMidxLanes] + values[k];
  }
  double sum = 0.0;
  for (int l = 0; l < kMidxLanes; ++l) running[l] = sum = sum + double(lanes[l]);
}

// The same for omega without the row's excluded ids; `changed` is room for a row of omega.
inline void cell_lanes(const MidxSampleParams& p, const MidxList& list, const float* b, int64_t k1, float* changed,
                       float* values, double* running) {
  const float* omega = p.omega + k1 * p.codes;
  if (list.count > 0 && midx_touches(p, list, k1)) {
    for (int64_t k = 0; k < p.codes; ++k) changed[k] = omega[k];
    for (int64_t i = 0; i < list.count; ++i) {
      const MidxGone& gone = list.entries[i];
      if ((gone.first & 1) != 0 && gone.cell / p.codes == k1) changed[gone.cell % p.codes] = gone.omega;
    }
    omega = changed;
  }
  product_lanes(b, omega, p.codes, values, running);
}

template <typename T>
inline MidxPick pick(const T* values, int64_t codes, const double* running, double point) {
  int lane = 0;
  for (int l = 0; l < kMidxLanes - 1; ++l) lane += int(running[l] <= point);
  return midx_walk<T>(codes, lane, lane > 0 ? running[lane - 1] : 0.0, point, [&](int64_t k) { return values[k]; });
}

inline void gone_rows(const MidxSampleParams& p, int64_t begin, int64_t end) {
  alignas(64) float values[kMidxMostCodes], changed[kMidxMostCodes];
  double running[kMidxLanes];
  for (int64_t b = begin; b < end; ++b) {
    const StaticRow row = midx_uniform_row(p, b);
    const MidxList list = midx_list(p, row);
    MidxGone* gone = p.gone + row.begin;
    for (int64_t i = 0; i < list.count; ++i) gone[i].cell = midx_gone_cell(p, row, row.begin + i);
    for (int64_t i = 0; i < list.count; ++i) gone[i] = midx_gone(p, row, list, i);
    const float* weights = p.weights + b * 2 * p.codes + p.codes;
    for (int64_t i = 0; i < list.count; ++i) {
      if ((gone[i].first & 2) == 0) continue;
      cell_lanes(p, list, weights, gone[i].cell / p.codes, changed, values, running);
      gone[i].mass = float(running[kMidxLanes - 1]);
    }
  }
}

inline void draw_row(const MidxSampleParams& p, int64_t b, int64_t first, int64_t last) {
  const StaticSampleParams& u = p.uniform;
  alignas(64) double sizes[kMidxMostCodes];
  alignas(64) float values[kMidxMostCodes], changed[kMidxMostCodes];
  double running[kMidxLanes], inner[kMidxLanes];
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
  double rest[kBlock];
  int64_t cells[kBlock], ids[kBlock];
  for (int64_t block = first; block < last; block += kBlock) {
    const int count = int(last - block < kBlock ? last - block : kBlock);
    for (int i = 0; i < count; ++i) {
      const double x = midx_uniform(p, key, b, block + i);
      cells[i] = -1;
      ids[i] = kNoClass;
      if (x < row.share || !(total > 0.0)) {
        ids[i] = midx_from_uniform(p, row, x);
        __builtin_prefetch(p.cell + ids[i]);
        continue;
      }
      const double point = midx_unit_range((x - row.share) / (1.0 - row.share)) * total;
      const MidxPick one = pick(sizes, p.codes, running, point);
      if (one.index < 0) continue;
      cell_lanes(p, list, weights + p.codes, one.index, changed, values, inner);
      const MidxPick two = pick(values, p.codes, inner, one.rest * inner[kMidxLanes - 1]);
      if (two.index < 0) continue;
      cells[i] = one.index * p.codes + two.index;
      rest[i] = two.rest;
      __builtin_prefetch(p.starts + cells[i]);
    }
    if (list.count == 0 && p.prefix == nullptr) {
      for (int i = 0; i < count; ++i) {
        if (cells[i] >= 0) __builtin_prefetch(p.members + midx_start(p, cells[i]));
      }
    }
    for (int i = 0; i < count; ++i) {
      if (cells[i] >= 0) ids[i] = midx_member(p, uniform, list, cells[i], rest[i]);
      if (ids[i] >= 0) __builtin_prefetch(p.cell + ids[i]);
    }
    for (int i = 0; i < count; ++i) {
      u.ids[at + block + i] = ids[i] < 0 ? 0 : ids[i];
      u.log_q[at + block + i] = midx_log_q(p, row, weights, ids[i]);
    }
  }
}

}  // namespace midx_rows
}  // namespace SX_ISA_NS
}  // namespace samplex
