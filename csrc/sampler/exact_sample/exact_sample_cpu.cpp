// exact_sample on the CPU: the choice of the SIMD level, the scalar bodies, and the passes that are too short for one.
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/exact_sample/exact_sample_cpu_rows.h"

namespace samplex::cpu {
namespace {

void exact_mass_rows_scalar(const ExactMassParams& params, int64_t begin, int64_t end) {
  params.law.is_double ? exact_mass_rows<double>(params, begin, end) : exact_mass_rows<float>(params, begin, end);
}

void exact_draw_range_scalar(const ExactDrawParams& params, int64_t begin, int64_t end) {
  dispatch_dtype("exact_draw", params.table.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.law.is_double)
      exact_draw_range<T, double>(params, begin, end);
    else if constexpr (sizeof(T) < 8)
      exact_draw_range<T, float>(params, begin, end);
  });
}

void exact_blocks_row(const ExactBlocksParams& p, PhiloxKey key, int64_t b, uint64_t* running) {
  const double* mass = p.mass + b * p.blocks;
  double top = negative_infinity<double>(), sum = 0.0;
  for (int64_t k = 0; k < p.blocks; ++k) top = max_nan(top, mass[k]);
  if (is_finite(top)) {
    for (int64_t k = 0; k < p.blocks; ++k) sum += exp(mass[k] - top);
  }
  p.lse[b] = is_finite(top) ? top + log(sum) : top;
  uint64_t total = 0;
  for (int64_t k = 0; k < p.blocks; ++k) {
    if (is_finite(top)) total += exact_block_units(exp(mass[k] - top), sum);
    running[k] = total;
  }
  for (int64_t j = 0; j < p.num_samples; ++j) {
    const int64_t block = exact_locate(running, p.blocks, exact_point(key, p.row + b, j, 0, total));
    p.place[b * p.num_samples + j] = block * p.batch + b;
  }
}

// In double, so that the product adds no rounding error to log_q. H is the type of the logits.
template <typename T, typename H>
double exact_dot(const H* h, const T* w, int64_t dim) {
  double lanes[4] = {};
  int64_t c = 0;
  for (; c + 4 <= dim; c += 4) {
    for (int j = 0; j < 4; ++j) lanes[j] += double(h[c + j]) * double(to_acc(w[c + j]));
  }
  for (; c < dim; ++c) lanes[0] += double(h[c]) * double(to_acc(w[c]));
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

template <typename T, typename H>
void exact_log_prob_rows(const ExactLogProbParams& p, int64_t begin, int64_t end) {
  const ExactMap<double> map(p.law);
  for (int64_t b = begin; b < end; ++b) {
    const H* h = static_cast<const H*>(p.table.hidden) + b * p.table.dim;
    const ExactList list = exact_list(p.law, b);
    for (int64_t at = b * p.num_ids; at < (b + 1) * p.num_ids; ++at) {
      const int64_t id = p.ids[at];
      const T* row = static_cast<const T*>(p.table.weight) + id * p.table.dim;
      const double bias = load_scalar<double>(p.table.bias, id, 0.0);
      p.log_q[at] = exact_given(p.law, list, id, map.size(exact_dot(h, row, p.table.dim), bias), p.lse[b]);
    }
  }
}

}  // namespace

void launch_exact_mass(const ExactMassParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.law.is_double), exact_mass_rows);
  parallel_for_shared(params.batch, 1 + (1 << 14) / params.count,
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

void launch_exact_blocks(const ExactBlocksParams& params) {
  const PhiloxKey key = {uint64_t(params.key[0]), uint64_t(params.key[1])};
  parallel_for_shared(params.batch, 1 + (1 << 10) / (params.blocks + params.num_samples),
                      [&](int64_t begin, int64_t end) {
                        std::vector<uint64_t> running(static_cast<size_t>(params.blocks));
                        for (int64_t b = begin; b < end; ++b) exact_blocks_row(params, key, b, running.data());
                      });
}

void launch_exact_draw(const ExactDrawParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.law.is_double), exact_draw_range);
  parallel_for_shared(params.table.batch * params.num_samples, 4,
                      [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

void launch_exact_log_prob(const ExactLogProbParams& params) {
  dispatch_dtype("exact_log_prob", params.table.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for_shared(params.table.batch, 1 + (1 << 14) / (params.num_ids * params.table.dim + 1),
                        [&](int64_t begin, int64_t end) {
                          if (params.law.is_double)
                            exact_log_prob_rows<T, double>(params, begin, end);
                          else
                            exact_log_prob_rows<T, float>(params, begin, end);
                        });
  });
}

}  // namespace samplex::cpu
