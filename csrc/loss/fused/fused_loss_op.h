// The torch side that fused losses share: what a forward keeps for its backward, the reduction, the backward itself,
// and the GEMMs of shared draws.
#pragma once

#include <algorithm>
#include <tuple>

#include "common/calls.h"
#include "loss/fused/fused_loss_params.h"

namespace samplex::glue {

inline Tensor as_acc(const Tensor& t) {
  const ScalarType acc = acc_type(t.scalar_type());
  return t.scalar_type() == acc ? t : torch::stable::to(t, acc);
}

// Rows of `weight` [n, d] in the accumulation type, in memory that is used again from step to step.
inline Tensor gather_rows(const Tensor& weight, const Tensor& ids) {
  const int64_t n = ids.size(0), d = weight.size(1);
  const Tensor rows = empty_pooled(weight, {n, d}, acc_type(weight.scalar_type()));
  if (n == 0 || d == 0) return rows;
  GatherRowsParams params{};
  params.weight = in_any(weight);
  params.ids = in<int64_t>(ids);
  params.rows = out_any(rows);
  params.count = n;
  params.dim = d;
  params.num_classes = weight.size(0);
  params.dtype = dtype_tag("gather_rows", "weight", weight);
  SX_RUN("gather_rows", weight, launch_gather_rows, params);
  return rows;
}

// result [n, p] = a [n, k] times b [k, p]. mm.out and not matmul: under autocast the functional overloads answer in
// half precision. (The stable ABI cannot call addmm, whose factors are of torch's type Scalar.)
inline Tensor product_into(const Tensor& result, const Tensor& a, const Tensor& b) {
  return tensor_of(call_op("aten::mm", "out", a, b, result)[0]);
}

inline Tensor product(const Tensor& a, const Tensor& b) {
  return product_into(empty_pooled(a, {a.size(0), b.size(1)}, a.scalar_type()), a, b);
}

// What the forward keeps for the backward, in one tensor: eight would cost more to make than a small batch to compute.
// Offsets in numbers; a part that is not kept is -1.
struct SavedLoss {
  int64_t d_loss = -1, d_lse = -1, coef_loss = -1, coef_lse = -1, row_loss = -1, denom = -1, factor = -1;
  int64_t ratio = -1, size = 0;

