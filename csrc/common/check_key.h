// The key of an op that draws rows: what its tensor may look like.
#pragma once

#include "common/glue.h"

namespace samplex::glue {

// Whether `key` [2] (seed, offset) or [3] has the third number, that of the first row in a larger batch.
inline bool check_key(const char* op, const Tensor& key, const Tensor& ref) {
  const bool with_row = key.dim() == 1 && key.size(0) == 3;
  check_tensor(op, "key", key, {with_row ? 3 : 2}, "[2] or [3]", ScalarType::Long, ref);
  return with_row;
}

}  // namespace samplex::glue
