// The entry losses on the GPU: one block per batch row, of one warp or of several for wide rows. Formulas in
// entry_loss_params.h.
//
//   entry_loss_kernel        float, half, bfloat16 storage; d <= 4096: each class row is read once
//   entry_loss_wide_kernel   any other d, double, and shared draws (whose products come from a GEMM)
//   entry_loss_check_kernel  SAMPLEX_DEBUG=1: stops with a message at the first id out of range
//
// One pass: a group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running
// gradient of h in registers; kRows class rows are in flight in a group. A draw's coefficient follows from its own
// product (and the targets' scores, which a relative loss takes first), so the rows are added to the gradient while
// they are still in registers. Only the targets of a relative loss are read twice, the second time from the cache.
// Where several warps share a row, their products meet in shared memory, and each warp computes what follows. There is
// no float atomic; sums run in an order that the shapes fix: the same bits every time.
#pragma once

#include "common/vec_load.cuh"
#include "loss/entry_loss/entry_loss_math.h"
#include "loss/fused/fused_loss_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kCheckThreads = 128;

// What a kernel is compiled for: the less it must be ready for, the fewer registers it takes.
enum class EntryMode {
  kPlain,    // negative sampling, one target, no mask
  kNoise,    // negative sampling and nce
  kRelative  // one_vs_each and augment_reduce
};
// Blocks an SM shall hold. Left to itself ptxas spills a few registers of the general kernels to fit one block more; a
// warp has kRows class rows in flight in each group, so that few of them keep the memory busy.
constexpr int blocks_of(EntryMode mode) { return mode == EntryMode::kPlain ? 0 : 1; }

// ------------------------------------------------------------------------------------------------ a row
// What every lane knows of its batch row.
template <typename A>
struct EntryLossRow {
  A count, weight;    // how many targets, and a
  A level, log_eta;   // relative losses: the target's score (of several: their mean), log eta
  A *scores, *pulls;  // relative losses with several targets: [P] each, written by thread 0
};

// Class of target k, -1 where it takes no part; see class_or_unknown for an id out of range.
SX_DEVICE inline int64_t target_of(const EntryLossParams& p, int64_t b, int64_t k) {
  const int64_t id = p.target[b * p.num_targets + k];
  return counts_as_target(p, id) ? class_or_unknown(id, p.num_classes) : -1;
}

// Class row `id`; h stands in for that of an entry that takes no part and for one out of range.
template <typename T>
SX_DEVICE inline const T* row_of(const EntryLossParams& p, int64_t id, const T* hidden) {
  return uint64_t(id) < uint64_t(p.num_classes) ? static_cast<const T*>(p.weight) + id * p.dim : hidden;
}

// By the whole warp. count = 0: the row has no target.
template <typename A>
SX_DEVICE inline EntryLossRow<A> read_row(const EntryLossParams& p, int64_t b) {
  EntryLossRow<A> row{A(0), A(0), A(0), A(0), nullptr, nullptr};
  for (int64_t k = lane_id(); k < p.num_targets; k += kWarpSize) {
    const int64_t id = target_of(p, b, k);
    if (id < 0) continue;
    row.count += A(1);
    row.weight += class_scalar<A>(p.class_weight, id, p.num_classes, A(1));
  }
  row.count = group_sum<kWarpSize>(row.count);
  row.weight = group_sum<kWarpSize>(row.weight);
  if (row.count > A(0)) row.weight /= row.count;
  if (p.scratch != nullptr) {
    row.scores = static_cast<A*>(p.scratch) + b * 2 * p.num_targets;
    row.pulls = row.scores + p.num_targets;
  }
  if (p.kind == EntryLoss::kAugmentReduce) row.log_eta = static_cast<const A*>(p.log_eta)[b];
  return row;
}

// a_y
template <typename A>
SX_DEVICE inline A share_of(const EntryLossParams& p, const EntryLossRow<A>& row, int64_t id) {
  return class_scalar<A>(p.class_weight, id, p.num_classes, A(1)) / row.count;
}

template <EntryMode kMode>
SX_DEVICE inline bool draw_masked(const EntryLossParams& p, int64_t b, int64_t id) {
  if (kMode == EntryMode::kRelative) {
    for (int64_t k = 0; k < p.num_targets; ++k) {
      const int64_t target = p.target[b * p.num_targets + k];
      if (target == id && counts_as_target(p, target)) return true;
    }
  }
  return is_known_positive(p.known_offsets, p.known_ids, p.known_size, b, id);
}

