// The SIMT harness: fibers, schedules, barriers, bounds checks. The model is described in include/cuda_runtime.h.
//
// Nothing unwinds out of a fiber. An error stores its text and switches to the scheduler for good; the fibers of the
// block are dropped where they stand, which is safe because device code owns nothing, and the scheduler, on the
// caller's own stack, throws std::runtime_error. So a check may fail inside code that the compiler takes to be
// noexcept.
//
// All state is per OS thread: torch may run a backward op on another thread than the forward op.
#include <cuda_runtime.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>

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

__thread Builtins builtins;

namespace {

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
asm(R"(
.text
.p2align 4
.globl sx_simt_switch
.hidden sx_simt_switch
.type sx_simt_switch, @function
sx_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sx_simt_switch, .-sx_simt_switch
)");

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
const char* schedule_name(Schedule s) {
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
__thread Fiber* running = nullptr;

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t a, size_t n) const { return a >= begin && a <= end && n <= end - a; }
};

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

bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string triple(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string place(const char* what, const Where& where) {
  return std::string(what) + " (" + where.file_name() + ":" + std::to_string(where.line()) + " in " +
         where.function_name() + ")";
}

std::string hex(uint64_t x) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

// Overlapping ranges become one; ranges that only touch stay two, so that no access may straddle them.
std::vector<Range> merged(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> out;
  for (const Range& r : ranges) {
    if (r.begin >= r.end) continue;
    if (!out.empty() && r.begin < out.back().end) {
      out.back().end = std::max(out.back().end, r.end);
    } else {
      out.push_back(r);
    }
  }
  return out;
}

// The loaded segments of the library this function is in: constants and tables of the kernels.
struct Segments {
  std::vector<Range> readable, writable;
};
const Segments& own_segments() {
  static const Segments segments = [] {
    Segments found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
          const auto me = reinterpret_cast<uintptr_t>(&own_segments);
          auto& s = *static_cast<Segments*>(out);
          Segments here;
          bool mine = false;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& segment = info->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD) continue;
            const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
            const Range range{begin, begin + segment.p_memsz};
            mine = mine || range.holds(me, 1);
            here.readable.push_back(range);
            if (segment.p_flags & PF_W) here.writable.push_back(range);
          }
          if (mine) s = here;
          return mine ? 1 : 0;
        },
        &found);
    return found;
  }();
  return segments;
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
      mprotect(stacks + stride * i, page, PROT_NONE);  // an overflow faults instead of running into a neighbour
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

Machine& machine() {
  thread_local std::unique_ptr<Machine> mine = std::make_unique<Machine>();
  return *mine;
}

[[noreturn]] void fiber_main() {
  Fiber& f = *running;
  Machine& m = *f.machine;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &m.host_bottom, &m.host_size);
#endif
  try {
    m.call(m.body);
  } catch (const std::exception& e) {
    m.failed = true;
    m.error = m.header(f) + "exception: " + e.what();
  } catch (...) {
    m.failed = true;
    m.error = m.header(f) + "exception of an unknown type";
  }
  f.state = State::kExited;
  --m.alive;
  m.suspend(f, true);
  std::abort();  // an exited fiber is never resumed
}

void Machine::start_block() {
  threads = int(block.x * block.y * block.z);
  alive = threads;
  failed = false;
  for (auto& waiting : pending) waiting.clear();
  std::memset(dynamic, kPoison, smem);
  unsigned char* const shared = sx_simt_shared_begin + sizeof sx_simt_shared_begin;
  std::memset(shared, kPoison, size_t(sx_simt_shared_end - shared));
  uint3 t{0, 0, 0};
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = State::kReady;
    f.thread = t;
    auto* low = reinterpret_cast<char*>(f.stack_low);
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(low, kStackBytes);  // what a dropped fiber left behind
    f.fake_stack = nullptr;
#endif
    // Different tops: stacks a power of two apart would all fall into the same cache sets.
    f.context.prepare(low, kStackBytes - size_t(i % 20) * 192, fiber_main);
    if (++t.x == block.x) {
      t.x = 0;
      if (++t.y == block.y) {
        t.y = 0;
        ++t.z;
      }
    }
  }
}

