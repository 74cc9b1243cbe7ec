// The feature maps compiled for AVX2; double stays with the scalar unit.
#include "features/rff/rff_cpu_rows.h"

namespace samplex::cpu {

void rff_pack_avx2(const RffParams& params, void* packed, int64_t first, int64_t last) {
  rff_pack_panels<float>(params, packed, first, last);
}

void rff_range_avx2(const RffParams& params, const void* packed, const RffRange& range) {
  rff_dispatch_float(params.dtype, [&](auto tag) { rff_range<typename decltype(tag)::type>(params, packed, range); });
}

void rff_bwd_range_avx2(const RffBwdParams& params, const void* packed, int64_t begin, int64_t end) {
  rff_dispatch_float(params.dtype,
                     [&](auto tag) { rff_bwd_range<typename decltype(tag)::type>(params, packed, begin, end); });
}

}  // namespace samplex::cpu
