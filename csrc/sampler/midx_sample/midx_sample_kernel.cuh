// midx_sample on the device: a block has some draws (or given ids) of a row. It makes the sums over k1 once; then a
// warp has a draw, a lane of the sums over k2 to each lane. The bits are those of midx_sample_math.h.
#pragma once

#include "common/warp.cuh"
#include "sampler/midx_sample/midx_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kMidxWarps = 4;
constexpr int kMidxThreads = kMidxWarps * kWarpSize;
constexpr int kMidxResident = 4;   // blocks per SM; without it ptxas aims for more of them and spills
constexpr int64_t kMidxPart = 64;  // draws of a row that a block makes
static_assert(kMidxLanes == kWarpSize, "a lane of the sums to each lane of a warp");

// The running sum over the lanes up to this one. All lanes come here.
SX_DEVICE inline double midx_running(double sum) {
  const int place = lane_id() % kMidxGroup, first = lane_id() - place;
  double group = 0.0, own = 0.0, before = 0.0;
  for (int l = 0; l < kMidxGroup; ++l) {
    group = group + shuffle_from(sum, first + l);
    if (l == place) own = group;
  }
  for (int l = 0; l < kWarpSize; l += kMidxGroup) {
    const double other = shuffle_from(group, l);
    if (l < first) before = before + other;
  }
  return before + own;
}

// Which lane holds the point, and the sum in front of it. All lanes come here.
struct MidxLane {
  int lane;
  double before;
};
SX_DEVICE inline MidxLane midx_find_lane(double running, double point) {
  const int lane = __popc(warp_ballot(running <= point && lane_id() < kWarpSize - 1));
  const double before = shuffle_from(running, lane > 0 ? lane - 1 : 0);
  return {lane, lane > 0 ? before : 0.0};
}

// b[k2] omega[k1, k2] without the row's excluded ids.
struct MidxCells {
  const MidxSampleParams& p;
  const MidxList& list;
  const float* b;
  int64_t k1;
  bool touched;
  SX_DEVICE float operator()(int64_t k2) const {
    const int64_t cell = k1 * p.codes + k2;
    return b[k2] * (touched ? midx_omega(p, list, cell) : p.omega[cell]);
  }
};

// The running sums over the lanes of a k1's cells. All lanes come here.
SX_DEVICE inline double midx_cell_sums(const MidxSampleParams& p, const MidxCells& cells) {
  float sum = 0.0f;
  for (int64_t k = lane_id(); k < p.codes; k += kWarpSize) sum = sum + cells(k);
  return midx_running(double(sum));
}

// gone [nnz]: a block has a row.
__global__ void __launch_bounds__(kMidxThreads) midx_gone_kernel(MidxSampleParams p) {
  for (int64_t b = blockIdx.x; b < p.uniform.batch; b += gridDim.x) {
    const StaticRow row = midx_uniform_row(p, b);
    const MidxList list = midx_list(p, row);
    MidxGone* gone = p.gone + row.begin;
    for (int64_t i = threadIdx.x; i < list.count; i += kMidxThreads) {
      gone[i].cell = midx_gone_cell(p, row, row.begin + i);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < list.count; i += kMidxThreads) {
      const MidxGone made = midx_gone(p, row, list, i);
      gone[i].first = made.first;
      gone[i].omega = made.omega;
    }
    __syncthreads();
    const float* weights = p.weights + b * 2 * p.codes + p.codes;
    for (int64_t i = warp_id(); i < list.count; i += kMidxWarps) {
      if ((gone[i].first & 2) == 0) continue;  // the same for all lanes
      const MidxCells cells = {p, list, weights, gone[i].cell / p.codes, true};
      const double sum = midx_cell_sums(p, cells);
      if (lane_id() == kWarpSize - 1) gone[i].mass = float(sum);
    }
  }
}