// Each ready thread of [first, last) once, up to where it waits; whether any ran.
bool Machine::run_lanes(int first, int last) {
  bool any = false;
  const bool down = schedule == Schedule::kReversed;
  for (int k = first; k < last && !failed; ++k) {
    Fiber& f = fibers[down ? last - 1 - (k - first) : k];
    if (f.state != State::kReady) continue;
    resume(f);
    any = true;
  }
  return any && !failed;
}

// True if every thread of the block waits at one and the same barrier; they may go on then.
bool Machine::release_barrier() {
  for (int i = 0; i < threads; ++i) {
    if (fibers[i].state != State::kBarrier || !same_place(fibers[i].where, fibers[0].where)) return false;
  }
  for (int i = 0; i < threads; ++i) fibers[i].state = State::kReady;
  return true;
}

void Machine::run_block() {
  start_block();
  const int warps = (threads + kWarp - 1) / kWarp;
  while (alive > 0) {
    if (schedule == Schedule::kFair) {
      while (run_lanes(0, threads)) {
      }
    } else {
      for (int k = 0; k < warps && !failed; ++k) {
        const int w = schedule == Schedule::kReversed ? warps - 1 - k : k;
        while (run_lanes(w * kWarp, std::min(threads, (w + 1) * kWarp))) {
        }
      }
    }
    if (failed) throw std::runtime_error(error);
    if (alive > 0 && !release_barrier()) throw std::runtime_error(stuck());
  }
  if (failed) throw std::runtime_error(error);
}

void Machine::run_grid() {
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  builtins.block_size = {block.x, block.y, block.z};
  builtins.grid_size = {grid.x, grid.y, grid.z};
  for (uint64_t k = 0; k < blocks; ++k) {
    const uint64_t b = schedule == Schedule::kReversed ? blocks - 1 - k : k;
    builtins.block = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
    run_block();
  }
}

// ------------------------------------------------------------------------------------------------ reports
std::string Machine::state_of(const Fiber& f) const {
  switch (f.state) {
    case State::kExited:
      return "has returned";
    case State::kBarrier:
    case State::kCollective:
      return "waits at " + place(f.what, f.where);
    case State::kReady:
      break;
  }
  return "runs";
}

// No thread can run and the block is not done: name one that waits and one it waits for.
std::string Machine::stuck() const {
  for (int i = 0; i < threads; ++i) {
    const Fiber& f = fibers[i];
    if (f.state != State::kCollective) continue;
    const int warp = i / kWarp * kWarp;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (!(f.mask >> lane & 1)) continue;
      const int j = warp + lane;
      const bool here = j < threads && fibers[j].state == State::kCollective && fibers[j].mask == f.mask &&
                        fibers[j].what == f.what && same_place(fibers[j].where, f.where);
      if (here) continue;
      return header(f) + "waits at " + place(f.what, f.where) + ", mask " + hex(f.mask) + ", which lane " +
             std::to_string(lane) + " never reaches: " +
             (j < threads ? "thread " + triple(fibers[j].thread) + " " + state_of(fibers[j])
                          : "the block has only " + std::to_string(threads) + " threads");
    }
  }
  for (int i = 0; i < threads; ++i) {
    const Fiber& f = fibers[i];
    if (f.state != State::kBarrier) continue;
    for (int j = 0; j < threads; ++j) {
      if (fibers[j].state == State::kBarrier && same_place(fibers[j].where, f.where)) continue;
      return header(f) + "waits at " + place(f.what, f.where) + ", which thread " + triple(fibers[j].thread) +
             " never reaches: it " + state_of(fibers[j]);
    }
  }
  return header() + ", block " + triple(builtins.block) + ": internal: stuck for no known reason";
}

