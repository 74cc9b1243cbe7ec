// CPU launchers of the feature maps: packing of the table, split of the work, SIMD dispatch.
#include <algorithm>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/workspace.h"
#include "features/rff/rff_cpu_rows.h"

namespace samplex::cpu {
namespace {

void rff_pack_scalar(const RffParams& p, void* packed, int64_t first, int64_t last) {
  if (p.dtype == DType::kFloat64) return rff_pack_panels<double>(p, packed, first, last);
  rff_pack_panels<float>(p, packed, first, last);
}

void rff_range_scalar(const RffParams& p, const void* packed, const RffRange& range) {
  dispatch_dtype("rff", p.dtype, [&](auto tag) { rff_range<typename decltype(tag)::type>(p, packed, range); });
}

void rff_bwd_range_scalar(const RffBwdParams& p, const void* packed, int64_t begin, int64_t end) {
  dispatch_dtype("rff", p.dtype, [&](auto tag) { rff_bwd_range<typename decltype(tag)::type>(p, packed, begin, end); });
}

SimdLevel level_of(DType dtype) { return simd_level_unless(dtype == DType::kFloat64); }

void pack(const RffParams& p, void* packed, int64_t first, int64_t last) {
  SX_SIMD_BODY(level_of(p.dtype), rff_pack)(p, packed, first, last);
}

void run(const RffParams& p, const void* packed, const RffRange& range) {
  SX_SIMD_BODY(level_of(p.dtype), rff_range)(p, packed, range);
}

void run_bwd(const RffBwdParams& p, const void* packed, int64_t begin, int64_t end) {
  SX_SIMD_BODY(level_of(p.dtype), rff_bwd_range)(p, packed, begin, end);
}

// Rows a thread takes at a time: a multiple of the tiles' rows, small enough for every thread to have several.
int64_t chunk_rows(int64_t batch, int64_t most) {
  const int64_t share = (batch / (4 * num_threads()) + 11) / 12 * 12;
  return std::clamp<int64_t>(share, 12, most);
}

size_t item_size(DType dtype) { return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float); }

}  // namespace

void rff_pack(const RffParams& params, void* packed) {
  if (params.kind != RffKind::kQuadratic) pack(params, packed, 0, rff_panels(params.num_features));
}

void rff_rows(const RffParams& params, const void* packed, int64_t begin, int64_t end) {
  run(params, packed, {begin, end, 0, rff_panels(params.num_features)});
}

void launch_rff(const RffParams& params) {
  if (params.kind == RffKind::kQuadratic) {
    const int64_t width = rff_num_numbers(params.kind, params.dim, 0);
    return parallel_for_shared(params.batch, 1 + (1 << 15) / width,
                               [&](int64_t begin, int64_t end) { run(params, nullptr, {begin, end, 0, 0}); });
  }
  const int64_t panels = rff_panels(params.num_features), most = rff_block_rows(params.dim);
  const Workspace workspace(size_t(rff_packed_size(params.dim, params.num_features)) * item_size(params.dtype));
  void* const packed = workspace.data();
  const int64_t panel_work = kRffPanel * params.dim;
  if (params.batch <= std::min<int64_t>(most, 24)) {
    // Few rows: threads share the frequencies, and a panel is used while it is still in the cache that packed it.
    const int64_t grain = 1 + (1 << 16) / (panel_work * (params.batch + 1));
    return parallel_for(panels, grain, [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; ++panel) {
        pack(params, packed, panel, panel + 1);
        run(params, packed, {0, params.batch, panel, panel + 1});
      }
    });
  }
  parallel_for(panels, 1 + (1 << 16) / panel_work,
               [&](int64_t first, int64_t last) { pack(params, packed, first, last); });
  parallel_for_shared(params.batch, chunk_rows(params.batch, most),
                      [&](int64_t begin, int64_t end) { run(params, packed, {begin, end, 0, panels}); });
}

void launch_rff_bwd(const RffBwdParams& params) {
  if (params.kind == RffKind::kQuadratic) {
    const int64_t width = rff_num_numbers(params.kind, params.dim, 0);
    return parallel_for_shared(params.batch, 1 + (1 << 15) / width,
                               [&](int64_t begin, int64_t end) { run_bwd(params, nullptr, begin, end); });
  }
  const int64_t panels = rff_panels(params.dim);
  const Workspace workspace(size_t(panels * kRffPanel * params.num_features) * item_size(params.dtype));
  void* const packed = workspace.data();
  if (params.d_x != nullptr) {
    parallel_for(panels, 1 + (1 << 16) / (kRffPanel * params.num_features), [&](int64_t first, int64_t last) {
      if (params.dtype == DType::kFloat64)
        rff_bwd_pack(params, static_cast<double*>(packed), first, last);
      else
        rff_bwd_pack(params, static_cast<float*>(packed), first, last);
    });
  }
  parallel_for_shared(params.batch, chunk_rows(params.batch, 48),
                      [&](int64_t begin, int64_t end) { run_bwd(params, packed, begin, end); });
}

}  // namespace samplex::cpu