// ids, log_q [B, m], or log_q alone for given ids. Shared memory: sizes of all k1.
template <bool Given>
__global__ void __launch_bounds__(kMidxThreads, kMidxResident) midx_sample_kernel(MidxSampleParams p) {
  SX_DYN_SMEM(double, sizes);
  __shared__ double lanes[2][kWarpSize];  // running sums with everything, and without the excluded ids
  const StaticSampleParams& u = p.uniform;
  PhiloxKey key = {0, 0};
  if (u.key != nullptr) key = {uint64_t(u.key[0]), uint64_t(u.key[1])};
  const int64_t parts = (u.num_samples + kMidxPart - 1) / kMidxPart;
  for (int64_t item = blockIdx.x; item < u.batch * parts; item += gridDim.x) {
    const int64_t b = item / parts, first = (item - b * parts) * kMidxPart;
    const int64_t last = first + kMidxPart < u.num_samples ? first + kMidxPart : u.num_samples;
    const StaticRow uniform = midx_uniform_row(p, b);
    const MidxList list = midx_list(p, uniform);
    const float* weights = p.weights + b * 2 * p.codes;
    for (int64_t k = threadIdx.x; k < p.codes; k += kMidxThreads) {
      sizes[k] = double(weights[k]) * double(p.mass[b * p.codes + k]);
    }
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == 1 && threadIdx.x < kWarpSize) {
        for (int64_t i = threadIdx.x; i < list.count; i += kWarpSize) {
          if ((list.entries[i].first & 2) == 0) continue;
          const int64_t k1 = list.entries[i].cell / p.codes;
          sizes[k1] = double(weights[k1]) * double(list.entries[i].mass);
        }
      }
      __syncthreads();
      if (warp_id() == 0) {
        double sum = 0.0;
        for (int64_t k = lane_id(); k < p.codes; k += kWarpSize) sum = sum + sizes[k];
        lanes[turn][lane_id()] = midx_running(sum);
      }
      __syncthreads();
    }
    const double total = lanes[1][kWarpSize - 1];
    const MidxRow row = midx_row(p, uniform, lanes[0][kWarpSize - 1], total);
    const int64_t at = b * u.num_samples;
    if constexpr (Given) {
      for (int64_t j = first + threadIdx.x; j < last; j += kMidxThreads) {
        u.log_q[at + j] = midx_log_q_of(p, row, weights, u.given[at + j]);
      }
    } else {
      for (int64_t j = first + warp_id(); j < last; j += kMidxWarps) {  // the same for all lanes, as all below
        const double x = midx_uniform(p, key, b, j);
        // Cell and member one after the other, not one inside the other: the compiler keeps a barrier register for each
        // branch that lanes might leave at different times, and spills them where branches nest deeper.
        const bool some = row.left > 0.0, from_uniform = some && (x < row.share || !(total > 0.0));
        int64_t id = kNoClass, cell = -1;
        double rest = 0.0;
        if (some && !from_uniform) {
          const double point = midx_unit_range((x - row.share) / (1.0 - row.share)) * total;
          const MidxLane outer = midx_find_lane(lanes[1][lane_id()], point);
          const MidxPick one =
              midx_walk<double>(p.codes, outer.lane, outer.before, point, [&](int64_t k) { return sizes[k]; });
          if (one.index >= 0) {
            const MidxCells cells = {p, list, weights + p.codes, one.index, midx_touches(p, list, one.index)};
            const double running = midx_cell_sums(p, cells);
            const double inner_point = one.rest * shuffle_from(running, kWarpSize - 1);
            const MidxLane inner = midx_find_lane(running, inner_point);
            const MidxPick two = midx_walk<float>(p.codes, inner.lane, inner.before, inner_point, cells);
            if (two.index >= 0) cell = one.index * p.codes + two.index;
            rest = two.rest;
          }
        }
        if (lane_id() == 0) {
          if (cell >= 0) id = midx_member(p, uniform, list, cell, rest);
          if (from_uniform) id = midx_from_uniform(p, row, x);
          const bool none = row.left == 0.0;
          u.ids[at + j] = none ? stand_in(u, uniform) : id < 0 ? 0 : id;
          u.log_q[at + j] = none ? 0.0f : row.left > 0.0 ? midx_log_q(p, row, weights, id) : quiet_nan<float>();
        }
      }
    }
    __syncthreads();  // before the next item writes sizes and lanes
  }
}

}  // namespace samplex::SX_BACKEND_NS