#ifdef SX_SIMT_CHECKED
std::string Machine::describe_address(uintptr_t a, size_t n, bool write) const {
  std::string text = std::string(write ? "store" : "load") + " of " + std::to_string(n) + " bytes at " + hex(a);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (write && !b.writable && a >= b.begin && a < b.end) {
      return text + " writes to noted buffer " + std::to_string(i) + " (input, " + std::to_string(b.end - b.begin) +
             " bytes) at byte " + std::to_string(a - b.begin);
    }
  }
  uintptr_t best = UINTPTR_MAX;
  std::string nearest = "no buffer was noted";
  const auto consider = [&](uintptr_t begin, uintptr_t end, const std::string& name) {
    const bool after = a >= begin;
    const uintptr_t gap = !after ? begin - a : a >= end ? a - end : 0;
    if (begin == 0 || gap >= best) return;
    best = gap;
    if (after && a < end) {
      nearest = "it runs over the end of " + name + " by " + std::to_string(a + n - end) + " bytes";
    } else {
      nearest = "it starts " + std::to_string(gap) + " bytes " + (after ? "past the end of " : "before ") + name;
    }
  };
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    consider(b.begin, b.end,
             "noted buffer " + std::to_string(i) + " (" + (b.writable ? "output" : "input") + ", " +
                 std::to_string(b.end - b.begin) + " bytes)");
  }
  const auto dyn = reinterpret_cast<uintptr_t>(dynamic);
  consider(dyn, dyn + smem, "dynamic shared memory (" + std::to_string(smem) + " bytes)");
  const auto shared = reinterpret_cast<uintptr_t>(sx_simt_shared_begin) + sizeof sx_simt_shared_begin;
  const auto shared_end = reinterpret_cast<uintptr_t>(sx_simt_shared_end);
  consider(shared, shared_end, "static shared memory");
  return text + " is out of bounds: " + nearest;
}
#endif

// ------------------------------------------------------------------------------------------------ bounds
void Machine::set_legal_ranges(size_t body_bytes) {
  const auto at = [](const volatile void* p, size_t n) {
    const auto a = reinterpret_cast<uintptr_t>(p);
    return Range{a, a + n};
  };
  std::vector<Range> reads = own_segments().readable, writes = own_segments().writable;
  for (const Buffer& b : buffers) {
    reads.push_back({b.begin, b.end});
    if (b.writable) writes.push_back({b.begin, b.end});
  }
  unsigned char* const shared = sx_simt_shared_begin + sizeof sx_simt_shared_begin;
  for (auto* list : {&reads, &writes}) {
    list->push_back(at(dynamic, smem));
    list->push_back(at(shared, size_t(sx_simt_shared_end - shared)));
  }
  reads.push_back(at(body, body_bytes));
  reads.push_back(at(&builtins, sizeof builtins));
  loads = merged(std::move(reads));
  stores = merged(std::move(writes));
  load_hit = store_hit = Range{};
}

#ifdef SX_SIMT_CHECKED
__attribute__((noinline)) void check_slow(Fiber& f, uintptr_t a, size_t n, bool write) {
  Machine& m = *f.machine;
  const std::vector<Range>& legal = write ? m.stores : m.loads;
  auto next = std::upper_bound(legal.begin(), legal.end(), a, [](uintptr_t x, const Range& r) { return x < r.begin; });
  if (next != legal.begin() && std::prev(next)->holds(a, n)) {
    (write ? m.store_hit : m.load_hit) = *std::prev(next);
    return;
  }
  if (n == 0) return;
  m.fail(f, m.header(f) + m.describe_address(a, n, write));
}

template <bool kWrite>
inline void check(uintptr_t a, size_t n) {
  Fiber* const f = running;
  if (f == nullptr) return;
  if (a - f->stack_low < kStackBytes) return;
  const Range& hit = kWrite ? f->machine->store_hit : f->machine->load_hit;
  if (hit.holds(a, n)) [[likely]]
    return;
  check_slow(*f, a, n, kWrite);
}
#endif

// ------------------------------------------------------------------------------------------------ schedules
std::vector<Schedule> schedules(const char* op) {
  const char* value = std::getenv("SX_SIMT_SCHEDULES");
  const std::string name = value == nullptr || *value == '\0' ? "all" : value;
  if (name == "all") return {Schedule::kFair, Schedule::kGreedy, Schedule::kReversed};
  for (Schedule s : {Schedule::kFair, Schedule::kGreedy, Schedule::kReversed}) {
    if (name == schedule_name(s)) return {s};
  }
  throw std::runtime_error(std::string(op) + ": SX_SIMT_SCHEDULES must be fair, greedy, reversed or all, got '" + name +
                           "'");
}

