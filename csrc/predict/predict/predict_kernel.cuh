// Device passes over a chunk of logits. A row is cut into parts, one for a block (PredictCut); what the parts find is
// put together by the block itself where it has the whole row, else by a second kernel. Neither the cut nor the
// alignment of a row changes a bit of the result.
//
//   predict_lse_kernel    a warp sums 2,048 columns; predict_lse_merge_kernel adds up those numbers, a warp a row
//   predict_grad_kernel   columns in place
//   predict_topk_kernel   the k largest of a part; predict_topk_merge_kernel, of all parts and what is held
//   predict_dots_kernel   a warp has a candidate at a time
#pragma once

#include "common/vec_load.cuh"
#include "predict/predict/predict_device.cuh"

namespace samplex::SX_BACKEND_NS {

// ------------------------------------------------------------------------------------------------ lse
// More logits into an online softmax. -inf has no mass; +inf and nan stay in max.
template <typename A>
SX_DEVICE inline void predict_push(OnlineSoftmax<A>& own, const A (&s)[kPredictOwn<A>]) {
  A most = own.max;
#pragma unroll
  for (int j = 0; j < kPredictOwn<A>; ++j) most = max_nan(most, s[j]);
  const A shift = most == negative_infinity<A>() ? A(0) : most;
  A sum = own.sum * exp_acc(own.max - shift);
#pragma unroll
  for (int j = 0; j < kPredictOwn<A>; ++j) sum += exp_acc(s[j] - shift);
  own = {most, sum};
}

// A warp adds up the sums of a row.
template <typename A>
SX_DEVICE inline void predict_lse_merge(const PredictLseParams& p, int64_t b) {
  const int64_t pieces = (p.chunk.count + kPredictLseWarp - 1) / kPredictLseWarp;
  const A* sums = static_cast<const A*>(p.sums) + 3 * b * pieces;
  A most = negative_infinity<A>();
  for (int64_t i = lane_id(); i < pieces; i += kWarpSize) most = max_nan(most, sums[3 * i]);
  most = group_max<kWarpSize>(most);
  double sum = 0, total = 0;
  for (int64_t i = lane_id(); i < pieces; i += kWarpSize) {
    sum += double(sums[3 * i + 1]) * shifted_exp(double(sums[3 * i]), double(most));
    total += double(sums[3 * i + 2]);
  }
  sum = group_sum<kWarpSize>(sum);
  total = group_sum<kWarpSize>(total);
  if (lane_id() != 0) return;
  p.lse[b] = predict_merge_lse(p.lse[b], double(most), sum);
  if (p.total != nullptr) p.total[b] += total;
}

// Before sm_86 a third block would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860
template <typename A>
constexpr int kLseResident = 2;
#else
template <typename A>
constexpr int kLseResident = kPredictResident<A>;
#endif

template <typename A>
__global__ void __launch_bounds__(kPredictThreads, kLseResident<A>) predict_lse_kernel(PredictLseParams p) {
  using Tile = PredictTile<A, kWarpSize>;
  constexpr int kOwn = kPredictOwn<A>, kWidth = kPredictWidth<A>;
  const int64_t b = blockIdx.x / p.cut.parts, part = blockIdx.x % p.cut.parts;
  const PredictRow<A> row(p.chunk, b);
  const A* class_weight = static_cast<const A*>(p.class_weight);
  const bool weights_aligned = predict_aligned(class_weight);
  const int64_t last = p.chunk.count < (part + 1) * p.cut.size ? p.chunk.count : (part + 1) * p.cut.size;
  for (int64_t begin = part * p.cut.size + warp_id() * kPredictLseWarp; begin < last;
       begin += kPredictWarps * kPredictLseWarp) {
    const int64_t end = p.chunk.count < begin + kPredictLseWarp ? p.chunk.count : begin + kPredictLseWarp;
    OnlineSoftmax<A> own = online_empty<A>();
    A total = 0;
    for (int64_t tile = begin; tile < end; tile += Tile::kColumns) {
      const bool inside = tile + Tile::kColumns <= end;
      A s[kOwn];
      row.template load<kWarpSize>(tile, end, s);
      if (p.total != nullptr) {
        A weight[kOwn];
        if (class_weight != nullptr) Tile::load(class_weight, tile, end, inside && weights_aligned, weight);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const A term = class_weight == nullptr ? s[j] : weight[j] * s[j];
          total += inside || Tile::column(tile, j / kWidth, j % kWidth) < end ? term : A(0);
        }
      }
      if (!inside) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          if (Tile::column(tile, j / kWidth, j % kWidth) >= end) s[j] = negative_infinity<A>();
        }
      }
      predict_push(own, s);
    }
    const A most = group_max<kWarpSize>(own.max);
    const A sum = group_sum<kWarpSize>(own.sum * shifted_exp(own.max, most));
    total = group_sum<kWarpSize>(total);
    if (lane_id() == 0) {
      const int64_t pieces = (p.chunk.count + kPredictLseWarp - 1) / kPredictLseWarp;
      A* sums = static_cast<A*>(p.sums) + 3 * (b * pieces + begin / kPredictLseWarp);
      sums[0] = most;
      sums[1] = sum;
      sums[2] = total;
    }
  }
  if (part == 0) {
    for (int64_t t = b * p.num_targets + threadIdx.x; t < (b + 1) * p.num_targets; t += kPredictThreads) {
      const int64_t column = p.chunk.column_of(p.target[t]);
      if (column >= 0 && column < p.chunk.count) {
        static_cast<A*>(p.positive)[t] = row.map.logit(row.dots[column], column);
      }
    }
  }
  if (p.cut.parts > 1) return;
  __syncthreads();
  if (warp_id() == 0) predict_lse_merge<A>(p, b);
}

