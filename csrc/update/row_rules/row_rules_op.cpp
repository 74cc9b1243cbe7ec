// Row optimizers: row_apply_ on given gradient rows; row_update_, which takes the entries of a
// loss backward (loss_entries) and updates at once. See row_rules_params.h.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "update/row_reduce/row_reduce_op.h"
#include "update/row_rules/row_rules_params.h"

namespace samplex::glue {
namespace {

constexpr int64_t kMaxNoiseRows = int64_t(1) << 32, kMaxNoiseColumns = int64_t(8) << 24;

bool is_row_type(const Tensor& t, const Tensor& weight) {
  return t.scalar_type() == weight.scalar_type() || t.scalar_type() == acc_type(weight.scalar_type());
}

// A state of the weight's shape, or of one number per row.
void* state_of(const char* op, const char* arg, const Tensor& state, const Tensor& weight, bool by_row) {
  const int64_t C = weight.size(0);
  const bool flat = by_row || weight.dim() == 1;
  check_tensor(op, arg, state, flat ? Shape{C} : Shape{C, weight.size(1)}, flat ? "[C]" : "[C, d]",
               acc_type(weight.scalar_type()), weight);
  return out_any(state);
}

// The numbers of a step on the device; `step` says whether they are there.
struct Live {
  const std::optional<Tensor>& lr;
  const std::optional<Tensor>& step;
  const std::optional<Tensor>& found_inf;
};

RowTable table_of_rows(const char* op, const char* arg, const Tensor& weight) {
  check_given(op, arg, weight);
  check_value(weight.dim() == 1 || weight.dim() == 2, op, ": ", arg, " must be [C] or [C, d], got ", describe(weight));
  check_value(weight.is_contiguous(), op, ": ", arg, " must be contiguous, got ", describe(weight));
  RowTable table{};
  table.dtype = dtype_tag(op, arg, weight);
  table.values = out_any(weight);
  return table;
}

void take_key(const char* op, RowRulesParams& params, const std::optional<Tensor>& key, int64_t first_row,
              const Tensor& weight) {
  check_value(first_row >= 0, op, ": first_row must be at least 0, got ", first_row);
  if (!key) return;
  check_tensor(op, "key", *key, {2}, "[2]", ScalarType::Long, weight);
  check_value(params.num_rows <= kMaxNoiseRows && params.dim <= kMaxNoiseColumns, op, ": weight must be at most [",
              kMaxNoiseRows, ", ", kMaxNoiseColumns, "] with a key, got ", describe(weight));
  check_value(first_row <= kMaxNoiseRows - params.num_rows, op, ": first_row must be at most ",
              kMaxNoiseRows - params.num_rows, " with a key, got ", first_row);
  params.key = in<int64_t>(*key);
  params.first_row = first_row;
}

// Launches the kernel that computes this step's rules in device memory, and points params to them. Keep the returned
// tensor until the update is launched.
std::optional<Tensor> run_live(const char* op, RowRulesParams& params, const Tensor& weight) {
  if (params.weight.live.step == nullptr) return std::nullopt;
  static_assert(sizeof(RowRule) % sizeof(int64_t) == 0);
  Tensor memory = empty(weight, {int64_t(2 * sizeof(RowRule) / sizeof(int64_t))}, ScalarType::Long);
  params.weight.live.rule = static_cast<RowRule*>(out_any(memory));
  if (params.bias.live.step != nullptr) params.bias.live.rule = params.weight.live.rule + 1;
  SX_RUN(op, weight, launch_row_rules_live, params);
  return memory;
}

struct Given {
  const std::optional<Tensor>& row_ids;
  const Tensor& rows;
  const std::optional<Tensor>& count;
  const std::optional<Tensor>& key;
  int64_t first_row;
};

// Checks what all rules share and runs the update. `table` has the states.
void run_given(const char* op, const Tensor& weight, const RowTable& table, const Given& x) {
  RowRulesParams params{};
  params.weight = table;
  params.num_rows = weight.size(0);
  params.dim = weight.dim() == 2 ? weight.size(1) : 1;
  const int64_t n = x.row_ids ? x.row_ids->numel() : params.num_rows;
  if (x.row_ids) check_tensor(op, "row_ids", *x.row_ids, {-1}, "[n]", ScalarType::Long, weight);
  check_given(op, "rows", x.rows);
  check_type(is_row_type(x.rows, weight), op, ": rows must be ", dtype_name(weight.scalar_type()),
             " as the weight, or ", dtype_name(acc_type(weight.scalar_type())), ", got ", describe(x.rows));
  check_tensor(op, "rows", x.rows, weight.dim() == 2 ? Shape{n, params.dim} : Shape{n},
               weight.dim() == 2 ? "[n, d]" : "[n]", x.rows.scalar_type(), weight);
  if (x.count) check_tensor(op, "count", *x.count, {1}, "[1]", ScalarType::Long, weight);
  take_key(op, params, x.key, x.first_row, weight);
  params.row_ids = x.row_ids ? in<int64_t>(*x.row_ids) : nullptr;
  params.rows = in_any(x.rows);
  params.rows_dtype = dtype_tag(op, "rows", x.rows);
  params.count = x.count ? in<int64_t>(*x.count) : nullptr;
  params.n = n;
  if (x.row_ids && ids_on_host(weight)) {
    const int64_t present = x.count ? std::min(n, params.count[0]) : n;
    for (int64_t i = 0; i < present; ++i) {
      check_index(params.row_ids[i] >= 0 && params.row_ids[i] < params.num_rows, op,
                  ": row_ids must be in [0, C) with C = ", params.num_rows, ", got ", params.row_ids[i]);
    }
  }
  const std::optional<Tensor> rules = run_live(op, params, weight);
  if (n > 0 && params.dim > 0) SX_RUN(op, weight, launch_row_rules_rows, params);
}

// A tensor of one number.
void check_number(const char* op, const std::string& arg, const Tensor& t, ScalarType dtype, const Tensor& weight) {
  check_tensor(op, arg.c_str(), t, t.dim() == 1 ? Shape{1} : Shape{}, "one number", dtype, weight);
}

void take_rule(const char* op, const std::string& table_name, RowTable& table, const Tensor& weight,
               const std::vector<double>& x, const Live& live) {
  const std::string arg = table_name + "rule";
  const size_t wanted = live.step ? 11 : 9;
  check_value(x.size() == wanted, op, ": ", arg, " must have ", wanted, " numbers, got ", x.size());
  check_value(x[0] >= 0 && x[0] <= 4 && x[0] == std::floor(x[0]), op, ": ", arg, "[0] must be a kind of 0 to 4, got ",
              x[0]);
  table.rule = {RowRuleKind(int(x[0])), x[1] != 0.0, x[2], x[3], x[4], x[5], x[6], x[7], x[8], false};
  if (!live.step) {
    check_value(!live.lr && !live.found_inf, op, ": ", table_name, live.lr ? "lr" : "found_inf",
                " must be None without ", table_name, "step, got a tensor");
    return;
  }
  check_number(op, table_name + "step", *live.step, ScalarType::Float, weight);
  table.live.step = out<float>(*live.step);
  table.live.decay = x[9];
  table.live.lr_decay = x[10];
  if (live.lr) {
    table.live.lr_double = live.lr->scalar_type() == ScalarType::Double;
    check_number(op, table_name + "lr", *live.lr, table.live.lr_double ? ScalarType::Double : ScalarType::Float,
                 weight);
    table.live.lr = in_any(*live.lr);
  }
  if (live.found_inf) {
    check_number(op, "found_inf", *live.found_inf, ScalarType::Float, weight);
    table.live.found_inf = in<float>(*live.found_inf);
  }
}

void take_states(const char* op, const char* arg0, const char* arg1, RowTable& table, const Tensor& weight,
                 const std::optional<Tensor>& state0, const std::optional<Tensor>& state1) {
  const RowRuleKind kind = table.rule.kind;
  const int wanted = kind == RowRuleKind::kSgd ? 0 : kind == RowRuleKind::kAdam ? 2 : 1;
  check_value(int(state0.has_value()) + int(state1.has_value()) == wanted && (state0 || !state1), op, ": ", arg0,
              " and ", arg1, " must be the ", wanted, " states of the rule, got ",
              int(state0.has_value()) + int(state1.has_value()));
  if (state0) table.state0 = state_of(op, arg0, *state0, weight, kind == RowRuleKind::kRowAdagrad);
  if (state1) table.state1 = state_of(op, arg1, *state1, weight, false);
}

// One step of given gradient rows. The rule's numbers come from the caller: see samplex_cuda/optim/rules.py. With
// `step`, it holds constants, and the numbers of the step are read on the device: see RowLive.
void row_apply_(Tensor weight, std::optional<Tensor> state0, std::optional<Tensor> state1,
                std::optional<Tensor> row_ids, Tensor rows, std::optional<Tensor> count, std::optional<Tensor> key,
                std::vector<double> rule, std::optional<Tensor> lr, std::optional<Tensor> step,
                std::optional<Tensor> found_inf, int64_t first_row) {
  constexpr const char* op = "row_apply_";
  begin_op();
  RowTable table = table_of_rows(op, "weight", weight);
  take_rule(op, "", table, weight, rule, {lr, step, found_inf});
  take_states(op, "state0", "state1", table, weight, state0, state1);
  run_given(op, weight, table, {row_ids, rows, count, key, first_row});
}

// ------------------------------------------------------------------------------------------------ inside a backward
RowReduceSource entries_from(const char* op, const char* arg_ids, const char* arg_coef, const char* arg_rows,
                             const RowSource& x, const Tensor& weight) {
  const auto& [ids, coef, rows] = x;
  const int64_t d = weight.size(1);
  check_given(op, arg_ids, ids);
  check_given(op, arg_rows, rows);
  check_value(ids.dim() == 1 || ids.dim() == 2, op, ": ", arg_ids, " must be [S] or [S, k], got ", describe(ids));
  const int64_t S = ids.size(0), k = ids.dim() == 2 ? ids.size(1) : 1;
  check_tensor(op, arg_ids, ids, ids.dim() == 2 ? Shape{S, k} : Shape{S}, ids.dim() == 2 ? "[S, k]" : "[S]",
               ScalarType::Long, weight);
  check_type(is_row_type(rows, weight), op, ": ", arg_rows, " must be ", dtype_name(weight.scalar_type()),
             " as the weight, or ", dtype_name(acc_type(weight.scalar_type())), ", got ", describe(rows));
  check_tensor(op, arg_rows, rows, {S, d}, "[S, d]", rows.scalar_type(), weight);
  if (coef) check_tensor(op, arg_coef, *coef, {S, k}, "[S, k]", acc_type(weight.scalar_type()), weight);
  return {in<int64_t>(ids),        coef ? in_any(*coef) : nullptr, in_any(rows), S * k,
          std::max<int64_t>(k, 1), dtype_tag(op, arg_rows, rows)};
}

void row_update_(Tensor weight, std::optional<Tensor> weight_state0, std::optional<Tensor> weight_state1,
                 std::optional<Tensor> bias, std::optional<Tensor> bias_state0, std::optional<Tensor> bias_state1,
                 Tensor ids_a, std::optional<Tensor> coef_a, Tensor rows_a, Tensor ids_b, std::optional<Tensor> coef_b,
                 Tensor rows_b, std::optional<Tensor> bias_b, std::optional<Tensor> key,
                 std::vector<double> weight_rule, std::vector<double> bias_rule, std::optional<Tensor> weight_lr,
                 std::optional<Tensor> weight_step, std::optional<Tensor> bias_lr, std::optional<Tensor> bias_step,
                 std::optional<Tensor> found_inf, std::optional<Tensor> keys, int64_t first_row, bool project) {
  call_row_update("row_update_",
                  {weight, weight_state0, weight_state1, bias, bias_state0, bias_state1, key, weight_rule, bias_rule,
                   weight_lr, weight_step, bias_lr, bias_step, found_inf, first_row, project},
                  {ids_a, coef_a, rows_a}, {ids_b, coef_b, rows_b}, bias_b, keys);
}

}  // namespace

void call_row_update(const char* op, const RowUpdate& tables, const RowSource& a, const RowSource& b,
                     const std::optional<Tensor>& bias_b, const std::optional<Tensor>& keys) {
  const auto& [weight, weight_state0, weight_state1, bias, bias_state0, bias_state1, key, weight_rule, bias_rule,
               weight_lr, weight_step, bias_lr, bias_step, found_inf, first_row, project] = tables;
  begin_op();
  check_given(op, "weight", weight);
  check_value(weight.dim() == 2, op, ": weight must be [C, d], got ", describe(weight));
  RowRulesParams params{};
  params.weight = table_of_rows(op, "weight", weight);
  take_rule(op, "weight_", params.weight, weight, weight_rule, {weight_lr, weight_step, found_inf});
  take_states(op, "weight_state0", "weight_state1", params.weight, weight, weight_state0, weight_state1);
  params.num_rows = weight.size(0);
  params.dim = weight.size(1);
  params.project = project;
  const ScalarType acc = acc_type(weight.scalar_type());
  if (bias) {
    check_type(is_row_type(*bias, weight), op, ": bias must be ", dtype_name(weight.scalar_type()),
               " as the weight, or ", dtype_name(acc), ", got ", describe(*bias));
    check_tensor(op, "bias", *bias, {params.num_rows}, "[C]", bias->scalar_type(), weight);
    params.bias = table_of_rows(op, "bias", *bias);
    check_value(weight_step.has_value() == bias_step.has_value(), op,
                ": bias_step must be given with weight_step, and not without, got ", describe(bias_step));
    take_rule(op, "bias_", params.bias, weight, bias_rule, {bias_lr, bias_step, found_inf});
    take_states(op, "bias_state0", "bias_state1", params.bias, *bias, bias_state0, bias_state1);
  }
  take_key(op, params, key, first_row, weight);
  RowReduceParams& e = params.entries;
  e.source[0] = entries_from(op, "ids_a", "coef_a", "rows_a", a, weight);
  e.source[1] = entries_from(op, "ids_b", "coef_b", "rows_b", b, weight);
  if (bias_b) {
    check_tensor(op, "bias_b", *bias_b, {e.source[1].entries}, "[S * k]", acc, weight);
    e.source[1].bias = in_any(*bias_b);
  }
  e.dim = params.dim;
  e.num_rows = params.num_rows;
  e.double_acc = acc == ScalarType::Double;
  const std::optional<Tensor> rules = run_live(op, params, weight);
  if (e.source[0].entries + e.source[1].entries == 0 || weight.numel() == 0) return;
  std::optional<SortedEntries> kept;
  if (backend_of(op, weight) != Backend::kCpu) kept = run_row_sort(op, e, weight, keys);
  SX_RUN(op, weight, launch_row_rules_entries, params);
}

}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "row_apply_(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1, Tensor? row_ids, Tensor rows, "
      "Tensor? count, Tensor? key, float[] rule, Tensor? lr=None, Tensor(d!)? step=None, Tensor? found_inf=None, "
      "int first_row=0) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "row_update_(Tensor(a!) weight, Tensor(b!)? weight_state0, Tensor(c!)? weight_state1, Tensor(d!)? bias, "
      "Tensor(e!)? bias_state0, Tensor(f!)? bias_state1, Tensor ids_a, Tensor? coef_a, Tensor rows_a, Tensor ids_b, "
      "Tensor? coef_b, Tensor rows_b, Tensor? bias_b, Tensor? key, float[] weight_rule, float[] bias_rule, "
      "Tensor? weight_lr=None, Tensor(g!)? weight_step=None, Tensor? bias_lr=None, Tensor(h!)? bias_step=None, "
      "Tensor? found_inf=None, Tensor(i!)? keys=None, int first_row=0, "
      "bool project=False) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("row_apply_", TORCH_BOX(&samplex::glue::row_apply_));
  m.impl("row_update_", TORCH_BOX(&samplex::glue::row_update_));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("row_apply_", TORCH_BOX(&samplex::glue::row_apply_));
  m.impl("row_update_", TORCH_BOX(&samplex::glue::row_update_));
}
