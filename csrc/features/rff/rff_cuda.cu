#include "features/rff/rff_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

int64_t tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Wide tiles where they are enough to fill a device, narrow ones for small batches. Double, for gradient checks, has
// the wide ones alone.
constexpr int64_t kEnoughBlocks = 128;

template <typename T>
constexpr int kNarrow = sizeof(acc_t<T>) == 4 ? 2 : 8;

bool wide_tiles(int64_t batch, int64_t columns) {
  return tiles(batch, 8 * kRffWarps) * tiles(columns, kRffTileColumns) >= kEnoughBlocks;
}

template <typename T, RffKind Kind, int TM>
void product(const RffParams& p, void* stream) {
  const dim3 grid(unsigned(tiles(p.batch, TM * kRffWarps)), unsigned(tiles(p.num_features, kRffTileColumns)));
  SX_LAUNCH("rff", (rff_kernel<T, Kind, TM>), grid, kRffThreads, 0, stream, p);
}

template <typename T, RffKind Kind, int TM>
void product_bwd(const RffBwdParams& p, void* stream) {
  const int64_t columns = p.d_x == nullptr ? 1 : p.dim;
  const dim3 grid(unsigned(tiles(p.batch, TM * kRffWarps)), unsigned(tiles(columns, kRffTileColumns)));
  SX_LAUNCH("rff_bwd", (rff_bwd_kernel<T, Kind, TM>), grid, kRffThreads, 0, stream, p);
}

unsigned quadratic_grid(int64_t batch) { return unsigned(batch < 65535 ? batch : 65535); }

template <typename T>
void forward(const RffParams& p, void* stream) {
  if (p.kind == RffKind::kQuadratic) {
    const size_t smem = 2 * size_t(p.dim) * sizeof(acc_t<T>);
    SX_LAUNCH("rff", rff_quadratic_kernel<T>, quadratic_grid(p.batch), kRffQuadraticThreads, smem, stream, p);
    return;
  }
  const bool wide = wide_tiles(p.batch, p.num_features);
  if (p.kind == RffKind::kPositive)
    wide ? product<T, RffKind::kPositive, 8>(p, stream) : product<T, RffKind::kPositive, kNarrow<T>>(p, stream);
  else
    wide ? product<T, RffKind::kFourier, 8>(p, stream) : product<T, RffKind::kFourier, kNarrow<T>>(p, stream);
}

template <typename T>
void backward(const RffBwdParams& p, void* stream) {
  if (p.kind == RffKind::kQuadratic) {
    const size_t smem = kRffQuadraticBwdRows * size_t(p.dim) * sizeof(acc_t<T>);
    SX_LAUNCH("rff_bwd", rff_quadratic_bwd_kernel<T>, quadratic_grid(p.batch), kRffQuadraticThreads, smem, stream, p);
    return;
  }
  const bool wide = wide_tiles(p.batch, p.dim);
  if (p.kind == RffKind::kPositive)
    wide ? product_bwd<T, RffKind::kPositive, 8>(p, stream) : product_bwd<T, RffKind::kPositive, kNarrow<T>>(p, stream);
  else
    wide ? product_bwd<T, RffKind::kFourier, 8>(p, stream) : product_bwd<T, RffKind::kFourier, kNarrow<T>>(p, stream);
}

}  // namespace

void launch_rff(const RffParams& params, void* stream) {
  dispatch_dtype("rff", params.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(params, stream); });
}

void launch_rff_bwd(const RffBwdParams& params, void* stream) {
  dispatch_dtype("rff_bwd", params.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(params, stream); });
}

}  // namespace samplex::SX_BACKEND_NS
