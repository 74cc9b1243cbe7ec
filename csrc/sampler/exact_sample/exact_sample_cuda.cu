#include "sampler/exact_sample/exact_sample_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

// The kernels stride over what is more.
unsigned exact_grid(int64_t blocks) { return unsigned(blocks < (1 << 20) ? blocks : 1 << 20); }

// body(T, H, Width) for the types of a table and its queries, and the numbers of a row that are read at a time.
template <typename F>
void exact_dispatch(const char* op, const ExactTable& table, bool is_double, const F& body) {
  dispatch_dtype(op, table.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using One = std::integral_constant<int, 1>;
    if (is_double) return body(TypeTag<T>{}, TypeTag<double>{}, One{});
    if constexpr (sizeof(T) < 8) {
      if (table.wide) return body(TypeTag<T>{}, TypeTag<float>{}, std::integral_constant<int, 16 / int(sizeof(T))>{});
      return body(TypeTag<T>{}, TypeTag<float>{}, One{});
    }
  });
}

}  // namespace

void launch_exact_mass(const ExactMassParams& p, void* stream) {
  const int64_t blocks = (p.count + kExactBlock - 1) / kExactBlock, groups = (blocks + kExactWarps - 1) / kExactWarps;
  const unsigned grid = exact_grid(p.batch * groups);
  if (p.law.is_double)
    SX_LAUNCH("exact_mass", (exact_mass_kernel<double, false>), grid, kExactThreads, 0, stream, p);
  else if (p.wide)
    SX_LAUNCH("exact_mass", (exact_mass_kernel<float, true>), grid, kExactThreads, 0, stream, p);
  else
    SX_LAUNCH("exact_mass", (exact_mass_kernel<float, false>), grid, kExactThreads, 0, stream, p);
}

void launch_exact_product_mass(const ExactProductMassParams& p, void* stream) {
  const int64_t tiles = (p.table.batch + kProductRows - 1) / kProductRows;
  const unsigned grid = exact_grid(tiles * p.blocks);
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.table.wide)
      SX_LAUNCH("exact_product_mass", (exact_product_mass_kernel<T, true>), grid, kProductThreads, 0, stream, p);
    else
      SX_LAUNCH("exact_product_mass", (exact_product_mass_kernel<T, false>), grid, kProductThreads, 0, stream, p);
  };
  p.table.dtype == DType::kBFloat16 ? launch(TypeTag<BFloat16>{}) : launch(TypeTag<Half>{});
}

void launch_exact_blocks(const ExactBlocksParams& p, void* stream) {
  SX_LAUNCH("exact_blocks", exact_blocks_kernel, exact_grid(p.batch), kExactThreads, 0, stream, p);
}

void launch_exact_draw(const ExactDrawParams& p, void* stream) {
  exact_dispatch("exact_draw", p.table, p.law.is_double, [&](auto t, auto h, auto width) {
    using T = typename decltype(t)::type;
    using A = typename decltype(h)::type;
    SX_LAUNCH("exact_draw", (exact_draw_kernel<T, A, decltype(width)::value>),
              exact_grid((p.table.batch * p.num_samples + p.window - 1) / p.window), kExactThreads, 0, stream, p);
  });
}

void launch_exact_log_prob(const ExactLogProbParams& p, void* stream) {
  exact_dispatch("exact_log_prob", p.table, p.law.is_double, [&](auto t, auto h, auto width) {
    using T = typename decltype(t)::type;
    using H = typename decltype(h)::type;
    const int64_t blocks = (p.table.batch * p.num_ids + kExactWarps - 1) / kExactWarps;
    SX_LAUNCH("exact_log_prob", (exact_log_prob_kernel<T, H, decltype(width)::value>), exact_grid(blocks),
              kExactThreads, 0, stream, p);
  });
}

}  // namespace samplex::SX_BACKEND_NS