// ------------------------------------------------------------------------------------------------ entries of a row
// What a lane knows of one entry before its class row is read. An entry that takes no part has id -1.
template <typename A>
struct EntryLossEntry {
  int64_t id;
  A bias, log_q;
  A share;  // of its term; in kNoise only
};

// kStaged: a shared draw, whose bias may have been staged.
template <EntryMode kMode, bool kStaged = false, typename A>
SX_DEVICE inline EntryLossEntry<A> load_entry(const EntryLossParams& p, const EntryLossRow<A>& row,
                                              const EntryLossFactors<A>& f, int64_t b, int64_t k) {
  constexpr bool kGeneral = kMode != EntryMode::kPlain;
  const int64_t P = kGeneral ? p.num_targets : 1;
  EntryLossEntry<A> entry{-1, A(0), A(0), A(0)};
  if (k >= P + p.num_samples) return entry;
  const int64_t at = (p.shared ? 0 : b * p.num_samples) + k - P;
  const bool target = k < P;
  entry.id = target ? p.target[b * P + k] : p.ids[at];
  if (kGeneral) {
    if (target ? !counts_as_target(p, entry.id) : draw_masked<kMode>(p, b, entry.id)) {
      entry.id = -1;
      return entry;
    }
  }
  entry.id = class_or_unknown(entry.id, p.num_classes);
  if (kMode == EntryMode::kNoise) entry.share = target ? share_of(p, row, entry.id) : row.weight * f.share;
  if (kStaged && p.draw_bias != nullptr)
    entry.bias = static_cast<const A*>(p.draw_bias)[at];
  else
    entry.bias = class_scalar<A>(p.bias, entry.id, p.num_classes, A(0));
  if (kMode == EntryMode::kRelative || p.reg != 0 || (kGeneral && p.kind == EntryLoss::kNce))
    entry.log_q = target ? static_cast<const A*>(p.target_log_q)[b * P + k] : static_cast<const A*>(p.log_q)[at];
  return entry;
}

// Negative sampling of one target: adds the entry's term to `loss` and returns its coefficient.
template <typename A>
SX_DEVICE inline A plain_entry(const EntryLossFactors<A>& f, A row_weight, bool target, A dot, A bias, A log_q,
                               A& loss) {
  const EntryTerm<A> term = entry_term(f.scale * (dot + bias), target, f.reg, log_q);
  const A share = row_weight * (target ? A(1) : f.share);
  loss += share * term.value;
  return share * f.scale * term.slope;
}

// An entry against noise. there: whether it takes part.
template <typename A>
SX_DEVICE inline A noise_entry(const EntryLossParams& p, const EntryLossFactors<A>& f, bool target, bool there, A score,
                               A log_q, A share, A& loss) {
  if (p.kind == EntryLoss::kNce) score += log_weight(log_q, f.log_m);
  const EntryTerm<A> term = entry_term(score, target, f.reg, log_q);
  if (!there) return A(0);
  loss += share * term.value;
  return share * f.scale * term.slope;
}

// A draw of a relative loss, by the whole warp, each lane with its own. there: whether it takes part. counts: whether
// this lane, of those that hold the same one, adds it to the sums.
template <typename A>
SX_DEVICE inline A relative_draw(const EntryLossParams& p, const EntryLossFactors<A>& f, const EntryLossRow<A>& row,
                                 int64_t b, bool there, bool counts, A score, A log_q, A& loss, A& pull) {
  const A log_v = log_weight(log_q, f.log_m);
  if (p.kind == EntryLoss::kAugmentReduce) {
    const A e = there ? exp_acc(score + log_v - row.level - row.log_eta) : A(0);
    if (counts) pull += e;
    return f.scale * row.weight * e;
  }
  const A v = exp_acc(log_v);
  A coef = 0;
  for (int64_t k = 0; k < p.num_targets; ++k) {
    const int64_t id = target_of(p, b, k);
    if (id < 0) continue;  // the whole warp
    const EntryTerm<A> term = softplus_term(score - (p.num_targets == 1 ? row.level : row.scores[k]));
    const A share = share_of(p, row, id), slope = there ? v * term.slope : A(0);
    if (there && counts) loss += share * v * term.value;
    coef += share * slope;
    if (p.num_targets == 1) {
      if (counts) pull += slope;
    } else {
      const A part = group_sum<kWarpSize>(counts ? slope : A(0));
      if (threadIdx.x == 0) row.pulls[k] += part;
    }
  }
  return f.scale * coef;
}

