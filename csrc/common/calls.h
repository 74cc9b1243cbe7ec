// Ops that our ops call: torch's own, and two that belong to other stages: row_reduce, which the backward of every loss
// ends in, and the draws of a static distribution.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "common/glue.h"

namespace samplex::glue {

// The results are in the first places of what is returned.
template <size_t kResults = 1, typename... Args>
inline auto call_op(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max(kResults, sizeof...(Args))> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}

inline Tensor tensor_of(StableIValue value) { return torch::stable::detail::to<Tensor>(value); }

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

// Draws of a static distribution, [B, m] or [m] where shared, with their log_q; defined by sampler/static_sample.
struct StaticDraw {
  Tensor ids, log_q;
};

// `law` is a StaticLaw; table and prefix are those of an alias table. Per-row draws exclude the class target[b], none
// if that is negative; the caller has checked that it is below num_classes.
StaticDraw call_static_sample(int64_t law, const Tensor& key, int64_t num_samples, int64_t num_classes, bool shared,
                              const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
                              const Tensor& target);

}  // namespace samplex::glue
