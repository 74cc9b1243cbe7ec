// shard_logits and shard_hidden: schemas, checks, allocation. See shard_rows_params.h for the formulas.
#include <tuple>

#include "common/glue.h"
#include "loss/shard_rows/shard_rows_params.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;
using Logits = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kMostClasses = int64_t(1) << 52, kMostSpread = int64_t(1) << 31, kMost = int64_t(1) << 31;

Logits shard_logits(Tensor hidden, Tensor weight, MaybeTensor bias, Tensor target, Tensor ids, int64_t num_classes,
                    int64_t step, int64_t start) {
  constexpr const char* op = "shard_logits";
  begin_op();
  ShardLogitsParams p{};
  p.dtype = dtype_tag(op, "weight", weight);
  check_tensor(op, "weight", weight, {-1, -1}, "[n, d]", weight.scalar_type(), weight);
  check_tensor(op, "hidden", hidden, {-1, weight.size(1)}, "[B, d]", weight.scalar_type(), weight);
  if (bias) {
    p.bias_dtype = dtype_tag(op, "bias", *bias);
    check_tensor(op, "bias", *bias, {weight.size(0)}, "[n]", bias->scalar_type(), weight);
  }
  check_tensor(op, "target", target, {hidden.size(0), -1}, "[B, P]", ScalarType::Long, weight);
  check_tensor(op, "ids", ids, {hidden.size(0), -1}, "[B, m]", ScalarType::Long, weight);
  check_value(num_classes >= 1 && num_classes <= kMostClasses, op, ": num_classes must be in [1, 2^52], got ",
              num_classes);
  check_value(step == 1 || (step > 1 && step < num_classes && num_classes <= kMostSpread), op,
              ": step must be 1, or below num_classes if that is at most 2^31, got ", step, " with ", num_classes,
              " classes");
  p.rows = weight.size(0);
  check_value(start >= 0 && start <= num_classes && p.rows <= num_classes - start, op,
              ": start must be at least 0 and leave room for the ", p.rows,
              " rows of weight below num_classes = ", num_classes, ", got ", start);
  p.batch = hidden.size(0);
  p.num_targets = target.size(1);
  p.num_ids = ids.size(1);
  check_value(p.batch < kMost && p.num_targets < kMost && p.num_ids < kMost, op,
              ": target and ids must have fewer than 2^31 rows and columns, got ", describe(target), " and ",
              describe(ids));
  p.dim = weight.size(1);
  p.num_classes = num_classes;
  p.inverse = 1.0 / double(num_classes);
  p.step = step;
  p.start = start;
  const int64_t entries = p.num_targets + p.num_ids;
  Logits result{empty_pooled(weight, {p.batch, entries}, acc_type(weight.scalar_type())),
                empty(weight, {p.batch, p.num_targets}, ScalarType::Long),
                empty_pooled(weight, {p.batch, p.num_ids}, ScalarType::Long)};
  if (p.batch == 0 || entries == 0) return result;
  auto& [logits, target_rows, id_rows] = result;
  p.hidden = in_any(hidden);
  p.weight = in_any(weight);
  p.bias = bias ? in_any(*bias) : nullptr;
  p.target = in<int64_t>(target);
  p.ids = in<int64_t>(ids);
  p.logits = out_any(logits);
  p.target_rows = out<int64_t>(target_rows);
  p.id_rows = out<int64_t>(id_rows);
  SX_RUN(op, weight, launch_shard_logits, p);
  return result;
}

Tensor shard_hidden(Tensor weight, Tensor target_coef, Tensor id_coef, Tensor target_rows, Tensor id_rows) {
  constexpr const char* op = "shard_hidden";
  begin_op();
  ShardHiddenParams p{};
  p.dtype = dtype_tag(op, "weight", weight);
  const ScalarType acc = acc_type(weight.scalar_type());
  check_tensor(op, "weight", weight, {-1, -1}, "[n, d]", weight.scalar_type(), weight);
  check_tensor(op, "target_rows", target_rows, {-1, -1}, "[B, P]", ScalarType::Long, weight);
  p.batch = target_rows.size(0);
  p.num_targets = target_rows.size(1);
  check_tensor(op, "id_rows", id_rows, {p.batch, -1}, "[B, m]", ScalarType::Long, weight);
  p.num_ids = id_rows.size(1);
  check_tensor(op, "target_coef", target_coef, {p.batch, p.num_targets}, "[B, P]", acc, weight);
  check_tensor(op, "id_coef", id_coef, {p.batch, p.num_ids}, "[B, m]", acc, weight);
  check_value(p.batch < kMost && p.num_targets < kMost && p.num_ids < kMost, op,
              ": target_rows and id_rows must have fewer than 2^31 rows and columns, got ", describe(target_rows),
              " and ", describe(id_rows));
  p.dim = weight.size(1);
  p.rows = weight.size(0);
  Tensor hidden = empty_pooled(weight, {p.batch, p.dim}, acc);
  if (p.batch == 0 || p.dim == 0) return hidden;
  p.weight = in_any(weight);
  p.target_coef = in_any(target_coef);
  p.id_coef = in_any(id_coef);
  p.target_rows = in<int64_t>(target_rows);
  p.id_rows = in<int64_t>(id_rows);
  p.hidden = out_any(hidden);
  SX_RUN(op, weight, launch_shard_hidden, p);
  return hidden;
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "shard_logits(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor ids, int num_classes, int step, "
      "int start) -> (Tensor logits, Tensor target_rows, Tensor id_rows)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def("shard_hidden(Tensor weight, Tensor target_coef, Tensor id_coef, Tensor target_rows, Tensor id_rows) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("shard_logits", TORCH_BOX(&samplex::glue::shard_logits));
  m.impl("shard_hidden", TORCH_BOX(&samplex::glue::shard_hidden));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("shard_logits", TORCH_BOX(&samplex::glue::shard_logits));
  m.impl("shard_hidden", TORCH_BOX(&samplex::glue::shard_hidden));
}
