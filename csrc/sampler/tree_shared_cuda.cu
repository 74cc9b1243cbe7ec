#include "sampler/tree_shared_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

void launch_tree_shared(const TreeSharedParams& p, void* stream) {
  const unsigned grid = unsigned(p.num_samples < kTreeSharedBlocks ? p.num_samples : kTreeSharedBlocks);
  const size_t memory = p.masses != nullptr ? 0 : size_t(p.batch) * sizeof(double);
  if (p.tree.dtype == DType::kBFloat16)
    SX_LAUNCH("tree_shared", tree_shared_kernel<BFloat16>, grid, kTreeSharedThreads, memory, stream, p);
  else
    SX_LAUNCH("tree_shared", tree_shared_kernel<float>, grid, kTreeSharedThreads, memory, stream, p);
}

}  // namespace samplex::SX_BACKEND_NS
