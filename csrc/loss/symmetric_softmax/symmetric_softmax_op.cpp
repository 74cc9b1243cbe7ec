// symmetric_softmax and symmetric_softmax_bwd: schemas, checks, allocation. See symmetric_softmax_params.h for the
// formulas. The products are the caller's: one matrix [B, B], with queries in rows and keys in columns.
#include <tuple>

#include "common/ids.h"
#include "loss/symmetric_softmax/symmetric_softmax_params.h"

namespace samplex::glue {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kMostRows = 65535;  // of a grid of blocks

struct Masks {
  const std::optional<Tensor>&labels, &known_offsets, &known_ids, &key_shift, &query_shift;
};

SymmetricSoftmaxParams params_of(const char* op, const Tensor& dots, const Masks& masks, double scale) {
  begin_op();
  check_given(op, "dots", dots);
  const ScalarType acc = dots.scalar_type();
  check_type(acc == ScalarType::Float || acc == ScalarType::Double, op, ": dots must be float32 or float64, got ",
             describe(dots));
  check_tensor(op, "dots", dots, {-1, -1}, "[B, B]", acc, dots);
  const int64_t B = dots.size(0);
  check_value(dots.size(1) == B && B <= kMostRows, op, ": dots must be [B, B] with B <= 65535, got ", describe(dots));
  if (masks.labels) check_tensor(op, "labels", *masks.labels, {B}, "[B]", ScalarType::Long, dots);
  check_value(masks.known_offsets.has_value() == masks.known_ids.has_value(), op,
              ": known_offsets and known_ids must be given together");
  check_value(!masks.known_offsets || masks.labels, op, ": labels must be given with known_offsets, got None");
  if (masks.known_offsets) {
    check_tensor(op, "known_offsets", *masks.known_offsets, {B + 1}, "[B + 1]", ScalarType::Long, dots);
    check_tensor(op, "known_ids", *masks.known_ids, {-1}, "[n]", ScalarType::Long, dots);
    check_csr(op, "known", *masks.known_offsets, *masks.known_ids, B, -1);
  }
  if (masks.key_shift) check_tensor(op, "key_shift", *masks.key_shift, {B}, "[B]", acc, dots);
  if (masks.query_shift) check_tensor(op, "query_shift", *masks.query_shift, {B}, "[B]", acc, dots);
  SymmetricSoftmaxParams params{};
  params.dots = in_any(dots);
  params.labels = in<int64_t>(masks.labels);
  params.known_offsets = in<int64_t>(masks.known_offsets);
  params.known_ids = in<int64_t>(masks.known_ids);
  params.known_size = masks.known_ids ? masks.known_ids->numel() : 0;
  params.key_shift = masks.key_shift ? in_any(*masks.key_shift) : nullptr;
  params.query_shift = masks.query_shift ? in_any(*masks.query_shift) : nullptr;
  params.batch = B;
  params.block_rows = symmetric_block_rows(B);
  params.scale = scale;
  params.double_acc = acc == ScalarType::Double;
  return params;
}

Forward symmetric_softmax(const Tensor& dots, const std::optional<Tensor>& labels,
                          const std::optional<Tensor>& known_offsets, const std::optional<Tensor>& known_ids,
                          const std::optional<Tensor>& key_shift, const std::optional<Tensor>& query_shift,
                          double scale) {
  constexpr const char* op = "symmetric_softmax";
  SymmetricSoftmaxParams params =
      params_of(op, dots, {labels, known_offsets, known_ids, key_shift, query_shift}, scale);
  const ScalarType acc = dots.scalar_type();
  const int64_t B = params.batch;
  Forward result{empty(dots, {B}, acc), empty(dots, {B}, acc), empty(dots, {B}, acc)};
  if (B == 0) return result;
  auto& [loss, row_lse, column_lse] = result;
  params.loss = out_any(loss);
  params.row_lse = out_any(row_lse);
  params.column_lse = out_any(column_lse);
  std::optional<Tensor> partial;
  if (backend_of(op, dots) == Backend::kCpu) {
    partial = empty_pooled(dots, {2, symmetric_blocks(B), B}, acc);
    params.partial = out_any(*partial);
  }
  SX_RUN(op, dots, launch_symmetric_softmax, params);
  return result;
}

Tensor symmetric_softmax_bwd(const Tensor& grad, const Tensor& dots, const std::optional<Tensor>& labels,
                             const std::optional<Tensor>& known_offsets, const std::optional<Tensor>& known_ids,
                             const std::optional<Tensor>& key_shift, const std::optional<Tensor>& query_shift,
                             const Tensor& row_lse, const Tensor& column_lse, double scale) {
  constexpr const char* op = "symmetric_softmax_bwd";
  SymmetricSoftmaxParams params =
      params_of(op, dots, {labels, known_offsets, known_ids, key_shift, query_shift}, scale);
  const ScalarType acc = dots.scalar_type();
  const int64_t B = params.batch;
  check_tensor(op, "grad", grad, {B}, "[B]", acc, dots);
  check_tensor(op, "row_lse", row_lse, {B}, "[B]", acc, dots);
  check_tensor(op, "column_lse", column_lse, {B}, "[B]", acc, dots);
  Tensor coefs = empty_pooled(dots, {B, B}, acc);
  if (B == 0) return coefs;
  params.grad = in_any(grad);
  params.row_lse = const_cast<void*>(in_any(row_lse));
  params.column_lse = const_cast<void*>(in_any(column_lse));
  params.coefs = out_any(coefs);
  SX_RUN(op, dots, launch_symmetric_softmax_grad, params);
  return coefs;
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "symmetric_softmax(Tensor dots, Tensor? labels, Tensor? known_offsets, Tensor? known_ids, Tensor? key_shift, "
      "Tensor? query_shift, float scale) -> (Tensor loss, Tensor row_lse, Tensor column_lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "symmetric_softmax_bwd(Tensor grad, Tensor dots, Tensor? labels, Tensor? known_offsets, Tensor? known_ids, "
      "Tensor? key_shift, Tensor? query_shift, Tensor row_lse, Tensor column_lse, float scale) -> Tensor coefs",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("symmetric_softmax", TORCH_BOX(&samplex::glue::symmetric_softmax));
  m.impl("symmetric_softmax_bwd", TORCH_BOX(&samplex::glue::symmetric_softmax_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("symmetric_softmax", TORCH_BOX(&samplex::glue::symmetric_softmax));
  m.impl("symmetric_softmax_bwd", TORCH_BOX(&samplex::glue::symmetric_softmax_bwd));
}
