// loss_entries: the first half of a loss backward that updates its table at once. The gradient of h, and that of the
// class rows as (ids, coefficients, h), before anything is summed by class. See fused_loss_op.h.
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
  check_tensor(op, "grad_loss", grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  if (grad_lse) check_tensor(op, "grad_lse", *grad_lse, {B}, "[B]", acc, hidden);
  check_value(with_lse || !grad_lse, op, ": grad_lse must be None without with_lse, got ", describe(grad_lse));
  const SavedLoss at({B, P, m, d, shared}, reduction, true, with_lse, with_ratio);
  check_tensor(op, "saved", saved, {at.size}, "what the forward kept", acc, hidden);
  LossBackward x{grad_loss, grad_lse, hidden, target, ids, saved};
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

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "loss_entries(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "int reduction, bool with_lse, bool with_bias, bool with_ratio=False, Tensor? grad_scale=None, "
      "Tensor(a!)? found_inf=None, int? num_classes=None) -> "
      "(Tensor d_hidden, Tensor coef_target, Tensor coef_draw, Tensor draw_rows, Tensor draw_bias, Tensor keys)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { m.impl("loss_entries", TORCH_BOX(&samplex::glue::loss_entries)); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { m.impl("loss_entries", TORCH_BOX(&samplex::glue::loss_entries)); }
