// bigram_sample on the device: one thread a row, then one thread a draw; no shared memory, no collectives. The
// distribution, and with it every bit of the result, is that of bigram_sample_math.h.
#pragma once

#include "common/macros.h"
#include "sampler/bigram_sample/bigram_sample_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kBigramBlock = 256;

// rows [B]: context and excluded ids of each row looked up once, not once a draw.
__global__ void __launch_bounds__(kBigramBlock) bigram_rows_kernel(BigramSampleParams p) {
  const int64_t stride = int64_t(gridDim.x) * kBigramBlock;
  for (int64_t b = int64_t(blockIdx.x) * kBigramBlock + threadIdx.x; b < p.unigram.batch; b += stride) {
    p.rows[b] = bigram_row(p, b);
  }
}

// ids, log_q [B, m], or log_q alone for given ids.
__global__ void __launch_bounds__(kBigramBlock, 2) bigram_sample_kernel(BigramSampleParams p) {
  PhiloxKey key = {0, 0};
  if (p.unigram.key != nullptr) key = {uint64_t(p.unigram.key[0]), uint64_t(p.unigram.key[1])};
  const int64_t count = p.unigram.batch * p.unigram.num_samples, stride = int64_t(gridDim.x) * kBigramBlock;
  for (int64_t i = int64_t(blockIdx.x) * kBigramBlock + threadIdx.x; i < count; i += stride) bigram_one(p, key, i);
}

}  // namespace samplex::SX_BACKEND_NS
