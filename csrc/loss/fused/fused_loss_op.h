// The torch side that fused losses share: what a forward keeps for its backward, the reduction, the backward itself,
// and the GEMMs of shared draws.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/calls.h"
#include "common/panel_layout.h"
#include "loss/fused/fused_loss_params.h"

namespace samplex::glue {

inline Tensor as_acc(const Tensor& t) {
  const ScalarType acc = acc_type(t.scalar_type());
  return t.scalar_type() == acc ? t : torch::stable::to(t, acc);
}

// result [n, p] = a [n, k] times b [k, p]. mm.out and not matmul: under autocast the functional overloads answer in
// half precision. (The stable ABI cannot call addmm, whose factors are of torch's type Scalar.)
inline Tensor product_into(const Tensor& result, const Tensor& a, const Tensor& b) {
  return tensor_of(call_op("aten::mm", "out", a, b, result)[0]);
}

// The same of 16-bit factors with sums in float, on tensor cores. torch has that product for CUDA tensors alone; CPU
// tensors come here in tests.
inline Tensor product16_into(const Tensor& result, const Tensor& a, const Tensor& b) {
  if (a.is_cpu()) return product_into(result, as_acc(a), as_acc(b));
  return tensor_of(call_op("aten::mm", "dtype_out", a, b, ScalarType::Float, result)[0]);
}

// Draws that the op makes by itself.
struct DrawHere {
  const Tensor& key;
  int64_t law, num_samples;
  bool shared;
  const std::optional<Tensor>& table;
  const std::optional<Tensor>& prefix;
  // Where to put the gradient of h by a reduced loss, if the caller wants it from the forward; a CPU makes it.
  std::optional<Tensor>* d_hidden = nullptr;
};

struct LossShape;
struct SavedLoss;

// The class rows of shared draws, which three GEMMs take. A CPU has them in the accumulation type, in memory that is
// used again from step to step: as panels, from which the loss makes the products as it goes (common/panels.h), or,
// where `cpu::takes_panels` says no, as rows for torch. A GPU has them as they are stored, and 16-bit products run on
// tensor cores: those of h and the rows lose nothing; coefficients lose eight digits of 24 where they go in as two bf16
// numbers, which takes the rows twice. fp16 has too small a range for that: its coefficients stay in float.
struct SharedRows {
  static constexpr int64_t kAlign = 8;  // columns of a 16-bit factor
  std::optional<Tensor> rows;           // [copies * width, d]; absent without shared draws, and with panels
  std::optional<Tensor> panels;         // what `gather.across` and `gather.along` point to
  int64_t width = 0, copies = 1;
  bool split = false;
  // What kernels of this op wrote lives as long as the op: the test harness looks at all of it with every kernel.
  std::vector<Tensor> kept;
  GatherRowsParams gather{};     // how to gather the rows; n = 0 without rows
  std::optional<Tensor> staged;  // A [m + 1] of a GPU: their biases, and a counter

  // Nothing runs yet: `gather` is for code that makes the ids, or for `run`.
  SharedRows(const char* op, const Tensor& weight, const ScalarTable& bias, int64_t batch, int64_t draws, bool shared,
             bool need_grad) {
    const int64_t d = weight.size(1);
    if (!shared || draws == 0) return;
    width = draws;
    split = splits(op, weight);
    if (split && need_grad) {
      width = split_width(draws);
      copies = 2;
    }
    const ScalarType acc = acc_type(weight.scalar_type());
    gather.weight = in_any(weight);
    gather.n = draws;
    gather.width = width;
    gather.copies = copies;
    gather.num_classes = weight.size(0);
    gather.dim = d;
    gather.dtype = dtype_tag(op, "weight", weight);
    gather.bias = bias;
    const bool on_cpu = backend_of(op, weight) == Backend::kCpu;
    if (on_cpu && cpu::takes_panels(gather.dtype, batch, draws, d)) {
      const int64_t across = panels_of(draws) * kPanel * d, along = need_grad ? panels_of(d) * kPanel * draws : 0;
      panels = empty_pooled(weight, {across + along}, acc);
      gather.across = static_cast<float*>(out_any(*panels));
      if (need_grad) gather.along = gather.across + across;
      return;
    }
    if (on_cpu) {
      rows = empty_pooled(weight, {draws, d}, acc);
    } else {
      rows = empty(weight, {copies * width, d}, weight.scalar_type());
      staged = empty(weight, {draws + 1}, acc);
      char* const memory = static_cast<char*>(out_any(*staged));
      if (bias.data != nullptr) gather.biases = memory;
      gather.arrived = reinterpret_cast<int*>(memory + size_t(draws) * staged->element_size());
    }
    gather.rows = out_any(*rows);
  }

