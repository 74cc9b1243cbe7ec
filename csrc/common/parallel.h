// Loops over torch's own thread pool. Kernels see only this header, so they stay free of torch.
#pragma once

#include <algorithm>
#include <atomic>
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

// The same in chunks that the threads take from each other: [0, n) is cut into one range a thread, its owner works
// through it from the front, and a thread that is done takes chunks of the others. One thread is often slower than the
// rest (another process, a farther cache), and equal shares would make all wait for it. body must not care who calls
// it.
template <typename F>
inline void parallel_for_shared(int64_t n, int64_t chunk, const F& body) {
  constexpr int64_t kMostThreads = 256;
  struct alignas(64) Counter {
    std::atomic<int64_t> next;
  };
  const int64_t threads = std::min<int64_t>({num_threads(), kMostThreads, (n + chunk - 1) / chunk});
  if (threads <= 1) return n > 0 ? body(int64_t(0), n) : void();
  Counter counters[kMostThreads];
  const auto begin_of = [&](int64_t range) { return n * range / threads; };
  for (int64_t range = 0; range < threads; ++range) counters[range].next.store(begin_of(range));
  parallel_for(threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t own = first; own < last; ++own) {
      for (int64_t step = 0; step < threads; ++step) {
        const int64_t range = (own + step) % threads, end = begin_of(range + 1);
        for (;;) {
          const int64_t begin = counters[range].next.fetch_add(chunk);
          if (begin >= end) break;
          body(begin, std::min(begin + chunk, end));
        }
      }
    }
  });
}

}  // namespace samplex
