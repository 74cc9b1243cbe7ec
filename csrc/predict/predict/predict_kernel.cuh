// Device passes over a chunk of logits; a block has a row.
//
//   predict_lse_kernel    every thread keeps an online softmax of its columns; the block merges them in a fixed order
//   predict_grad_kernel   columns one by one, in place
//   predict_topk_kernel   columns above the limit are collected in shared memory and sorted with those held when there
//                         is no room for another step
//   predict_dots_kernel   a warp has a candidate at a time
#pragma once

#include "common/warp.cuh"
#include "predict/predict/predict_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kPredictThreads = 256;
constexpr int kPredictWarps = kPredictThreads / kWarpSize;
// Entries that a block sorts: those held, and room for two steps.
constexpr int kPredictSorted = 1024;
static_assert(kPredictMostK + 2 * kPredictThreads <= kPredictSorted);

// One more logit into an online softmax. -inf has no mass; +inf and nan stay in max.
template <typename A>
SX_DEVICE inline void predict_push(OnlineSoftmax<A>& s, A x) {
  if (x == negative_infinity<A>()) return;
  if (x <= s.max) {
    s.sum += exp_acc(x - s.max);
  } else {
    s.sum = s.sum * shifted_exp(s.max, x) + A(1);
    s.max = max_nan(s.max, x);
  }
}

template <typename A>
__global__ void __launch_bounds__(kPredictThreads) predict_lse_kernel(PredictLseParams p) {
  __shared__ A maxima[kPredictWarps];
  __shared__ double sums[kPredictWarps];
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  const A* class_weight = static_cast<const A*>(p.class_weight);
  const int64_t b = blockIdx.x;
  const A* dots = static_cast<const A*>(chunk.dots) + b * chunk.count;
  OnlineSoftmax<A> own = online_empty<A>();
  double total = 0;
  for (int64_t c = threadIdx.x; c < chunk.count; c += kPredictThreads) {
    const A s = map.logit(dots[c], c);
    predict_push(own, s);
    if (p.total != nullptr) total += double((class_weight == nullptr ? A(1) : class_weight[c]) * s);
  }
  const A most = block_max<kPredictWarps>(own.max, maxima);
  const double sum = block_sum<kPredictWarps>(double(own.sum * shifted_exp(own.max, most)), sums);
  if (threadIdx.x == 0) p.lse[b] = predict_merge_lse(p.lse[b], double(most), sum);
  if (p.total != nullptr) {
    total = block_sum<kPredictWarps>(total, sums);
    if (threadIdx.x == 0) p.total[b] += total;
  }
  for (int64_t t = b * p.num_targets + threadIdx.x; t < (b + 1) * p.num_targets; t += kPredictThreads) {
    const int64_t column = chunk.column_of(p.target[t]);
    if (column >= 0 && column < chunk.count) static_cast<A*>(p.positive)[t] = map.logit(dots[column], column);
  }
}

template <typename A>
__global__ void __launch_bounds__(kPredictThreads) predict_grad_kernel(PredictGradParams p) {
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  const A* class_weight = static_cast<const A*>(p.class_weight);
  const A* target_coef = static_cast<const A*>(p.target_coef);
  const int64_t b = blockIdx.x;
  A* dots = static_cast<A*>(chunk.dots) + b * chunk.count;
  const A lse = A(p.lse[b]), smooth = p.smooth == nullptr ? A(0) : static_cast<const A*>(p.smooth)[b];
  A coef = static_cast<const A*>(p.coef)[b];
  const bool ignored = coef == A(0) && smooth == A(0);
  // What rounding took from lse goes into the coefficient.
  if (is_finite(lse)) coef *= A(exp_acc(double(lse) - p.lse[b]));
  for (int64_t c = threadIdx.x; c < chunk.count; c += kPredictThreads) {
    const A dot = dots[c], slope = map.slope(dot, c);
    A grad = 0;
    if (!ignored) {
      grad = coef * exp_acc(map.logit(dot, c) - lse);
      if (smooth != A(0)) grad -= smooth * (class_weight == nullptr ? A(1) : class_weight[c]);
      grad *= slope;
    }
    for (int64_t t = b * p.num_targets; t < (b + 1) * p.num_targets; ++t) {
      if (p.target[t] == chunk.first + c && target_coef[t] != A(0)) grad -= target_coef[t] * slope;
    }
    dots[c] = grad;
  }
}