// Keeps the score of target k, and their mean in row.level. total: the weights of the mean so far.
template <typename A>
SX_DEVICE inline void keep_target(const EntryLossParams& p, EntryLossRow<A>& row, int64_t id, int64_t k, A score,
                                  A& total) {
  if (p.num_targets == 1) {
    row.level = score;
    return;
  }
  if (threadIdx.x == 0) {
    row.scores[k] = score;
    row.pulls[k] = A(0);
  }
  // With class weights of zero their plain mean.
  const A share = row.weight == A(0) ? A(1) : share_of(p, row, id);
  row.level += share * score;
  total += share;
}

template <typename A>
SX_DEVICE inline A target_ratio(const EntryLossParams& p, const EntryLossRow<A>& row, int64_t k) {
  return exp_acc((p.num_targets == 1 ? row.level : row.scores[k]) - row.level - row.log_eta);
}

// What targets add to the ratio of augment_reduce.
template <typename A>
SX_DEVICE inline A target_ratios(const EntryLossParams& p, const EntryLossRow<A>& row, int64_t b) {
  A base = 0;
  if (p.kind != EntryLoss::kAugmentReduce) return base;
  for (int64_t k = 0; k < p.num_targets; ++k) {
    if (target_of(p, b, k) >= 0) base += target_ratio(p, row, k);
  }
  return base;
}

// Coefficient of target k of a relative loss, once the draws are done.
template <typename A>
SX_DEVICE inline A target_coef(const EntryLossParams& p, const EntryLossFactors<A>& f, const EntryLossRow<A>& row,
                               int64_t id, int64_t k, A base, A pull) {
  const A share = share_of(p, row, id);
  if (p.kind == EntryLoss::kAugmentReduce)
    return f.scale * ((row.weight * target_ratio(p, row, k) - share * base) - share * pull);
  return -f.scale * share * (p.num_targets == 1 ? pull : row.pulls[k]);
}

// An ignored row, by the whole block.
template <int kBlock, typename A>
SX_DEVICE inline void zero_row(const EntryLossParams& p, int64_t b) {
  if (threadIdx.x == 0) {
    static_cast<A*>(p.loss)[b] = static_cast<A*>(p.denom)[b] = A(0);
    if (p.ratio != nullptr) static_cast<A*>(p.ratio)[b] = A(1);
  }
  if (!p.need_grad) return;
  const int64_t entries = p.num_targets + p.num_samples;
  for (int64_t k = threadIdx.x; k < entries; k += kBlock) static_cast<A*>(p.coef_loss)[b * p.coefs.stride + k] = A(0);
  for (int64_t c = threadIdx.x; c < p.dim; c += kBlock) static_cast<A*>(p.d_loss)[b * p.dim + c] = A(0);
}

// Loss, denominator and ratio of a row, by thread 0.
template <EntryMode kMode, typename A>
SX_DEVICE inline void store_row(const EntryLossParams& p, const EntryLossRow<A>& row, int64_t b, A loss, A base,
                                A pull) {
  if (threadIdx.x != 0) return;
  if (kMode == EntryMode::kRelative && p.kind == EntryLoss::kAugmentReduce) {
    loss = row.weight * (row.log_eta - A(1) + (base + pull));
    static_cast<A*>(p.ratio)[b] = base + pull;
  }
  if (kMode == EntryMode::kRelative) {
    // Without draws no score of a target counts: one out of range must show all the same.
    for (int64_t k = 0; k < p.num_targets; ++k) {
      if (target_of(p, b, k) == p.num_classes) loss = quiet_nan<A>();
    }
  }
  static_cast<A*>(p.loss)[b] = loss;
  static_cast<A*>(p.denom)[b] = row.weight;
}

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
  for (int64_t k = kRelative ? targets : 0; k < rows_read; ++k) {
    const EntryLossEntry<A> entry = load_entry<kMode>(p, row, f, b, k);
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

template <typename T, int kWidth, EntryMode kMode>
__global__ void __launch_bounds__(kWarpSize, blocks_of(kMode)) entry_loss_wide_kernel(EntryLossParams p) {
  __shared__ acc_t<T> scratch[1];
  entry_wide_row<T, kWidth, kMode>(p);
  reduce_loss_last<kWarpSize>(p.mean, scratch);
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
