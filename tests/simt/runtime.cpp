// The SIMT harness: fibers, schedules, barriers. checks.cpp has the bounds. The model is described in
// include/cuda_runtime.h.
//
// Nothing unwinds out of a fiber. An error stores its text and switches to the scheduler for good; the fibers of the
// block are dropped where they stand, which is safe because device code owns nothing, and the scheduler, on the
// caller's own stack, throws std::runtime_error. So a check may fail inside code that the compiler takes to be
// noexcept.
//
// All state is per OS thread: torch may run a backward op on another thread than the forward op.
#include <cstdarg>

#include "machine.h"

#ifdef __x86_64__
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
#endif

namespace sx_simt {

__thread Builtins builtins;
__thread Fiber* running = nullptr;

Machine& machine() {
  thread_local std::unique_ptr<Machine> mine = std::make_unique<Machine>();
  return *mine;
}

namespace {

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

}  // namespace

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

// ------------------------------------------------------------------------------------------------ schedules
namespace {

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
    throw std::runtime_error(std::string(op) + ": launch exceeds the limits: grid " + std::to_string(grid.x) + "x" +
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

// Three barriers in place of one: all have read the last answer, then it is cleared, then all have spoken.
bool barrier_any(bool predicate, const Where& where) {
  static __thread bool any;
  barrier(where);
  any = false;
  barrier(where);
  if (predicate) any = true;
  barrier(where);
  return any;
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
