// row_reduce: weighted source rows summed by class id, without a host sync. See row_reduce_params.h.
#include "update/row_reduce/row_reduce_op.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace samplex::glue {
namespace {

// "The dimension being sorted can not have more than INT_MAX elements." The kernels count on it.
constexpr int64_t kMostSorted = INT32_MAX;

RowKeys row_keys_of(const char* op, int64_t entries, int64_t num_rows, int64_t dim) {
  check_value(entries <= kMostSorted, op, ": a call must have at most ", kMostSorted,
              " entries (the limit of torch's sort), got ", entries, "; split the batch");
  RowKeys keys{};
  keys.num_rows = num_rows;
  keys.wide = num_rows > INT32_MAX;
  // Blocks of columns: at most, with one column a lane.
  keys.num_counters = plan_row_chunks(entries).slots * std::max<int64_t>(1, (dim + 31) / 32);
  return keys;
}

// Keys, then counters, in numbers of the keys' type.
int64_t key_numbers(const RowKeys& keys, int64_t entries) {
  return entries + (keys.wide ? (keys.num_counters + 1) / 2 : keys.num_counters);
}

ScalarType key_type(const RowKeys& keys) { return keys.wide ? ScalarType::Long : ScalarType::Int; }

void take_key_memory(RowKeys& keys, const Tensor& memory, int64_t entries) {
  keys.keys = out_any(memory);
  keys.counters = reinterpret_cast<int*>(static_cast<char*>(keys.keys) + size_t(entries) * memory.element_size());
}

}  // namespace

RowKeysMemory call_row_keys(const char* op, const Tensor& like, int64_t entries, int64_t num_rows, int64_t dim) {
  RowKeys keys = row_keys_of(op, entries, num_rows, dim);
  const Tensor memory = empty(like, {key_numbers(keys, entries)}, key_type(keys));
  take_key_memory(keys, memory, entries);
  return {memory, keys};
}

SortedEntries run_row_sort(const char* op, RowReduceParams& params, const Tensor& like,
                           const std::optional<Tensor>& given) {
  const int64_t entries = params.source[0].entries + params.source[1].entries;
  Tensor memory;
  if (given) {
    params.keys = row_keys_of(op, entries, params.num_rows, params.dim);
    check_tensor(op, "keys", *given, {key_numbers(params.keys, entries)}, "[n], as loss_entries made them",
                 key_type(params.keys), like);
    take_key_memory(params.keys, *given, entries);
    memory = *given;
  } else {
    RowKeysMemory made = call_row_keys(op, like, entries, params.num_rows, params.dim);
    params.keys = made.keys;
    memory = made.memory;
  }
  RowChunks& chunks = params.chunks = plan_row_chunks(entries);
  const ScalarType acc = params.double_acc ? ScalarType::Double : ScalarType::Float;
  const Tensor partial = empty(like, {chunks.slots, params.dim + 1}, acc);
  chunks.partial = out_any(partial);
  chunks.partial_bias =
      static_cast<char*>(chunks.partial) + chunks.slots * params.dim * int64_t(partial.element_size());
  chunks.arrived = params.keys.counters;
  if (!given) {
    SX_RUN_DEVICE(op, like, launch_row_reduce_keys, params);
  }
  Tensor keys = memory;
  if (keys.size(0) != entries) keys = torch::stable::narrow(keys, 0, 0, entries);
  const auto made = call_op<2>("aten::sort", "stable", keys, std::optional<bool>(true), int64_t(0), false);
  const Tensor sorted = tensor_of(made[0]), order = tensor_of(made[1]);
  params.sorted = in_any(sorted);
  params.order = in<int64_t>(order);
  return {memory, sorted, order, partial};
}

RowGradients run_row_reduce(const char* op, RowReduceParams params, const Tensor& like, bool with_bias) {
  const int64_t entries = params.source[0].entries + params.source[1].entries;
  const ScalarType acc = params.double_acc ? ScalarType::Double : ScalarType::Float;
  params.capacity = std::min(entries, params.num_rows);
  RowGradients result{empty_pooled(like, {params.capacity}, ScalarType::Long),
                      empty_pooled(like, {params.capacity, params.dim}, acc),
                      empty(like, {with_bias ? params.capacity : 0}, acc), empty(like, {1}, ScalarType::Long)};
  if (entries == 0) {
    torch::stable::zero_(result.count);
    return result;
  }
  params.row_ids = out<int64_t>(result.row_ids);
  params.row_grads = out_any(result.row_grads);
  params.row_bias = with_bias ? out_any(result.row_bias) : nullptr;
  params.count = out<int64_t>(result.count);
  if (backend_of(op, like) == Backend::kCpu) {
    const bool aligned = reinterpret_cast<uintptr_t>(params.row_grads) % 64 == 0;
    const size_t bytes = size_t(params.capacity * params.dim) * (params.double_acc ? 8 : 4);
    params.stream = aligned && params.dim % 16 == 0 && params.dim <= kStreamWidth && bytes >= kStreamRowsSmallest;
    cpu::launch_row_reduce(params);
    return result;
  }
  const SortedEntries kept = run_row_sort(op, params, like);
  const Tensor heads = empty(like, {entries}, ScalarType::Int);
  params.heads = out<int>(heads);
  SX_RUN_DEVICE(op, like, launch_row_reduce_heads, params);
  const Tensor ranks = tensor_of(call_op("aten::cumsum", "", heads, int64_t(0), std::optional<ScalarType>{})[0]);
  params.ranks = in<int64_t>(ranks);
  SX_RUN_DEVICE(op, like, launch_row_reduce_rows, params);
  return result;
}

