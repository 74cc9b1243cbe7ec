// The symmetric softmax compiled for AVX2; double stays with the scalar unit.
#include "loss/symmetric_softmax/symmetric_softmax_cpu_rows.h"

namespace samplex::cpu {

void symmetric_rows_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  symmetric_rows<float>(params, begin, end);
}
void symmetric_columns_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  symmetric_columns<float>(params, begin, end);
}
void symmetric_grad_avx2(const SymmetricSoftmaxParams& params, int64_t begin, int64_t end) {
  symmetric_grad<float>(params, begin, end);
}

}  // namespace samplex::cpu