  void run(const char* op, const Tensor& weight, const Tensor& ids) {
    gather.ids = in<int64_t>(ids);
    if (gather.n > 0) SX_RUN(op, weight, launch_gather_rows, gather);
  }

  bool any() const { return rows.has_value() || panels.has_value(); }

  // dots [B, m], rows `stride` apart, and what else the loss makes of the panels where it has them.
  DrawProducts products(const Tensor& hidden, void* dots, int64_t stride, const LossShape& x, const SavedLoss& at,
                        const Tensor& saved, bool need_hidden);

  static bool splits(const char* op, const Tensor& like) {
    return like.scalar_type() == ScalarType::BFloat16 && backend_of(op, like) != Backend::kCpu;
  }
  static int64_t split_width(int64_t draws) { return (draws + kAlign - 1) / kAlign * kAlign; }

  // Numbers from one row of products to the next: 64 bytes or more of them, as GEMMs want it.
  static int64_t dots_stride(int64_t draws) { return (draws + 15) / 16 * 16; }

  // dots [B, m] = h . w of the draws
  void dots(const Tensor& result, const Tensor& hidden) const {
    const int64_t m = result.size(1);
    Tensor once = *rows;
    if (once.size(0) != m) once = torch::stable::narrow(once, 0, 0, m);
    if (once.element_size() == 2)
      product16_into(result, hidden, torch::stable::transpose(once, 0, 1));
    else
      product_into(result, as_acc(hidden), torch::stable::transpose(once, 0, 1));
  }

  // Memory for coefficients in two parts, where `sum` takes them so.
  DrawParts parts_for(const Tensor& hidden, bool wanted) {
    if (!wanted || !split || copies == 1) return {nullptr, width};
    return {out_any(kept.emplace_back(empty(hidden, {hidden.size(0), 2 * width}, hidden.scalar_type()))), width};
  }

  // result [B, d] = coefficients [B, m] times the rows
  void sum(Tensor& result, const Tensor& coefs, const DrawParts& parts) const {
    if (parts.parts == nullptr) {
      product_into(result, coefs, as_acc(*rows));
      return;
    }
    const std::array<int64_t, 2> sizes{coefs.size(0), 2 * width}, strides{2 * width, 1};
    product16_into(result, torch::stable::from_blob(parts.parts, sizes, strides, rows->device(), rows->scalar_type()),
                   *rows);
  }
};

// The entries of a batch row: P targets, then m draws, which are its own or shared by the batch.
struct LossShape {
  int64_t batch, targets, draws, dim;
  bool shared;

  int64_t entries() const { return targets + draws; }
};

// What the forward keeps for the backward, in one tensor: eight would cost more to make than a small batch to compute.
// Offsets in numbers; a part that is not kept is -1. The coefficients of shared draws are a factor of GEMMs, which want
// their first column and the distance of two rows to be multiples of 64 bytes. `saved_numbers` of
// samplex_cuda/ops/saved_loss.py is the same layout.
struct SavedLoss {
  static constexpr int64_t kAlign = 16;
  int64_t d_loss = -1, d_lse = -1, draws_loss = -1, draws_lse = -1, coef_loss = -1, coef_lse = -1, row_loss = -1;
  int64_t denom = -1, factor = -1, ratio = -1, size = 0;
  CoefLayout coefs;