namespace {

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct SourceNames {
  const char *ids, *coef, *rows;
};

RowReduceSource source_of(const SourceNames& names, const RowSource& x, const Tensor& like) {
  const char* op = "row_reduce";
  check_given(op, names.ids, x.ids);
  check_given(op, names.rows, x.rows);
  check_value(x.ids.dim() == 1 || x.ids.dim() == 2, op, ": ", names.ids, " must be [S] or [S, k], got ",
              describe(x.ids));
  const bool flat = x.ids.dim() == 1;  // one entry per row
  const int64_t S = x.ids.size(0), k = flat ? 1 : x.ids.size(1);
  check_tensor(op, names.ids, x.ids, flat ? Shape{S} : Shape{S, k}, flat ? "[S]" : "[S, k]", ScalarType::Long, like);
  check_tensor(op, names.rows, x.rows, {S, like.size(1)}, "[S, d]", x.rows.scalar_type(), like);
  if (x.coef) {
    const bool flat_coef = flat && x.coef->dim() == 1;
    check_tensor(op, names.coef, *x.coef, flat_coef ? Shape{S} : Shape{S, k}, flat_coef ? "[S]" : "[S, k]",
                 acc_type(like.scalar_type()), like);
  }
  const DType dtype = dtype_tag(op, names.rows, x.rows);
  return {
      in<int64_t>(x.ids), x.coef ? in_any(*x.coef) : nullptr, in_any(x.rows), S * k, std::max<int64_t>(k, 1), dtype};
}

RowGradients reduce(const RowSource& a, const RowSource& b, const std::optional<Tensor>& bias_b, int64_t num_rows,
                    bool with_bias, bool check_ids) {
  begin_op();
  check_given("row_reduce", "rows_a", a.rows);
  check_value(a.rows.dim() == 2, "row_reduce: rows_a must be [S, d], got ", describe(a.rows));
  check_value(num_rows >= 0, "row_reduce: num_rows must be >= 0, got ", num_rows);
  RowReduceParams params{};
  params.dim = a.rows.size(1);
  params.num_rows = num_rows;
  params.double_acc = a.rows.scalar_type() == ScalarType::Double;
  params.source[0] = source_of({"ids_a", "coef_a", "rows_a"}, a, a.rows);
  params.source[1] = source_of({"ids_b", "coef_b", "rows_b"}, b, a.rows);
  if (bias_b) {
    check_tensor("row_reduce", "bias_b", *bias_b, {b.ids.numel()}, "[S * k]", acc_type(a.rows.scalar_type()), a.rows);
    params.source[1].bias = in_any(*bias_b);
  }
  for (const Tensor* ids : {&a.ids, &b.ids}) {
    if (!check_ids || !ids_on_host(*ids)) continue;
    const int64_t* at = static_cast<const int64_t*>(ids->const_data_ptr());
    for (int64_t i = 0; i < ids->numel(); ++i) {
      check_index(at[i] < num_rows, "row_reduce: ids must be below num_rows = ", num_rows, ", got ", at[i]);
    }
  }
  return run_row_reduce("row_reduce", params, a.rows, with_bias);
}

Outputs row_reduce(const Tensor& ids_a, const std::optional<Tensor>& coef_a, const Tensor& rows_a, const Tensor& ids_b,
                   const std::optional<Tensor>& coef_b, const Tensor& rows_b, int64_t num_rows, bool with_bias,
                   const std::optional<Tensor>& bias_b, bool check_ids) {
  const RowGradients rows =
      reduce({ids_a, coef_a, rows_a}, {ids_b, coef_b, rows_b}, bias_b, num_rows, with_bias, check_ids);
  return {rows.row_ids, rows.row_grads, rows.row_bias, rows.count};
}

}  // namespace

RowGradients call_row_reduce(const RowSource& a, const RowSource& b, const std::optional<Tensor>& bias_b,
                             int64_t num_rows, bool with_bias) {
  return reduce(a, b, bias_b, num_rows, with_bias, false);
}

}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "row_reduce(Tensor ids_a, Tensor? coef_a, Tensor rows_a, Tensor ids_b, Tensor? coef_b, Tensor rows_b, "
      "int num_rows, bool with_bias, Tensor? bias_b=None, bool check_ids=True) -> "
      "(Tensor row_ids, Tensor row_grads, Tensor row_bias, Tensor count)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { m.impl("row_reduce", TORCH_BOX(&samplex::glue::row_reduce)); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { m.impl("row_reduce", TORCH_BOX(&samplex::glue::row_reduce)); }
