// CPU launchers of what fused losses share: class rows of shared draws, their products, the sum over the batch, and the
// backward.
#include <algorithm>

#include "common/parallel.h"
#include "common/simd.h"
#include "loss/fused/fused_loss_cpu_rows.h"

namespace samplex::cpu {
namespace {

template <typename A>
void mean_of(const LossMeanParams& p) {
  double loss = 0, denom = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    loss += static_cast<const A*>(p.row_loss)[b];
    denom += static_cast<const A*>(p.denom)[b];
  }
  const A factor = p.mean ? mean_factor(A(denom)) : A(1);
  *static_cast<A*>(p.loss) = A(loss * factor);
  *static_cast<A*>(p.factor) = factor;
}

template <typename A>
void sum_columns(const A* x, int64_t rows, int64_t begin, int64_t end, int64_t stride, A factor, A* sums) {
  for (int64_t j = begin; j < end; ++j) sums[j] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = begin; j < end; ++j) sums[j] += x[i * stride + j];
  }
  for (int64_t j = begin; j < end; ++j) sums[j] *= factor;
}

void gather_rows_scalar(const GatherRowsParams& p, int64_t begin, int64_t end) {
  dispatch_dtype("gather_rows", p.dtype,
                 [&](auto tag) { gather_rows_of<typename decltype(tag)::type>(p, begin, end); });
}

void loss_bwd_rows_scalar(const LossBwdParams& p, int64_t begin, int64_t end) {
  dispatch_dtype("fused loss backward", p.dtype,
                 [&](auto tag) { loss_bwd_rows_of<typename decltype(tag)::type>(p, begin, end); });
}

template <typename T>
void row_norms_of(const RowNormsParams& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int64_t kLanes = 16;  // a fixed order that vectors can take
  for (int64_t i = begin; i < end; ++i) {
    const T* row = static_cast<const T*>(p.weight) + p.ids[i] * p.dim;
    A lanes[kLanes] = {}, sum = 0;
    int64_t c = 0;
    for (; c + kLanes <= p.dim; c += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += to_acc(row[c + k]) * to_acc(row[c + k]);
    }
    for (; c < p.dim; ++c) sum += to_acc(row[c]) * to_acc(row[c]);
    for (const A lane : lanes) sum += lane;
    static_cast<A*>(p.inverse)[i] = inverse_norm(sum);
  }
}

void panel_product_tiles_scalar(const PanelProductParams& p, int64_t begin, int64_t end) {
  panel_product_tiles_of(p, begin, end);
}

}  // namespace

bool takes_panels(DType dtype, int64_t batch, int64_t draws, int64_t dim) {
  constexpr int64_t kTiny = 1 << 14;                       // torch's product takes about 5 us before it begins
  if (dtype == DType::kFloat64 || dim == 0) return false;  // rows of width 0 have no panels
  return simd_level() != SimdLevel::kScalar || batch * draws * dim <= kTiny;
}

void launch_panel_product(const PanelProductParams& p) {
  if (p.rows == 0 || p.columns == 0) return;
  const auto body = SX_SIMD_BODY(simd_level(), panel_product_tiles);
  const int64_t tiles = product_chunks(p.rows) * panels_of(p.columns);
  const int64_t of_tile = p.depth * kPanel * std::min(p.rows, kProductRows);
  const int64_t at_once = 1 + (1 << 16) / (of_tile + 1);
  parallel_for_shared(tiles, at_once, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

int64_t rows_at_once(const DrawProducts& x) {
  // Four chunks a thread, so that one of them that is late costs little; and a loss of few draws in larger ones.
  const int64_t threads = num_threads(), share = (x.batch + 4 * threads - 1) / (4 * threads);
  const int64_t worth = 1 + (1 << 18) / (x.draws * x.dim + 1);
  const int64_t most =
      std::clamp<int64_t>((std::max(share, worth) + kRowStep - 1) / kRowStep * kRowStep, kRowStep, kProductRows);
  // Of few chunks one thread may have one more than the others: fewer rows where that makes them more even.
  const auto longest = [&](int64_t rows) {
    const int64_t chunks = (x.batch + rows - 1) / rows;
    return (chunks + threads - 1) / threads * rows;
  };
  constexpr int64_t kEven = 32;  // whole tiles with AVX-512
  return most > kEven && 16 * longest(kEven) <= 15 * longest(most) ? kEven : most;
}

bool products_come_apart(const DrawProducts& x) {
  if (x.across == nullptr) return false;
  return x.batch < kRowStep * num_threads() && x.batch * x.draws * x.dim >= (1 << 20);
}

void launch_draw_dots(const DrawProducts& x) {
  launch_panel_product({x.hidden, x.dim, 1, x.across, x.dots, x.batch, x.dim, x.draws, x.dots_stride, false});
}

void launch_draw_sums(const DrawProducts& x) {
  if (x.along == nullptr) return;
  const auto sum = [&](const float* coefs, float* to) {
    if (to == nullptr) return;
    launch_panel_product({coefs, x.coef_stride, 1, x.along, to, x.batch, x.draws, x.dim, x.dim, false});
  };
  sum(x.coef_loss, x.draws_loss);
  sum(x.coef_lse, x.draws_lse);
}

void launch_gather_rows(const GatherRowsParams& p) {
  const auto body = SX_SIMD_BODY(simd_level_unless(p.dtype == DType::kFloat64), gather_rows);
  const int64_t groups = (p.n + kGatherDraws - 1) / kGatherDraws;
  parallel_for(groups, 1 + (1 << 14) / (kGatherDraws * p.dim + 1),
               [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

void launch_row_norms(const RowNormsParams& p) {
  parallel_for(p.n, 1 + (1 << 14) / (p.dim + 1), [&](int64_t begin, int64_t end) {
    dispatch_dtype("row_norms", p.dtype, [&](auto tag) { row_norms_of<typename decltype(tag)::type>(p, begin, end); });
  });
}

void column_sums(bool double_acc, const void* x, int64_t rows, int64_t columns, int64_t stride, double factor,
                 void* sums) {
  parallel_for(columns, 1 + (1 << 16) / (rows + 1), [&](int64_t begin, int64_t end) {
    if (double_acc)
      sum_columns(static_cast<const double*>(x), rows, begin, end, stride, factor, static_cast<double*>(sums));
    else
      sum_columns(static_cast<const float*>(x), rows, begin, end, stride, float(factor), static_cast<float*>(sums));
  });
}

void launch_loss_mean(const LossMeanParams& params) {
  if (params.double_acc)
    mean_of<double>(params);
  else
    mean_of<float>(params);
}

void launch_loss_bwd(const LossBwdParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.dtype == DType::kFloat64), loss_bwd_rows);
  const int64_t work = params.num_targets + (params.coef_draw != nullptr ? params.num_samples : 0) + params.dim;
  parallel_for(params.batch, 1 + (1 << 14) / (work + 1), [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

}  // namespace samplex::cpu
