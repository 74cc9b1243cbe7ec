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

// to += more, both [n] numbers of type A in `to`'s layout.
void add_into(const Tensor& to, const Tensor& more) {
  if (!to.is_cpu()) {
    Tensor target = to;
    torch::stable::copy_(target, torch::stable::subtract(to, more, -1.0));
    return;
  }
  const auto add = [&](auto* sum, const auto* x) {
    for (int64_t i = 0, n = to.numel(); i < n; ++i) sum[i] += x[i];
  };
  if (to.scalar_type() == ScalarType::Double)
    add(static_cast<double*>(to.mutable_data_ptr()), static_cast<const double*>(more.const_data_ptr()));
  else
    add(static_cast<float*>(to.mutable_data_ptr()), static_cast<const float*>(more.const_data_ptr()));
}

// What the forward keeps for the backward, in one tensor: eight would cost more to make than a small batch to compute.
// Offsets in numbers; a part that is not kept is -1.
struct Saved {
  int64_t d_loss = -1, d_lse = -1, coef_loss = -1, coef_lse = -1, row_loss = -1, denom = -1, factor = -1, size = 0;

  Saved(int64_t batch, int64_t entries, int64_t dim, Reduction reduction, bool need_grad, bool with_lse) {
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
  }
};

void* part_of(const Tensor& saved, int64_t offset, int64_t count, bool writable) {
  if (offset < 0) return nullptr;
  const size_t item = saved.element_size();
  char* data = static_cast<char*>(const_cast<void*>(saved.const_data_ptr())) + size_t(offset) * item;
  note_bytes(saved, data, size_t(count) * item, writable);
  return data;
}

// A part as a [rows, columns] tensor for torch's GEMMs.
Tensor view_of(const Tensor& saved, int64_t offset, int64_t rows, int64_t columns, int64_t stride) {
  char* data = static_cast<char*>(const_cast<void*>(saved.const_data_ptr())) + size_t(offset) * saved.element_size();
  const std::array<int64_t, 2> sizes{rows, columns}, strides{stride, 1};
  return torch::stable::from_blob(data, sizes, strides, saved.device(), saved.scalar_type());
}