// The bytes of all writable ranges, one after another.
std::vector<unsigned char> snapshot(const std::vector<Range>& ranges) {
  size_t total = 0;
  for (const Range& r : ranges) total += r.end - r.begin;
  std::vector<unsigned char> bytes(total);
  unsigned char* to = bytes.data();
  for (const Range& r : ranges) {
    std::memcpy(to, reinterpret_cast<const void*>(r.begin), r.end - r.begin);
    to += r.end - r.begin;
  }
  return bytes;
}

void restore(const std::vector<Range>& ranges, const std::vector<unsigned char>& bytes) {
  const unsigned char* from = bytes.data();
  for (const Range& r : ranges) {
    std::memcpy(reinterpret_cast<void*>(r.begin), from, r.end - r.begin);
    from += r.end - r.begin;
  }
}

void demand_equal(const Machine& m, const std::vector<Range>& ranges, const std::vector<unsigned char>& first,
                  Schedule first_schedule) {
  const unsigned char* was = first.data();
  for (const Range& r : ranges) {
    const auto* now = reinterpret_cast<const unsigned char*>(r.begin);
    const size_t n = r.end - r.begin;
    if (std::memcmp(was, now, n) != 0) {
      size_t offset = 0, differing = 0;
      for (size_t i = n; i-- > 0;) {
        if (was[i] != now[i]) {
          offset = i;
          ++differing;
        }
      }
      size_t index = 0, in_buffer = offset, size = n;
      for (size_t i = 0; i < m.buffers.size(); ++i) {
        const Buffer& b = m.buffers[i];
        if (!b.writable || r.begin + offset < b.begin || r.begin + offset >= b.end) continue;
        index = i;
        in_buffer = r.begin + offset - b.begin;
        size = b.end - b.begin;
        break;
      }
      throw std::runtime_error(
          std::string(m.op) + ": simt: kernel " + m.kernel + ": the schedules " + schedule_name(first_schedule) +
          " and " + schedule_name(m.schedule) + " leave different bits in noted buffer " + std::to_string(index) +
          " (output, " + std::to_string(size) + " bytes): first at byte " + std::to_string(in_buffer) + ", " +
          std::to_string(differing) + " bytes differ. A barrier is missing, or the result depends " +
          "on the order of threads");
    }
    was += n;
  }
}

void check_limits(const char* op, dim3 grid, dim3 block, size_t smem) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFFu || threads == 0 || threads > kMaxThreads ||
      block.z > 64 || grid.y > 65535 || grid.z > 65535 || smem > 48 * 1024) {
    throw std::runtime_error(std::string(op) + ": launch out of limits: grid " + std::to_string(grid.x) + "x" +
                             std::to_string(grid.y) + "x" + std::to_string(grid.z) + ", threads " +
                             std::to_string(threads) + ", dynamic shared memory " + std::to_string(smem));
  }
}

struct Busy {
  bool& flag;
  explicit Busy(bool& f) : flag(f) { flag = true; }
  ~Busy() {
    flag = false;
    running = nullptr;
  }
};

}  // namespace

// ------------------------------------------------------------------------------------------------ called by kernels
int lane() { return running->index % kWarp; }

void* dynamic_smem() { return running->machine->dynamic; }

void barrier(const Where& where) {
  Fiber& f = *running;
  f.what = "__syncthreads";
  f.where = where;
  f.state = State::kBarrier;
  f.machine->suspend(f, false);
}

