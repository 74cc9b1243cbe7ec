// negative_sampling and negative_sampling_bwd: schemas, checks, allocation. See negative_sampling_params.h for the
// formulas. Shared draws go through GEMMs, as in sampled_softmax; no [B, m, d] and no [C, d] tensor exists on any path.
#include <tuple>

#include "common/ids.h"
#include "loss/fused_loss_op.h"
#include "loss/negative_sampling_params.h"

namespace samplex::glue {
namespace {

constexpr const char* kOp = "negative_sampling";

using Forward = std::tuple<Tensor, Tensor>;

Forward negative_sampling(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& ids,
                          const Tensor& log_q, const std::optional<Tensor>& target_log_q,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight, double scale,
                          double reg, int64_t ignore_index, int64_t reduction_code, bool need_grad, bool sparse) {
  (void)sparse;  // read by the autograd formula only
  begin_op();
  const DType dtype = dtype_tag(kOp, "weight", weight);
  const ScalarType storage = weight.scalar_type(), acc = acc_type(storage);
  check_tensor(kOp, "weight", weight, {-1, -1}, "[C, d]", storage, weight);
  const int64_t C = weight.size(0), d = weight.size(1);
  check_tensor(kOp, "hidden", hidden, {-1, d}, "[B, d]", storage, weight);
  const int64_t B = hidden.size(0);
  const Reduction reduction = reduction_of(kOp, reduction_code);
  check_tensor(kOp, "target", target, {B}, "[B]", ScalarType::Long, weight);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, kOp, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1);
  const Shape draws = shared ? Shape{m} : Shape{B, m};
  check_tensor(kOp, "ids", ids, draws, shared ? "[m]" : "[B, m]", ScalarType::Long, weight);
  check_tensor(kOp, "log_q", log_q, draws, shared ? "[m]" : "[B, m]", acc, weight);
  check(m < (int64_t(1) << 31) - 1, kOp, ": draws of a row must stay below 2^31, got ", m);
  check(reg >= 0, kOp, ": reg must be at least 0, got ", reg);
  check(reg == 0 || target_log_q.has_value(), kOp, ": target_log_q must be [B] where reg is not 0, got None");
  if (target_log_q) check_tensor(kOp, "target_log_q", *target_log_q, {B}, "[B]", acc, weight);
  check_ids(kOp, "ids", ids, C);
  check_ids(kOp, "target", target, C, " or ignore_index", [&](int64_t id) { return id == ignore_index; });

  NegativeSamplingParams params{};
  params.bias = table_of(kOp, "bias", bias, C, weight);
  params.class_weight = table_of(kOp, "class_weight", class_weight, C, weight);
  const int64_t entries = 1 + m;
  const SavedLoss at(B, entries, d, reduction, need_grad, false);
  Forward result{reduction == Reduction::kNone ? empty(hidden, {B}, acc) : empty(hidden, {}, acc),
                 empty_pooled(hidden, {at.size}, acc)};
  auto& [loss, saved] = result;
  if (B == 0) {
    if (reduction != Reduction::kNone) torch::stable::zero_(loss);
    torch::stable::zero_(saved);  // holds the factor of the mean
    return result;
  }

  std::optional<Tensor> class_rows, dots;
  if (shared && m > 0) {
    class_rows = as_acc(gather_rows(weight, ids));
    dots = product(as_acc(hidden), torch::stable::transpose(*class_rows, 0, 1));
    params.dots = out_any(*dots);
  }
  params.hidden = in_any(hidden);
  params.weight = in_any(weight);
  params.target = in<int64_t>(target);
  params.ids = in<int64_t>(ids);
  params.log_q = in_any(log_q);
  params.target_log_q = target_log_q ? in_any(*target_log_q) : nullptr;
  params.loss = reduction == Reduction::kNone ? out_any(loss) : part_of(saved, at.row_loss, B, true);
  params.denom = part_of(saved, at.denom, B, true);
  params.coef_loss = part_of(saved, at.coef_loss, B * entries, true);
  params.d_loss = part_of(saved, at.d_loss, B * d, true);
  params.batch = B;
  params.num_samples = m;
  params.dim = d;
  params.num_classes = C;
  params.ignore_index = ignore_index;
  params.scale = scale;
  params.reg = reg;
  params.dtype = dtype;
  params.shared = shared;
  params.need_grad = need_grad;
  params.debug = debug_checks();
  SX_RUN(kOp, weight, launch_negative_sampling, params);

  if (need_grad && shared && m > 0) add_shared_draws(saved, at.d_loss, at.coef_loss, B, 1, *class_rows);
  run_loss_mean(kOp, reduction, params.loss, params.denom, loss, saved, at, B);
  return result;
}

LossGradients negative_sampling_bwd(const Tensor& grad_loss, const Tensor& hidden, const Tensor& target,
                                    const Tensor& ids, const Tensor& saved, int64_t num_classes, int64_t reduction_code,
                                    bool need_rows, bool with_bias) {
  constexpr const char* op = "negative_sampling_bwd";
  begin_op();
  dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const int64_t B = hidden.size(0), d = hidden.size(1);
  const Reduction reduction = reduction_of(op, reduction_code);
  check_tensor(op, "target", target, {B}, "[B]", ScalarType::Long, hidden);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1);
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  const bool reduced = reduction != Reduction::kNone;
  check_tensor(op, "grad_loss", grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  const SavedLoss at(B, 1 + m, d, reduction, true, false);
  check_tensor(op, "saved", saved, {at.size}, "what the forward kept", acc, hidden);
  return run_loss_backward(op, {grad_loss, std::nullopt, hidden, target, ids, saved}, at, 1, num_classes, need_rows,
                           with_bias);
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "negative_sampling(Tensor hidden, Tensor weight, Tensor target, Tensor ids, Tensor log_q, Tensor? target_log_q, "
      "Tensor? bias, Tensor? class_weight, float scale, float reg, int ignore_index, int reduction, bool need_grad, "
      "bool sparse) -> (Tensor loss, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "negative_sampling_bwd(Tensor grad_loss, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "int num_classes, int reduction, bool need_rows, bool with_bias) -> "
      "(Tensor d_hidden, Tensor row_ids, Tensor row_grads, Tensor row_bias, Tensor count)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("negative_sampling", TORCH_BOX(&samplex::glue::negative_sampling));
  m.impl("negative_sampling_bwd", TORCH_BOX(&samplex::glue::negative_sampling_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("negative_sampling", TORCH_BOX(&samplex::glue::negative_sampling));
  m.impl("negative_sampling_bwd", TORCH_BOX(&samplex::glue::negative_sampling_bwd));
}
