#include "sampler/static_sample/static_sample_kernel.cuh"

namespace samplex::SX_BACKEND_NS {

namespace {

// Enough blocks to fill any device; the kernels stride over the rest.
unsigned static_grid(int64_t count) {
  const int64_t blocks = (count + kStaticBlock - 1) / kStaticBlock;
  return unsigned(blocks < 65535 ? blocks : 65535);
}

}  // namespace

void launch_static_sample(const StaticSampleParams& p, void* stream) {
  const int64_t count = p.batch * p.num_samples;
  if (count + p.num_scored == 0) return;
  if (p.gather.n > 0) {
    const int64_t draw_blocks = (p.gather.width + kStaticWarps - 1) / kStaticWarps;
    const int64_t score_blocks = (p.num_scored + kStaticBlock - 1) / kStaticBlock;
    with_gather_words(p.gather, [&](auto word, int64_t words) {
      SX_LAUNCH("static_sample", static_gather_kernel<decltype(word)>, unsigned(score_blocks + draw_blocks),
                kStaticBlock, 0, stream, p, words, int(score_blocks));
    });
    return;
  }
  if (p.exclude != nullptr) {
    SX_LAUNCH("static_sample", static_rows_kernel, static_grid(p.batch), kStaticBlock, 0, stream, p);
  }
  SX_LAUNCH("static_sample", static_sample_kernel, static_grid(count + p.num_scored), kStaticBlock, 0, stream, p);
}

}  // namespace samplex::SX_BACKEND_NS
