// What more than one kernel of the entry losses uses: a batch row, its entries, the numbers kept per example.
#pragma once

#include "common/vec_load.cuh"
#include "loss/entry_loss/entry_loss_math.h"
#include "loss/fused/fused_loss_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kExampleBatch = 8;  // numbers of examples that a thread loads at once: they wait for memory together

// What a kernel is compiled for: the less it must be ready for, the fewer registers it takes.
enum class EntryMode {
  kPlain,    // negative sampling, one target, no mask
  kNoise,    // negative sampling and nce
  kRelative  // one_vs_each and augment_reduce
};
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
  if (p.kind == EntryLoss::kAugmentReduce) row.log_eta = example_log_eta<A>(p.examples, p.log_eta, b);
  return row;
}

// a_y
template <typename A>
SX_DEVICE inline A share_of(const EntryLossParams& p, const EntryLossRow<A>& row, int64_t id) {
  return class_scalar<A>(p.class_weight, id, p.num_classes, A(1)) / row.count;
}

// By the whole warp; `asks`: whether the lane has a draw.
template <EntryMode kMode>
SX_DEVICE inline bool draw_masked(const EntryLossParams& p, int64_t b, int64_t id, bool asks) {
  bool masked = false;
  if (kMode == EntryMode::kRelative) {
    for (int64_t k = 0; !masked && k < p.num_targets; ++k) {
      const int64_t target = p.target[b * p.num_targets + k];
      masked = target == id && counts_as_target(p, target);
    }
  }
  const bool known = is_known_positive(p.known_offsets, p.known_ids, p.known_size, b, id, asks && !masked);
  return masked || known;
}

// ------------------------------------------------------------------------------------------------ entries of a row
// What a lane knows of one entry before its class row is read. An entry that takes no part has id -1.
template <typename A>
struct EntryLossEntry {
  int64_t id;
  A bias, log_q;
  A share;  // of its term; in kNoise only
};

// Entry k of a lane; by the whole warp. kStaged: a shared draw, whose bias may have been staged.
template <EntryMode kMode, bool kStaged = false, typename A>
SX_DEVICE inline EntryLossEntry<A> load_entry(const EntryLossParams& p, const EntryLossRow<A>& row,
                                              const EntryLossFactors<A>& f, int64_t b, int64_t k) {
  constexpr bool kGeneral = kMode != EntryMode::kPlain;
  const int64_t P = kGeneral ? p.num_targets : 1;
  EntryLossEntry<A> entry{-1, A(0), A(0), A(0)};
  const bool there = k < P + p.num_samples, target = k < P;
  const int64_t at = (p.shared ? 0 : b * p.num_samples) + k - P;
  if (there) entry.id = target ? p.target[b * P + k] : p.ids[at];
  bool masked = false;
  if (kGeneral) {
    masked = draw_masked<kMode>(p, b, entry.id, there && !target);
    if (target) masked = !counts_as_target(p, entry.id);
  }
  if (!there || masked) {
    entry.id = -1;
    return entry;
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

// ------------------------------------------------------------------------------------------------ examples
// The larger of *to and x, where neither has a sign: such numbers are ordered as their bits are, and nan, made
// positive, is above all of them. An integer maximum does not depend on the order.
SX_DEVICE inline void max_into(float* to, float x) {
  atomicMax(reinterpret_cast<unsigned*>(to), bit_copy<unsigned>(x != x ? quiet_nan<float>() : x));
}
SX_DEVICE inline void max_into(double* to, double x) {
  using Bits = unsigned long long;  // the type that the atomic takes
  atomicMax(reinterpret_cast<Bits*>(to), bit_copy<Bits>(x != x ? quiet_nan<double>() : x));
}

// By all threads of one block, after all rows of the loss. Every number is computed before one is changed, and all are
// cleared before the maximum of those with one index is taken.
template <int kThreads, typename A>
SX_DEVICE inline void move_examples(const EntryExamples& x) {
  A* const log_eta = static_cast<A*>(x.log_eta);
  A* const moved = static_cast<A*>(x.ratio);
  constexpr int64_t kStep = int64_t(kThreads) * kExampleBatch;
  // Index of kExampleBatch rows; -1 where there is nothing to change.
  const auto ids_of = [&](int64_t first, int64_t* ids) {
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) {
      const int64_t b = first + int64_t(i) * kThreads;
      const int64_t id = b < x.batch ? x.index[b] : -1;
      ids[i] = uint64_t(id) < uint64_t(x.size) ? id : -1;
    }
  };
  int64_t ids[kExampleBatch];
  for (int64_t first = threadIdx.x; first < x.batch; first += kStep) {
    A used[kExampleBatch], ratio[kExampleBatch];
    ids_of(first, ids);
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) {
      used[i] = ids[i] < 0 ? A(0) : log_eta[ids[i]];
      ratio[i] = ids[i] < 0 ? A(1) : moved[first + int64_t(i) * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) {
      if (ids[i] >= 0) moved[first + int64_t(i) * kThreads] = moved_log_eta(x, used[i], ratio[i]);
    }
  }
  __syncthreads();
  for (int64_t first = threadIdx.x; first < x.batch; first += kStep) {
    ids_of(first, ids);
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) {
      if (ids[i] >= 0) log_eta[ids[i]] = A(0);
    }
  }
  __syncthreads();
  for (int64_t first = threadIdx.x; first < x.batch; first += kStep) {
    A to[kExampleBatch];
    ids_of(first, ids);
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) to[i] = ids[i] < 0 ? A(0) : moved[first + int64_t(i) * kThreads];
#pragma unroll
    for (int i = 0; i < kExampleBatch; ++i) {
      if (ids[i] >= 0) max_into(log_eta + ids[i], to[i]);
    }
  }
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
