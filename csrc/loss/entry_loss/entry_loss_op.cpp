// entry_loss, entry_loss_static, augment_reduce_static_ and entry_loss_bwd, the losses that are sums over entries:
// schemas, checks, allocation. See entry_loss_params.h for the formulas. Shared draws go through GEMMs, as in
// sampled_softmax; no [B, m, d] and no [C, d] tensor exists on any path.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "common/ids.h"
#include "common/philox.h"
#include "loss/entry_loss/entry_loss_params.h"
#include "loss/fused/fused_loss_op.h"

namespace samplex::glue {
namespace {

using Forward = std::tuple<Tensor, Tensor>;

// Messages carry the name of the loss.
constexpr const char* kNames[] = {"negative_sampling", "nce", "one_vs_each", "augment_reduce"};
constexpr const char* kBackwardNames[] = {"negative_sampling_bwd", "nce_bwd", "one_vs_each_bwd", "augment_reduce_bwd"};

EntryLoss kind_of(const char* op, int64_t code) {
  check_value(code >= 0 && code <= 3, op,
              ": kind must be 0 (negative_sampling), 1 (nce), 2 (one_vs_each) or 3 (augment_reduce), got ", code);
  return EntryLoss(code);
}

// With more rows the mean of a GPU has a separate kernel: one warp, the last of the loss, would take longer than a
// launch does.
constexpr int64_t kMeanOfLastBlock = 2048;

// P of a target [B] or [B, P].
int64_t check_target(const char* op, const Tensor& target, int64_t batch, const Tensor& like) {
  check_given(op, "target", target);
  const bool one = target.dim() == 1;
  check_tensor(op, "target", target, one ? Shape{batch} : Shape{batch, -1}, one ? "[B]" : "[B, P]", ScalarType::Long,
               like);
  return one ? 1 : target.size(1);
}

// Numbers per example, one of which each row reads and moves.
struct Examples {
  const Tensor& index;  // [B]
  double rate;
};

// `ids` and `log_q` are given, or with `here` set by the draw, and then target_log_q too. With `examples` log_eta has a
// number per example instead of one per row.
Forward forward(const Tensor& hidden, const Tensor& weight, const Tensor& target, Tensor& ids, Tensor& log_q,
                const DrawHere* here, const Examples* examples, std::optional<Tensor> target_log_q,
                const std::optional<Tensor>& log_eta, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& class_weight, const std::optional<Tensor>& known_offsets,
                const std::optional<Tensor>& known_ids, int64_t kind_code, double scale, double reg,
                int64_t ignore_index, int64_t reduction_code, bool need_grad) {
  begin_op();
  const EntryLoss kind = kind_of("entry_loss", kind_code);
  const char* op = kNames[kind_code];
  const DType dtype = dtype_tag(op, "weight", weight);
  const ScalarType storage = weight.scalar_type(), acc = acc_type(storage);
  check_tensor(op, "weight", weight, {-1, -1}, "[C, d]", storage, weight);
  const int64_t C = weight.size(0), d = weight.size(1);
  check_tensor(op, "hidden", hidden, {-1, d}, "[B, d]", storage, weight);
  const int64_t B = hidden.size(0);
  const Reduction reduction = reduction_of(op, reduction_code);
  const int64_t P = check_target(op, target, B, weight);
  if (here == nullptr) {
    check_given(op, "ids", ids);
    check_value(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  }
  const bool shared = here != nullptr ? here->shared : ids.dim() == 1;
  const int64_t m = here != nullptr ? here->num_samples : ids.size(ids.dim() - 1);
  check_value(here == nullptr || (m >= 0 && m <= kPhiloxMaxDraws), op, ": num_samples must be in [0, 2^24], got ", m);
  if (here == nullptr) {
    const Shape draws = shared ? Shape{m} : Shape{B, m};
    check_tensor(op, "ids", ids, draws, shared ? "[m]" : "[B, m]", ScalarType::Long, weight);
    check_tensor(op, "log_q", log_q, draws, shared ? "[m]" : "[B, m]", acc, weight);
  }
  check_value(P + m < (int64_t(1) << 31) - 1, op, ": targets and draws of a row must stay below 2^31, got ", P + m);
  check_value(reg >= 0, op, ": reg must be at least 0, got ", reg);
  check_value(reg == 0 || kind == EntryLoss::kNegativeSampling, op, ": reg must be 0, got ", reg);
  const bool relative = kind == EntryLoss::kOneVsEach || kind == EntryLoss::kAugmentReduce;
  const bool reads_targets = reg != 0 || kind == EntryLoss::kNce;
  check_value(here != nullptr || reg == 0 || target_log_q.has_value(), op,
              ": target_log_q must be [B] if reg is not 0, got None");
  check_value(here != nullptr || kind != EntryLoss::kNce || target_log_q.has_value(), op,
              ": target_log_q must be [B], got None");
  if (target_log_q) {
    check_given(op, "target", target);
    const bool one = target.dim() == 1;
    check_tensor(op, "target_log_q", *target_log_q, one ? Shape{B} : Shape{B, P}, one ? "[B]" : "[B, P]", acc, weight);
  }
  check_value(kind != EntryLoss::kAugmentReduce || log_eta.has_value(), op, ": log_eta must be [B], got None");
  if (log_eta)
    check_tensor(op, "log_eta", *log_eta, examples != nullptr ? Shape{-1} : Shape{B},
                 examples != nullptr ? "[N]" : "[B]", acc, weight);
  if (examples != nullptr) {
    check_tensor(op, "index", examples->index, {B}, "[B]", ScalarType::Long, weight);
    check_value(examples->rate > 0 && examples->rate <= 1, op, ": rate must be in (0, 1], got ", examples->rate);
    check_ids(op, "index", examples->index, log_eta->size(0));
  }
  check_value(known_offsets.has_value() == known_ids.has_value(), op,
              ": known_offsets and known_ids must be given together");
  if (known_offsets) {
    check_tensor(op, "known_offsets", *known_offsets, {B + 1}, "[B + 1]", ScalarType::Long, weight);
    check_tensor(op, "known_ids", *known_ids, {-1}, "[n]", ScalarType::Long, weight);
    check_csr(op, "positives", *known_offsets, *known_ids, B, C);
  }
  if (here == nullptr) check_ids(op, "ids", ids, C);
  check_ids(op, "target", target, C, " or ignore_index",
            [&](int64_t id) { return id == ignore_index || (P > 1 && id == kPadding); });

  EntryLossParams params{};
  params.bias = table_of(op, "bias", bias, C, weight);
  params.class_weight = table_of(op, "class_weight", class_weight, C, weight);
  const LossShape shape{B, P, m, d, shared};
  const SavedLoss at(shape, reduction, need_grad, false, kind == EntryLoss::kAugmentReduce);
  Forward result{reduction == Reduction::kNone ? empty(hidden, {B}, acc) : empty(hidden, {}, acc),
                 empty_pooled(hidden, {at.size}, acc)};
  auto& [loss, saved] = result;
  SharedRows class_rows(op, weight, params.bias, B, m, shared, need_grad);
  std::optional<StaticDraw> drawn;
  std::optional<Tensor> scored;  // as the draw writes it
  if (here != nullptr) {
    const auto as_read = [&](const Tensor& t) { return acc == ScalarType::Double ? torch::stable::to(t, acc) : t; };
    if (reads_targets) scored = empty(hidden, {B}, ScalarType::Float);
    drawn = call_static_sample(here->law, here->key, m, C, shared, here->table, here->prefix, target, !relative,
                               class_rows.gather, scored);
    ids = drawn->ids;
    log_q = as_read(drawn->log_q);
    if (scored) target_log_q = as_read(*scored);
  }
  if (B == 0) {
    if (reduction != Reduction::kNone) torch::stable::zero_(loss);
    torch::stable::zero_(saved);  // holds the factor of the mean
    return result;
  }

  std::optional<Tensor> dots, scratch;
  if (class_rows.any()) {
    if (class_rows.gather.ids == nullptr) class_rows.run(op, weight, ids);
    params.dots_stride = backend_of(op, weight) == Backend::kCpu ? m : SharedRows::dots_stride(m);
    dots = empty_pooled(hidden, {B, params.dots_stride}, acc);
    params.dots = out_any(*dots);
    if (params.dots_stride != m) dots = torch::stable::narrow(*dots, 1, 0, m);
    if (class_rows.rows) class_rows.dots(*dots, hidden);
    params.products = class_rows.products(hidden, params.dots, params.dots_stride, shape, at, saved, true);
  }
  if (relative && P > 0 && backend_of(op, weight) != Backend::kCpu) {
    scratch = empty(hidden, {B, 2, P}, acc);
    params.scratch = out_any(*scratch);
  }
  params.hidden = in_any(hidden);
  params.weight = in_any(weight);
  params.target = in<int64_t>(target);
  params.ids = in<int64_t>(ids);
  params.log_q = in_any(log_q);
  params.target_log_q = target_log_q ? in_any(*target_log_q) : nullptr;
  params.log_eta = log_eta ? in_any(*log_eta) : nullptr;
  if (examples != nullptr) {
    params.examples = {
        in<int64_t>(examples->index), out_any(*log_eta),        part_of(saved, at.ratio, B, true), B, log_eta->size(0),
        std::log1p(-examples->rate),  std::log(examples->rate), acc == ScalarType::Double};
  }
  params.known_offsets = in<int64_t>(known_offsets);
  params.known_ids = in<int64_t>(known_ids);
  params.known_size = known_ids ? known_ids->numel() : 0;
  params.loss = reduction == Reduction::kNone ? out_any(loss) : part_of(saved, at.row_loss, B, true);
  params.denom = part_of(saved, at.denom, B, true);
  params.ratio = part_of(saved, at.ratio, B, true);
  params.coef_loss = coefs_of(saved, at, at.coef_loss, B, true);
  params.coefs = at.coefs;
  params.d_loss = part_of(saved, at.d_loss, B * d, true);
  params.draw_bias = class_rows.gather.biases;
  params.parts = class_rows.parts_for(hidden, true);
  params.mean = mean_params(reduction, params.loss, params.denom, loss, saved, at, B);
  if (params.mean.loss != nullptr && B <= kMeanOfLastBlock) params.mean.arrived = class_rows.gather.arrived;
  params.batch = B;
  params.num_targets = P;
  params.num_samples = m;
  params.dim = d;
  params.num_classes = C;
  params.ignore_index = ignore_index;
  params.scale = scale;
  params.reg = reg;
  params.log_num_samples = std::log(double(std::max<int64_t>(m, 1)));
  params.kind = kind;
  params.dtype = dtype;
  params.shared = shared;
  params.need_grad = need_grad;
  params.debug = debug_checks();
  SX_RUN(op, weight, launch_entry_loss, params);

  run_shared_draws(saved, at, shape, class_rows, true, params.parts);
  run_loss_mean(op, saved, params.mean);
  if (examples != nullptr && params.mean.arrived == nullptr) SX_RUN(op, saved, launch_entry_examples, params.examples);
  return result;
}

// Of the ops that draw.
DrawHere drawn_here(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& key,
                    int64_t law, int64_t num_samples, bool shared, const std::optional<Tensor>& table,
                    const std::optional<Tensor>& prefix) {
  check_value(weight.dim() == 2, op, ": weight must be [C, d], got ", describe(weight));
  check_value(hidden.dim() == 2, op, ": hidden must be [B, d], got ", describe(hidden));
  check_tensor(op, "target", target, {hidden.size(0)}, "[B]", ScalarType::Long, weight);
  check_value(weight.size(0) >= 1, op, ": weight must have at least one class, got ", describe(weight));
  return {key, law, num_samples, shared, table, prefix};
}

Forward entry_loss(const Tensor& hidden, const Tensor& weight, const Tensor& target, Tensor ids, Tensor log_q,
                   const std::optional<Tensor>& target_log_q, const std::optional<Tensor>& log_eta,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
                   const std::optional<Tensor>& known_offsets, const std::optional<Tensor>& known_ids,
                   int64_t kind_code, double scale, double reg, int64_t ignore_index, int64_t reduction_code,
                   bool need_grad, bool sparse) {
  (void)sparse;  // read by the autograd formula only
  return forward(hidden, weight, target, ids, log_q, nullptr, nullptr, target_log_q, log_eta, bias, class_weight,
                 known_offsets, known_ids, kind_code, scale, reg, ignore_index, reduction_code, need_grad);
}

// Draws and loss in one op: a GPU draws, scores the targets and gathers the class rows of shared draws in one kernel.
// Of the losses that keep no number per example.
std::tuple<Tensor, Tensor, Tensor> entry_loss_static(
    const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& key, int64_t law,
    int64_t num_samples, bool shared, const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight, int64_t kind_code, double scale,
    double reg, int64_t ignore_index, int64_t reduction_code, bool need_grad) {
  const EntryLoss kind = kind_of("entry_loss_static", kind_code);
  check_value(kind != EntryLoss::kAugmentReduce,
              "entry_loss_static: kind must be 0 (negative_sampling), 1 (nce) or 2 (one_vs_each), got ", kind_code);
  const DrawHere here =
      drawn_here(kNames[kind_code], hidden, weight, target, key, law, num_samples, shared, table, prefix);
  Tensor ids, log_q;
  auto [loss, saved] =
      forward(hidden, weight, target, ids, log_q, &here, nullptr, std::nullopt, std::nullopt, bias, class_weight,
              std::nullopt, std::nullopt, kind_code, scale, reg, ignore_index, reduction_code, need_grad);
  return {loss, ids, saved};
}

// The same of augment_reduce, with the numbers that it keeps per example: read and moved by the op.
std::tuple<Tensor, Tensor, Tensor> augment_reduce_static(
    const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& key, int64_t law,
    int64_t num_samples, bool shared, const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight, const Tensor& log_eta,
    const Tensor& index, double rate, double scale, int64_t ignore_index, int64_t reduction_code, bool need_grad) {
  constexpr int64_t kKind = int64_t(EntryLoss::kAugmentReduce);
  const DrawHere here = drawn_here(kNames[kKind], hidden, weight, target, key, law, num_samples, shared, table, prefix);
  const Examples examples{index, rate};
  Tensor ids, log_q;
  auto [loss, saved] =
      forward(hidden, weight, target, ids, log_q, &here, &examples, std::nullopt, log_eta, bias, class_weight,
              std::nullopt, std::nullopt, kKind, scale, 0.0, ignore_index, reduction_code, need_grad);
  return {loss, ids, saved};
}

LossGradients entry_loss_bwd(const Tensor& grad_loss, const Tensor& hidden, const Tensor& target, const Tensor& ids,
                             const Tensor& saved, int64_t kind_code, int64_t num_classes, int64_t reduction_code,
                             bool need_rows, bool with_bias) {
  begin_op();
  const EntryLoss kind = kind_of("entry_loss_bwd", kind_code);
  const char* op = kBackwardNames[kind_code];
  dtype_tag(op, "hidden", hidden);
  check_value(num_classes >= 0, op, ": num_classes must be at least 0, got ", num_classes);
  const ScalarType acc = acc_type(hidden.scalar_type());
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d]", hidden.scalar_type(), hidden);
  const int64_t B = hidden.size(0), d = hidden.size(1);
  const Reduction reduction = reduction_of(op, reduction_code);
  const int64_t P = check_target(op, target, B, hidden);
  check_given(op, "ids", ids);
  const bool shared = ids.dim() == 1;
  check_value(ids.dim() == 1 || ids.dim() == 2, op, ": ids must be [B, m] or [m], got ", describe(ids));
  const int64_t m = ids.size(ids.dim() - 1);
  check_tensor(op, "ids", ids, shared ? Shape{m} : Shape{B, m}, shared ? "[m]" : "[B, m]", ScalarType::Long, hidden);
  const bool reduced = reduction != Reduction::kNone;
  check_tensor(op, "grad_loss", grad_loss, reduced ? Shape{} : Shape{B}, reduced ? "[]" : "[B]", acc, hidden);
  const SavedLoss at({B, P, m, d, shared}, reduction, true, false, kind == EntryLoss::kAugmentReduce);
  check_tensor(op, "saved", saved, {at.size}, "what the forward kept", acc, hidden);
  return run_loss_backward(op, {grad_loss, std::nullopt, hidden, target, ids, saved}, at, P, num_classes, need_rows,
                           with_bias);
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "entry_loss(Tensor hidden, Tensor weight, Tensor target, Tensor ids, Tensor log_q, Tensor? target_log_q, "
      "Tensor? log_eta, Tensor? bias, Tensor? class_weight, Tensor? known_offsets, Tensor? known_ids, int kind, "
      "float scale, float reg, int ignore_index, int reduction, bool need_grad, bool sparse) -> "
      "(Tensor loss, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "entry_loss_static(Tensor hidden, Tensor weight, Tensor target, Tensor key, int law, int num_samples, "
      "bool shared, Tensor? table, Tensor? prefix, Tensor? bias, Tensor? class_weight, int kind, float scale, "
      "float reg, int ignore_index, int reduction, bool need_grad) -> (Tensor loss, Tensor ids, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "augment_reduce_static_(Tensor hidden, Tensor weight, Tensor target, Tensor key, int law, int num_samples, "
      "bool shared, Tensor? table, Tensor? prefix, Tensor? bias, Tensor? class_weight, Tensor(a!) log_eta, "
      "Tensor index, float rate, float scale, int ignore_index, int reduction, bool need_grad) -> "
      "(Tensor loss, Tensor ids, Tensor saved)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "entry_loss_bwd(Tensor grad_loss, Tensor hidden, Tensor target, Tensor ids, Tensor saved, int kind, "
      "int num_classes, int reduction, bool need_rows, bool with_bias) -> "
      "(Tensor d_hidden, Tensor row_ids, Tensor row_grads, Tensor row_bias, Tensor count)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("entry_loss", TORCH_BOX(&samplex::glue::entry_loss));
  m.impl("entry_loss_static", TORCH_BOX(&samplex::glue::entry_loss_static));
  m.impl("augment_reduce_static_", TORCH_BOX(&samplex::glue::augment_reduce_static));
  m.impl("entry_loss_bwd", TORCH_BOX(&samplex::glue::entry_loss_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("entry_loss", TORCH_BOX(&samplex::glue::entry_loss));
  m.impl("entry_loss_static", TORCH_BOX(&samplex::glue::entry_loss_static));
  m.impl("augment_reduce_static_", TORCH_BOX(&samplex::glue::augment_reduce_static));
  m.impl("entry_loss_bwd", TORCH_BOX(&samplex::glue::entry_loss_bwd));
}
