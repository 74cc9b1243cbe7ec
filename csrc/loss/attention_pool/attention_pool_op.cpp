// attention_pool and attention_pool_bwd: schemas, checks, allocation. See attention_pool_params.h for the formulas.
//
// Backward: two coefficients a token are scaled by the upstream gradient, summed by id (row_reduce with rows of width
// 2), and only then become rows, each written once. No [B, T, d] and no [S, d] tensor exists on any path.
#include <tuple>

#include "common/calls.h"
#include "common/ids.h"
#include "loss/attention_pool/attention_pool_params.h"

namespace samplex::glue {
namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

bool is_padding(int64_t id) { return id == -1 || id == -100; }

Forward attention_pool(const Tensor& ids, const Tensor& table, const Tensor& query, const Tensor& value, bool need_grad,
                       bool need_vectors, bool sparse) {
  (void)sparse;  // read by the autograd formula only
  constexpr const char* op = "attention_pool";
  begin_op();
  const DType dtype = dtype_tag(op, "table", table);
  const ScalarType acc = acc_type(table.scalar_type());
  check_tensor(op, "table", table, {-1, -1}, "[S, d]", table.scalar_type(), table);
  const int64_t S = table.size(0), d = table.size(1);
  check_tensor(op, "ids", ids, {-1, -1}, "[B, T]", ScalarType::Long, table);
  const int64_t B = ids.size(0), T = ids.size(1);
  check_tensor(op, "query", query, {d}, "[d]", acc, table);
  check_tensor(op, "value", value, {d}, "[d]", acc, table);
  check_value(B < (int64_t(1) << 31) && T < (int64_t(1) << 31), op, ": B and T must stay below 2^31, got ",
              describe(ids));
  check_value(need_grad || !need_vectors, op, ": need_vectors must be False without need_grad, got True");
  check_ids(op, "ids", ids, S, " or -1, -100 for padding", is_padding);

  Forward result{empty(table, {B}, acc), empty_pooled(table, {need_grad ? B : 0, T, 2}, acc),
                 empty_pooled(table, {need_vectors ? B : 0, 2, d}, acc)};
  auto& [pooled, coefs, sums] = result;
  if (B == 0) return result;
  AttentionPoolParams params{};
  params.table = in_any(table);
  params.ids = in<int64_t>(ids);
  params.query = in_any(query);
  params.value = in_any(value);
  params.pooled = out_any(pooled);
  params.coefs = need_grad ? out_any(coefs) : nullptr;
  params.sums = need_vectors ? out_any(sums) : nullptr;
  params.batch = B;
  params.length = T;
  params.dim = d;
  params.num_rows = S;
  params.dtype = dtype;
  params.debug = debug_checks();
  SX_RUN(op, table, launch_attention_pool, params);
  return result;
}

Backward attention_pool_bwd(const Tensor& grad, const Tensor& ids, const Tensor& query, const Tensor& value,
                            const Tensor& coefs, const Tensor& sums, int64_t num_rows, bool need_rows,
                            bool need_vectors) {
  constexpr const char* op = "attention_pool_bwd";
  begin_op();
  check_given(op, "query", query);
  const ScalarType acc = query.scalar_type();
  check_type(acc == ScalarType::Float || acc == ScalarType::Double, op, ": query must be float32 or float64, got ",
             describe(query));
  check_tensor(op, "query", query, {-1}, "[d]", acc, query);
  const int64_t d = query.size(0);
  check_tensor(op, "value", value, {d}, "[d]", acc, query);
  check_tensor(op, "ids", ids, {-1, -1}, "[B, T]", ScalarType::Long, query);
  const int64_t B = ids.size(0), T = ids.size(1);
  check_tensor(op, "grad", grad, {B}, "[B]", acc, query);
  check_tensor(op, "coefs", coefs, {B, T, 2}, "[B, T, 2]", acc, query);
  if (need_vectors) check_tensor(op, "sums", sums, {B, 2, d}, "[B, 2, d]", acc, query);
  check_value(num_rows >= 0, op, ": num_rows must be >= 0, got ", num_rows);
  if (need_rows) check_ids(op, "ids", ids, num_rows, " or -1, -100 for padding", is_padding);
  const bool is_double = acc == ScalarType::Double;

  Tensor d_query = empty(query, {need_vectors ? d : 0}, acc), d_value = empty(query, {need_vectors ? d : 0}, acc);
  if (need_vectors && d > 0) {
    AttentionPoolVectorsParams vectors{};
    vectors.grad = in_any(grad);
    vectors.sums = in_any(sums);
    vectors.d_query = out_any(d_query);
    vectors.d_value = out_any(d_value);
    vectors.batch = B;
    vectors.dim = d;
    vectors.double_acc = is_double;
    std::optional<Tensor> partial;
    const int64_t parts = attention_pool_parts(B);
    if (parts > 1 && backend_of(op, query) != Backend::kCpu) {
      partial = empty(query, {parts, 2, d}, ScalarType::Double);
      vectors.partial = out<double>(*partial);
    }
    SX_RUN(op, query, launch_attention_pool_vectors, vectors);
  }

  const int64_t entries = need_rows ? B * T : 0;
  const Tensor scaled = empty_pooled(query, {entries, 2}, acc);
  if (entries > 0) {
    AttentionPoolScaleParams scale{};
    scale.grad = in_any(grad);
    scale.coefs = in_any(coefs);
    scale.scaled = out_any(scaled);
    scale.batch = B;
    scale.length = T;
    scale.double_acc = is_double;
    SX_RUN(op, query, launch_attention_pool_scale, scale);
  }
  const std::optional<Tensor> none;
  const Tensor no_ids = empty(query, {0}, ScalarType::Long), no_pairs = empty(query, {0, 2}, acc);
  const Tensor flat_ids = entries > 0 ? torch::stable::flatten(ids) : no_ids;
  const RowGradients pairs =
      call_row_reduce({flat_ids, none, scaled}, {no_ids, none, no_pairs}, none, need_rows ? num_rows : 0, false);
  const int64_t capacity = pairs.row_ids.size(0);
  Tensor rows = empty_pooled(query, {capacity, d}, acc);
  if (capacity > 0 && d > 0) {
    begin_op();  // the scratch of the reduction is gone: the test backend must not remember its addresses
    AttentionPoolRowsParams expand{};
    expand.pairs = in_any(pairs.row_grads);
    expand.count = in<int64_t>(pairs.count);
    expand.query = in_any(query);
    expand.value = in_any(value);
    expand.rows = out_any(rows);
    expand.capacity = capacity;
    expand.dim = d;
    expand.double_acc = is_double;
    const bool aligned = reinterpret_cast<uintptr_t>(expand.rows) % 64 == 0;
    expand.stream = aligned && d % 16 == 0 && size_t(capacity * d) * rows.element_size() >= kStreamRowsSmallest;
    SX_RUN(op, query, launch_attention_pool_rows, expand);
  }
  return {pairs.row_ids, rows, pairs.count, d_query, d_value};
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "attention_pool(Tensor ids, Tensor table, Tensor query, Tensor value, bool need_grad, bool need_vectors, "
      "bool sparse) -> (Tensor pooled, Tensor coefs, Tensor sums)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "attention_pool_bwd(Tensor grad, Tensor ids, Tensor query, Tensor value, Tensor coefs, Tensor sums, "
      "int num_rows, bool need_rows, bool need_vectors) -> "
      "(Tensor row_ids, Tensor row_grads, Tensor count, Tensor d_query, Tensor d_value)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("attention_pool", TORCH_BOX(&samplex::glue::attention_pool));
  m.impl("attention_pool_bwd", TORCH_BOX(&samplex::glue::attention_pool_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("attention_pool", TORCH_BOX(&samplex::glue::attention_pool));
  m.impl("attention_pool_bwd", TORCH_BOX(&samplex::glue::attention_pool_bwd));
}
