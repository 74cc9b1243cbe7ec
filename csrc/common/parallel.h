// Parallel loops. Kernels see only this header, so they stay free of torch.
//
// A loop runs on torch's own OpenMP team while the machine is quiet: the team spins between two regions, and a second
// set of threads would compete with it. Each region ends in a barrier of the whole team, which costs a scheduler slice
// if one thread was descheduled. If that happens, loops run for a while on workers that are waited for only if they
// have work (common/workers.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/export.h"

namespace samplex {

int num_threads();

enum class ThreadMode { kAuto, kOpenMP, kPool };

// How loops run: SAMPLEX_THREADS=auto|openmp|pool when the library is loaded, or what was set since then.
SX_EXPORT ThreadMode thread_mode();
SX_EXPORT void set_thread_mode(ThreadMode mode);
// Throws std::invalid_argument.
SX_EXPORT ThreadMode parse_thread_mode(const char* name);
SX_EXPORT const char* thread_mode_name(ThreadMode mode);

struct ThreadCounts {
  int64_t openmp;  // loops that ran on the OpenMP team
  int64_t pool;    // loops that ran on the workers
  int64_t late;    // loops of the OpenMP team in which a thread was descheduled
};
SX_EXPORT ThreadCounts thread_counts();

// Calls body(begin, end, context) on disjoint ranges that cover [0, n); at least `grain` items a range (but the last).
// How many ranges there are and who runs them is open, so results must not depend on it. A loop inside a body is
// serial.
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
