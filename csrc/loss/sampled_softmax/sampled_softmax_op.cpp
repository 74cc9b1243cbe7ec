// sampled_softmax, sampled_softmax_static and sampled_softmax_bwd: schemas, checks, allocation. See
// sampled_softmax_params.h for the formulas.
//
// Shared draws go through GEMMs: their class rows are gathered once ([m, d]), torch multiplies (a CPU with vectors does
// that in the kernel, batch row by batch row), and the kernel only keeps the softmax. No [B, m, d] and no [C, d] tensor
// exists on any path. Without `need_hidden` one of the three GEMMs, the gradient of h, is left out, and the backward's
// d_hidden means nothing.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "common/ids.h"
#include "common/philox.h"
#include "loss/fused/fused_loss_op.h"
#include "loss/sampled_softmax/sampled_softmax_params.h"

namespace samplex::glue {
namespace {

constexpr const char* kOp = "sampled_softmax";

using Forward = std::tuple<Tensor, Tensor, Tensor>;

struct Options {
  std::optional<Tensor> draw_labels, row_labels, target_weight;
  bool normalize = false;
  std::vector<double> margin;  // empty, or m1, m2, m3
};

// `ids` and `log_q` are given, or with `here` set by the draw.
Forward forward(const Tensor& hidden, const Tensor& weight, const Tensor& target, Tensor& ids, Tensor& log_q,
                const DrawHere* here, const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                const std::optional<Tensor>& known_offsets, const std::optional<Tensor>& known_ids, double scale,
                double label_smoothing, int64_t ignore_index, int64_t reduction_code, bool absolute, bool need_grad,
                bool with_lse, bool need_hidden, const Options& more) {
  begin_op();
  const DType dtype = dtype_tag(kOp, "weight", weight);
  const ScalarType storage = weight.scalar_type(), acc = acc_type(storage);
  check_tensor(kOp, "weight", weight, {-1, -1}, "[C, d]", storage, weight);
  const int64_t C = weight.size(0), d = weight.size(1);
  check_tensor(kOp, "hidden", hidden, {-1, d}, "[B, d]", storage, weight);
  const int64_t B = hidden.size(0);
  const Reduction reduction = reduction_of(kOp, reduction_code);
  check_given(kOp, "target", target);
  if (here == nullptr) check_given(kOp, "ids", ids);
  const int64_t P = target.dim() == 1 ? 1 : target.dim() == 2 ? target.size(1) : -1;
  check_tensor(kOp, "target", target, target.dim() == 1 ? Shape{B} : Shape{B, -1}, target.dim() == 1 ? "[B]" : "[B, P]",
               ScalarType::Long, weight);
  const bool shared = here != nullptr ? here->shared : ids.dim() == 1;
  if (here == nullptr)
    check_value(ids.dim() == 1 || ids.dim() == 2, kOp, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = here != nullptr ? here->num_samples : ids.size(ids.dim() - 1);
  check_value(here == nullptr || (m >= 0 && m <= kPhiloxMaxDraws), kOp, ": num_samples must be in [0, 2^24], got ", m);
  if (here == nullptr) {
    const Shape draws = shared ? Shape{m} : Shape{B, m};
    check_tensor(kOp, "ids", ids, draws, shared ? "[m]" : "[B, m]", ScalarType::Long, weight);
    check_tensor(kOp, "log_q", log_q, draws, shared ? "[m]" : "[B, m]", acc, weight);
  }
  check_value(P + m < (int64_t(1) << 31), kOp, ": targets and draws of a row must stay below 2^31, got ", P + m);
  check_value(label_smoothing >= 0 && label_smoothing <= 1, kOp, ": label_smoothing must be in [0, 1], got ",
              label_smoothing);
  check_value(known_offsets.has_value() == known_ids.has_value(), kOp,
              ": known_offsets and known_ids must be given together");
  if (more.target_weight) {
    check_tensor(kOp, "target_weight", *more.target_weight, target.dim() == 1 ? Shape{B} : Shape{B, P},
                 "of the shape of target", acc, weight);
  }
  // Its gradient would need coefficients of its own.
  check_value(!more.normalize || !bias, kOp, ": bias must be None with normalize=True, got a tensor");
  check_value(more.margin.empty() || more.margin.size() == 3, kOp, ": margin must be [] or [m1, m2, m3], got ",
              more.margin.size(), " numbers");
  check_value(more.margin.empty() || (more.normalize && !absolute), kOp,
              ": margin must be [] without normalize=True and with absolute=True, got three numbers");
  if (known_offsets) {
    check_tensor(kOp, "known_offsets", *known_offsets, {B + 1}, "[B + 1]", ScalarType::Long, weight);
    check_tensor(kOp, "known_ids", *known_ids, {-1}, "[n]", ScalarType::Long, weight);
    check_csr(kOp, "positives", *known_offsets, *known_ids, B, more.draw_labels ? -1 : C);
  }
  check_value(more.draw_labels.has_value() == more.row_labels.has_value(), kOp,
              ": draw_labels and row_labels must be given together");
  if (more.draw_labels) {
    check_value(shared && P == 1, kOp, ": draw_labels must be None unless draws are shared, with one target per row");
    check_tensor(kOp, "draw_labels", *more.draw_labels, {m}, "[m]", ScalarType::Long, weight);
    check_tensor(kOp, "row_labels", *more.row_labels, {B}, "[B]", ScalarType::Long, weight);
  }
  if (here == nullptr) check_ids(kOp, "ids", ids, C);
  check_ids(kOp, "target", target, C, " or ignore_index",
            [&](int64_t id) { return id == ignore_index || (P > 1 && id == kPadding); });

  SampledSoftmaxParams params{};
  params.bias = table_of(kOp, "bias", bias, C, weight);
  params.class_weight = table_of(kOp, "class_weight", class_weight, C, weight);
  const LossShape shape{B, P, m, d, shared};
  const SavedLoss at(shape, reduction, need_grad, with_lse);
  Forward result{reduction == Reduction::kNone ? empty(hidden, {B}, acc) : empty(hidden, {}, acc),
                 empty(hidden, {B}, acc), empty_pooled(hidden, {at.size}, acc)};
  auto& [loss, lse, saved] = result;
  SharedRows class_rows(kOp, weight, params.bias, B, m, shared, need_grad);
  std::optional<StaticDraw> drawn;
  if (here != nullptr) {
    drawn = call_static_sample(here->law, here->key, m, C, shared, here->table, here->prefix, target, false,
                               class_rows.gather);
    ids = drawn->ids;
    log_q = storage == ScalarType::Double ? torch::stable::to(drawn->log_q, storage) : drawn->log_q;
  }
  const bool unit_hidden = here != nullptr && here->d_hidden != nullptr && reduction != Reduction::kNone && need_grad &&
                           need_hidden && backend_of(kOp, weight) == Backend::kCpu;
  if (B == 0) {
    if (unit_hidden) *here->d_hidden = empty(hidden, {B, d}, storage);
    if (reduction != Reduction::kNone) torch::stable::zero_(loss);
    torch::stable::zero_(saved);  // holds the factor of the mean
    return result;
  }

  std::optional<Tensor> dots, signs, radial, inverse;
  if (class_rows.any()) {
    if (class_rows.gather.ids == nullptr) class_rows.run(kOp, weight, ids);
    // The CPU kernel turns products into coefficients where they are.
    const bool in_place = need_grad && backend_of(kOp, weight) == Backend::kCpu;
    params.dots_stride = in_place ? at.coefs.stride : SharedRows::dots_stride(m);
    dots = in_place ? draw_coefs(saved, at, at.coef_loss, shape) : empty(hidden, {B, params.dots_stride}, acc);
    params.dots = out_any(*dots);
    if (!in_place && params.dots_stride != m) dots = torch::stable::narrow(*dots, 1, 0, m);
    if (class_rows.rows) class_rows.dots(*dots, hidden);
    params.products = class_rows.products(hidden, params.dots, params.dots_stride, shape, at, saved, need_hidden);
  }
  params.hidden = in_any(hidden);
  params.weight = in_any(weight);
  params.target = in<int64_t>(target);
  params.ids = in<int64_t>(ids);
  params.log_q = in_any(log_q);
  params.known_offsets = in<int64_t>(known_offsets);
  params.known_ids = in<int64_t>(known_ids);
  params.draw_labels = in<int64_t>(more.draw_labels);
  params.row_labels = in<int64_t>(more.row_labels);
  params.known_size = known_ids ? known_ids->numel() : 0;
  params.loss = reduction == Reduction::kNone ? out_any(loss) : part_of(saved, at.row_loss, B, true);
  params.lse = out_any(lse);
  params.denom = part_of(saved, at.denom, B, true);
  params.coef_loss = coefs_of(saved, at, at.coef_loss, B, true);
  params.coef_lse = coefs_of(saved, at, at.coef_lse, B, true);
  params.coefs = at.coefs;
  params.d_loss = part_of(saved, at.d_loss, B * d, true);
  params.d_lse = part_of(saved, at.d_lse, B * d, true);
  if (shared && more.normalize && m > 0) {
    inverse = empty(hidden, {m}, acc);
    const RowNormsParams norms{in_any(weight), in<int64_t>(ids), out_any(*inverse), m, d, C, dtype};
    SX_RUN(kOp, weight, launch_row_norms, norms);
    params.draw_inverse = norms.inverse;
  }
  if (need_grad && !more.margin.empty() && backend_of(kOp, weight) != Backend::kCpu) {
    radial = empty(hidden, {B, P}, acc);
    params.radial = out_any(*radial);
  }
  if (need_grad && (absolute || more.normalize) && backend_of(kOp, weight) != Backend::kCpu) {
    signs = empty(hidden, {B, at.coefs.stride}, acc);
    params.signs = out_any(*signs);
  }
  params.draw_bias = class_rows.gather.biases;
  params.parts_loss = class_rows.parts_for(hidden, need_hidden);
  params.parts_lse = class_rows.parts_for(hidden, need_hidden && with_lse);
  params.mean = mean_params(reduction, params.loss, params.denom, loss, saved, at, B);
  if (params.mean.loss != nullptr) params.mean.arrived = class_rows.gather.arrived;
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
  params.target_weight = more.target_weight ? in_any(*more.target_weight) : nullptr;
  params.normalize = more.normalize;
  params.has_margin = !more.margin.empty();
  if (params.has_margin) params.margin = {more.margin[0], more.margin[1], more.margin[2]};
  params.need_grad = need_grad;
  params.debug = debug_checks();
  SX_RUN(kOp, weight, launch_sampled_softmax, params);

  run_shared_draws(saved, at, shape, class_rows, need_hidden, params.parts_loss, params.parts_lse);
  run_loss_mean(kOp, saved, params.mean);
  if (unit_hidden) *here->d_hidden = run_unit_hidden(kOp, hidden, saved, at, shape);
  return result;
}

Forward sampled_softmax(const Tensor& hidden, const Tensor& weight, const Tensor& target, Tensor ids, Tensor log_q,
                        const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                        const std::optional<Tensor>& known_offsets, const std::optional<Tensor>& known_ids,
                        double scale, double label_smoothing, int64_t ignore_index, int64_t reduction_code,
                        bool absolute, bool need_grad, bool with_lse, bool sparse, bool need_hidden,
                        const std::optional<Tensor>& draw_labels, const std::optional<Tensor>& row_labels,
                        const std::optional<Tensor>& target_weight, bool normalize, std::vector<double> margin) {
  (void)sparse;  // read by the autograd formula only
  return forward(hidden, weight, target, ids, log_q, nullptr, bias, class_weight, known_offsets, known_ids, scale,
                 label_smoothing, ignore_index, reduction_code, absolute, need_grad, with_lse, need_hidden,
                 {draw_labels, row_labels, target_weight, normalize, margin});
}

using StaticForward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Draw and loss in one op: what a training step with a static distribution takes. Per-row draws exclude the target.
// What most steps leave at its default comes last: Python passes nothing then, and each argument costs a small step
// time. With `unit_hidden` a CPU also gives d_hidden, the gradient of h where that of the reduced loss is 1; else [0].
StaticForward sampled_softmax_static(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                     const Tensor& key, int64_t num_samples, int64_t law, bool shared,
                                     const std::optional<Tensor>& bias, bool unit_hidden,
                                     const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
                                     const std::optional<Tensor>& class_weight, double scale, double label_smoothing,
                                     int64_t ignore_index, int64_t reduction_code, bool absolute, bool normalize,
                                     std::vector<double> margin, bool need_grad, bool need_hidden) {
  check_value(weight.dim() == 2, kOp, ": weight must be [C, d], got ", describe(weight));
  check_value(hidden.dim() == 2, kOp, ": hidden must be [B, d], got ", describe(hidden));
  check_tensor(kOp, "target", target, {hidden.size(0)}, "[B]", ScalarType::Long, weight);
  check_value(weight.size(0) >= 1, kOp, ": weight must have at least one class, got ", describe(weight));
  check_value(ignore_index < 0, kOp, ": ignore_index must be negative if the op draws, got ", ignore_index);
  std::optional<Tensor> d_hidden;
  const DrawHere here{key, law, num_samples, shared, table, prefix, unit_hidden ? &d_hidden : nullptr};
  Tensor ids, log_q;
  auto [loss, lse, saved] = forward(hidden, weight, target, ids, log_q, &here, bias, class_weight, std::nullopt,
                                    std::nullopt, scale, label_smoothing, ignore_index, reduction_code, absolute,
                                    need_grad, false, need_hidden, {.normalize = normalize, .margin = margin});
  return {loss, ids, saved, d_hidden ? *d_hidden : empty(hidden, {0}, hidden.scalar_type())};
}

LossGradients sampled_softmax_bwd(const Tensor& grad_loss, const std::optional<Tensor>& grad_lse, const Tensor& hidden,
                                  const Tensor& target, const Tensor& ids, const Tensor& saved, int64_t num_classes,
                                  int64_t reduction_code, bool with_lse, bool need_rows, bool with_bias) {
  constexpr const char* op = "sampled_softmax_bwd";
  begin_op();
  dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const int64_t B = hidden.size(0), d = hidden.size(1);
  const Reduction reduction = reduction_of(op, reduction_code);
  check_value(num_classes >= 0, op, ": num_classes must be at least 0, got ", num_classes);
  check_given(op, "target", target);
  check_given(op, "ids", ids);
  const int64_t P = target.dim() == 1 ? 1 : target.dim() == 2 ? target.size(1) : -1;
  check_tensor(op, "target", target, target.dim() == 1 ? Shape{B} : Shape{B, -1}, target.dim() == 1 ? "[B]" : "[B, P]",
               ScalarType::Long, hidden);
  const bool shared = ids.dim() == 1;
  check_value(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1);
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  const bool reduced = reduction != Reduction::kNone;
  check_tensor(op, "grad_loss", grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  check_value(!grad_lse || with_lse, op, ": grad_lse must be None if the forward did not keep lse (with_lse=False)");
  if (grad_lse) check_tensor(op, "grad_lse", *grad_lse, {B}, "[B]", acc, hidden);
  const SavedLoss at({B, P, m, d, shared}, reduction, true, with_lse);
  check_tensor(op, "saved", saved, {at.size}, "what the forward kept", acc, hidden);

  return run_loss_backward(op, {grad_loss, grad_lse, hidden, target, ids, saved}, at, P, num_classes, need_rows,
                           with_bias);
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "sampled_softmax(Tensor hidden, Tensor weight, Tensor target, Tensor ids, Tensor log_q, Tensor? bias, "
      "Tensor? class_weight, Tensor? known_offsets, Tensor? known_ids, float scale, float label_smoothing, "
      "int ignore_index, int reduction, bool absolute, bool need_grad, bool with_lse, bool sparse, "
      "bool need_hidden=True, Tensor? draw_labels=None, Tensor? row_labels=None, Tensor? target_weight=None, "
      "bool normalize=False, float[] margin=[]) -> "
      "(Tensor loss, Tensor lse, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "sampled_softmax_static(Tensor hidden, Tensor weight, Tensor target, Tensor key, int num_samples, int law, "
      "bool shared, Tensor? bias=None, bool unit_hidden=False, Tensor? table=None, Tensor? prefix=None, "
      "Tensor? class_weight=None, float scale=1.0, float label_smoothing=0.0, int ignore_index=-100, int reduction=1, "
      "bool absolute=False, bool normalize=False, float[] margin=[], bool need_grad=True, bool need_hidden=True) -> "
      "(Tensor loss, Tensor ids, Tensor saved, Tensor d_hidden)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "sampled_softmax_bwd(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "int num_classes, int reduction, bool with_lse, bool need_rows, bool with_bias) -> "
      "(Tensor d_hidden, Tensor row_ids, Tensor row_grads, Tensor row_bias, Tensor count)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("sampled_softmax", TORCH_BOX(&samplex::glue::sampled_softmax));
  m.impl("sampled_softmax_static", TORCH_BOX(&samplex::glue::sampled_softmax_static));
  m.impl("sampled_softmax_bwd", TORCH_BOX(&samplex::glue::sampled_softmax_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("sampled_softmax", TORCH_BOX(&samplex::glue::sampled_softmax));
  m.impl("sampled_softmax_static", TORCH_BOX(&samplex::glue::sampled_softmax_static));
  m.impl("sampled_softmax_bwd", TORCH_BOX(&samplex::glue::sampled_softmax_bwd));
}
