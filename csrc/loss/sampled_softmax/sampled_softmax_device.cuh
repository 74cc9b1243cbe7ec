// Entries of a batch row on the GPU: what takes part, with which id, correction and share. For the kernels of
// sampled_softmax_kernel.cuh.
#pragma once

#include "common/warp.cuh"
#include "loss/fused/fused_loss_kernel.cuh"
#include "loss/sampled_softmax/sampled_softmax_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

SX_DEVICE inline bool counts_as_target(const SampledSoftmaxParams& p, int64_t id) {
  return id != p.ignore_index && !(p.num_targets > 1 && id == kPadding);
}

// Whether a lane's draw is left out; by the whole warp. `asks`: whether the lane has a draw.
SX_DEVICE inline bool draw_masked(const SampledSoftmaxParams& p, int64_t b, int64_t id, bool asks) {
  bool masked = false;
  for (int64_t k = 0; !masked && k < p.num_targets; ++k) {
    const int64_t target = p.target[b * p.num_targets + k];
    masked = target == id && counts_as_target(p, target);
  }
  const bool known = is_known_positive(p.known_offsets, p.known_ids, p.known_size, b, id, asks && !masked);
  return masked || known;
}

// Class of target k, -1 where it takes no part; see class_or_unknown for an id out of range.
SX_DEVICE inline int64_t target_id(const SampledSoftmaxParams& p, int64_t b, int64_t k) {
  const int64_t id = p.target[b * p.num_targets + k];
  return counts_as_target(p, id) ? class_or_unknown(id, p.num_classes) : -1;
}

// Drawn class of entry k, whether it takes part or not.
SX_DEVICE inline int64_t drawn_id(const SampledSoftmaxParams& p, int64_t b, int64_t k) {
  return p.ids[(p.shared ? 0 : b * p.num_samples) + k - p.num_targets];
}

// Class of a lane's entry k (target, then draws), -1 where it takes no part or is not there; by the whole warp.
SX_DEVICE inline int64_t entry_id(const SampledSoftmaxParams& p, int64_t b, int64_t k, bool there) {
  const bool draw = there && k >= p.num_targets;
  const int64_t id = draw ? drawn_id(p, b, k) : -1;
  bool masked;
  if (p.draw_labels != nullptr) {
    const int64_t label = draw ? p.draw_labels[k - p.num_targets] : -1;
    const bool own = draw && label == p.row_labels[b];
    const bool known = is_known_positive(p.known_offsets, p.known_ids, p.known_size, b, label, draw && !own);
    masked = own || known;
  } else {
    masked = draw_masked(p, b, id, draw);
  }
  if (draw) return masked ? -1 : class_or_unknown(id, p.num_classes);
  return there ? target_id(p, b, k) : -1;
}

// body(k, whether it is below `end`) for k = first + this thread, in steps of kBlock threads. All lanes of a warp come
// to the body together.
template <int kBlock, typename F>
SX_DEVICE inline void for_entries(int64_t first, int64_t end, const F& body) {
  for (int64_t base = first + int64_t(threadIdx.x) - lane_id(); base < end; base += kBlock) {
    body(base + lane_id(), base + lane_id() < end);
  }
}

// What is added to scale * h.w before and after the absolute value.
template <typename A>
struct EntryOffsets {
  A inside;   // scale * bias
  A outside;  // -log_q - log m for a draw; nan where log_q is not finite, so that bad input shows
};

template <typename A>
SX_DEVICE inline EntryOffsets<A> entry_offsets(const SampledSoftmaxParams& p, int64_t b, int64_t k, int64_t id,
                                               A log_m) {
  const A bias = k >= p.num_targets && p.draw_bias != nullptr ? static_cast<const A*>(p.draw_bias)[k - p.num_targets]
                                                              : class_scalar<A>(p.bias, id, p.num_classes, A(0));
  const A inside = A(p.scale) * bias;
  if (k < p.num_targets) return {inside, A(0)};
  const A log_q = static_cast<const A*>(p.log_q)[(p.shared ? 0 : b * p.num_samples) + k - p.num_targets];
  return {inside, is_finite(log_q) ? -log_q - log_m : quiet_nan<A>()};
}

// Whether p.signs holds slopes of the logits.
SX_DEVICE inline bool has_slopes(const SampledSoftmaxParams& p) { return p.absolute || p.normalize; }

// sign(x) with sign(0) = 0, and nan for nan
template <typename A>
SX_DEVICE inline A sign_of(A x) {
  return x > 0 ? A(1) : x < 0 ? A(-1) : x;
}

