#include "sampler/kernel_tree/kernel_tree_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

// What a row may take of shared memory, besides what the kernel always takes.
constexpr size_t kRowBytes = 36 * 1024;

unsigned kernel_tree_grid(int64_t blocks) { return unsigned(blocks < 65535 ? blocks : 65535); }

}  // namespace

void launch_kernel_tree_sample(const KernelTreeSampleParams& p, void* stream) {
  const size_t leaf = size_t((p.tree.leaf_size + 31) / 32 * 32),
               row = size_t(p.tree.stride + p.tree.dim) * sizeof(float);
  const bool small = p.tree.leaf_size <= kKernelTreeSharedLeaf, fits = row <= kRowBytes;
  const size_t bytes = (small ? kKernelTreeWarps * leaf * (sizeof(double) + sizeof(float)) : 0) + (fits ? row : 0);
  const unsigned blocks = unsigned(p.batch < kKernelTreeGrid ? p.batch : kKernelTreeGrid);
  if (fits)
    SX_LAUNCH("kernel_tree_sample", kernel_tree_sample_kernel<true>, blocks, kKernelTreeThreads, bytes, stream, p);
  else
    SX_LAUNCH("kernel_tree_sample", kernel_tree_sample_kernel<false>, blocks, kKernelTreeThreads, bytes, stream, p);
}

void launch_kernel_tree_leaves(const KernelTreeLeavesParams& p, void* stream) {
  const int64_t leaves = p.ids != nullptr ? p.count : (p.count + p.leaf_size - 1) / p.leaf_size;
  SX_LAUNCH("kernel_tree_leaves", kernel_tree_leaves_kernel, kernel_tree_grid(leaves), kKernelTreeSumThreads, 0, stream,
            p);
}

void launch_kernel_tree_parents(const KernelTreeParentsParams& p, void* stream) {
  int64_t count = p.count;
  for (int level = p.depth - 1; level >= 0; --level) {
    if (p.leaves == nullptr) count = (count + 1) / 2;
    SX_LAUNCH("kernel_tree_parents", kernel_tree_parents_kernel, kernel_tree_grid(count), kKernelTreeSumThreads, 0,
              stream, p, level, count);
  }
}

}  // namespace samplex::SX_BACKEND_NS