template <typename A>
__global__ void __launch_bounds__(kPredictThreads) predict_lse_merge_kernel(PredictLseParams p) {
  const int64_t b = int64_t(blockIdx.x) * kPredictWarps + warp_id();
  if (b < p.chunk.batch) predict_lse_merge<A>(p, b);
}

// ------------------------------------------------------------------------------------------------ gradient
// Two blocks where the gradient is split: with three it spills on sm_120.
template <typename A, bool InParts>
__global__ void __launch_bounds__(kPredictThreads, InParts ? 2 : kPredictResident<A>)
    predict_grad_kernel(PredictGradParams p) {
  using Tile = PredictTile<A, kPredictThreads>;
  constexpr int kOwn = kPredictOwn<A>, kWidth = kPredictWidth<A>;
  const int64_t b = blockIdx.x / p.cut.parts, part = blockIdx.x % p.cut.parts;
  const PredictRow<A> row(p.chunk, b);
  const A* class_weight = static_cast<const A*>(p.class_weight);
  const A* target_coef = static_cast<const A*>(p.target_coef);
  const bool weights_aligned = predict_aligned(class_weight);
  const A lse = A(p.lse[b]), smooth = p.smooth == nullptr ? A(0) : static_cast<const A*>(p.smooth)[b];
  A coef = static_cast<const A*>(p.coef)[b];
  const bool ignored = coef == A(0) && smooth == A(0);
  // What rounding took from lse goes into the coefficient.
  if (is_finite(lse)) coef *= A(exp_acc(double(lse) - p.lse[b]));
  const int64_t end = row.count < (part + 1) * p.cut.size ? row.count : (part + 1) * p.cut.size;
  for (int64_t tile = part * p.cut.size; tile < end; tile += Tile::kColumns) {
    const bool inside = tile + Tile::kColumns <= end;
    A s[kOwn], grad[kOwn];
    row.template load_signed<kPredictThreads>(tile, end, s);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) grad[j] = ignored ? A(0) : coef * exp_acc(row.map.size_of(s[j]) - lse);
    if (smooth != A(0)) {
      A weight[kOwn];
      if (class_weight != nullptr) Tile::load(class_weight, tile, end, inside && weights_aligned, weight);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) grad[j] -= smooth * (class_weight == nullptr ? A(1) : weight[j]);
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) grad[j] = ignored ? A(0) : grad[j] * row.map.slope_at(s[j]);
    for (int64_t t = b * p.num_targets; t < (b + 1) * p.num_targets; ++t) {
      const int64_t column = p.chunk.column_of(p.target[t]);
      if (column < tile || column >= tile + Tile::kColumns || target_coef[t] == A(0)) continue;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (column == Tile::column(tile, j / kWidth, j % kWidth)) grad[j] -= target_coef[t] * row.map.slope_at(s[j]);
      }
    }
    if constexpr (InParts) {
      BFloat16* high = static_cast<BFloat16*>(p.parts) + b * p.parts_width;
      BFloat16* low = high + p.chunk.batch * p.parts_width;
      predict_store_parts(high, low, tile, end, inside && predict_aligned(high) && predict_aligned(low), grad);
    } else {
      Tile::store(row.dots, tile, end, inside && row.aligned, grad);
    }
  }
}