Reduction reduction_of(const char* op, int64_t code) {
  check(code >= 0 && code <= 2, op, ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ", code);
  return Reduction(code);
}

// Bias and class weights keep their own floating type: casting [C] numbers in a step would cost O(C).
ScalarTable table_of(const char* arg, const std::optional<Tensor>& t, int64_t num_classes, const Tensor& weight) {
  if (!t) return {nullptr, DType::kFloat32};
  const ScalarType own = t->scalar_type();
  const ScalarType acc = acc_type(weight.scalar_type());
  check_tensor(kOp, arg, *t, {num_classes}, "[C]", own == weight.scalar_type() ? own : acc, weight);
  return {in_any(*t), dtype_tag(kOp, arg, *t)};
}

using Forward = std::tuple<Tensor, Tensor, Tensor>;

Forward sampled_softmax(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& ids,
                        const Tensor& log_q, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& class_weight, const std::optional<Tensor>& known_offsets,
                        const std::optional<Tensor>& known_ids, double scale, double label_smoothing,
                        int64_t ignore_index, int64_t reduction_code, bool absolute, bool need_grad, bool with_lse,
                        bool sparse) {
  (void)sparse;  // read by the autograd formula only
  begin_op();
  const DType dtype = dtype_tag(kOp, "weight", weight);
  const ScalarType storage = weight.scalar_type(), acc = acc_type(storage);
  check_tensor(kOp, "weight", weight, {-1, -1}, "[C, d]", storage, weight);
  const int64_t C = weight.size(0), d = weight.size(1);
  check_tensor(kOp, "hidden", hidden, {-1, d}, "[B, d]", storage, weight);
  const int64_t B = hidden.size(0);
  const Reduction reduction = reduction_of(kOp, reduction_code);
  const int64_t P = target.dim() == 1 ? 1 : target.dim() == 2 ? target.size(1) : -1;
  check_tensor(kOp, "target", target, target.dim() == 1 ? Shape{B} : Shape{B, -1}, target.dim() == 1 ? "[B]" : "[B, P]",
               ScalarType::Long, weight);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, kOp, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1);
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
  const int64_t entries = P + m;
  const Saved at(B, entries, d, reduction, need_grad, with_lse);
  Forward result{reduction == Reduction::kNone ? empty(hidden, {B}, acc) : empty(hidden, {}, acc),
                 empty(hidden, {B}, acc), empty(hidden, {at.size}, acc)};
  auto& [loss, lse, saved] = result;
  if (B == 0) {
    if (reduction != Reduction::kNone) torch::stable::zero_(loss);
    return result;
  }

  std::optional<Tensor> class_rows, dots, signs;
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
  params.known_offsets = in<int64_t>(known_offsets);
  params.known_ids = in<int64_t>(known_ids);
  params.loss = reduction == Reduction::kNone ? out_any(loss) : part_of(saved, at.row_loss, B, true);
  params.lse = out_any(lse);
  params.denom = part_of(saved, at.denom, B, true);
  params.coef_loss = part_of(saved, at.coef_loss, B * entries, true);
  params.coef_lse = part_of(saved, at.coef_lse, B * entries, true);
  params.d_loss = part_of(saved, at.d_loss, B * d, true);
  params.d_lse = part_of(saved, at.d_lse, B * d, true);
  if (need_grad && absolute && backend_of(kOp, weight) != Backend::kCpu) {
    signs = empty(hidden, {B, entries}, acc);
    params.signs = out_any(*signs);
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
    const auto add_draws = [&](int64_t gradient, int64_t coefs) {
      add_into(view_of(saved, gradient, B, d, d), product(view_of(saved, coefs + P, B, m, entries), *class_rows));
    };
    add_draws(at.d_loss, at.coef_loss);
    if (with_lse) add_draws(at.d_lse, at.coef_lse);
  }
  if (reduction != Reduction::kNone) {
    SampledSoftmaxMeanParams mean{};
    mean.row_loss = params.loss;
    mean.denom = params.denom;
    mean.loss = out_any(loss);
    mean.factor = part_of(saved, at.factor, 1, true);
    mean.batch = B;
    mean.mean = reduction == Reduction::kMean;
    mean.double_acc = acc == ScalarType::Double;
    SX_RUN(kOp, weight, launch_sampled_softmax_mean, mean);
  }
  return result;
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward sampled_softmax_bwd(const Tensor& grad_loss, const std::optional<Tensor>& grad_lse, const Tensor& hidden,
                             const Tensor& target, const Tensor& ids, const Tensor& saved, int64_t num_classes,
                             int64_t reduction_code, bool with_lse, bool need_rows, bool with_bias) {
  constexpr const char* op = "sampled_softmax_bwd";
  begin_op();
  const DType dtype = dtype_tag(op, "hidden", hidden);
  const ScalarType acc = acc_type(hidden.scalar_type());
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const int64_t B = hidden.size(0), d = hidden.size(1);
  const Reduction reduction = reduction_of(op, reduction_code);
  const int64_t P = target.dim() == 1 ? 1 : target.dim() == 2 ? target.size(1) : -1;
  check_tensor(op, "target", target, target.dim() == 1 ? Shape{B} : Shape{B, -1}, target.dim() == 1 ? "[B]" : "[B, P]",
               ScalarType::Long, hidden);
  const bool shared = ids.dim() == 1;
  check(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1), entries = P + m;
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  const bool reduced = reduction != Reduction::kNone;
  check_tensor(op, "grad_loss", grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  check(!grad_lse || with_lse, op, ": grad_lse must be None where the forward did not keep lse (with_lse=False)");
  if (grad_lse) check_tensor(op, "grad_lse", *grad_lse, {B}, "[B]", acc, hidden);
  const Saved at(B, entries, d, reduction, true, with_lse);
  check_tensor(op, "saved", saved, {at.size}, "what the forward kept", acc, hidden);

  Tensor d_hidden = empty(hidden, {B, d}, hidden.scalar_type());
  const Tensor coef_target = empty(hidden, {B, P}, acc);
  const Tensor coef_draw = empty(hidden, {B, m}, acc);
  SampledSoftmaxBwdParams params{};
  params.grad_loss = in_any(grad_loss);
  params.grad_lse = grad_lse ? in_any(*grad_lse) : nullptr;
  params.factor = part_of(saved, at.factor, 1, false);
  params.coef_loss = part_of(saved, at.coef_loss, B * entries, false);
  params.coef_lse = part_of(saved, at.coef_lse, B * entries, false);
  params.d_loss = part_of(saved, at.d_loss, B * d, false);
  params.d_lse = part_of(saved, at.d_lse, B * d, false);
  params.coef_target = out_any(coef_target);
  params.coef_draw = out_any(coef_draw);
  params.d_hidden = out_any(d_hidden);
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
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
      "int ignore_index, int reduction, bool absolute, bool need_grad, bool with_lse, bool sparse) -> "
      "(Tensor loss, Tensor lse, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "sampled_softmax_bwd(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor target, Tensor ids, Tensor saved, "
      "int num_classes, int reduction, bool with_lse, bool need_rows, bool with_bias) -> "
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
