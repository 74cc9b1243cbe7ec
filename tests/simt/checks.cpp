// Bounds of the SIMT harness: which memory a kernel may touch, what g++'s checks call, and the texts of the reports.
#include <link.h>

#include "machine.h"

namespace sx_simt {

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

namespace {

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

}  // namespace

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

}  // namespace sx_simt

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
