// The entry losses on the GPU: one block per batch row, of one warp or of several for wide rows. Formulas in
// entry_loss_params.h.
//
//   entry_loss_kernel        float, half, bfloat16 storage; d <= 4096: each class row is read once
//   entry_loss_wide_kernel   any other d, double, and shared draws (whose products come from a GEMM)
//   entry_examples_kernel    one block: numbers kept per example after a step of augment_reduce; where it can, the last
//                            block of the loss does it
//   entry_loss_check_kernel  SAMPLEX_DEBUG=1: stops with a message at the first id out of range
//
// One pass: a group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running
// gradient of h in registers; kRows class rows are in flight in a group. A draw's coefficient follows from its own
// product (and the targets' scores, which a relative loss takes first), so the rows are added to the gradient while
// they are still in registers. Only the targets of a relative loss are read twice, the second time from the cache.
// Where several warps share a row, their products meet in shared memory, and each warp computes what follows. There is
// no float atomic; sums run in an order that the shapes fix: the same bits every time.
#pragma once

#include "loss/entry_loss/entry_loss_device.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kCheckThreads = 128;
constexpr int kExampleThreads = 512;  // of the one block that moves the numbers of examples
// Blocks an SM shall hold. Left to itself ptxas spills a few registers of the general kernels to fit one block more; a
// warp has kRows class rows in flight in each group, so that few of them keep the memory busy.
constexpr int blocks_of(EntryMode mode) { return mode == EntryMode::kPlain ? 0 : 1; }

