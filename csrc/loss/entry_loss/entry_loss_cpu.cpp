// CPU launcher of the entry losses: scalar body, SIMD dispatch once per range.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/entry_loss/entry_loss_cpu_rows.h"

namespace samplex::cpu {

void launch_entry_loss(const EntryLossParams& params) {
  const SimdLevel level = params.dtype == DType::kFloat64 ? SimdLevel::kScalar : simd_level();
  const int64_t work = (params.num_targets + params.num_samples) * params.dim;
  parallel_for_shared(params.batch, 1 + (1 << 16) / (work + 1), [&](int64_t begin, int64_t end) {
#ifdef SAMPLEX_X86_SIMD
    if (level == SimdLevel::kAvx512) return entry_loss_rows_avx512(params, begin, end);
    if (level == SimdLevel::kAvx2) return entry_loss_rows_avx2(params, begin, end);
#endif
    dispatch_dtype("entry_loss", params.dtype,
                   [&](auto tag) { entry_loss_rows<typename decltype(tag)::type>(params, begin, end); });
  });
}

}  // namespace samplex::cpu
