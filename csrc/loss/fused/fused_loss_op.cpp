// A loss backward that updates its table at once. loss_entries is the first half of it: the gradient of h, and that of
// the class rows as (ids, coefficients, h), before anything is summed by class; row_update_ takes these. loss_update_
// is both for one loss whose gradient of h is there already. See fused_loss_op.h.
#include "loss/fused/fused_loss_op.h"

namespace samplex::glue {
namespace {

using Entries = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Entries loss_entries(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor hidden, Tensor target, Tensor ids,
                     Tensor saved, int64_t reduction_code, bool with_lse, bool with_bias, bool with_ratio,
                     std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                     std::optional<int64_t> num_classes) {
  constexpr const char* op = "loss_entries";
  begin_op();
  LossBackward x{grad_loss, grad_lse, hidden, target, ids, saved};
  const SavedLoss at = check_backward(op, x, reduction_code, with_lse, with_ratio);
  const ScalarType acc = acc_type(hidden.scalar_type());
  const int64_t d = hidden.size(1), P = target.dim() == 1 ? 1 : target.size(1);
  const bool shared = ids.dim() == 1;
  if (grad_scale) {
    check_tensor(op, "grad_scale", *grad_scale, {}, "[]", ScalarType::Float, hidden);
    x.grad_scale = in<float>(*grad_scale);
  }
  if (found_inf) {
    check_tensor(op, "found_inf", *found_inf, {}, "[]", ScalarType::Float, hidden);
    x.found_inf = out<float>(*found_inf);
  }
  check_value(!num_classes || *num_classes >= 0, op, ": num_classes must be at least 0, got ", num_classes.value_or(0));
  x.keys_for = num_classes;
  LossEntries e = run_loss_entries(op, x, at, P, true, with_bias);
  // One number for each shared draw, in front of its row.
  if (shared) e.coef_draw = e.draw_coef ? *e.draw_coef : empty(hidden, {0, 1}, acc);
  return {
      e.d_hidden,
      e.coef_target,
      e.coef_draw,
      e.draw_rows ? *e.draw_rows : empty(hidden, {0, d}, acc),
      e.draw_bias ? *e.draw_bias : empty(hidden, {0}, acc),
      e.keys ? *e.keys : empty(hidden, {0}, num_classes.value_or(0) > INT32_MAX ? ScalarType::Long : ScalarType::Int)};
}

// What most steps leave at its default comes last, as in sampled_softmax_static.
void loss_update_(const Tensor& weight, const Tensor& grad_loss, const Tensor& hidden, const Tensor& target,
                  const Tensor& ids, const Tensor& saved, const std::vector<double>& weight_rule,
                  const std::optional<Tensor>& weight_state0, const std::optional<Tensor>& weight_state1,
                  const std::optional<Tensor>& bias, const std::vector<double>& bias_rule,
                  const std::optional<Tensor>& bias_state0, const std::optional<Tensor>& bias_state1,
                  int64_t reduction_code, bool with_ratio, const std::optional<Tensor>& key,
                  const std::optional<Tensor>& weight_lr, const std::optional<Tensor>& weight_step,
                  const std::optional<Tensor>& bias_lr, const std::optional<Tensor>& bias_step, int64_t first_row) {
  constexpr const char* op = "loss_update_";
  begin_op();
  const std::optional<Tensor> none;
  LossBackward x{grad_loss, none, hidden, target, ids, saved};
  const SavedLoss at = check_backward(op, x, reduction_code, false, with_ratio);
  check_given(op, "weight", weight);
  check_value(weight.dim() == 2 && weight.size(1) == hidden.size(1), op, ": weight must be [C, ", hidden.size(1),
              "] to fit hidden, got ", describe(weight));
  x.need_hidden = false;
  const LossEntries e = run_loss_entries(op, x, at, target.dim() == 1 ? 1 : target.size(1), true, bias.has_value());
  const RowUpdate tables{weight,      weight_state0, weight_state1, bias,      bias_state0,
                         bias_state1, key,           weight_rule,   bias_rule, weight_lr,
                         weight_step, bias_lr,       bias_step,     none,      first_row};
  const RowSource targets{target, e.coef_target, hidden};
  if (e.draw_rows) {
    call_row_update(op, tables, targets, {ids, e.draw_coef, *e.draw_rows}, e.draw_bias, none);
  } else if (ids.dim() == 2) {
    call_row_update(op, tables, targets, {ids, e.coef_draw, hidden}, none, none);
  } else {  // shared draws of an empty batch, or m = 0
    const Tensor no_ids = empty(hidden, {0}, ScalarType::Long),
                 no_rows = empty(hidden, {0, hidden.size(1)}, acc_type(hidden.scalar_type()));
    call_row_update(op, tables, targets, {no_ids, none, no_rows}, none, none);
  }
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "loss_entries(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "int reduction, bool with_lse, bool with_bias, bool with_ratio=False, Tensor? grad_scale=None, "
      "Tensor(a!)? found_inf=None, int? num_classes=None) -> "
      "(Tensor d_hidden, Tensor coef_target, Tensor coef_draw, Tensor draw_rows, Tensor draw_bias, Tensor keys)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "loss_update_(Tensor(a!) weight, Tensor grad_loss, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "float[] weight_rule, Tensor(b!)? weight_state0=None, Tensor(c!)? weight_state1=None, Tensor(d!)? bias=None, "
      "float[] bias_rule=[], Tensor(e!)? bias_state0=None, Tensor(f!)? bias_state1=None, int reduction=1, "
      "bool with_ratio=False, Tensor? key=None, Tensor? weight_lr=None, Tensor(g!)? weight_step=None, "
      "Tensor? bias_lr=None, Tensor(h!)? bias_step=None, "
      "int first_row=0) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("loss_entries", TORCH_BOX(&samplex::glue::loss_entries));
  m.impl("loss_update_", TORCH_BOX(&samplex::glue::loss_update_));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("loss_entries", TORCH_BOX(&samplex::glue::loss_entries));
  m.impl("loss_update_", TORCH_BOX(&samplex::glue::loss_update_));
}
