// Memory of large host buffers: hints, and tables that forked processes do not slow down.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/export.h"

namespace samplex {

// Asks for huge pages behind the whole pages inside [data, data + bytes): fewer TLB misses when rows are gathered at
// random from a large table. Call it before the first touch. Returns whether the system took the hint.
SX_EXPORT bool advise_huge_pages(void* data, size_t bytes);

// Zeroed memory for a table, in a separate mapping that starts on 2 MiB and asks for huge pages. Throws
// std::bad_alloc.
//
// After a fork, the first write to each private page copies it: with random rows that is a page fault for nearly every
// row of a step, and twice the memory in the end. Shared pages are not copied. A forked child gets a private view of
// them: it reads what the parent has written last, and its own writes stay with it. With `shared` the memory is of that
// kind if the system has it on huge pages; otherwise it is private.
SX_EXPORT void* table_take(size_t bytes, bool shared);
SX_EXPORT void table_give(void* data);

// Moves a private table to shared memory at the same address, on small pages if there are no huge ones; nobody may
// write to it meanwhile. Returns how many bytes are shared now: all, or fewer where the system has no more (0 where it
// has no such memory); -1 for memory of another kind.
SX_EXPORT int64_t table_share(void* data);
SX_EXPORT size_t table_shared_bytes(void* data);

}  // namespace samplex
