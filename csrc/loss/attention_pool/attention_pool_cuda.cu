// Launchers: a block a batch row; the one-pass kernel is chosen by storage type, alignment and d.
#include "loss/attention_pool/attention_pool_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

constexpr const char* kOp = "attention_pool";

unsigned blocks(int64_t items) { return unsigned((items + kPoolThreads - 1) / kPoolThreads); }

template <typename T, int kWidth, int kChunks, int kTeam = 1>
void one_pass(const AttentionPoolParams& p, void* stream) {
  using Pass = PoolPass<T, kWidth, kChunks, kTeam>;
  constexpr size_t kBuffer = kTeam > 1 ? 0 : sizeof(float) * kPoolWarps * 2 * Pass::kSpan;
  SX_LAUNCH(kOp, (attention_pool_kernel<T, kWidth, kChunks, kTeam>), unsigned(p.batch), Pass::kThreads,
            p.sums == nullptr ? 0 : kBuffer, stream, p);
}

// Rows of at most kMostColumns: all warps of a block share them.
constexpr int kTeamElements = 16;  // of a lane
constexpr int64_t kTeamColumns = kTeamElements * kWarpSize, kMostColumns = 8 * kTeamColumns;

template <typename T, int kWidth>
void by_team(const AttentionPoolParams& p, void* stream) {
  constexpr int kChunks = kTeamElements / kWidth;
  if (p.dim <= 2 * kTeamColumns)
    one_pass<T, kWidth, kChunks, 2>(p, stream);
  else if (p.dim <= 4 * kTeamColumns)
    one_pass<T, kWidth, kChunks, 4>(p, stream);
  else
    one_pass<T, kWidth, kChunks, 8>(p, stream);
}

template <typename T>
void launch(const AttentionPoolParams& p, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t d = p.dim;
  const bool vectors = d % kWidth == 0 && vector_aligned(p.table);
  if (d == 0 || d > kMostColumns) {  // rows without columns: the other kernel reads none
    SX_LAUNCH(kOp, attention_pool_any_kernel<T>, unsigned(p.batch), kPoolThreads, 0, stream, p);
  } else if (!vectors) {
    if (d <= 8 * kWarpSize)
      one_pass<T, 1, 8>(p, stream);
    else
      by_team<T, 1>(p, stream);
  } else if (d <= 8 * kWarpSize) {
    one_pass<T, kWidth, 8 / kWidth>(p, stream);
  } else if (d <= 16 * kWarpSize) {
    one_pass<T, kWidth, 16 / kWidth>(p, stream);
  } else if (d <= 24 * kWarpSize) {
    one_pass<T, kWidth, 24 / kWidth>(p, stream);
  } else {
    by_team<T, kWidth>(p, stream);
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
      SX_LAUNCH(kOp, attention_pool_any_kernel<double>, unsigned(params.batch), kPoolThreads, 0, stream, params);
  }
}

void launch_attention_pool_scale(const AttentionPoolScaleParams& params, void* stream) {
  const unsigned grid = blocks(params.batch * params.length * 2);
  if (params.double_acc)
    SX_LAUNCH(kOp, attention_pool_scale_kernel<double>, grid, kPoolThreads, 0, stream, params);
  else
    SX_LAUNCH(kOp, attention_pool_scale_kernel<float>, grid, kPoolThreads, 0, stream, params);
}

namespace {

template <typename A, int kWidth>
void rows(const AttentionPoolRowsParams& p, void* stream) {
  SX_LAUNCH(kOp, (attention_pool_rows_kernel<A, kWidth>), unsigned(p.capacity), kPoolThreads, 0, stream, p);
}

template <typename A, int kWidth>
void vectors(const AttentionPoolVectorsParams& p, void* stream) {
  const int64_t parts = attention_pool_parts(p.batch);
  const dim3 grid(blocks(2 * p.dim / kWidth), unsigned(parts));
  SX_LAUNCH(kOp, (attention_pool_vectors_kernel<A, kWidth>), grid, kPoolThreads, 0, stream, p);
  if (parts > 1) SX_LAUNCH(kOp, attention_pool_parts_kernel<A>, blocks(2 * p.dim), kPoolThreads, 0, stream, p, parts);
}

}  // namespace

void launch_attention_pool_rows(const AttentionPoolRowsParams& params, void* stream) {
  const bool wide = params.dim % 4 == 0 && vector_aligned(params.rows) && vector_aligned(params.query) &&
                    vector_aligned(params.value);
  if (params.double_acc)
    rows<double, 1>(params, stream);
  else if (wide)
    rows<float, 4>(params, stream);
  else
    rows<float, 1>(params, stream);
}

void launch_attention_pool_vectors(const AttentionPoolVectorsParams& params, void* stream) {
  if (params.double_acc)
    vectors<double, 1>(params, stream);
  else if (params.dim % 4 == 0 && vector_aligned(params.sums))
    vectors<float, 4>(params, stream);
  else
    vectors<float, 1>(params, stream);
}

}  // namespace samplex::SX_BACKEND_NS
