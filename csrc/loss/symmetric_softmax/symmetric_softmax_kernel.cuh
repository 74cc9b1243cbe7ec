// The symmetric softmax on the GPU. Sums run in an order that depends on the batch only.
//
//   symmetric_rows_kernel      a block per row: row_lse
//   symmetric_columns_kernel   a block per 32 columns, a lane per column, rows dealt out to its warps: column_lse, loss
//   symmetric_grad_kernel      a thread per product
#pragma once

#include "common/warp.cuh"
#include "loss/fused/fused_loss_kernel.cuh"
#include "loss/symmetric_softmax/symmetric_softmax_params.h"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kSymmetricWarps = 8;
constexpr int kSymmetricThreads = kSymmetricWarps * kWarpSize;

template <typename A>
struct Pairs {
  const SymmetricSoftmaxParams& p;

  SX_DEVICE A score(int64_t i, int64_t j) const { return A(p.scale) * static_cast<const A*>(p.dots)[i * p.batch + j]; }
  SX_DEVICE bool masked(int64_t i, int64_t j) const {
    if (p.labels == nullptr || i == j) return false;
    const int64_t label = p.labels[j];
    return label == p.labels[i] || is_known(i, label);
  }
  // Whether a label is one of the row's known positives. Offsets are clamped: those of a device come unchecked.
  SX_DEVICE bool is_known(int64_t i, int64_t label) const {
    if (p.known_offsets == nullptr) return false;
    const int64_t first = p.known_offsets[i], last = p.known_offsets[i + 1];
    const int64_t end = last < p.known_size ? last : p.known_size;
    for (int64_t k = first < 0 ? 0 : first; k < end; ++k) {
      if (p.known_ids[k] == label) return true;
    }
    return false;
  }
  SX_DEVICE static A shift(const void* shifts, int64_t i, int64_t j, int64_t at) {
    return shifts == nullptr || i == j ? A(0) : static_cast<const A*>(shifts)[at];
  }
  SX_DEVICE A in_row(int64_t i, int64_t j) const { return score(i, j) + shift(p.key_shift, i, j, j); }
  SX_DEVICE A in_column(int64_t i, int64_t j) const { return score(i, j) + shift(p.query_shift, i, j, i); }
};

// Not online_merge of (x, 1): a nan must reach the sum.
template <typename A>
SX_DEVICE inline void enter(OnlineSoftmax<A>& online, A x) {
  if (x > online.max) {
    online.sum *= shifted_exp(online.max, x);
    online.max = x;
  }
  online.sum += shifted_exp(x, online.max);
}

template <typename A>
__global__ void __launch_bounds__(kSymmetricThreads) symmetric_rows_kernel(SymmetricSoftmaxParams p) {
  __shared__ A scratch[kSymmetricWarps];
  const Pairs<A> pairs{p};
  const int64_t i = blockIdx.x;
  OnlineSoftmax<A> online = online_empty<A>();
  for (int64_t j = threadIdx.x; j < p.batch; j += kSymmetricThreads) {
    if (!pairs.masked(i, j)) enter(online, pairs.in_row(i, j));
  }
  const A max = block_max<kSymmetricWarps>(online.max, scratch);
  const A sum = block_sum<kSymmetricWarps>(online.sum * shifted_exp(online.max, max), scratch);
  if (threadIdx.x == 0) static_cast<A*>(p.row_lse)[i] = max + log_acc(sum);
}

template <typename A>
__global__ void __launch_bounds__(kSymmetricThreads) symmetric_columns_kernel(SymmetricSoftmaxParams p) {
  __shared__ A maxima[kSymmetricWarps][kWarpSize];
  __shared__ A sums[kSymmetricWarps][kWarpSize];
  const Pairs<A> pairs{p};
  const int lane = lane_id(), warp = warp_id();
  const int64_t j = int64_t(blockIdx.x) * kWarpSize + lane;
  OnlineSoftmax<A> online = online_empty<A>();
  for (int64_t i = warp; i < p.batch && j < p.batch; i += kSymmetricWarps) {
    if (!pairs.masked(i, j)) enter(online, pairs.in_column(i, j));
  }
  maxima[warp][lane] = online.max;
  sums[warp][lane] = online.sum;
  __syncthreads();
  if (warp != 0 || j >= p.batch) return;
  for (int w = 1; w < kSymmetricWarps; ++w) {
    online = online_merge(online, OnlineSoftmax<A>{maxima[w][lane], sums[w][lane]});
  }
  const A lse = online_lse(online), own = pairs.score(j, j);
  static_cast<A*>(p.column_lse)[j] = lse;
  static_cast<A*>(p.loss)[j] = (static_cast<const A*>(p.row_lse)[j] - own) / 2 + (lse - own) / 2;
}

template <typename A>
__global__ void __launch_bounds__(kSymmetricThreads) symmetric_grad_kernel(SymmetricSoftmaxParams p) {
  const int64_t i = blockIdx.y, j = int64_t(blockIdx.x) * kSymmetricThreads + threadIdx.x;
  if (j >= p.batch) return;
  const Pairs<A> pairs{p};
  const A scale = A(p.scale), half = scale / 2;
  const A* const grad = static_cast<const A*>(p.grad);
  A coef = half * grad[i] * exp_acc(pairs.in_row(i, j) - static_cast<const A*>(p.row_lse)[i]);
  coef += half * grad[j] * exp_acc(pairs.in_column(i, j) - static_cast<const A*>(p.column_lse)[j]);
  if (i == j) coef -= scale * grad[i];
  // Asked last: fewer registers are held across the exponentials.
  static_cast<A*>(p.coefs)[i * p.batch + j] = pairs.masked(i, j) ? A(0) : coef;
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
