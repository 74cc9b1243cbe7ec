#include "common/parallel.h"

#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <string>

#include "common/workers.h"

namespace samplex {
namespace {

// A thread that starts or ends this much later than its own work explains was descheduled. Waking a sleeping team takes
// less, and longer with each thread; a turn of a DataLoader's worker takes 0.2 to 0.3 ms, a scheduler slice some ms.
constexpr int64_t kLate = 150'000, kLatePerThread = 5'000;  // ns
// One late thread can be an accident. Two within this time mean that other processes want the cores.
constexpr int64_t kWindow = 30'000'000;  // ns
// How long loops stay off the OpenMP team then. Doubles each time the team is found late again: every attempt may cost
// a slice, and leaves a team behind that spins for milliseconds.
constexpr int64_t kShortestPause = 50'000'000, kLongestPause = 400'000'000;  // ns
constexpr int64_t kQuietLoops = 200;  // loops without a late thread after which the pause starts over
constexpr int64_t kRangesPerThread = 4;

std::atomic<int64_t> pause_end{0}, pause_length{kShortestPause}, quiet_loops{0}, last_late{-kWindow};
std::atomic<int64_t> openmp_loops{0}, pool_loops{0}, late_loops{0};

thread_local bool inside = false;

struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// CPU time of this thread: unlike the clock, it stops while another process has the core.
int64_t cpu_time() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec time;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0) return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
#endif
  return now();
}

std::atomic<ThreadMode>& mode() {
  static std::atomic<ThreadMode> value = [] {
    const char* const name = std::getenv("SAMPLEX_THREADS");
    return name == nullptr || *name == '\0' ? ThreadMode::kAuto : parse_thread_mode(name);
  }();
  return value;
}

void note_late(int64_t time) {
  late_loops.fetch_add(1, std::memory_order_relaxed);
  quiet_loops.store(0, std::memory_order_relaxed);
  if (time - last_late.exchange(time, std::memory_order_relaxed) > kWindow) return;
  const int64_t length = pause_length.load(std::memory_order_relaxed);
  pause_length.store(std::min(2 * length, kLongestPause), std::memory_order_relaxed);
  pause_end.store(time + length, std::memory_order_relaxed);
}

void run_openmp(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  openmp_loops.fetch_add(1, std::memory_order_relaxed);
  const int64_t start = now();
  std::atomic<int64_t> latest{0};
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    const Inside guard;
    const int64_t before = cpu_time();
    body(begin, end, context);
    const int64_t late = now() - start - (cpu_time() - before);
    for (int64_t seen = latest.load(std::memory_order_relaxed); late > seen;) {
      if (latest.compare_exchange_weak(seen, late, std::memory_order_relaxed)) break;
    }
  });
  if (latest.load(std::memory_order_relaxed) > kLate + kLatePerThread * num_threads()) return note_late(now());
  if (quiet_loops.fetch_add(1, std::memory_order_relaxed) == kQuietLoops) {
    pause_length.store(kShortestPause, std::memory_order_relaxed);
  }
}

bool run_pool(int64_t n, int64_t grain, int threads, void (*body)(int64_t, int64_t, void*), void* context) {
  struct Job {
    int64_t n, ranges;
    void (*body)(int64_t, int64_t, void*);
    void* context;
  } job{n, std::clamp<int64_t>(n / grain, 2, kRangesPerThread * threads), body, context};
  const bool ran = run_on_workers(
      job.ranges, threads,
      [](int64_t range, void* given) {
        const Inside guard;
        const Job& j = *static_cast<const Job*>(given);
        j.body(j.n * range / j.ranges, j.n * (range + 1) / j.ranges, j.context);
      },
      &job);
  if (ran) pool_loops.fetch_add(1, std::memory_order_relaxed);
  return ran;
}

}  // namespace

int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

ThreadMode thread_mode() { return mode().load(std::memory_order_relaxed); }

void set_thread_mode(ThreadMode value) {
  mode().store(value, std::memory_order_relaxed);
  pause_end.store(0, std::memory_order_relaxed);
  pause_length.store(kShortestPause, std::memory_order_relaxed);
  last_late.store(-kWindow, std::memory_order_relaxed);
}

ThreadMode parse_thread_mode(const char* name) {
  for (const ThreadMode known : {ThreadMode::kAuto, ThreadMode::kOpenMP, ThreadMode::kPool}) {
    if (std::string(name) == thread_mode_name(known)) return known;
  }
  throw std::invalid_argument("SAMPLEX_THREADS must be auto, openmp or pool, got " + std::string(name));
}

const char* thread_mode_name(ThreadMode value) {
  return value == ThreadMode::kOpenMP ? "openmp" : value == ThreadMode::kPool ? "pool" : "auto";
}

ThreadCounts thread_counts() {
  return {openmp_loops.load(std::memory_order_relaxed), pool_loops.load(std::memory_order_relaxed),
          late_loops.load(std::memory_order_relaxed)};
}

void parallel_ranges(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int threads = n <= grain || inside ? 1 : num_threads();
  if (threads <= 1) return body(0, n, context);
  const ThreadMode chosen = thread_mode();
  const bool child = in_forked_child();
  const bool pool = child || chosen == ThreadMode::kPool ||
                    (chosen == ThreadMode::kAuto && now() < pause_end.load(std::memory_order_relaxed));
  if (pool && run_pool(n, grain, threads, body, context)) return;
  if (child) return body(0, n, context);
  run_openmp(n, grain, body, context);
}

}  // namespace samplex
