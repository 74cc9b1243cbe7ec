// Loops over torch's own thread pool. Kernels see only this header, so they stay free of torch.
#pragma once

#include <cstdint>

namespace samplex {

int num_threads();

// Calls body(begin, end, context) on disjoint ranges that cover [0, n); at least `grain` items a range.
void parallel_ranges(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

// body(int64_t begin, int64_t end)
template <typename F>
inline void parallel_for(int64_t n, int64_t grain, const F& body) {
  parallel_ranges(
      n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace samplex