// Every logit -inf (an infinite h) is not a sum of nothing but a bad row.
template <typename A>
SX_DEVICE inline A row_lse(A max, A sum) {
  return max == negative_infinity<A>() ? quiet_nan<A>() : max + log_acc(sum);
}

// What a row knows before it reads any class row.
template <typename A>
struct RowSetup {
  int64_t num_targets;  // without padding
  A weight_sum;         // class weights of the targets, summed, each times its target_weight if that is given
  A target_share, every_share;
  A denom;
};

template <typename A>
SX_DEVICE inline A target_weight(const SampledSoftmaxParams& p, int64_t b, int64_t k) {
  return p.target_weight == nullptr ? A(1) : static_cast<const A*>(p.target_weight)[b * p.num_targets + k];
}

// Share a_k of entry k.
template <typename A>
SX_DEVICE inline A entry_share(const SampledSoftmaxParams& p, const RowSetup<A>& row, int64_t b, int64_t k,
                               int64_t id) {
  A share = row.every_share;
  if (k < p.num_targets) share += row.target_share * target_weight<A>(p, b, k);
  if (share != A(0) && p.class_weight.data != nullptr)
    share *= class_scalar<A>(p.class_weight, id, p.num_classes, A(1));
  return share;
}

// Counts targets and, for label smoothing, entries. All threads of the block call it.
template <int kBlockWarps, typename A>
SX_DEVICE inline RowSetup<A> setup_row(const SampledSoftmaxParams& p, int64_t b, A* scratch) {
  RowSetup<A> row = {0, A(0), A(0), A(0), A(0)};
  for (int64_t k = 0; k < p.num_targets; ++k) {
    const int64_t id = p.target[b * p.num_targets + k];
    if (!counts_as_target(p, id)) continue;
    ++row.num_targets;
    row.weight_sum += class_scalar<A>(p.class_weight, class_or_unknown(id, p.num_classes), p.num_classes, A(1)) *
                      target_weight<A>(p, b, k);
  }
  if (row.num_targets == 0) return row;
  const bool given = p.target_weight != nullptr;
  row.target_share = A(1 - p.label_smoothing) / (given ? A(1) : A(row.num_targets));
  row.denom = given ? A(1) : row.weight_sum / A(row.num_targets);
  if (p.label_smoothing > 0) {
    // Counted in the accumulation type: exact up to 2^24 draws, the most a key allows.
    A entries = 0;
    for_entries<kBlockWarps * kWarpSize>(0, p.num_targets + p.num_samples, [&](int64_t k, bool there) {
      entries += entry_id(p, b, k, there) >= 0 ? A(1) : A(0);
    });
    row.every_share = A(p.label_smoothing) / block_sum<kBlockWarps>(entries, scratch);
  }
  return row;
}

template <int kBlock, typename A>
SX_DEVICE inline void zero_row(const SampledSoftmaxParams& p, int64_t b) {
  const int64_t entries = p.num_targets + p.num_samples;
  if (threadIdx.x == 0) {
    static_cast<A*>(p.loss)[b] = A(0);
    static_cast<A*>(p.lse)[b] = A(0);
    static_cast<A*>(p.denom)[b] = A(0);
  }
  const auto clear = [&](void* rows, int64_t width, int64_t stride) {
    if (rows == nullptr) return;
    for (int64_t k = threadIdx.x; k < width; k += kBlock) static_cast<A*>(rows)[b * stride + k] = A(0);
  };
  clear(p.coef_loss, entries, p.coefs.stride);
  clear(p.coef_lse, entries, p.coefs.stride);
  clear(p.d_loss, p.dim, p.dim);
  clear(p.d_lse, p.dim, p.dim);
}

// What entry k of class `id` pulls with: scale sign_k a_k.
template <typename A>
SX_DEVICE inline A entry_pull(const SampledSoftmaxParams& p, const RowSetup<A>& row, int64_t b, int64_t k, int64_t id) {
  if (id < 0 || (k >= p.num_targets && row.every_share == A(0))) return A(0);
  const A share = entry_share(p, row, b, k, id);
  if (share == A(0)) return A(0);
  return A(p.scale) * share * (has_slopes(p) ? static_cast<const A*>(p.signs)[b * p.coefs.stride + k] : A(1));
}

// total * push, where a zero wins over nan: a row that does not count has no gradient.
template <typename A>
SX_DEVICE inline A weighted(A total, A push) {
  return total == A(0) ? A(0) : total * push;
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