uint64_t collective(const char* what, Collective kind, unsigned mask, uint64_t value, int source, const Where& where) {
  Fiber& f = *running;
  Machine& m = *f.machine;
  const unsigned bit = 1u << (f.index % kWarp);
  const int first = f.index / kWarp * kWarp;
  f.what = what;
  f.where = where;
  f.kind = kind;
  f.mask = mask;
  f.posted = value;
  f.source = source;
  f.state = State::kCollective;
  if (!(mask & bit)) {
    m.fail(f, m.header(f) + place(what, where) + ": mask " + hex(mask) + " does not name the calling lane " +
                  std::to_string(f.index % kWarp));
  }
  if (kind == Collective::kShuffle && !(mask >> source & 1)) {
    m.fail(f, m.header(f) + place(what, where) + ": reads lane " + std::to_string(source) + ", which mask " +
                  hex(mask) + " does not name");
  }
  std::vector<Pending>& waiting = m.pending[f.index / kWarp];
  size_t k = 0;
  while (k < waiting.size() &&
         !(waiting[k].mask == mask && waiting[k].what == what && same_place(waiting[k].where, where))) {
    ++k;
  }
  if (k == waiting.size()) waiting.push_back({what, where, mask, 0});
  waiting[k].arrived |= bit;
  if (waiting[k].arrived != mask) {
    m.suspend(f, false);
    return f.result;
  }
  // The last lane to arrive hands every lane its result, so that a lane which runs ahead cannot overwrite one.
  waiting[k] = waiting.back();
  waiting.pop_back();
  uint64_t ballot = 0;
  if (kind == Collective::kBallot) {
    for (int i = 0; i < kWarp; ++i) {
      if (mask >> i & 1 && m.fibers[first + i].posted != 0) ballot |= uint64_t(1) << i;
    }
  }
  for (int i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    Fiber& other = m.fibers[first + i];
    other.result = kind == Collective::kShuffle ? m.fibers[first + other.source].posted : ballot;
    other.state = State::kReady;
  }
  return f.result;
}

void trap(const Where& where) {
  Fiber& f = *running;
  Machine& m = *f.machine;
  while (!m.printed.empty() && m.printed.back() == '\n') m.printed.pop_back();
  m.fail(f, m.header(f) + place("__trap", where) + (m.printed.empty() ? "" : ": " + m.printed));
}

int device_printf(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  const int n = std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fputs(text, stdout);
  if (running != nullptr) running->machine->printed = text;
  return n;
}

// ------------------------------------------------------------------------------------------------ called by launchers
void run(const char* op, const char* kernel, dim3 grid, dim3 block, size_t smem, const void* body, size_t body_bytes,
         void (*call)(const void*)) {
  Machine& m = machine();
  check_limits(op, grid, block, smem);
  if (m.busy) throw std::runtime_error(std::string(op) + ": simt: a kernel may not launch a kernel");
  if (sx_simt_shared_begin + sizeof sx_simt_shared_begin > sx_simt_shared_end) {
    throw std::runtime_error(std::string(op) + ": simt: the linker did not keep shared_begin before shared_end");
  }
  const Busy busy(m.busy);
  m.make_stacks();
  m.op = op;
  m.kernel = kernel;
  if (m.kernel.size() > 2 && m.kernel.front() == '(' && m.kernel.back() == ')') {
    m.kernel = m.kernel.substr(1, m.kernel.size() - 2);
  }
  m.grid = grid;
  m.block = block;
  m.smem = smem;
  m.body = body;
  m.call = call;
  m.printed.clear();
  // Aligned to 16 bytes and no more, which is all a kernel may rely on.
  m.dynamic_owner = std::make_unique_for_overwrite<unsigned char[]>(smem + 48);
  const auto raw = reinterpret_cast<uintptr_t>(m.dynamic_owner.get());
  m.dynamic = reinterpret_cast<unsigned char*>((raw + 15) / 32 * 32 + 16);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(m.dynamic + smem, size_t(m.dynamic_owner.get() + smem + 48 - (m.dynamic + smem)));
  struct Unpoison {
    void* p;
    size_t n;
    ~Unpoison() { __asan_unpoison_memory_region(p, n); }
  } const unpoison{m.dynamic_owner.get(), smem + 48};
#endif
  m.set_legal_ranges(body_bytes);

  const std::vector<Schedule> plan = schedules(op);
  std::vector<Range> ranges;
  for (const Buffer& b : m.buffers) {
    if (b.writable) ranges.push_back({b.begin, b.end});
  }
  ranges = merged(std::move(ranges));
  std::vector<unsigned char> before, first;
  if (plan.size() > 1) before = snapshot(ranges);
  for (size_t k = 0; k < plan.size(); ++k) {
    m.schedule = plan[k];
    if (k > 0) restore(ranges, before);
    m.run_grid();
    if (k == 0 && plan.size() > 1) first = snapshot(ranges);
    if (k > 0) demand_equal(m, ranges, first, plan[0]);
  }
}

}  // namespace sx_simt

