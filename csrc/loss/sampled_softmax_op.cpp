// sampled_softmax and sampled_softmax_bwd: schemas, checks, allocation. See sampled_softmax_params.h for the formulas.
//
// Shared draws go through GEMMs: their class rows are gathered once ([m, d]), torch multiplies, and the kernel only
// keeps the softmax. No [B, m, d] and no [C, d] tensor exists on any path.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "common/glue.h"
#include "common/ids.h"
#include "loss/sampled_softmax_params.h"
#include "update/row_reduce_op.h"

namespace samplex::glue {
namespace {

constexpr const char* kOp = "sampled_softmax";

Tensor gather_rows(const Tensor& weight, const Tensor& ids) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(weight), torch::stable::detail::from(int64_t(0)),
                                    torch::stable::detail::from(ids)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::index_select", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor as_acc(const Tensor& t) {
  const ScalarType acc = acc_type(t.scalar_type());
  return t.scalar_type() == acc ? t : torch::stable::to(t, acc);
}

// a [n, k] times b [k, p]. mm.out and not matmul: under autocast the functional overloads answer in half precision.
Tensor product(const Tensor& a, const Tensor& b) {
  const Tensor result = empty(a, {a.size(0), b.size(1)}, a.scalar_type());
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(result)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// Bias and class weights keep their own floating type: casting [C] numbers in a step would cost O(C).
ScalarTable table_of(const char* arg, const std::optional<Tensor>& t, int64_t num_classes, const Tensor& weight) {
  if (!t) return {nullptr, DType::kFloat32};
  const ScalarType own = t->scalar_type();
  const ScalarType acc = acc_type(weight.scalar_type());
  check_tensor(kOp, arg, *t, {num_classes}, "[C]", own == weight.scalar_type() ? own : acc, weight);
  return {in_any(*t), dtype_tag(kOp, arg, *t)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward sampled_softmax(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& ids,
                        const Tensor& log_q, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& class_weight, const std::optional<Tensor>& known_offsets,
                        const std::optional<Tensor>& known_ids, double scale, double label_smoothing,
                        int64_t ignore_index, bool absolute, bool need_grad, bool sparse) {
  (void)sparse;  // read by the autograd formula only
  begin_op();
  const DType dtype = dtype_tag(kOp, "weight", weight);
  const ScalarType storage = weight.scalar_type(), acc = acc_type(storage);
  check_tensor(kOp, "weight", weight, {-1, -1}, "[C, d]", storage, weight);
  const int64_t C = weight.size(0), d = weight.size(1);
  check_tensor(kOp, "hidden", hidden, {-1, d}, "[B, d]", storage, weight);
  const int64_t B = hidden.size(0);
  check_tensor(kOp, "target", target, {B, -1}, "[B, P]", ScalarType::Long, weight);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, kOp, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1), P = target.size(1);
  const Shape draws = shared ? Shape{m} : Shape{B, m};
  check_tensor(kOp, "ids", ids, draws, shared ? "[m]" : "[B, m]", ScalarType::Long, weight);
  check_tensor(kOp, "log_q", log_q, draws, shared ? "[m]" : "[B, m]", acc, weight);
  check(P + m < (int64_t(1) << 31), kOp, ": targets and draws of a row must stay below 2^31, got ", P + m);
  check(label_smoothing >= 0 && label_smoothing <= 1, kOp, ": label_smoothing must be in [0, 1], got ",
        label_smoothing);
  check(known_offsets.has_value() == known_ids.has_value(), kOp, ": known_offsets and known_ids must come together");
  if (known_offsets) {
    check_tensor(kOp, "known_offsets", *known_offsets, {B + 1}, "[B + 1]", ScalarType::Long, weight);
    check_tensor(kOp, "known_ids", *known_ids, {-1}, "[n]", ScalarType::Long, weight);
    check_csr(kOp, "positives", *known_offsets, *known_ids, B, C);
  }
  check_ids(kOp, "ids", ids, C);
  check_ids(kOp, "target", target, C, " or ignore_index",
            [&](int64_t id) { return id == ignore_index || (P > 1 && id == kPadding); });

  SampledSoftmaxParams params{};
  params.bias = table_of("bias", bias, C, weight);
  params.class_weight = table_of("class_weight", class_weight, C, weight);
  const int64_t grad_rows = need_grad ? B : 0, entries = P + m;
  const int64_t pull_width = label_smoothing > 0 ? entries : P;
  Forward result{empty(hidden, {B}, acc),
                 empty(hidden, {B}, acc),
                 empty(hidden, {B}, acc),
                 empty(hidden, {grad_rows}, acc),
                 empty(hidden, {grad_rows, entries}, acc),
                 empty(hidden, {grad_rows, pull_width}, acc),
                 empty(hidden, {grad_rows, d}, acc),
                 empty(hidden, {grad_rows, d}, acc)};
  auto& [loss, lse, denom, total, push, pull, d_push, d_pull] = result;
  if (B == 0) return result;

  std::optional<Tensor> class_rows, dots, signs;
  if (shared && m > 0) {
    class_rows = as_acc(gather_rows(weight, ids));
    dots = product(as_acc(hidden), torch::stable::transpose(*class_rows, 0, 1));
    params.dots = in_any(*dots);
  }
  params.hidden = in_any(hidden);
  params.weight = in_any(weight);
  params.target = in<int64_t>(target);
  params.ids = in<int64_t>(ids);
  params.log_q = in_any(log_q);
  params.known_offsets = in<int64_t>(known_offsets);
  params.known_ids = in<int64_t>(known_ids);
  params.loss = out_any(loss);
  params.lse = out_any(lse);
  params.denom = out_any(denom);
  if (need_grad) {
    params.total = out_any(total);
    params.push = out_any(push);
    params.pull = out_any(pull);
    params.d_push = out_any(d_push);
    params.d_pull = out_any(d_pull);
    if (absolute && backend_of(kOp, weight) != Backend::kCpu) {
      signs = empty(hidden, {B, entries}, acc);
      params.signs = out_any(*signs);
    }
  }
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
  params.num_classes = C;
  params.ignore_index = ignore_index;
  params.scale = scale;
  params.label_smoothing = label_smoothing;
  params.log_num_samples = std::log(double(std::max<int64_t>(m, 1)));
  params.dtype = dtype;
  params.shared = shared;
  params.absolute = absolute;
  params.need_grad = need_grad;
  params.debug = debug_checks();
  SX_RUN(kOp, weight, launch_sampled_softmax, params);

  if (need_grad && shared && m > 0) {
    d_push = add(d_push, product(torch::stable::narrow(push, 1, P, m), *class_rows));
    if (label_smoothing > 0) {
      d_pull = add(d_pull, product(torch::stable::narrow(pull, 1, P, m), *class_rows));
    }
  }
  return result;
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward sampled_softmax_bwd(const Tensor& grad_loss, const std::optional<Tensor>& grad_lse, const Tensor& hidden,
                             const Tensor& target, const Tensor& ids, const Tensor& total, const Tensor& push,
                             const Tensor& pull, const Tensor& d_push, const Tensor& d_pull, int64_t num_classes,
                             bool need_rows, bool with_bias) {
  constexpr const char* op = "sampled_softmax_bwd";
  begin_op();
  const DType dtype = dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const int64_t B = hidden.size(0), d = hidden.size(1);
  check_tensor(op, "target", target, {B, -1}, "[B, P]", ScalarType::Long, hidden);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1), P = target.size(1), entries = P + m;
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  check_tensor(op, "grad_loss", grad_loss, {B}, "[B]", acc, hidden);
  if (grad_lse) check_tensor(op, "grad_lse", *grad_lse, {B}, "[B]", acc, hidden);
  check_tensor(op, "total", total, {B}, "[B]", acc, hidden);
  check_tensor(op, "push", push, {B, entries}, "[B, P + m]", acc, hidden);
  check_tensor(op, "pull", pull, {B, pull.dim() == 2 && pull.size(1) == entries ? entries : P}, "[B, P] or [B, P + m]",
               acc, hidden);
  check_tensor(op, "d_push", d_push, {B, d}, "[B, d]", acc, hidden);
  check_tensor(op, "d_pull", d_pull, {B, d}, "[B, d]", acc, hidden);

  Tensor d_hidden = empty(hidden, {B, d}, hidden.scalar_type());
  const Tensor coef_target = empty(hidden, {B, P}, acc);
  const Tensor coef_draw = empty(hidden, {B, m}, acc);
  SampledSoftmaxBwdParams params{};
  params.grad_loss = in_any(grad_loss);
  params.grad_lse = grad_lse ? in_any(*grad_lse) : nullptr;
  params.total = in_any(total);
  params.push = in_any(push);
  params.pull = in_any(pull);
  params.d_push = in_any(d_push);
  params.d_pull = in_any(d_pull);
  params.coef_target = out_any(coef_target);
  params.coef_draw = out_any(coef_draw);
  params.d_hidden = out_any(d_hidden);
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
  params.pull_width = pull.size(1);
  params.dtype = dtype;
  if (B > 0) SX_RUN(op, hidden, launch_sampled_softmax_bwd, params);

  RowReduceParams rows{};
  rows.dim = d;
  rows.num_rows = num_classes;
  rows.double_acc = acc == ScalarType::Double;
  if (!need_rows) {
    rows.num_rows = 0;
    RowGradients none{empty(hidden, {0}, ScalarType::Long), empty(hidden, {0, d}, acc), empty(hidden, {0}, acc),
                      empty(hidden, {1}, ScalarType::Long)};
    torch::stable::zero_(none.count);
    return {d_hidden, none.row_ids, none.row_grads, none.row_bias, none.count};
  }
  rows.source[0] = {in<int64_t>(target), in_any(coef_target), in_any(hidden), B * P, std::max<int64_t>(P, 1), dtype};
  std::optional<Tensor> draw_rows, draw_bias;
  if (shared && m > 0 && B > 0) {
    // One row per draw, already summed over the batch; a column of ones carries the bias along.
    draw_rows = product(torch::stable::transpose(coef_draw, 0, 1), as_acc(hidden));
    const DType acc_tag = acc == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
    rows.source[1] = {in<int64_t>(ids), nullptr, in_any(*draw_rows), m, 1, acc_tag};
    if (with_bias) {
      const std::array<int64_t, 1> over_rows{0};
      draw_bias = torch::stable::sum(coef_draw, over_rows);
      rows.source[1].bias = in_any(*draw_bias);
    }
  } else {
    rows.source[1] = {in<int64_t>(ids),   in_any(coef_draw),       in_any(hidden),
                      shared ? 0 : B * m, std::max<int64_t>(m, 1), dtype};
  }
  RowGradients g = run_row_reduce(op, rows, hidden, with_bias);
  return {d_hidden, g.row_ids, g.row_grads, g.row_bias, g.count};
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "sampled_softmax(Tensor hidden, Tensor weight, Tensor target, Tensor ids, Tensor log_q, Tensor? bias, "
      "Tensor? class_weight, Tensor? known_offsets, Tensor? known_ids, float scale, float label_smoothing, "
      "int ignore_index, bool absolute, bool need_grad, bool sparse) -> (Tensor loss, Tensor lse, Tensor denom, "
      "Tensor total, Tensor push, Tensor pull, Tensor d_push, Tensor d_pull)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "sampled_softmax_bwd(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor target, Tensor ids, Tensor total, "
      "Tensor push, Tensor pull, Tensor d_push, Tensor d_pull, int num_classes, bool need_rows, bool with_bias) -> "
      "(Tensor d_hidden, Tensor row_ids, Tensor row_grads, Tensor row_bias, Tensor count)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("sampled_softmax", TORCH_BOX(&samplex::glue::sampled_softmax));
  m.impl("sampled_softmax_bwd", TORCH_BOX(&samplex::glue::sampled_softmax_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("sampled_softmax", TORCH_BOX(&samplex::glue::sampled_softmax));
  m.impl("sampled_softmax_bwd", TORCH_BOX(&samplex::glue::sampled_softmax_bwd));
}
