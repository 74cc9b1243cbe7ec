// CPU launchers of the symmetric softmax: scalar bodies, SIMD dispatch once per range, and the merge of the columns.
#include "common/parallel.h"
#include "common/simd.h"
#include "loss/symmetric_softmax/symmetric_softmax_cpu_rows.h"

namespace samplex::cpu {

namespace {

void symmetric_rows_scalar(const SymmetricSoftmaxParams& p, int64_t begin, int64_t end) {
  p.double_acc ? symmetric_rows<double>(p, begin, end) : symmetric_rows<float>(p, begin, end);
}
void symmetric_columns_scalar(const SymmetricSoftmaxParams& p, int64_t begin, int64_t end) {
  p.double_acc ? symmetric_columns<double>(p, begin, end) : symmetric_columns<float>(p, begin, end);
}
void symmetric_grad_scalar(const SymmetricSoftmaxParams& p, int64_t begin, int64_t end) {
  p.double_acc ? symmetric_grad<double>(p, begin, end) : symmetric_grad<float>(p, begin, end);
}

constexpr int64_t kColumns = 1024;  // that are merged at a time

// The maximum of each column over the blocks.
template <typename A>
void merge_maxima(const SymmetricSoftmaxParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.batch;
  A* const most = static_cast<A*>(p.column_lse);
  for (int64_t j = begin; j < end; ++j) most[j] = static_cast<const A*>(p.partial)[j];
  for (int64_t block = 1; block < symmetric_blocks(n); ++block) {
    const A* const of = static_cast<const A*>(p.partial) + block * n;
    for (int64_t j = begin; j < end; ++j) most[j] = of[j] > most[j] ? of[j] : most[j];
  }
}

// From the maximum to the lse of each column, and the loss of its pair.
template <typename A>
void merge_sums(const SymmetricSoftmaxParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.batch, blocks = symmetric_blocks(n);
  A* const total = static_cast<A*>(p.partial) + blocks * n;
  A* const lse = static_cast<A*>(p.column_lse);
  A* const loss = static_cast<A*>(p.loss);
  for (int64_t block = 1; block < blocks; ++block) {
    for (int64_t j = begin; j < end; ++j) total[j] += total[block * n + j];
  }
  for (int64_t j = begin; j < end; ++j) {
    lse[j] += log_acc(total[j]);
    loss[j] = (static_cast<const A*>(p.row_lse)[j] - loss[j]) / 2 + (lse[j] - loss[j]) / 2;
  }
}

}  // namespace

void launch_symmetric_softmax(const SymmetricSoftmaxParams& params) {
  const SimdLevel level = simd_level_unless(params.double_acc);
  const auto rows = SX_SIMD_BODY(level, symmetric_rows), columns = SX_SIMD_BODY(level, symmetric_columns);
  const int64_t blocks = symmetric_blocks(params.batch);
  parallel_for_shared(blocks, 1, [&](int64_t begin, int64_t end) { rows(params, begin, end); });
  parallel_for(params.batch, kColumns, [&](int64_t begin, int64_t end) {
    params.double_acc ? merge_maxima<double>(params, begin, end) : merge_maxima<float>(params, begin, end);
  });
  parallel_for_shared(blocks, 1, [&](int64_t begin, int64_t end) { columns(params, begin, end); });
  parallel_for(params.batch, kColumns, [&](int64_t begin, int64_t end) {
    params.double_acc ? merge_sums<double>(params, begin, end) : merge_sums<float>(params, begin, end);
  });
}

void launch_symmetric_softmax_grad(const SymmetricSoftmaxParams& params) {
  const auto body = SX_SIMD_BODY(simd_level_unless(params.double_acc), symmetric_grad);
  parallel_for_shared(symmetric_blocks(params.batch), 1, [&](int64_t begin, int64_t end) { body(params, begin, end); });
}

}  // namespace samplex::cpu
