#include "sampler/midx_sample/midx_sample_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

namespace {

// The kernels stride over what is more.
unsigned midx_grid(int64_t blocks) { return unsigned(blocks < (1 << 20) ? blocks : 1 << 20); }

}  // namespace

void launch_midx_sample(const MidxSampleParams& p, void* stream) {
  const StaticSampleParams& u = p.uniform;
  if (u.exclude != nullptr) SX_LAUNCH("midx_sample", midx_gone_kernel, midx_grid(u.batch), kMidxThreads, 0, stream, p);
  const int64_t parts = (u.num_samples + kMidxPart - 1) / kMidxPart;
  const auto kernel = u.given != nullptr ? midx_sample_kernel<true> : midx_sample_kernel<false>;
  SX_LAUNCH("midx_sample", kernel, midx_grid(u.batch * parts), kMidxThreads, size_t(p.codes) * sizeof(double), stream,
            p);
}

}  // namespace samplex::SX_BACKEND_NS