// ------------------------------------------------------------------------------------------------ one pass
// Columns are split into chunks of kWidth: thread `seat` of those that share a class row has chunks seat, seat +
// kSeats, … of it. Those are the kGroup lanes of a group, or, of a wide row, all kWarps warps of the block (kGroup is
// 32 then). There are no branches around register arrays: an entry that is not there reads h instead of a class row, a
// column that is not there reads column 0 against h = 0.
template <typename T, int kWidth, int kChunks, int kGroup, int kRows, EntryMode kMode, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, blocks_of(kMode)) entry_loss_kernel(EntryLossParams p) {
  constexpr int kThreads = kWarps * kWarpSize, kSeats = kGroup * kWarps;
  [[maybe_unused]] __shared__ float parts[2][kWarps][kRows];  // products of a tile by warp; two of them in turn
  constexpr bool kGeneral = kMode != EntryMode::kPlain, kRelative = kMode == EntryMode::kRelative;
  constexpr int kElements = kWidth * kChunks;
  constexpr int kGroups = kWarpSize / kGroup;
  constexpr int kRound = kGroups * kRows;  // entries of a tile
  static_assert(kRows <= kGroup && kWarpSize % kRound == 0 && (kWarps == 1 || kGroup == kWarpSize));
  const int64_t b = blockIdx.x;
  EntryLossRow<float> row{};
  if constexpr (kGeneral) {
    row = read_row<float>(p, b);
    if (row.count == 0) return zero_row<kThreads, float>(p, b);  // the whole block
  } else {
    if (p.target[b] == p.ignore_index) return zero_row<kThreads, float>(p, b);  // the whole block
    row.weight = class_scalar(p.class_weight, target_of(p, b, 0), p.num_classes, 1.0f);
  }
  const int lane = lane_id(), group = lane / kGroup, place = lane % kGroup;
  const int seat = kWarps == 1 ? place : int(threadIdx.x);
  const bool writer = kWarps == 1 || warp_id() == 0;  // warps differ only in their columns
  const int targets = kGeneral ? int(p.num_targets) : 1;
  const int dim = int(p.dim), entries = targets + int(p.num_samples);
  const T* hidden = static_cast<const T*>(p.hidden) + b * dim;
  const EntryLossFactors<float> f(p);
  const auto column = [&](int chunk) { return (chunk * kSeats + seat) * kWidth; };
  const auto load_row = [&](const T* from, float* to) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool real = column(chunk) < dim;
      load_values<kWidth>(from + (real ? column(chunk) : 0), to + chunk * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {  // 0 times an infinite number would be nan
        if (!real) to[chunk * kWidth + i] = 0;
      }
    }
  };

  const auto sync = [] {
    if constexpr (kWarps == 1)
      warp_sync();
    else
      __syncthreads();
  };
  // Product of a row over this warp's columns -> over all of them.
  [[maybe_unused]] int turn = 0;
  const auto whole_product = [&](float x, [[maybe_unused]] int which, [[maybe_unused]] bool writes) {
    if constexpr (kWarps == 1)
      return x;
    else
      return across_warps(parts, turn, x, which, writes);
  };

  float h[kElements], sum[kElements];
  load_row(hidden, h);
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] = 0;
  float loss = 0, pull = 0, base = 0;
  if constexpr (kRelative) {
    float total = 0;
    for (int k = 0; k < targets; ++k) {  // every group reads the same row
      const int64_t id = target_of(p, b, k);
      if (id < 0) continue;  // the whole warp
      float target_row[kElements], dot = 0;
      load_row(row_of(p, id, hidden), target_row);
#pragma unroll
      for (int i = 0; i < kElements; ++i) dot += h[i] * target_row[i];
      dot = whole_product(group_sum<kGroup>(dot), 0, lane == 0);
      keep_target(p, row, id, k, f.scale * (dot + class_scalar(p.bias, id, p.num_classes, 0.0f)), total);
    }
    if (targets > 1) {
      row.level /= total;
      sync();  // what thread 0 wrote
    }
  }
  // A lane holds id, bias and log_q of one entry of the stage and hands them round.
  for (int stage = kRelative ? targets : 0; stage < entries; stage += kWarpSize) {
    const EntryLossEntry<float> held = load_entry<kMode>(p, row, f, b, stage + lane);
    const unsigned taking_part = kGeneral ? warp_ballot(held.id >= 0) : 0u;
    for (int tile = 0; tile < kWarpSize && stage + tile < entries; tile += kRound) {
      float rows[kRows][kElements], dots[kRows];
      // All class rows are requested before any is used: the gather is bound by latency.
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t id = shuffle_from(held.id, tile + r * kGroups + group);
        load_row(row_of(p, id, hidden), rows[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dots[r] = h[0] * rows[r][0];
#pragma unroll
        for (int i = 1; i < kElements; ++i) dots[r] += h[i] * rows[r][i];
      }
      float dot = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float whole = group_sum<kGroup>(dots[r]);
        if (place % kRows == r) dot = whole;
      }
      dot = whole_product(dot, place % kRows, place < kRows);
      // From here on a lane speaks for one entry of its group; of those that speak for the same one the first counts.
      const int mine = tile + (place % kRows) * kGroups + group, k = stage + mine;
      const float bias = shuffle_from(held.bias, mine), log_q = shuffle_from(held.log_q, mine);
      float coef;
      if constexpr (kGeneral) {
        const bool there = taking_part >> mine & 1u, counts = place < kRows;
        const float score = f.scale * (dot + bias);
        if constexpr (kRelative) {
          coef = relative_draw(p, f, row, b, there, counts, score, log_q, loss, pull);
        } else {
          float term = 0;
          coef = noise_entry(p, f, k < targets, there, score, log_q, shuffle_from(held.share, mine), term);
          if (counts) loss += term;
        }
      } else {
        float term = 0;
        coef = plain_entry(f, row.weight, k == 0, dot, bias, log_q, term);
        if (k >= entries) coef = 0;
        if (k < entries && place < kRows) loss += term;
      }
      if (p.need_grad && writer && k < entries && place < kRows)
        static_cast<float*>(p.coef_loss)[b * entries + k] = coef;
      if (p.need_grad) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float c = shuffle_from(coef, group * kGroup + r);
          bool there = stage + tile + r * kGroups + group < entries;
          if (kGeneral) there = taking_part >> (tile + r * kGroups + group) & 1u;
          // Not 0 * row: what stands in for an entry that is not there may be infinite.
          if (there) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) sum[i] += c * rows[r][i];
          }
        }
      }
    }
  }
  loss = group_sum<kWarpSize>(loss);
  if constexpr (kRelative) {
    pull = group_sum<kWarpSize>(pull);
    sync();  // what thread 0 wrote
    base = target_ratios(p, row, b);
    for (int k = 0; p.need_grad && k < targets; ++k) {
      const int64_t id = target_of(p, b, k);
      const float coef = id < 0 ? 0.0f : target_coef(p, f, row, id, k, base, pull);
      if (threadIdx.x == 0) static_cast<float*>(p.coef_loss)[b * entries + k] = coef;
      if (id < 0) continue;  // the whole warp
      float target_row[kElements];
      load_row(row_of(p, id, hidden), target_row);
      if (group == 0) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] += coef * target_row[i];
      }
    }
  }
  store_row<kMode>(p, row, b, loss, base, pull);
  if (!p.need_grad) return;  // the whole block
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int step = kGroup; step < kWarpSize; step *= 2) sum[i] += shuffle_xor(sum[i], step);
  }
  float* d_loss = static_cast<float*>(p.d_loss) + b * dim;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk % kGroups == group && column(chunk) < dim)
      store_floats<kWidth>(d_loss + column(chunk), sum + chunk * kWidth);
  }
}

