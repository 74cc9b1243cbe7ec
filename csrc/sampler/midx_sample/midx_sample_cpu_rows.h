// The CPU bodies of midx_sample, compiled once per instruction set. Draws of a row go through their stages in blocks,
// so that the scattered reads of a block overlap.
#pragma once

#include "common/philox_many.h"
#include "common/vec.h"
#include "sampler/midx_sample/midx_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {
namespace midx_rows {

constexpr int kBlock = 16;         // draws that go through the choice of their codes together
constexpr int kMany = 4 * kBlock;  // draws whose classes are read together

// Running sums are kept in another order than the lanes: lane l of group g at 4 l + g, so that the four groups are
// summed side by side.
constexpr int kGroups = kMidxLanes / kMidxGroup;
static_assert(kGroups == 4 && kMidxGroup == 8, "the vectors below");

inline int running_place(int lane) { return (lane % kMidxGroup) * kGroups + lane / kMidxGroup; }

#if defined(__AVX512F__) || defined(__AVX2__)
inline __m256d four_lanes(const float* lanes) { return _mm256_cvtps_pd(_mm_loadu_ps(lanes)); }
inline __m256d four_lanes(const double* lanes) { return _mm256_loadu_pd(lanes); }
#endif

// Running sums over the lanes.
template <typename T>
inline void running_sums(const T* lanes, double* running) {
#if defined(__AVX512F__) || defined(__AVX2__)
  __m256d group = _mm256_setzero_pd(), sums[kMidxGroup];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256d a = four_lanes(lanes + half * 4), b = four_lanes(lanes + half * 4 + kMidxGroup),
                  c = four_lanes(lanes + half * 4 + 2 * kMidxGroup), d = four_lanes(lanes + half * 4 + 3 * kMidxGroup);
    const __m256d ab0 = _mm256_unpacklo_pd(a, b), ab1 = _mm256_unpackhi_pd(a, b), cd0 = _mm256_unpacklo_pd(c, d),
                  cd1 = _mm256_unpackhi_pd(c, d);
    group = sums[half * 4] = _mm256_add_pd(group, _mm256_permute2f128_pd(ab0, cd0, 0x20));
    group = sums[half * 4 + 1] = _mm256_add_pd(group, _mm256_permute2f128_pd(ab1, cd1, 0x20));
    group = sums[half * 4 + 2] = _mm256_add_pd(group, _mm256_permute2f128_pd(ab0, cd0, 0x31));
    group = sums[half * 4 + 3] = _mm256_add_pd(group, _mm256_permute2f128_pd(ab1, cd1, 0x31));
  }
  alignas(32) double of_group[kGroups];
  _mm256_store_pd(of_group, group);
  const double one = 0.0 + of_group[0], two = one + of_group[1];
  const __m256d before = _mm256_set_pd(two + of_group[2], two, one, 0.0);
#pragma GCC unroll 8
  for (int l = 0; l < kMidxGroup; ++l) _mm256_storeu_pd(running + l * kGroups, _mm256_add_pd(before, sums[l]));
#else
  double group[kGroups] = {};
  for (int l = 0; l < kMidxGroup; ++l) {
    for (int g = 0; g < kGroups; ++g) {
      group[g] = group[g] + double(lanes[g * kMidxGroup + l]);
      running[l * kGroups + g] = group[g];
    }
  }
  double before = 0.0;
  for (int g = 0; g < kGroups; ++g) {
    for (int l = 0; l < kMidxGroup; ++l) running[l * kGroups + g] = before + running[l * kGroups + g];
    before = before + group[g];
  }
#endif
}

// The lane that a point lies in: how many of the running sums but the last are not above it.
inline int lane_of(const double* running, double point) {
#if defined(__AVX512F__)
  const __m512d x = _mm512_set1_pd(point);
  uint32_t bits = 0;
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    bits |= uint32_t(_mm512_cmp_pd_mask(_mm512_loadu_pd(running + v * 8), x, _CMP_LE_OQ)) << (v * 8);
  }
  return __builtin_popcount(bits & 0x7fffffffu);