// ------------------------------------------------------------------------------------------------ top-k
// Columns [begin, end) of a row.
template <typename A>
struct PredictColumns {
  PredictRow<A> row;
  int64_t begin, end, first;

  SX_DEVICE void load(int64_t tile, A (&s)[kPredictOwn<A>]) const { row.template load<kPredictThreads>(tile, end, s); }
  SX_DEVICE bool exists(int64_t) const { return true; }
  SX_DEVICE A value(int64_t c) const { return row.map.logit(row.dots[c], c); }
  SX_DEVICE int64_t id(int64_t c) const { return first + c; }
};

// What the parts of a row have found.
template <typename A>
struct PredictFound {
  const A* values;
  const int64_t* ids;
  int64_t begin, end;
  bool aligned;

  SX_DEVICE void load(int64_t tile, A (&s)[kPredictOwn<A>]) const {
    using Tile = PredictTile<A, kPredictThreads>;
    Tile::load(values, tile, end, aligned && tile + Tile::kColumns <= end, s);
  }
  SX_DEVICE bool exists(int64_t c) const { return ids[c] >= 0; }
  SX_DEVICE A value(int64_t c) const { return values[c]; }
  SX_DEVICE int64_t id(int64_t c) const { return ids[c]; }
};

// The k largest of the source and the first `held` of `values`, which are the largest of lower ids. `with_held`: they
// take part, and the answer goes in their place; else only the smallest of k does, as a border, and the answer goes to
// `to_values`, padded with -1.
template <typename A, typename Source>
SX_DEVICE inline void predict_topk_block(const Source& source, PredictShared<A>& shared, int k, int held,
                                         bool with_held, A* values, int64_t* ids, A* to_values, int64_t* to_ids) {
  using Key = PredictKey<A>;
  constexpr int kEach = int(kPredictMostK) / kPredictThreads;
  PredictPool<A> pool = {shared, k, {0, 0}};
  if (held == k) pool.border = Key::of(values[k - 1], uint32_t(k - 1));
  if (with_held) {
    for (int i = int(threadIdx.x); i < held; i += kPredictThreads) pool.put(i, Key::of(values[i], uint32_t(i)));
  }
  if (threadIdx.x == 0) shared.used = with_held ? held : 0;
  __syncthreads();
  for (int64_t tile = source.begin; tile < source.end; tile += PredictTile<A, kPredictThreads>::kColumns) {
    pool.offer(source, tile, uint32_t(held));
  }
  const int n = pool.sort();
  A found[kEach];
  int64_t found_ids[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = int(threadIdx.x) + e * kPredictThreads;
    found[e] = negative_infinity<A>();
    found_ids[e] = -1;
    if (i >= n) continue;
    const uint32_t place = ~shared.later[i];
    if (place < uint32_t(held)) {
      found[e] = values[place];
      found_ids[e] = ids[place];
    } else {
      const int64_t c = source.begin + int64_t(place - uint32_t(held));
      found[e] = source.value(c);
      found_ids[e] = source.id(c);
    }
  }
  __syncthreads();  // `values` are read
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = int(threadIdx.x) + e * kPredictThreads;
    if (i >= (with_held ? n : k)) continue;
    to_values[i] = found[e];
    to_ids[i] = found_ids[e];
  }
}

