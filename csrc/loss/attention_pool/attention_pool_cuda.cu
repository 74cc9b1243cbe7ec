// Launchers: a block a batch row; the one-pass kernel is chosen by storage type, alignment and d.
#include "loss/attention_pool/attention_pool_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

constexpr const char* kOp = "attention_pool";

unsigned blocks(int64_t items) { return unsigned((items + kPoolThreads - 1) / kPoolThreads); }

template <typename T, int kWidth, int kChunks>
void one_pass(const AttentionPoolParams& p, void* stream) {
  constexpr size_t kBuffer = sizeof(float) * kPoolWarps * 2 * PoolPass<T, kWidth, kChunks>::kSpan;
  SX_LAUNCH(kOp, (attention_pool_kernel<T, kWidth, kChunks>), unsigned(p.batch), kPoolThreads,
            p.sums == nullptr ? 0 : kBuffer, stream, p);
}

template <typename T>
void launch(const AttentionPoolParams& p, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t d = p.dim;
  const bool vectors = d % kWidth == 0 && reinterpret_cast<uintptr_t>(p.table) % 16 == 0;
  if (d == 0 || (vectors ? d > 768 : d > 256)) {  // rows without columns: the other kernel reads none
    SX_LAUNCH(kOp, attention_pool_wide_kernel<T>, unsigned(p.batch), kPoolThreads, 0, stream, p);
  } else if (!vectors) {
    one_pass<T, 1, 8>(p, stream);
  } else if (d <= 8 * kWarpSize) {
    one_pass<T, kWidth, 8 / kWidth>(p, stream);
  } else if (d <= 16 * kWarpSize) {
    one_pass<T, kWidth, 16 / kWidth>(p, stream);
  } else {
    one_pass<T, kWidth, 24 / kWidth>(p, stream);
  }
}

}  // namespace

void launch_attention_pool(const AttentionPoolParams& params, void* stream) {
  if (params.debug && params.length > 0) {
    SX_LAUNCH(kOp, attention_pool_check_kernel, blocks(params.batch * params.length), kPoolThreads, 0, stream, params);
  }
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, stream);
    case DType::kFloat16:
      return launch<Half>(params, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, stream);
    case DType::kFloat64:
      SX_LAUNCH(kOp, attention_pool_wide_kernel<double>, unsigned(params.batch), kPoolThreads, 0, stream, params);
  }
}

void launch_attention_pool_scale(const AttentionPoolScaleParams& params, void* stream) {
  const unsigned grid = blocks(params.batch * params.length * 2);
  if (params.double_acc)
    SX_LAUNCH(kOp, attention_pool_scale_kernel<double>, grid, kPoolThreads, 0, stream, params);
  else
    SX_LAUNCH(kOp, attention_pool_scale_kernel<float>, grid, kPoolThreads, 0, stream, params);
}

void launch_attention_pool_rows(const AttentionPoolRowsParams& params, void* stream) {
  if (params.double_acc)
    SX_LAUNCH(kOp, attention_pool_rows_kernel<double>, unsigned(params.capacity), kPoolThreads, 0, stream, params);
  else
    SX_LAUNCH(kOp, attention_pool_rows_kernel<float>, unsigned(params.capacity), kPoolThreads, 0, stream, params);
}

namespace {

template <typename A>
void vectors(const AttentionPoolVectorsParams& p, void* stream) {
  const int64_t parts = attention_pool_parts(p.batch);
  const dim3 grid(blocks(2 * p.dim), unsigned(parts));
  SX_LAUNCH(kOp, attention_pool_vectors_kernel<A>, grid, kPoolThreads, 0, stream, p);
  if (parts > 1) SX_LAUNCH(kOp, attention_pool_parts_kernel<A>, blocks(2 * p.dim), kPoolThreads, 0, stream, p, parts);
}

}  // namespace

void launch_attention_pool_vectors(const AttentionPoolVectorsParams& params, void* stream) {
  if (params.double_acc)
    vectors<double>(params, stream);
  else
    vectors<float>(params, stream);
}

}  // namespace samplex::SX_BACKEND_NS