// ------------------------------------------------------------------------------------------------ called by the glue
namespace samplex::simt {

void forget_buffers() { sx_simt::machine().buffers.clear(); }

void note_buffer(const void* data, size_t bytes, bool writable) {
  if (data == nullptr || bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  sx_simt::machine().buffers.push_back({begin, begin + bytes, writable});
}

}  // namespace samplex::simt

// ------------------------------------------------------------------------------------------------ called by g++'s
// checks -fsanitize=kernel-address and -fsanitize=alignment,bounds make g++ call these; no sanitizer runtime is linked.
#ifdef SX_SIMT_CHECKED
extern "C" {

#define SX_SIMT_ACCESS(n)                                                     \
  void __asan_load##n##_noabort(uintptr_t a) { sx_simt::check<false>(a, n); } \
  void __asan_store##n##_noabort(uintptr_t a) { sx_simt::check<true>(a, n); } \
  void __asan_load##n(uintptr_t a) { sx_simt::check<false>(a, n); }           \
  void __asan_store##n(uintptr_t a) { sx_simt::check<true>(a, n); }
SX_SIMT_ACCESS(1)
SX_SIMT_ACCESS(2)
SX_SIMT_ACCESS(4)
SX_SIMT_ACCESS(8)
SX_SIMT_ACCESS(16)
#undef SX_SIMT_ACCESS
void __asan_loadN_noabort(uintptr_t a, size_t n) { sx_simt::check<false>(a, n); }
void __asan_storeN_noabort(uintptr_t a, size_t n) { sx_simt::check<true>(a, n); }
void __asan_loadN(uintptr_t a, size_t n) { sx_simt::check<false>(a, n); }
void __asan_storeN(uintptr_t a, size_t n) { sx_simt::check<true>(a, n); }
void __asan_handle_no_return() {}

#ifdef SX_SIMT_UBSAN
// The layouts g++ emits. `file` and the type names are plain C strings.
struct SxUbsanPlace {
  const char* file;
  uint32_t line, column;
};
struct SxUbsanType {
  uint16_t kind, info;
  char name[1];
};
struct SxUbsanBounds {
  SxUbsanPlace place;
  const SxUbsanType *array, *index;
};
struct SxUbsanMismatch {
  SxUbsanPlace place;
  const SxUbsanType* type;
  unsigned char log_alignment, kind;
};

// -ffile-prefix-map does not reach these names, so cut them to the path inside the project here.
static std::string sx_simt_place(const SxUbsanPlace& place) {
  const std::string file = place.file;
  const size_t cut = std::max(file.rfind("/csrc/") + 1, file.rfind("/tests/") + 1);
  return file.substr(cut) + ":" + std::to_string(place.line) + ": ";
}

void __ubsan_handle_out_of_bounds(SxUbsanBounds* data, uintptr_t index) {
  sx_simt::Fiber* f = sx_simt::running;
  if (f == nullptr) return;
  f->machine->fail(*f, f->machine->header(*f) + sx_simt_place(data->place) + "index " +
                           std::to_string(static_cast<long long>(index)) + " is out of bounds of " + data->array->name);
}
void __ubsan_handle_type_mismatch_v1(SxUbsanMismatch* data, uintptr_t address) {
  sx_simt::Fiber* f = sx_simt::running;
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  if (f == nullptr || address % alignment == 0) return;
  f->machine->fail(*f, f->machine->header(*f) + sx_simt_place(data->place) + "misaligned access: " + data->type->name +
                           " at " + sx_simt::hex(address) + " wants alignment " + std::to_string(alignment));
}
#endif
}
#endif