#elif defined(__AVX2__)
  const __m256d x = _mm256_set1_pd(point);
  uint32_t bits = 0;
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    bits |= uint32_t(_mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(running + v * 4), x, _CMP_LE_OQ))) << (v * 4);
  }
  return __builtin_popcount(bits & 0x7fffffffu);
#else
  int lane = 0;
  for (int l = 0; l < kMidxLanes - 1; ++l) lane += int(running[l] <= point);
  return lane;
#endif
}

inline double sum_before(const double* running, int lane) { return lane > 0 ? running[running_place(lane - 1)] : 0.0; }

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

// midx_walk of all draws of a block after the choice of their lanes, without branches that depend on a draw: those
// would be guessed wrong.
struct Walk {
  alignas(64) double point[kBlock], before[kBlock], low[kBlock], high[kBlock];
  alignas(64) int64_t at[kBlock];  // the lane, then the code

  // The code of draw i, and where in its part the point lies.
  MidxPick found(int i) const {
    if (!(high[i] > point[i])) return {-1, 0.0};
    return {at[i], midx_unit_range((point[i] - low[i]) / (high[i] - low[i]))};
  }
};

// value(i, k) is that of code k for draw i, of the type T that the lanes were summed in.
template <typename T, typename F>
inline void walk(int64_t codes, Walk& w, const F& value) {
  alignas(64) T sum[kBlock] = {};
  alignas(64) int64_t lane[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    lane[i] = w.at[i];
    w.low[i] = w.high[i] = w.before[i];
  }
  const auto step = [&](int i, int64_t k, T x) {
    sum[i] = sum[i] + x;
    const double next = w.before[i] + double(sum[i]);
    const bool past = w.high[i] > w.point[i];  // found already
    w.low[i] = past ? w.low[i] : w.high[i];
    w.at[i] = past ? w.at[i] : k;
    w.high[i] = past ? w.high[i] : next;
  };
  int64_t first = 0;
  for (; first + kMidxLanes <= codes; first += kMidxLanes) {
    alignas(64) T x[kBlock];  // apart from the rest, which then takes vectors
    for (int i = 0; i < kBlock; ++i) x[i] = value(i, lane[i] + first);
    for (int i = 0; i < kBlock; ++i) step(i, lane[i] + first, x[i]);
  }
  for (int i = 0; i < kBlock; ++i) {
    if (lane[i] + first < codes) step(i, lane[i] + first, value(i, lane[i] + first));
  }
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
  alignas(64) double running[kMidxLanes], inner[kMidxLanes];
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
  alignas(64) double uniforms[kBlock], rests[kMany], q[kMany];
  alignas(64) int64_t first_code[kBlock], own[kBlock];
  int64_t many_cells[kMany], many_ids[kMany];
  uint32_t rows[kBlock], positions[kBlock];
  uint64_t bits[2][kBlock];
  Walk one, two;
  for (int i = 0; i < kBlock; ++i) rows[i] = uint32_t(b);
  int64_t many = first;  // the first draw of `rests` and what is beside it
  for (int64_t block = first; block < last; block += kBlock) {
    const int count = int(last - block < kBlock ? last - block : kBlock);
    double* rest = rests + (block - many);
    int64_t *cells = many_cells + (block - many), *ids = many_ids + (block - many);
    for (int i = 0; i < kBlock; ++i) positions[i] = uint32_t(block + i) << 8;
    philox_many(key, rows, positions, kBlock, bits[0], bits[1]);
    for (int i = 0; i < kBlock; ++i) {
      const double random = uniform53(bits[0][i]);
      uniforms[i] = p.stratified ? midx_unit_range((double(block + i) + random) / double(u.num_samples)) : random;
    }
    for (int i = 0; i < kBlock; ++i) {
      one.point[i] = midx_unit_range((uniforms[i] - row.share) / (1.0 - row.share)) * total;
      one.at[i] = 0;
    }
    for (int l = 0; l < kMidxLanes - 1; ++l) {
      const double bound = running[l];
      for (int i = 0; i < kBlock; ++i) one.at[i] += int64_t(bound <= one.point[i]);
    }
    for (int i = 0; i < kBlock; ++i) one.before[i] = sum_before(running, int(one.at[i]));
    walk<double>(p.codes, one, [&](int, int64_t k) { return sizes[k]; });
    for (int i = 0; i < kBlock; ++i) {
      const MidxPick found = one.found(i);
      first_code[i] = found.index;
      rest[i] = found.rest;
      ids[i] = kNoClass;
      cells[i] = -1;
      if (i >= count) {
        first_code[i] = -1;
      } else if (uniforms[i] < row.share || !(total > 0.0)) {
        first_code[i] = -1;
        ids[i] = midx_from_uniform(p, row, uniforms[i]);
        __builtin_prefetch(p.cell + ids[i]);
      }
      own[i] = (first_code[i] < 0 ? 0 : first_code[i]) * p.codes;
      for (int64_t k = 0; k < p.codes; k += 16) __builtin_prefetch(p.omega + own[i] + k);
    }
    for (int i = 0; i < kBlock; ++i) {
      two.point[i] = two.before[i] = 0.0;
      two.at[i] = 0;
      if (first_code[i] < 0) continue;
      product_lanes(second, omega.row(first_code[i]), p.codes, inner);
      two.point[i] = rest[i] * inner[kMidxLanes - 1];
      const int lane = lane_of(inner, two.point[i]);
      two.at[i] = lane;
      two.before[i] = sum_before(inner, lane);
    }
    walk<float>(p.codes, two, [&](int i, int64_t k) { return second[k] * p.omega[own[i] + k]; });
    for (int i = 0; i < kBlock; ++i) {
      if (first_code[i] < 0) continue;
      MidxPick found = two.found(i);
      if (list.count > 0 && midx_touches(p, list, first_code[i])) {  // few draws
        const float* changed = omega.row(first_code[i]);
        product_lanes(second, changed, p.codes, inner);
        const int lane = lane_of(inner, two.point[i]);
        found = midx_walk<float>(p.codes, lane, sum_before(inner, lane), two.point[i],
                                 [&](int64_t k) { return second[k] * changed[k]; });
      }
      if (found.index < 0) continue;
      cells[i] = own[i] + found.index;
      rest[i] = found.rest;
      __builtin_prefetch(p.starts + cells[i]);
    }
    if (block + kBlock < last && block + kBlock < many + kMany) continue;
    // Of these in a row: each waits for memory that the next ones can wait for at the same time.
    const int done = int(block + count - many);
    for (int i = 0; i < done; ++i) {
      if (many_cells[i] >= 0) __builtin_prefetch(p.members + midx_start(p, many_cells[i]));
    }
    for (int i = 0; i < done; ++i) {
      if (many_cells[i] >= 0) many_ids[i] = midx_member(p, uniform, list, many_cells[i], rests[i]);
      if (many_ids[i] >= 0 && many_cells[i] < 0) many_cells[i] = midx_cell(p, many_ids[i]);
      u.ids[at + many + i] = many_ids[i] < 0 ? 0 : many_ids[i];
    }
    for (int i = 0; i < done; ++i) q[i] = midx_q(p, row, weights, many_ids[i], int32_t(many_cells[i]));
    for (int i = 0; i < done; ++i) rests[i] = exact_log(q[i]) - row.log_left;
    for (int i = 0; i < done; ++i) u.log_q[at + many + i] = q[i] > 0.0 ? float(rests[i]) : midx_no_log(q[i]);
    many = block + kBlock;
  }
}

}  // namespace midx_rows
}  // namespace SX_ISA_NS
}  // namespace samplex