  SavedLoss(const LossShape& x, Reduction reduction, bool need_grad, bool with_lse, bool with_ratio = false)
      : coefs{x.entries(), 0} {
    if (x.shared) {
      coefs.gap = (kAlign - x.targets % kAlign) % kAlign;
      coefs.stride = (coefs.gap + x.entries() + kAlign - 1) / kAlign * kAlign;
    }
    const int64_t batch = x.batch, dim = x.dim;
    const auto place = [this](int64_t& part, bool kept, int64_t count) {
      if (!kept) return;
      part = size;
      size += count;
    };
    const auto place_coefs = [&](int64_t& part, bool kept) {
      place(part, kept, batch * coefs.stride);
      if (kept) part += coefs.gap;
    };
    if (x.shared) {  // first, where the memory begins on a multiple of 64 bytes
      place_coefs(coef_loss, need_grad);
      place_coefs(coef_lse, need_grad && with_lse);
    }
    place(d_loss, need_grad, batch * dim);  // or first: vector stores want it aligned
    place(d_lse, need_grad && with_lse, batch * dim);
    place(draws_loss, need_grad && x.shared, batch * dim);  // what shared draws add to d_loss and d_lse
    place(draws_lse, need_grad && x.shared && with_lse, batch * dim);
    if (!x.shared) {
      place_coefs(coef_loss, need_grad);
      place_coefs(coef_lse, need_grad && with_lse);
    }
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

inline void* coefs_of(const Tensor& saved, const SavedLoss& at, int64_t offset, int64_t batch, bool writable) {
  if (offset < 0) return nullptr;
  char* rows = static_cast<char*>(part_of(saved, offset - at.coefs.gap, batch * at.coefs.stride, writable));
  return rows + size_t(at.coefs.gap) * saved.element_size();
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

// The coefficients of shared draws as a [B, m] matrix.
inline Tensor draw_coefs(const Tensor& saved, const SavedLoss& at, int64_t coefs, const LossShape& x) {
  return view_of(saved, coefs + x.targets, x.batch, x.draws, at.coefs.stride);
}

inline DrawProducts SharedRows::products(const Tensor& hidden, void* dots, int64_t stride, const LossShape& x,
                                         const SavedLoss& at, const Tensor& saved, bool need_hidden) {
  DrawProducts made{};
  if (!panels) return made;
  const auto part = [&](int64_t offset) { return static_cast<float*>(part_of(saved, offset, x.batch * x.dim, true)); };
  const auto coefs = [&](int64_t offset) {
    return offset < 0 ? nullptr : static_cast<const float*>(coefs_of(saved, at, offset, x.batch, true)) + x.targets;
  };
  made.across = gather.across;
  made.along = need_hidden ? gather.along : nullptr;
  made.hidden = static_cast<const float*>(in_any(kept.emplace_back(as_acc(hidden))));
  made.dots = static_cast<float*>(dots);
  made.dots_stride = stride;
  made.coef_loss = coefs(at.coef_loss);
  made.coef_lse = coefs(at.coef_lse);
  made.coef_stride = at.coefs.stride;
  made.draws_loss = part(at.draws_loss);
  made.draws_lse = part(at.draws_lse);
  made.batch = x.batch;
  made.draws = x.draws;
  made.dim = x.dim;
  return made;
}

// What shared draws add to the gradients of h by the loss and by lse; 0 if it is not requested.
inline void run_shared_draws(const Tensor& saved, const SavedLoss& at, const LossShape& x, const SharedRows& class_rows,
                             bool need_hidden, const DrawParts& parts_loss, const DrawParts& parts_lse = {}) {
  const auto make = [&](int64_t part, int64_t coefs, const DrawParts& parts) {
    if (part < 0 || x.batch == 0 || (need_hidden && class_rows.panels)) return;  // of panels: the loss has made it
    Tensor sum = view_of(saved, part, x.batch, x.dim, x.dim);
    if (need_hidden && class_rows.rows)
      class_rows.sum(sum, draw_coefs(saved, at, coefs, x), parts);
    else
      torch::stable::zero_(sum);
  };
  make(at.draws_loss, at.coef_loss, parts_loss);
  make(at.draws_lse, at.coef_lse, parts_lse);
}

// The reduced loss of the batch, and the factor its backward needs; all nullptr without a reduction.
inline LossMeanParams mean_params(Reduction reduction, const void* row_loss, const void* denom, const Tensor& loss,
                                  const Tensor& saved, const SavedLoss& at, int64_t batch) {
  LossMeanParams mean{};
  if (reduction == Reduction::kNone) return mean;
  mean.row_loss = row_loss;
  mean.denom = denom;
  mean.loss = out_any(loss);
  mean.factor = part_of(saved, at.factor, 1, true);
  mean.batch = batch;
  mean.mean = reduction == Reduction::kMean;
  mean.double_acc = loss.scalar_type() == ScalarType::Double;
  return mean;
}

// A separate kernel, unless the loss kernel has already done it.
inline void run_loss_mean(const char* op, const Tensor& saved, const LossMeanParams& mean) {
  if (mean.loss != nullptr && mean.arrived == nullptr) SX_RUN(op, saved, launch_loss_mean, mean);
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
  // Of a loss scale: see LossBwdParams
  const float* grad_scale = nullptr;
  float* found_inf = nullptr;
  // Classes of the table, where sort keys of the entries are wanted; a CPU makes none.
  std::optional<int64_t> keys_for = std::nullopt;
  bool need_hidden = true;  // without, d_hidden means nothing
};

// Checks what the ops of a backward share.
inline SavedLoss check_backward(const char* op, const LossBackward& x, int64_t reduction_code, bool with_lse,
                                bool with_ratio) {
  const Tensor &hidden = x.hidden, &target = x.target, &ids = x.ids;
  dtype_tag(op, "hidden", hidden);
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  const int64_t B = hidden.size(0), d = hidden.size(1);
  const Reduction reduction = reduction_of(op, reduction_code);
  check_given(op, "target", target);
  check_given(op, "ids", ids);
  check_value(target.dim() == 1 || target.dim() == 2, op, ": target must be [B] or [B, P], got ", describe(target));
  const int64_t P = target.dim() == 1 ? 1 : target.size(1);
  check_tensor(op, "target", target, target.dim() == 1 ? Shape{B} : Shape{B, P}, "[B] or [B, P]", ScalarType::Long,
               hidden);
  check_value(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const bool shared = ids.dim() == 1, reduced = reduction != Reduction::kNone;
  const int64_t m = ids.size(ids.dim() - 1);
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  check_tensor(op, "grad_loss", x.grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  if (x.grad_lse) check_tensor(op, "grad_lse", *x.grad_lse, {B}, "[B]", acc, hidden);
  check_value(with_lse || !x.grad_lse, op, ": grad_lse must be None without with_lse, got ", describe(x.grad_lse));
  const SavedLoss at({B, P, m, d, shared}, reduction, true, with_lse, with_ratio);
  check_tensor(op, "saved", x.saved, {at.size}, "what the forward kept", acc, hidden);
  return at;
}

using LossGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // d_hidden, row ids, rows, bias, count

// The gradient of the class rows before it is summed by class: (ids, coefficients, rows of h).
struct LossEntries {
  Tensor d_hidden;
  Tensor coef_target;               // A [B, P]
  Tensor coef_draw;                 // A [B, m]
  std::optional<Tensor> draw_coef;  // A [m, 1]: factors of draw_rows
  std::optional<Tensor> draw_rows;  // A [m, d]: shared draws are summed over the batch
  std::optional<Tensor> draw_bias;  // A [m]
  std::vector<Tensor> kept;         // as in SharedRows
  std::optional<Tensor> keys;       // see call_row_keys
};

// Everything is checked by the caller.
inline LossEntries run_loss_entries(const char* op, const LossBackward& x, const SavedLoss& at, int64_t P,
                                    bool need_rows, bool with_bias) {
  const auto& [grad_loss, grad_lse, hidden, target, ids, saved, grad_scale, found_inf, keys_for, need_hidden] = x;
  const DType dtype = dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  const bool shared = ids.dim() == 1;
  const LossShape shape{hidden.size(0), P, ids.size(ids.dim() - 1), hidden.size(1), shared};
  const int64_t B = shape.batch, d = shape.dim, m = shape.draws;
  // The whole batch has one upstream gradient: it need not go onto [B, m] coefficients of shared draws. A CPU, which
  // has it available, puts it onto h [B, d]; not where it is 0, which wins over a nan in a coefficient. A GPU puts it
  // onto the summed rows, as their coefficient: one of 0 leaves them out.
  const void* factor_at = part_of(saved, at.factor, 1, false);
  const bool on_cpu = backend_of(op, hidden) == Backend::kCpu;
  const bool one_upstream = shared && m > 0 && B > 0 && need_rows && factor_at != nullptr && !grad_lse;
  const bool one_factor = one_upstream && on_cpu;
  double factor = one_factor ? number_of(acc, grad_loss.const_data_ptr()) * number_of(acc, factor_at) : 0.0;
  if (one_factor && grad_scale != nullptr) factor *= 1.0 / double(*grad_scale);
  const bool unit = one_upstream && !on_cpu && !SharedRows::splits(op, hidden);
  const bool one_product = factor != 0.0 || unit;
  const bool makes_hidden = need_hidden || !on_cpu;
  const Tensor d_hidden = makes_hidden ? empty_pooled(hidden, {B, d}, hidden.scalar_type()) : hidden;
  const Tensor coef_target = empty(hidden, {B, P}, acc);
  const bool sum_draws = need_rows && shared && m > 0 && B > 0;
  const bool split = sum_draws && SharedRows::splits(op, hidden);
  const int64_t width = SharedRows::split_width(m);
  const Tensor parts = split ? empty(hidden, {2 * B, width}, hidden.scalar_type()) : d_hidden;
  const Tensor coef_draw = one_product ? draw_coefs(saved, at, at.coef_loss, shape)
                           : split     ? parts
                                       : empty(hidden, {B, m}, acc);
  LossBwdParams params{};
  params.grad_loss = in_any(grad_loss);
  params.grad_lse = grad_lse ? in_any(*grad_lse) : nullptr;
  params.factor = factor_at;
  params.coef_loss = coefs_of(saved, at, at.coef_loss, B, false);
  params.coef_lse = coefs_of(saved, at, at.coef_lse, B, false);
  params.coefs = at.coefs;
  params.d_loss = part_of(saved, at.d_loss, B * d, false);
  params.d_lse = part_of(saved, at.d_lse, B * d, false);
  params.draws_loss = part_of(saved, at.draws_loss, B * d, false);
  params.draws_lse = part_of(saved, at.draws_lse, B * d, false);
  params.coef_target = out_any(coef_target);
  params.coef_draw = one_product || split ? nullptr : out_any(coef_draw);
  params.draw_parts = {split ? out_any(parts) : nullptr, width};
  params.d_hidden = makes_hidden ? out_any(d_hidden) : nullptr;
  params.denom = part_of(saved, at.denom, B, false);
  params.hidden = in_any(hidden);
  const bool in_panels = on_cpu && sum_draws && cpu::takes_panels(dtype, B, m, d);
  const Tensor clean = split       ? empty(hidden, {2 * B, d}, hidden.scalar_type())
                       : in_panels ? empty_pooled(hidden, {panels_of(d) * kPanel * B}, acc)
                       : sum_draws ? empty_pooled(hidden, {B, d}, acc)
                                   : d_hidden;
  params.clean_panels = in_panels;
  params.clean_hidden = sum_draws ? out_any(clean) : nullptr;
  params.hidden_factor = factor != 0.0 ? factor : 1.0;
  params.grad_scale = grad_scale;
  params.found_inf = found_inf;
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
  params.dtype = dtype;
  params.shared = shared;
  params.unit_coefs = unit;
  LossEntries entries_of{d_hidden,     coef_target,  coef_draw,      std::nullopt,
                         std::nullopt, std::nullopt, {clean, parts}, std::nullopt};
  if (sum_draws) entries_of.draw_coef = empty(hidden, {m, 1}, acc);
  if (sum_draws && with_bias) entries_of.draw_bias = empty(hidden, {m}, acc);
  if (on_cpu && sum_draws) {
    void* const ones = entries_of.draw_coef->mutable_data_ptr();
    if (acc == ScalarType::Double)
      std::fill_n(static_cast<double*>(ones), m, 1.0);
    else
      std::fill_n(static_cast<float*>(ones), m, 1.0f);
  } else if (!on_cpu) {
    if (sum_draws) params.draw_coef = out_any(*entries_of.draw_coef);
    if (entries_of.draw_bias) params.draw_bias = out_any(*entries_of.draw_bias);
    if (keys_for && B > 0) {
      const RowKeysMemory made = call_row_keys(op, hidden, B * P + (shared ? m : B * m), *keys_for, d);
      params.keys = made.keys;
      params.target = in<int64_t>(target);
      params.ids = in<int64_t>(ids);
      entries_of.keys = made.memory;
    }
  }
  if (B > 0) SX_RUN(op, hidden, launch_loss_bwd, params);

  if (sum_draws) {
    // One row per draw, already summed over the batch.
    const Tensor rows = empty_pooled(hidden, {m, d}, acc);
    if (split) {
      Tensor factor = parts;
      if (width != m) factor = torch::stable::narrow(factor, 1, 0, m);
      product16_into(rows, torch::stable::transpose(factor, 0, 1), clean);
    } else if (in_panels) {
      cpu::launch_panel_product({static_cast<const float*>(coef_draw.const_data_ptr()), 1, coef_draw.stride(0),
                                 static_cast<const float*>(clean.const_data_ptr()),
                                 static_cast<float*>(rows.mutable_data_ptr()), m, B, d, d, false});
    } else {
      product_into(rows, torch::stable::transpose(coef_draw, 0, 1), clean);
    }
    entries_of.draw_rows = rows;
    if (with_bias && on_cpu) {
      cpu::column_sums(acc == ScalarType::Double, coef_draw.const_data_ptr(), B, m, coef_draw.stride(0),
                       params.hidden_factor, entries_of.draw_bias->mutable_data_ptr());
    }
  }
  return entries_of;
}

// The gradient of h where that of the loss is 1: what the backward would make of `saved`, on a CPU.
inline Tensor run_unit_hidden(const char* op, const Tensor& hidden, const Tensor& saved, const SavedLoss& at,
                              const LossShape& shape) {
  static constexpr float kOne = 1.0f;
  static constexpr double kOneDouble = 1.0;
  const Tensor d_hidden = empty_pooled(hidden, {shape.batch, shape.dim}, hidden.scalar_type());
  LossBwdParams params{};
  params.grad_loss = saved.scalar_type() == ScalarType::Double ? static_cast<const void*>(&kOneDouble) : &kOne;
  params.factor = part_of(saved, at.factor, 1, false);
  params.d_loss = part_of(saved, at.d_loss, shape.batch * shape.dim, false);
  params.draws_loss = part_of(saved, at.draws_loss, shape.batch * shape.dim, false);
  params.denom = part_of(saved, at.denom, shape.batch, false);
  params.d_hidden = out_any(d_hidden);
  params.batch = shape.batch;
  params.num_targets = shape.targets;
  params.num_samples = shape.draws;
  params.dim = shape.dim;
  params.dtype = dtype_tag(op, "hidden", hidden);
  cpu::launch_loss_bwd(params);
  return d_hidden;
}

inline LossGradients run_loss_backward(const char* op, const LossBackward& x, const SavedLoss& at, int64_t P,
                                       int64_t num_classes, bool need_rows, bool with_bias) {
  const LossEntries e = run_loss_entries(op, x, at, P, need_rows, with_bias);
  const Tensor &hidden = x.hidden, &target = x.target, &ids = x.ids;
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
  if (e.draw_rows) return reduce({ids, e.draw_coef, *e.draw_rows}, e.draw_bias);
  if (ids.dim() == 2) return reduce({ids, e.coef_draw, hidden}, none);
  // Shared draws of an empty batch, or m = 0.
  return reduce({empty(hidden, {0}, ScalarType::Long), none, empty(hidden, {0, d}, acc)}, none);
}

}  // namespace samplex::glue
