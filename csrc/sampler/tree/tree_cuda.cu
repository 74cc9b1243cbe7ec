#include "sampler/tree/tree_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

// Enough blocks to fill any device; the kernels stride over the rest.
unsigned tree_grid(int64_t blocks) { return unsigned(blocks < 65535 ? blocks : 65535); }

template <typename T>
void sample(const TreeSampleParams& p, void* stream) {
  const size_t memory = size_t(p.tree.dim) * sizeof(float);
  if (p.base.table != nullptr)
    SX_LAUNCH("tree_sample", (tree_sample_kernel<T, true>), tree_grid(p.batch), kTreeThreads, memory, stream, p);
  else
    SX_LAUNCH("tree_sample", (tree_sample_kernel<T, false>), tree_grid(p.batch), kTreeThreads, memory, stream, p);
}

template <typename T>
void logits(const TreeAllParams& p, void* stream) {
  const int64_t nodes = p.batch << p.tree.depth;
  SX_LAUNCH("tree_log_prob_all", tree_logits_kernel<T>, tree_grid((nodes + kTreeSortThreads - 1) / kTreeSortThreads),
            kTreeSortThreads, 0, stream, p);
}

template <typename T>
void topk(const TreeTopkParams& p, void* stream) {
  int size = 2;
  while (size < 2 * p.beam) size *= 2;
  SX_LAUNCH("tree_topk", tree_topk_kernel<T>, unsigned(p.batch), kTreeSortThreads, 4 * sizeof(double) * size_t(size),
            stream, p, size);
}

}  // namespace

void launch_tree_project(const TreeProjectParams& p, void* stream) {
  const int64_t rows = (p.batch + kProjectRows - 1) / kProjectRows, columns = (p.dim + kProjectWide - 1) / kProjectWide;
  SX_LAUNCH("tree_project", tree_project_kernel, tree_grid(rows * columns), kProjectThreads, 0, stream, p);
}

void launch_tree_sample(const TreeSampleParams& p, void* stream) {
  if (p.tree.dtype == DType::kBFloat16)
    sample<BFloat16>(p, stream);
  else
    sample<float>(p, stream);
}

void launch_tree_log_prob_all(const TreeAllParams& p, void* stream) {
  if (p.tree.dtype == DType::kBFloat16)
    logits<BFloat16>(p, stream);
  else
    logits<float>(p, stream);
  const int64_t count = p.batch * p.tree.num_classes;
  const unsigned grid = tree_grid((count + kTreeSortThreads - 1) / kTreeSortThreads);
  if (p.base.table != nullptr)
    SX_LAUNCH("tree_log_prob_all", tree_all_kernel<true>, grid, kTreeSortThreads, 0, stream, p);
  else
    SX_LAUNCH("tree_log_prob_all", tree_all_kernel<false>, grid, kTreeSortThreads, 0, stream, p);
}

void launch_tree_topk(const TreeTopkParams& p, void* stream) {
  if (p.tree.dtype == DType::kBFloat16)
    topk<BFloat16>(p, stream);
  else
    topk<float>(p, stream);
}

}  // namespace samplex::SX_BACKEND_NS
