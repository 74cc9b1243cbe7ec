#include "common/workers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace samplex {
namespace {

using Clock = std::chrono::steady_clock;
using Body = void (*)(int64_t, void*);

// The next region of the same op comes within microseconds, the next op after the Python code between the two.
constexpr auto kWorkerSpin = std::chrono::microseconds(50);
constexpr auto kCallerSpin = std::chrono::microseconds(20);
constexpr int kMostWorkers = 255;

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Asks for short turns on the processor: the worker then waits less for its next turn, and has no more time in total.
// Linux from 6.12 on grants it to threads of the usual kind; others ignore it.
void ask_for_short_turns() {
#if defined(__linux__) && defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;  // ns
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 || attributes.policy != 0) return;
  attributes.runtime = 100'000;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// Whether `done()` came true within `time`.
template <typename F>
bool spin(Clock::duration time, const F& done) {
  const auto end = Clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      pause_cpu();
    }
  } while (Clock::now() < end);
  return done();
}

class Workers {
 public:
  bool run(int64_t count, int threads, Body body, void* context) {
    const std::unique_lock<std::mutex> lock(in_use_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    const int wanted = int(std::min<int64_t>({threads - 1, count - 1, kMostWorkers}));
    while (started_ < wanted && start_worker()) ++started_;

    // No worker can claim a task of the last job any more, so nobody uses these.
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(uint32_t(count), std::memory_order_relaxed);
    helpers_.store(wanted, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    ++job_;
    left_.store((uint64_t(job_) << 32) | uint64_t(count), std::memory_order_release);
    posted_.store(job_, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) posted_.notify_all();

    work(job_);
    const auto all_finished = [&] { return finished_.load(std::memory_order_acquire) == uint32_t(count); };
    if (!spin(kCallerSpin, all_finished)) {
      for (;;) {
        const uint32_t seen = finished_.load(std::memory_order_acquire);
        if (seen == uint32_t(count)) break;
        finished_.wait(seen, std::memory_order_acquire);
      }
    }
    if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

 private:
  // A worker that cannot be started (a limit of the system) is done without.
  bool start_worker() {
    try {
      std::thread([this, number = started_] { serve(number); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  [[noreturn]] void serve(int number) {
    ask_for_short_turns();
    uint32_t seen = 0;
    for (;;) {
      const auto fresh = [&] { return posted_.load(std::memory_order_acquire) != seen; };
      if (!spin(kWorkerSpin, fresh)) {
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        posted_.wait(seen, std::memory_order_seq_cst);
        sleeping_.fetch_sub(1, std::memory_order_relaxed);
      }
      seen = posted_.load(std::memory_order_acquire);
      if (number < helpers_.load(std::memory_order_relaxed)) work(seen);
    }
  }

  // Claims and runs tasks of a job until none is left. A successful exchange proves that the job was still open, so the
  // fields that were read before it are the job's own.
  void work(uint32_t job) {
    uint64_t left = left_.load(std::memory_order_acquire);
    while (left >> 32 == job && uint32_t(left) > 0) {
      const uint32_t count = count_.load(std::memory_order_relaxed);
      const Body body = body_.load(std::memory_order_relaxed);
      void* const context = context_.load(std::memory_order_relaxed);
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      try {
        if (!failed_.load(std::memory_order_relaxed)) body(count - uint32_t(left), context);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex_);
        if (!failed_.load(std::memory_order_relaxed)) {
          error_ = std::current_exception();
          failed_.store(true, std::memory_order_relaxed);
        }
      }
      if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) finished_.notify_one();
      left = left_.load(std::memory_order_acquire);
    }
  }

  std::mutex in_use_;
  int started_ = 0;
  uint32_t job_ = 0;

  alignas(64) std::atomic<uint64_t> left_{0};  // job << 32 | tasks that nobody has claimed
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  std::atomic<int> helpers_{0};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<uint32_t> posted_{0};  // number of the newest job
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

// Never destroyed: workers sleep in it until the process ends.
std::atomic<Workers*> instance{nullptr};
std::atomic<bool> forked{false};

// Without a lock, which a fork might leave locked in the child.
Workers& workers() {
  Workers* found = instance.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Workers* const fresh = new Workers;
  if (instance.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

#if defined(__unix__) || defined(__APPLE__)
// The child starts with no workers and a lock that nobody holds. What the parent's object held is left alone.
const int registered = pthread_atfork(nullptr, nullptr, [] {
  instance.store(nullptr, std::memory_order_relaxed);
  forked.store(true, std::memory_order_relaxed);
});
#endif

}  // namespace

bool run_on_workers(int64_t count, int threads, void (*body)(int64_t, void*), void* context) {
  return workers().run(count, threads, body, context);
}

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace samplex
