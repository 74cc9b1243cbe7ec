#include "sampler/bigram_sample/bigram_sample_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

namespace {

// Enough blocks to fill any device; the kernels stride over the rest.
unsigned bigram_grid(int64_t count) {
  const int64_t blocks = (count + kBigramBlock - 1) / kBigramBlock;
  return unsigned(blocks < 65535 ? blocks : 65535);
}

}  // namespace

void launch_bigram_sample(const BigramSampleParams& p, void* stream) {
  const int64_t batch = p.unigram.batch, count = batch * p.unigram.num_samples;
  if (count == 0) return;
  SX_LAUNCH("bigram_sample", bigram_rows_kernel, bigram_grid(batch), kBigramBlock, 0, stream, p);
  SX_LAUNCH("bigram_sample", bigram_sample_kernel, bigram_grid(count), kBigramBlock, 0, stream, p);
}

}  // namespace samplex::SX_BACKEND_NS
