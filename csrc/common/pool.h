// Large host buffers that are used again: a fresh 40 MB tensor costs ten thousand page faults, more than the work that
// fills it. Blocks are multiples of 2 MiB, ask for huge pages, and go back to the pool when their tensor dies.
#pragma once

#include <cstddef>

#include "common/export.h"

namespace samplex {

constexpr size_t kPoolSmallest = size_t(1) << 18;  // below this, ordinary memory is as good

void* pool_take(size_t bytes);  // throws std::bad_alloc
void pool_give(void* data);

// Gives the unused blocks back to the system; returns how many bytes they were.
SX_EXPORT size_t pool_release();
SX_EXPORT size_t pool_unused_bytes();

}  // namespace samplex
