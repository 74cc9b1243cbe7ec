// Memory hints for large host buffers.
#pragma once

#include <cstddef>

#include "common/export.h"

namespace samplex {

// Asks for huge pages behind the whole pages inside [data, data + bytes): fewer TLB misses when rows are gathered at
// random from a large table. Call it before the first touch. Returns whether the system took the hint.
SX_EXPORT bool advise_huge_pages(void* data, size_t bytes);

}  // namespace samplex
