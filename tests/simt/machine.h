// State of the SIMT harness: fibers, buffers, the block that runs. For runtime.cpp and checks.cpp alone.
#pragma once

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/backend.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" {
extern __attribute__((visibility("hidden"))) __thread unsigned char sx_simt_shared_begin[256];
extern __attribute__((visibility("hidden"))) __thread unsigned char sx_simt_shared_end[256];
}

namespace sx_simt {

constexpr unsigned char kPoison = 0xCD;
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 256 * 1024;  // ASan's frames are larger
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

// ------------------------------------------------------------------------------------------------ context switch
#ifdef __x86_64__
// Saves what the System V ABI lets a callee clobber on no account, swaps the stack, and returns on the other one.
extern "C" void sx_simt_switch(void** save, void* load);

struct Context {
  void* sp = nullptr;
  void prepare(char* low, size_t bytes, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(low + bytes) & ~uintptr_t(15);
    auto* slots = reinterpret_cast<void**>(top) - 8;
    std::fill(slots, slots + 8, nullptr);
    slots[6] = reinterpret_cast<void*>(entry);  // slots[7] = 0 is entry's return address: backtraces end there
    sp = slots;
  }
  static void swap(Context& from, const Context& to) { sx_simt_switch(&from.sp, to.sp); }
};
#else
struct Context {
  ucontext_t context;
  void prepare(char* low, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack = {low, 0, bytes};
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Context& from, const Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

// ------------------------------------------------------------------------------------------------ state
enum class Schedule : int { kFair, kGreedy, kReversed };
inline const char* schedule_name(Schedule s) {
  return s == Schedule::kFair ? "fair" : s == Schedule::kGreedy ? "greedy" : "reversed";
}

enum class State : int { kReady, kBarrier, kCollective, kExited };

struct Machine;

struct Fiber {
  Context context;
  uintptr_t stack_low = 0;
  Machine* machine = nullptr;
  State state = State::kExited;
  uint3 thread{};
  int index = 0;  // linear thread number in the block
  // Where it waits.
  const char* what = nullptr;
  Where where;
  Collective kind = Collective::kSync;
  unsigned mask = 0;
  uint64_t posted = 0, result = 0;
  int source = 0;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack = nullptr;
#endif
};

// The fiber that runs on this OS thread; null on a host stack, where no access is checked.
extern __thread Fiber* running;

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t a, size_t n) const { return a >= begin && a <= end && n <= end - a; }
};

// Overlapping ranges become one; ranges that only touch stay two, so that no access may straddle them.
std::vector<Range> merged(std::vector<Range> ranges);

struct Buffer {
  uintptr_t begin, end;
  bool writable;
};

// Lanes of one warp that wait together. Different masks may wait side by side.
struct Pending {
  const char* what;
  Where where;
  unsigned mask, arrived;
};

inline bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

inline std::string triple(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

inline std::string place(const char* what, const Where& where) {
  return std::string(what) + " (" + where.file_name() + ":" + std::to_string(where.line()) + " in " +
         where.function_name() + ")";
}

inline std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

struct Machine {
  // Noted since the op began.
  std::vector<Buffer> buffers;

  // This launch.
  const char* op = "";
  std::string kernel;
  dim3 grid, block;
  size_t smem = 0;
  const void* body = nullptr;
  void (*call)(const void*) = nullptr;
  Schedule schedule = Schedule::kFair;
  std::vector<Range> loads, stores;  // legal, sorted, disjoint
  Range load_hit, store_hit;         // the last one that served
  bool busy = false;

  // This block.
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
  int threads = 0, alive = 0;
  std::vector<Pending> pending[kMaxThreads / kWarp];
  Context scheduler;
  bool failed = false;
  std::string error, printed;

  // Memory.
  char* stacks = nullptr;
  size_t stride = 0;
  unsigned char* dynamic = nullptr;
  std::unique_ptr<unsigned char[]> dynamic_owner;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack = nullptr;
  const void* host_bottom = nullptr;
  size_t host_size = 0;
#endif

  ~Machine() {
    if (stacks != nullptr) munmap(stacks, stride * kMaxThreads);
  }

  void make_stacks() {
    if (stacks != nullptr) return;
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    stride = kStackBytes + page;
    void* memory = mmap(nullptr, stride * kMaxThreads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("simt: no memory for the fibers' stacks");
    stacks = static_cast<char*>(memory);
    for (int i = 0; i < kMaxThreads; ++i) {
      mprotect(stacks + stride * i, page, PROT_NONE);  // an overflow faults instead of running into a neighbor
      fibers[i].stack_low = reinterpret_cast<uintptr_t>(stacks + stride * i + page);
      fibers[i].machine = this;
      fibers[i].index = i;
    }
  }

  std::string header() const {
    return std::string(op) + ": simt: kernel " + kernel + ", schedule " + schedule_name(schedule);
  }
  std::string header(const Fiber& f) const {
    return header() + ", block " + triple(builtins.block) + ", thread " + triple(f.thread) + ": ";
  }

  // ---------------------------------------------------------------------------------------------- switching
  void resume(Fiber& f) {
    builtins.thread = f.thread;
    running = &f;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fake_stack, reinterpret_cast<void*>(f.stack_low), kStackBytes);
#endif
    Context::swap(scheduler, f.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    running = nullptr;
  }

  void suspend(Fiber& f, bool forever) {
    (void)forever;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(forever ? nullptr : &f.fake_stack, host_bottom, host_size);
#endif
    Context::swap(f.context, scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(f.fake_stack, nullptr, nullptr);
#endif
  }

  // Called on a fiber; does not come back. `text` is moved away, so the dropped stack owns nothing.
  [[noreturn]] void fail(Fiber& f, std::string&& text) {
    error = std::move(text);
    failed = true;
    f.state = State::kExited;
    suspend(f, true);
    std::abort();  // a failed fiber is never resumed
  }

  // ---------------------------------------------------------------------------------------------- blocks
  void start_block();
  void run_block();
  void run_grid();
  bool run_lanes(int first, int last);
  bool release_barrier();
  std::string stuck() const;
  std::string state_of(const Fiber& f) const;
  void set_legal_ranges(size_t body_bytes);
  std::string describe_address(uintptr_t a, size_t n, bool write) const;
};

Machine& machine();  // of this OS thread

}  // namespace sx_simt
