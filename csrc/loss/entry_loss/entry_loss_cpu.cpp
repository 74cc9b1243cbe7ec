// CPU launchers of the entry losses: scalar body, SIMD dispatch once per range.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/entry_loss/entry_loss_cpu_rows.h"

namespace samplex::cpu {

namespace {

void entry_loss_rows_scalar(const EntryLossParams& params, int64_t begin, int64_t end) {
  dispatch_dtype("entry_loss", params.dtype,
                 [&](auto tag) { entry_loss_rows<typename decltype(tag)::type>(params, begin, end); });
}

template <typename A>
void move_examples(const EntryExamples& x) {
  A* const log_eta = static_cast<A*>(x.log_eta);
  A* const moved = static_cast<A*>(x.ratio);
  const auto inside = [&](int64_t b) { return uint64_t(x.index[b]) < uint64_t(x.size); };
  for (int64_t b = 0; b < x.batch; ++b) {
    if (inside(b)) moved[b] = moved_log_eta(x, log_eta[x.index[b]], moved[b]);
  }
  for (int64_t b = 0; b < x.batch; ++b) {
    if (inside(b)) log_eta[x.index[b]] = A(0);
  }
  for (int64_t b = 0; b < x.batch; ++b) {
    if (inside(b)) log_eta[x.index[b]] = max_nan(log_eta[x.index[b]], moved[b]);
  }
}

}  // namespace

void launch_entry_examples(const EntryExamples& params) {
  if (params.double_acc)
    move_examples<double>(params);
  else
    move_examples<float>(params);
}

void launch_entry_loss(const EntryLossParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), entry_loss_rows);
  const DrawProducts& products = params.products;
  const int64_t work = (params.num_targets + params.num_samples) * params.dim;
  const int64_t at_once = products.across != nullptr ? rows_at_once(products) : 1 + (1 << 16) / (work + 1);
  if (!products_come_apart(products)) {
    return parallel_for_shared(params.batch, at_once, [&](int64_t begin, int64_t end) { body(params, begin, end); });
  }
  EntryLossParams rest = params;
  rest.products = {};
  launch_draw_dots(products);
  parallel_for_shared(params.batch, 1, [&](int64_t begin, int64_t end) { body(rest, begin, end); });
  launch_draw_sums(products);
}

}  // namespace samplex::cpu
