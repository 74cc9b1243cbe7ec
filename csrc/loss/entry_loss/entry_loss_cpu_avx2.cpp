// The forward compiled for AVX2; double storage stays with the scalar unit.
#include "loss/entry_loss/entry_loss_cpu_rows.h"

namespace samplex::cpu {

void entry_loss_rows_avx2(const EntryLossParams& params, int64_t begin, int64_t end) {
  switch (params.dtype) {
    case DType::kFloat16:
      return entry_loss_rows<Half>(params, begin, end);
    case DType::kBFloat16:
      return entry_loss_rows<BFloat16>(params, begin, end);
    default:
      return entry_loss_rows<float>(params, begin, end);
  }
}

}  // namespace samplex::cpu