// Entries of a row in shared memory.
template <typename A>
struct PredictPool {
  A* values;
  int64_t* ids;

  SX_DEVICE bool before(int a, int b) const {
    if (predict_larger(values[a], values[b])) return true;
    return !predict_larger(values[b], values[a]) && ids[a] < ids[b];
  }
  // Bitonic over all of kPredictSorted; empty places must hold -inf and the largest id.
  SX_DEVICE void sort() const {
    for (int width = 2; width <= kPredictSorted; width *= 2) {
      for (int step = width / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < kPredictSorted; i += kPredictThreads) {
          const int other = i ^ step;
          if (other > i && before(other, i) == ((i & width) == 0)) {
            const A value = values[i];
            const int64_t id = ids[i];
            values[i] = values[other];
            ids[i] = ids[other];
            values[other] = value;
            ids[other] = id;
          }
        }
      }
    }
    __syncthreads();
  }
};

template <typename A>
__global__ void __launch_bounds__(kPredictThreads) predict_topk_kernel(PredictTopkParams p) {
  __shared__ A values[kPredictSorted];
  __shared__ int64_t ids[kPredictSorted];
  __shared__ int used;
  constexpr int64_t kNowhere = int64_t(1) << 62;
  const PredictPool<A> pool = {values, ids};
  const PredictChunk& chunk = p.chunk;
  const PredictMap<A> map(chunk);
  const int64_t b = blockIdx.x;
  const A* dots = static_cast<const A*>(chunk.dots) + b * chunk.count;
  const int k = int(p.k);
  int held = int(chunk.first < p.k ? chunk.first : p.k);
  for (int i = threadIdx.x; i < kPredictSorted; i += kPredictThreads) {
    values[i] = i < held ? static_cast<const A*>(p.values)[b * p.k + i] : negative_infinity<A>();
    ids[i] = i < held ? p.ids[b * p.k + i] : kNowhere;
  }
  if (threadIdx.x == 0) used = held;
  __syncthreads();
  for (int64_t from = 0; from < chunk.count; from += kPredictThreads) {
    // Later columns have higher ids: at the limit they stay outside.
    const bool full = held == k;
    const A limit = full ? values[k - 1] : A(0);
    const int64_t c = from + threadIdx.x;
    if (c < chunk.count) {
      const A s = map.logit(dots[c], c);
      if (!full || predict_larger(s, limit)) {
        const int at = atomicAdd(&used, 1);
        values[at] = s;
        ids[at] = chunk.first + c;
      }
    }
    __syncthreads();
    const int now = used;
    const bool last = from + kPredictThreads >= chunk.count;
    if (now > held && (last || !full || now + kPredictThreads > kPredictSorted)) {
      pool.sort();
      held = now < k ? now : k;
      for (int i = held + threadIdx.x; i < kPredictSorted; i += kPredictThreads) {
        values[i] = negative_infinity<A>();
        ids[i] = kNowhere;
      }
      if (threadIdx.x == 0) used = held;
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < held; i += kPredictThreads) {
    static_cast<A*>(p.values)[b * p.k + i] = values[i];
    p.ids[b * p.k + i] = ids[i];
  }
}

template <typename T>
__global__ void __launch_bounds__(kPredictThreads) predict_dots_kernel(PredictDotsParams p) {
  using A = acc_t<T>;
  const int64_t count = p.batch * p.num_ids, stride = int64_t(gridDim.x) * kPredictWarps;
  for (int64_t at = int64_t(blockIdx.x) * kPredictWarps + warp_id(); at < count; at += stride) {
    const int64_t id = p.ids[at];
    const bool known = uint64_t(id) < uint64_t(p.num_classes);
    const T* h = static_cast<const T*>(p.hidden) + at / p.num_ids * p.dim;
    const T* w = static_cast<const T*>(p.weight) + (known ? id : 0) * p.dim;
    A dot = 0;
    for (int64_t c = lane_id(); c < p.dim; c += kWarpSize) dot += to_acc(h[c]) * to_acc(w[c]);
    dot = group_sum<kWarpSize>(dot);
    if (lane_id() == 0) static_cast<A*>(p.dots)[at] = known ? dot : negative_infinity<A>();
  }
}

}  // namespace samplex::SX_BACKEND_NS
