// Fused sampled softmax on the GPU: one block per batch row. Formulas in sampled_softmax_params.h.
//
//   sampled_softmax_kernel         float, half, bfloat16 storage, d <= 4096: one pass, of one warp or of several
//   sampled_softmax_wide_kernel    any other d, double, and shared draws (whose products come from a GEMM); rows on the
//                                  sphere that are not aligned, or with a margin and several targets or smoothing
//   sampled_softmax_check_kernel   SAMPLEX_DEBUG=1: stops with a message at the first id out of range
#pragma once

#include "loss/sampled_softmax/sampled_softmax_one_pass_device.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kWarps = 4;  // block of all kernels but the one-pass one
constexpr int kThreads = kWarps * kWarpSize;

// Blocks an SM shall hold: eight of one warp; of wider ones sixteen warps, fewer where single columns take address
// registers.
template <typename T, int kWidth, int kChunks, int kGroup, bool kFull, int kRowWarps, bool kUnit>
__global__ void __launch_bounds__(kRowWarps* kWarpSize, kRowWarps == 1 ? 8 : (kWidth == 1 ? 12 : 16) / kRowWarps)
    sampled_softmax_kernel(SampledSoftmaxParams p) {
  using Body = OnePass<T, kWidth, kChunks, kGroup, kFull, kRowWarps, kUnit>;
  __shared__ typename Body::Shared shared;
  SX_DYN_SMEM(float, buffer);  // Body::kBuffer, with gradients
  Body body(p, shared, buffer, blockIdx.x);
  body.run(buffer);
}

// ------------------------------------------------------------------------------------------------ any d, shared draws
// |h|, by all threads of the block.
template <typename T>
SX_DEVICE inline acc_t<T> row_norm(const T* row, int64_t dim, acc_t<T>* scratch) {
  acc_t<T> squares = 0;
  for (int64_t c = threadIdx.x; c < dim; c += kThreads) squares += to_acc(row[c]) * to_acc(row[c]);
  return sqrt_of(block_sum<kWarps>(squares, scratch));
}