  SavedLoss(int64_t batch, int64_t entries, int64_t dim, Reduction reduction, bool need_grad, bool with_lse,
            bool with_ratio = false) {
    const auto place = [this](int64_t& part, bool kept, int64_t count) {
      if (!kept) return;
      part = size;
      size += count;
    };
    place(d_loss, need_grad, batch * dim);  // first: vector stores want it aligned
    place(d_lse, need_grad && with_lse, batch * dim);
    place(coef_loss, need_grad, batch * entries);
    place(coef_lse, need_grad && with_lse, batch * entries);
    place(row_loss, reduction != Reduction::kNone, batch);
    place(denom, true, batch);
    place(factor, reduction != Reduction::kNone, 1);
    place(ratio, with_ratio, batch);  // last: the Python side reads it from there
  }
};

inline void* part_of(const Tensor& saved, int64_t offset, int64_t count, bool writable) {
  if (offset < 0) return nullptr;
  const size_t item = saved.element_size();
  char* data = static_cast<char*>(const_cast<void*>(saved.const_data_ptr())) + size_t(offset) * item;
  note_bytes(saved, data, size_t(count) * item, writable);
  return data;
}

// A part as a [rows, columns] tensor for torch's GEMMs.
inline Tensor view_of(const Tensor& saved, int64_t offset, int64_t rows, int64_t columns, int64_t stride) {
  char* data = static_cast<char*>(const_cast<void*>(saved.const_data_ptr())) + size_t(offset) * saved.element_size();
  const std::array<int64_t, 2> sizes{rows, columns}, strides{stride, 1};
  return torch::stable::from_blob(data, sizes, strides, saved.device(), saved.scalar_type());
}

inline Reduction reduction_of(const char* op, int64_t code) {
  check_value(code >= 0 && code <= 2, op, ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", code);
  return Reduction(code);
}

// Bias and class weights keep their own floating type: casting [C] numbers in a step would cost O(C).
inline ScalarTable table_of(const char* op, const char* arg, const std::optional<Tensor>& t, int64_t num_classes,
                            const Tensor& weight) {
  if (!t) return {nullptr, DType::kFloat32};
  const ScalarType own = t->scalar_type();
  const ScalarType acc = acc_type(weight.scalar_type());
  check_tensor(op, arg, *t, {num_classes}, "[C]", own == weight.scalar_type() ? own : acc, weight);
  return {in_any(*t), dtype_tag(op, arg, *t)};
}

// The draws' part of a gradient of h, where draws are shared: coefficients [B, m] (columns P .. of `coefs`) times rows.
inline void add_shared_draws(const Tensor& saved, int64_t gradient, int64_t coefs, int64_t batch, int64_t num_targets,
                             const Tensor& class_rows) {
  const int64_t m = class_rows.size(0), d = class_rows.size(1);
  Tensor sum = view_of(saved, gradient, batch, d, d);
  const Tensor more = product(view_of(saved, coefs + num_targets, batch, m, num_targets + m), class_rows);
  if (saved.is_cpu())
    cpu::add_into(sum.scalar_type() == ScalarType::Double, more.const_data_ptr(), sum.numel(), sum.mutable_data_ptr());
  else
    torch::stable::copy_(sum, torch::stable::subtract(sum, more, -1.0));
}

// The reduced loss of the batch, and the factor its backward needs.
inline void run_loss_mean(const char* op, Reduction reduction, const void* row_loss, const void* denom,
                          const Tensor& loss, const Tensor& saved, const SavedLoss& at, int64_t batch) {
  if (reduction == Reduction::kNone) return;
  LossMeanParams mean{};
  mean.row_loss = row_loss;
  mean.denom = denom;
  mean.loss = out_any(loss);
  mean.factor = part_of(saved, at.factor, 1, true);
  mean.batch = batch;
  mean.mean = reduction == Reduction::kMean;
  mean.double_acc = loss.scalar_type() == ScalarType::Double;
  SX_RUN(op, saved, launch_loss_mean, mean);
}

// The one number of a tensor on the CPU.
inline double number_of(ScalarType type, const void* data) {
  return type == ScalarType::Double ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

struct LossBackward {
  const Tensor& grad_loss;                // A [B], or [] of a reduced loss
  const std::optional<Tensor>& grad_lse;  // A [B]
  const Tensor& hidden;                   // [B, d]
  const Tensor& target;                   // int64 [B] or [B, P]
  const Tensor& ids;                      // int64 [B, m], or [m] when shared
  const Tensor& saved;                    // what the forward kept
};

using LossGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // d_hidden, row ids, rows, bias, count

// The gradient of the class rows before it is summed by class: (ids, coefficients, rows of h).
struct LossEntries {
  Tensor d_hidden;
  Tensor coef_target;               // A [B, P]
  Tensor coef_draw;                 // A [B, m]
  std::optional<Tensor> draw_rows;  // A [m, d]: shared draws are summed over the batch
  std::optional<Tensor> draw_bias;  // A [m]
};

// Everything is checked by the caller.
inline LossEntries run_loss_entries(const char* op, const LossBackward& x, const SavedLoss& at, int64_t P,
                                    bool need_rows, bool with_bias) {
  const auto& [grad_loss, grad_lse, hidden, target, ids, saved] = x;
  const DType dtype = dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  const int64_t B = hidden.size(0), d = hidden.size(1), m = ids.size(ids.dim() - 1), entries = P + m;
  const bool shared = ids.dim() == 1;
  // The whole batch has one upstream gradient, and it is at hand: it goes onto h [B, d] and not onto [B, m]
  // coefficients of shared draws. Not where it is 0, which wins over a nan in a coefficient.
  const void* factor_at = part_of(saved, at.factor, 1, false);
  const bool one_factor = shared && m > 0 && B > 0 && need_rows && factor_at != nullptr && !grad_lse &&
                          backend_of(op, hidden) == Backend::kCpu;
  const double factor = one_factor ? number_of(acc, grad_loss.const_data_ptr()) * number_of(acc, factor_at) : 0.0;
  const bool one_product = factor != 0.0;
  Tensor d_hidden = empty_pooled(hidden, {B, d}, hidden.scalar_type());
  const Tensor coef_target = empty(hidden, {B, P}, acc);
  const Tensor coef_draw = one_product ? view_of(saved, at.coef_loss + P, B, m, entries) : empty(hidden, {B, m}, acc);
  LossBwdParams params{};
  params.grad_loss = in_any(grad_loss);
  params.grad_lse = grad_lse ? in_any(*grad_lse) : nullptr;
  params.factor = factor_at;
  params.coef_loss = part_of(saved, at.coef_loss, B * entries, false);
  params.coef_lse = part_of(saved, at.coef_lse, B * entries, false);
  params.d_loss = part_of(saved, at.d_loss, B * d, false);
  params.d_lse = part_of(saved, at.d_lse, B * d, false);
  params.coef_target = out_any(coef_target);
  params.coef_draw = one_product ? nullptr : out_any(coef_draw);
  params.d_hidden = out_any(d_hidden);
  params.denom = part_of(saved, at.denom, B, false);
  params.hidden = in_any(hidden);
  const bool sum_draws = need_rows && shared && m > 0 && B > 0;
  const Tensor clean = sum_draws ? empty_pooled(hidden, {B, d}, acc) : d_hidden;
  params.clean_hidden = sum_draws ? out_any(clean) : nullptr;
  params.hidden_factor = one_product ? factor : 1.0;
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
  params.dtype = dtype;
  if (B > 0) SX_RUN(op, hidden, launch_loss_bwd, params);

  LossEntries entries_of{d_hidden, coef_target, coef_draw, std::nullopt, std::nullopt};
  if (sum_draws) {
    // One row per draw, already summed over the batch.
    entries_of.draw_rows = product(torch::stable::transpose(coef_draw, 0, 1), clean);
    if (with_bias && hidden.is_cpu()) {
      const Tensor bias = empty(hidden, {m}, acc);
      cpu::column_sums(acc == ScalarType::Double, coef_draw.const_data_ptr(), B, m, coef_draw.stride(0),
                       params.hidden_factor, bias.mutable_data_ptr());
      entries_of.draw_bias = bias;
    } else if (with_bias) {
      const std::array<int64_t, 1> over_rows{0};
      entries_of.draw_bias = torch::stable::sum(coef_draw, over_rows);
    }
  }
  return entries_of;
}

inline LossGradients run_loss_backward(const char* op, const LossBackward& x, const SavedLoss& at, int64_t P,
                                       int64_t num_classes, bool need_rows, bool with_bias) {
  const LossEntries e = run_loss_entries(op, x, at, P, need_rows, with_bias);
  const auto& [grad_loss, grad_lse, hidden, target, ids, saved] = x;
  const ScalarType acc = acc_type(hidden.scalar_type());
  const int64_t d = hidden.size(1);
  if (!need_rows) {
    Tensor count = empty(hidden, {1}, ScalarType::Long);
    torch::stable::zero_(count);
    return {e.d_hidden, empty(hidden, {0}, ScalarType::Long), empty(hidden, {0, d}, acc), empty(hidden, {0}, acc),
            count};
  }
  const RowSource targets{target, e.coef_target, hidden};
  const std::optional<Tensor> none;
  const auto reduce = [&](const RowSource& draws, const std::optional<Tensor>& draw_bias) -> LossGradients {
    const RowGradients g = call_row_reduce(targets, draws, draw_bias, num_classes, with_bias);
    return {e.d_hidden, g.row_ids, g.row_grads, g.row_bias, g.count};
  };
  if (e.draw_rows) return reduce({ids, none, *e.draw_rows}, e.draw_bias);
  if (ids.dim() == 2) return reduce({ids, e.coef_draw, hidden}, none);
  // Shared draws of an empty batch, or m = 0.
  return reduce({empty(hidden, {0}, ScalarType::Long), none, empty(hidden, {0, d}, acc)}, none);
}

}  // namespace samplex::glue