// ------------------------------------------------------------------------------------------------ any width
// Rows too wide for registers: a lane adds the columns it has read to its own columns of d_loss in memory, right after
// the product, so that the class row comes from the cache the second time.
template <typename T, int kWidth, EntryMode kMode>
SX_DEVICE inline void entry_wide_row(const EntryLossParams& p) {
  using A = acc_t<T>;
  constexpr bool kGeneral = kMode != EntryMode::kPlain, kRelative = kMode == EntryMode::kRelative;
  const int64_t b = blockIdx.x;
  clear_padding<A>(p.coefs, p.coef_loss, b, p.num_targets + p.num_samples, lane_id(), kWarpSize);
  clear_parts<T>(p.parts, b, p.num_samples, lane_id(), kWarpSize);
  const auto zero = [&] {
    clear_parts<T>(p.parts, b, 0, lane_id(), kWarpSize);
    zero_row<kWarpSize, A>(p, b);
  };
  EntryLossRow<A> row{};
  if constexpr (kGeneral) {
    row = read_row<A>(p, b);
    if (row.count == 0) return zero();  // the whole block
  } else {
    if (p.target[b] == p.ignore_index) return zero();  // the whole block
    row.weight = class_scalar<A>(p.class_weight, target_of(p, b, 0), p.num_classes, A(1));
  }
  const int64_t targets = kGeneral ? p.num_targets : 1;
  const int64_t entries = targets + p.num_samples, rows_read = p.shared ? targets : entries;
  const int64_t first = int64_t(lane_id()) * kWidth, step = int64_t(kWarpSize) * kWidth;
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  A* coefs = static_cast<A*>(p.coef_loss) + b * p.coefs.stride;
  A* d_loss = static_cast<A*>(p.d_loss) + b * p.dim;
  const EntryLossFactors<A> f(p);
  const auto product_of = [&](const T* class_row) {
    A x[kWidth], w[kWidth];
    A dot = 0;
    for (int64_t c = first; c < p.dim; c += step) {
      load_columns<kWidth>(hidden + c, x);
      load_columns<kWidth>(class_row + c, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dot += x[i] * w[i];
    }
    return group_sum<kWarpSize>(dot);
  };
  const auto add_row = [&](const T* class_row, A coef, bool start) {
    A w[kWidth];
    for (int64_t c = first; c < p.dim; c += step) {
      load_columns<kWidth>(class_row + c, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d_loss[c + i] = (start ? A(0) : d_loss[c + i]) + coef * w[i];
    }
  };
  A loss = 0, pull = 0, base = 0;
  if constexpr (kGeneral) {
    for (int64_t c = first; p.need_grad && c < p.dim; c += step) {
      for (int i = 0; i < kWidth; ++i) d_loss[c + i] = A(0);
    }
  }
  if constexpr (kRelative) {
    A total = 0;
    for (int64_t k = 0; k < targets; ++k) {
      const int64_t id = target_of(p, b, k);
      if (id < 0) continue;  // the whole warp
      keep_target(p, row, id, k,
                  f.scale * (product_of(row_of(p, id, hidden)) + class_scalar<A>(p.bias, id, p.num_classes, A(0))),
                  total);
    }
    if (targets > 1) {
      row.level /= total;
      warp_sync();  // what lane 0 wrote
    }
  }
  EntryLossEntry<A> held{-1, A(0), A(0), A(0)};  // of 32 entries, one a lane
  for (int64_t k = kRelative ? targets : 0, i = 0; k < rows_read; ++k, ++i) {
    const int holder = int(i % kWarpSize);
    if (holder == 0) held = load_entry<kMode>(p, row, f, b, k + lane_id());
    const EntryLossEntry<A> entry{shuffle_from(held.id, holder), shuffle_from(held.bias, holder),
                                  shuffle_from(held.log_q, holder), shuffle_from(held.share, holder)};
    if (kGeneral && entry.id < 0) {  // the whole warp
      if (p.need_grad && lane_id() == 0) coefs[k] = A(0);
      continue;
    }
    const A dot = product_of(row_of(p, entry.id, hidden));
    A term = 0, coef;
    if constexpr (kRelative)
      coef = relative_draw(p, f, row, b, true, lane_id() == 0, f.scale * (dot + entry.bias), entry.log_q, term, pull);
    else if constexpr (kGeneral)
      coef = noise_entry(p, f, k < targets, true, f.scale * (dot + entry.bias), entry.log_q, entry.share, term);
    else
      coef = plain_entry(f, row.weight, k == 0, dot, entry.bias, entry.log_q, term);
    if (lane_id() == 0) {
      loss += term;
      if (p.need_grad) coefs[k] = coef;
    }
    if (p.need_grad) add_row(row_of(p, entry.id, hidden), coef, !kGeneral && k == 0);
  }
  // Shared draws: the products are there, and their part of d_loss goes to a GEMM. All lanes stay to the end.
  for (int64_t stage = rows_read; stage < entries; stage += kWarpSize) {
    const int64_t k = stage + lane_id();
    const EntryLossEntry<A> entry = load_entry<kMode, true>(p, row, f, b, k);
    const bool inside = k < entries, there = inside && (!kGeneral || entry.id >= 0);
    const A dot = inside ? static_cast<const A*>(p.dots)[b * p.dots_stride + k - targets] : A(0);
    A coef = 0;
    if constexpr (kRelative)
      coef = relative_draw(p, f, row, b, there, there, f.scale * (dot + entry.bias), entry.log_q, loss, pull);
    else if constexpr (kGeneral)
      coef = noise_entry(p, f, false, there, f.scale * (dot + entry.bias), entry.log_q, entry.share, loss);
    else if (inside)
      coef = plain_entry(f, row.weight, false, dot, entry.bias, entry.log_q, loss);
    if (p.need_grad && inside) {
      coefs[k] = coef;
      store_parts<T>(p.parts, b, k - targets, coef);
    }
  }
  loss = group_sum<kWarpSize>(loss);
  if constexpr (kRelative) {
    pull = group_sum<kWarpSize>(pull);
    warp_sync();  // what lane 0 wrote
    base = target_ratios(p, row, b);
    for (int64_t k = 0; p.need_grad && k < targets; ++k) {
      const int64_t id = target_of(p, b, k);
      const A coef = id < 0 ? A(0) : target_coef(p, f, row, id, k, base, pull);
      if (lane_id() == 0) coefs[k] = coef;
      if (id >= 0) add_row(row_of(p, id, hidden), coef, false);
    }
  }
  store_row<kMode>(p, row, b, loss, base, pull);
}

template <typename A>
__global__ void __launch_bounds__(kExampleThreads) entry_examples_kernel(EntryExamples x) {
  move_examples<kExampleThreads, A>(x);
}

template <typename T, int kWidth, EntryMode kMode>
__global__ void __launch_bounds__(kWarpSize, blocks_of(kMode)) entry_loss_wide_kernel(EntryLossParams p) {
  using A = acc_t<T>;
  __shared__ A scratch[1];
  entry_wide_row<T, kWidth, kMode>(p);
  const bool last = reduce_loss_last<kWarpSize>(p.mean, scratch);
  if constexpr (kMode == EntryMode::kRelative) {
    if (last && p.examples.index != nullptr) move_examples<kWarpSize, A>(p.examples);  // the whole block
  }
}

// ------------------------------------------------------------------------------------------------ debug check
// A separate kernel: a printf in the hot kernels costs them a stack frame and registers.
__global__ void __launch_bounds__(kCheckThreads) entry_loss_check_kernel(EntryLossParams p) {
  const char* op = p.kind == EntryLoss::kNegativeSampling ? "negative_sampling"
                   : p.kind == EntryLoss::kNce            ? "nce"
                   : p.kind == EntryLoss::kOneVsEach      ? "one_vs_each"
                                                          : "augment_reduce";
  check_loss_id<kCheckThreads>(op, p.target, p.batch * p.num_targets, p.ids, (p.shared ? 1 : p.batch) * p.num_samples,
                               p.num_classes, [&](int64_t id) { return !counts_as_target(p, id); });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
