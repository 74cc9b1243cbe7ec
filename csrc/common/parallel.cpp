#include "common/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace samplex {

int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

void parallel_ranges(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  if (n <= 0) return;
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}

}  // namespace samplex
