#include "sampler/subset_sample/subset_sample_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

void launch_subset_sample(const SubsetSampleParams& p, void* stream) {
  if (p.batch == 0 || p.num_samples == 0) return;
  // As many warps as there are tables; the kernel strides over the other rows.
  const int64_t blocks = p.tables / kSubsetWarps;
  SX_LAUNCH("subset_sample", subset_sample_kernel, unsigned(blocks), kSubsetBlock, 0, stream, p);
}

}  // namespace samplex::SX_BACKEND_NS