// A warp scores an entry; draws that come with their product are scored one a thread. The unit gradient takes a second
// pass over the rows, kWidth columns a thread.
template <typename T, int kWidth>
SX_DEVICE inline void wide_row(const SampledSoftmaxParams& p, acc_t<T>* scratch) {
  using A = acc_t<T>;
  __shared__ A coefs[kThreads];
  __shared__ A coefs_lse[kThreads];
  __shared__ int64_t ids[kThreads];
  const int64_t b = blockIdx.x, P = p.num_targets, m = p.num_samples, entries = P + m;
  clear_padding<A>(p.coefs, p.coef_loss, b, entries, threadIdx.x, kThreads);
  clear_padding<A>(p.coefs, p.coef_lse, b, entries, threadIdx.x, kThreads);
  const RowSetup<A> row = setup_row<kWarps, A>(p, b, scratch);
  const int64_t with_parts = row.num_targets == 0 ? 0 : m;
  clear_parts<T>(p.parts_loss, b, with_parts, threadIdx.x, kThreads);
  clear_parts<T>(p.parts_lse, b, with_parts, threadIdx.x, kThreads);
  if (row.num_targets == 0) return zero_row<kThreads, A>(p, b);  // the whole block
  const A log_m = A(p.log_num_samples);
  const T* hidden = static_cast<const T*>(p.hidden) + b * p.dim;
  const T* weight = static_cast<const T*>(p.weight);
  A* logits = static_cast<A*>(p.coef_loss) + b * p.coefs.stride;
  A* signs = static_cast<A*>(p.signs) + b * p.coefs.stride;

  OnlineSoftmax<A> online = online_empty<A>();
  A pulled = 0, shares = 0, drawn = 0;
  const A hidden_norm = p.has_margin ? row_norm<T>(hidden, p.dim, scratch) : A(0);
  const A of_hidden = hidden_norm > A(0) ? A(1) / hidden_norm : A(0);
  // `inverse`: 1 / |w|, or 1.
  const auto score = [&](int64_t k, int64_t id, A dot, A inverse) {
    const EntryOffsets<A> offsets = entry_offsets<A>(p, b, k, id, log_m);
    A product = p.normalize ? dot * inverse : dot, sign = inverse;
    if (p.has_margin && k < P) {
      const MarginValue<A> margin = margin_value(p.margin, product * of_hidden);
      product = hidden_norm * margin.value;
      sign *= margin.slope;
      if (p.need_grad) static_cast<A*>(p.radial)[b * P + k] = margin.radial * of_hidden;
    }
    A value = A(p.scale) * product + offsets.inside;
    if (p.absolute) {
      sign *= sign_of(value);
      value = value < 0 ? -value : value;
    }
    const A logit = value + offsets.outside;
    const A share = entry_share(p, row, b, k, id);
    pulled += share != A(0) ? share * value : A(0);
    shares += share;
    drawn += k >= P || id == p.num_classes ? A(1) : A(0);
    // Not online_merge of (logit, 1): a nan logit must reach the sum.
    if (logit > online.max) {
      online.sum *= shifted_exp(online.max, logit);
      online.max = logit;
    }
    online.sum += shifted_exp(logit, online.max);
    if (p.need_grad) {
      logits[k] = logit;
      if (has_slopes(p)) signs[k] = sign;
    }
  };

  const int64_t scored_by_warps = p.shared ? P : entries;
  int64_t held = -1;  // of 32 entries of the warp, one a lane
  for (int64_t k = warp_id(), i = 0; k < scored_by_warps; k += kWarps, ++i) {
    if (i % kWarpSize == 0) {
      const int64_t own = k + lane_id() * kWarps;
      held = entry_id(p, b, own, own < scored_by_warps);
    }
    const int64_t id = shuffle_from(held, int(i % kWarpSize));
    A dot = 0, squares = 0;
    if (id >= 0) {
      const T* class_row = id < p.num_classes ? weight + id * p.dim : hidden;
      for (int64_t c = int64_t(lane_id()) * kWidth; c < p.dim; c += kWarpSize * kWidth) {
        A x[kWidth], w[kWidth];
        load_columns<kWidth>(hidden + c, x);
        load_columns<kWidth>(class_row + c, w);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          dot += x[i] * w[i];
          squares += w[i] * w[i];
        }
      }
    }
    dot = group_sum<kWarpSize>(dot);
    if (p.normalize) squares = group_sum<kWarpSize>(squares);
    if (lane_id() == 0) {
      if (id >= 0)
        score(k, id, dot, p.normalize ? inverse_norm(squares) : A(1));
      else if (p.need_grad)
        logits[k] = negative_infinity<A>();
    }
  }
  if (p.shared) {
    for_entries<kThreads>(P, entries, [&](int64_t k, bool there) {
      const int64_t id = entry_id(p, b, k, there);
      if (id >= 0)
        score(k, id, static_cast<const A*>(p.dots)[b * p.dots_stride + k - P],
              p.normalize ? static_cast<const A*>(p.draw_inverse)[k - P] : A(1));
      else if (there && p.need_grad)
        logits[k] = negative_infinity<A>();
    });
  }

  const A block_max_value = block_max<kWarps>(online.max, scratch);
  const A block_total = block_sum<kWarps>(online.sum * shifted_exp(online.max, block_max_value), scratch);
  const A lse = row_lse(block_max_value, block_total);
  const bool trivial = block_sum<kWarps>(drawn, scratch) == A(0);
  const A total = block_sum<kWarps>(shares, scratch) * (trivial ? A(0) : A(1));
  const A total_pulled = block_sum<kWarps>(pulled, scratch);
  if (threadIdx.x == 0) {
    static_cast<A*>(p.loss)[b] = trivial ? A(0) : total * lse - total_pulled;
    static_cast<A*>(p.lse)[b] = lse;
    static_cast<A*>(p.denom)[b] = row.denom;
  }
  if (!p.need_grad) return;  // the whole block
  // Logits become coefficients. Masked entries hold -inf; in a nan row, and where all pull, they are asked again.
  A* coef_lse = p.coef_lse == nullptr ? nullptr : static_cast<A*>(p.coef_lse) + b * p.coefs.stride;
  // With a margin: what the targets add to the gradients of h in its own direction.
  A along_loss = 0, along_lse = 0;
  const bool asked = lse != lse || row.every_share != A(0);  // the same in every thread
  for_entries<kThreads>(0, entries, [&](int64_t k, bool there) {
    const int64_t id = asked ? entry_id(p, b, k, there) : there && k < P ? target_id(p, b, k) : -1;
    if (!there) return;
    const A logit = logits[k];
    const bool part = lse == lse ? logit != negative_infinity<A>() : id >= 0;
    A x = part ? A(p.scale) * exp_acc(logit - lse) : A(0);
    if (p.has_margin && part && k < P) {
      const A radial = static_cast<const A*>(p.radial)[b * P + k];
      const A pull = trivial ? A(0) : A(p.scale) * entry_share(p, row, b, k, id);
      along_lse += x * radial;
      along_loss += (weighted(total, x) - pull) * radial;
    }
    if (has_slopes(p) && part) x *= signs[k];
    if (coef_lse != nullptr) coef_lse[k] = x;
    const A coef = weighted(total, x) - (trivial ? A(0) : entry_pull(p, row, b, k, id));
    logits[k] = coef;
    if (k < P) return;
    store_parts<T>(p.parts_loss, b, k - P, coef);
    store_parts<T>(p.parts_lse, b, k - P, x);
  });
  __syncthreads();
  if (p.has_margin) {  // the whole block
    along_loss = block_sum<kWarps>(along_loss, scratch);
    along_lse = block_sum<kWarps>(along_lse, scratch);
  }

  for (int64_t column = 0; column < p.dim; column += kThreads * kWidth) {
    const int64_t c = column + int64_t(threadIdx.x) * kWidth;
    A of_loss[kWidth], of_lse[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) of_loss[i] = of_lse[i] = A(0);
    for (int64_t begin = 0; begin < scored_by_warps; begin += kThreads) {
      const int64_t k = begin + threadIdx.x;
      if (k < scored_by_warps) {
        const A of_entry = logits[k], of_its_lse = coef_lse != nullptr ? coef_lse[k] : A(0);
        // What takes no part has coefficients of 0, and who has those adds nothing.
        const bool none = of_entry == A(0) && of_its_lse == A(0);
        ids[threadIdx.x] = none ? -1 : k < P ? target_id(p, b, k) : class_or_unknown(drawn_id(p, b, k), p.num_classes);
        coefs[threadIdx.x] = of_entry;
        coefs_lse[threadIdx.x] = of_its_lse;
      }
      __syncthreads();
      const int64_t n = scored_by_warps - begin < kThreads ? scored_by_warps - begin : kThreads;
      for (int64_t j = 0; c < p.dim && j < n; ++j) {
        if (ids[j] < 0) continue;
        A w[kWidth];
        load_columns<kWidth>((ids[j] < p.num_classes ? weight + ids[j] * p.dim : hidden) + c, w);
        // Again a zero wins: a row of no weight stays clear of an infinite class row.
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          of_loss[i] += weighted(coefs[j], w[i]);
          of_lse[i] += weighted(coefs_lse[j], w[i]);
        }
      }
      __syncthreads();
    }
    if (p.has_margin && c < p.dim) {
      A x[kWidth];
      load_columns<kWidth>(hidden + c, x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        of_loss[i] += weighted(along_loss, x[i]);
        of_lse[i] += weighted(along_lse, x[i]);
      }
    }
    if (c < p.dim) {
      store_columns<kWidth>(static_cast<A*>(p.d_loss) + b * p.dim + c, of_loss);
      if (p.d_lse != nullptr) store_columns<kWidth>(static_cast<A*>(p.d_lse) + b * p.dim + c, of_lse);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kWidth > 1 ? 2 : 4) sampled_softmax_wide_kernel(SampledSoftmaxParams p) {
  __shared__ acc_t<T> scratch[kWarps];
  wide_row<T, kWidth>(p, scratch);
  reduce_loss_last<kThreads>(p.mean, scratch);
}

// ------------------------------------------------------------------------------------------------ debug check
// A separate kernel: a printf in the hot kernels costs them a stack frame and registers.
__global__ void __launch_bounds__(kThreads) sampled_softmax_check_kernel(SampledSoftmaxParams p) {
  const int64_t targets = p.batch * p.num_targets, draws = (p.shared ? 1 : p.batch) * p.num_samples;
  check_loss_id<kThreads>("sampled_softmax", p.target, targets, p.ids, draws, p.num_classes,
                          [&](int64_t id) { return !counts_as_target(p, id); });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