template <typename A>
__global__ void __launch_bounds__(kPredictThreads, kPredictResident<A>) predict_topk_kernel(PredictTopkParams p) {
  __shared__ PredictShared<A> shared;
  const int64_t b = blockIdx.x / p.cut.parts, part = blockIdx.x % p.cut.parts;
  const int64_t begin = part * p.cut.size,
                end = begin + p.cut.size < p.chunk.count ? begin + p.cut.size : p.chunk.count;
  const PredictColumns<A> columns = {PredictRow<A>(p.chunk, b), begin, end, p.chunk.first};
  const int held = int(p.chunk.first < p.k ? p.chunk.first : p.k);
  A* values = static_cast<A*>(p.values) + b * p.k;
  int64_t* ids = p.ids + b * p.k;
  const bool alone = p.cut.parts == 1;
  const int64_t to = (b * p.cut.parts + part) * p.k;
  predict_topk_block<A>(columns, shared, int(p.k), held, alone, values, ids,
                        alone ? values : static_cast<A*>(p.part_values) + to, alone ? ids : p.part_ids + to);
}

template <typename A>
__global__ void __launch_bounds__(kPredictThreads, kPredictResident<A>) predict_topk_merge_kernel(PredictTopkParams p) {
  __shared__ PredictShared<A> shared;
  const int64_t b = blockIdx.x, count = p.cut.parts * p.k;
  const A* part_values = static_cast<const A*>(p.part_values) + b * count;
  const PredictFound<A> found = {part_values, p.part_ids + b * count, 0, count, predict_aligned(part_values)};
  A* values = static_cast<A*>(p.values) + b * p.k;
  int64_t* ids = p.ids + b * p.k;
  const int held = int(p.chunk.first < p.k ? p.chunk.first : p.k);
  predict_topk_block<A>(found, shared, int(p.k), held, true, values, ids, values, ids);
}

// ------------------------------------------------------------------------------------------------ candidates
template <typename T, int kWidth>
__global__ void __launch_bounds__(kPredictThreads) predict_dots_kernel(PredictDotsParams p) {
  using A = acc_t<T>;
  const int64_t count = p.batch * p.num_ids, stride = int64_t(gridDim.x) * kPredictWarps;
  for (int64_t at = int64_t(blockIdx.x) * kPredictWarps + warp_id(); at < count; at += stride) {
    const int64_t id = p.ids[at];
    const bool known = uint64_t(id) < uint64_t(p.num_classes);
    const T* h = static_cast<const T*>(p.hidden) + at / p.num_ids * p.dim;
    const T* w = static_cast<const T*>(p.weight) + (known ? id : 0) * p.dim;
    A dot = 0;
    for (int64_t c = lane_id() * kWidth; c < p.dim; c += kWarpSize * kWidth) {
      A x[kWidth], y[kWidth];
      load_columns<kWidth>(h + c, x);
      load_columns<kWidth>(w + c, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot += x[i] * y[i];
    }
    dot = group_sum<kWarpSize>(dot);
    if (lane_id() == 0) static_cast<A*>(p.dots)[at] = known ? dot : negative_infinity<A>();
  }
}

}  // namespace samplex::SX_BACKEND_NS
