// Ops that our ops call: torch's own, and what belongs to other stages: row_reduce or row_update_, which the backward
// of every loss ends in, with the sort keys they take, and the draws of a static distribution.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "common/gather_rows.h"
#include "common/glue.h"
#include "common/row_keys.h"

namespace samplex::glue {

// The results are in the first places of what is returned.
template <size_t kResults = 1, typename... Args>
inline auto call_op(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max(kResults, sizeof...(Args))> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}

inline Tensor tensor_of(StableIValue value) { return torch::stable::detail::to<Tensor>(value); }

// Without its history: torch's ops with an output refuse factors that want a gradient.
inline Tensor detached(const Tensor& t) { return tensor_of(call_op("aten::detach", "", t)[0]); }

// Ids, coefficients and rows, as row_reduce takes them: ids [S] or [S, k], coefficients of that shape or None, rows
// [S, d].
struct RowSource {
  Tensor ids;
  std::optional<Tensor> coef;
  Tensor rows;
};

struct RowGradients {
  Tensor row_ids, row_grads, row_bias, count;
};

// The op row_reduce without its check of the ids: the loss has checked them, and an ignore_index may be out of range.
// `bias_b` is what the entries of `b` add to row_bias; None: their coefficients. Defined by update/row_reduce, so that
// no stage includes another: through the dispatcher a small backward took about 5 us more.
RowGradients call_row_reduce(const RowSource& a, const RowSource& b, const std::optional<Tensor>& bias_b,
                             int64_t num_rows, bool with_bias);

// Memory of the sort keys of `entries` entries, and of the counters behind them, for a GPU: the caller's kernel writes
// both, row_update_ takes the tensor, once. Defined by update/row_reduce.
struct RowKeysMemory {
  Tensor memory;
  RowKeys keys;
};
RowKeysMemory call_row_keys(const char* op, const Tensor& like, int64_t entries, int64_t num_rows, int64_t dim);

// What row_update_ is given besides the entries.
struct RowUpdate {
  const Tensor& weight;
  const std::optional<Tensor>&weight_state0, &weight_state1, &bias, &bias_state0, &bias_state1, &key;
  const std::vector<double>&weight_rule, &bias_rule;
  const std::optional<Tensor>&weight_lr, &weight_step, &bias_lr, &bias_step, &found_inf;
  int64_t first_row;
  bool project = false;  // leave the part along the class row out of each sum
};
// The op row_update_: `op` is the name in its messages. Defined by update/row_rules.
void call_row_update(const char* op, const RowUpdate& tables, const RowSource& a, const RowSource& b,
                     const std::optional<Tensor>& bias_b, const std::optional<Tensor>& keys);

// Draws of a static distribution, [B, m] or [m] where shared, with their log_q; defined by sampler/static_sample.
struct StaticDraw {
  Tensor ids, log_q;
  std::optional<Tensor> scratch;  // of the kernels: lives as long as the op
};

// `law` is a StaticLaw; table and prefix are those of an alias table. Per-row draws exclude the class target[b], none
// if that is negative or with `noise`; the caller has checked that it is below num_classes. Shared draws take `gather`
// along: a GPU gathers what the draws read of the class table in the kernel that draws, a CPU leaves it to the caller
// (gather.ids is nullptr then). target_log_q: float [B] or absent, set to the log-probabilities of the targets under
// the distribution without an exclusion, nan of a negative one; only with `shared` or `noise`.
StaticDraw call_static_sample(int64_t law, const Tensor& key, int64_t num_samples, int64_t num_classes, bool shared,
                              const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
                              const Tensor& target, bool noise, GatherRowsParams& gather,
                              const std::optional<Tensor>& target_log_q = std::nullopt);

}  // namespace samplex::glue
