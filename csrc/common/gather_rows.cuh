// A row of gather_rows.h, copied by a warp.
#pragma once

#include <cstring>

#include "common/gather_rows.h"
#include "common/warp.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

// Row `at` of the width, of class `id`, to each of the copies. Rows are copied as words of type Word, `words` a row.
template <typename Word>
SX_DEVICE inline void gather_row(const GatherRowsParams& p, int64_t words, int64_t at, int64_t id) {
  const bool drawn = at < p.n, inside = drawn && uint64_t(id) < uint64_t(p.num_classes);
  if (lane_id() == 0 && drawn && p.biases != nullptr) {
    if (p.dtype == DType::kFloat64)
      static_cast<double*>(p.biases)[at] = inside ? load_scalar(p.bias, id, 0.0) : quiet_nan<double>();
    else
      static_cast<float*>(p.biases)[at] = inside ? load_scalar(p.bias, id, 0.0f) : quiet_nan<float>();
  }
  if (lane_id() == 0 && at == 0 && p.arrived != nullptr) p.arrived[0] = 0;
  Word fill;
  memset(&fill, drawn ? 0xFF : 0, sizeof(Word));  // all bits set is a nan of every type
  const Word* from = static_cast<const Word*>(p.weight) + (inside ? id : 0) * words;
  for (int64_t c = lane_id(); c < words; c += kWarpSize) {
    const Word x = inside ? from[c] : fill;
    for (int64_t copy = 0; copy < p.copies; ++copy) static_cast<Word*>(p.rows)[(copy * p.width + at) * words + c] = x;
  }
}

// body(Word{}, words of a row) for the widest words that rows can be copied in.
template <typename F>
inline void with_gather_words(const GatherRowsParams& p, const F& body) {
  const int64_t bytes = p.dim * int64_t(size_of(p.dtype));
  const auto fits = [&](size_t size) {
    return bytes % int64_t(size) == 0 && reinterpret_cast<uintptr_t>(p.weight) % size == 0 &&
           reinterpret_cast<uintptr_t>(p.rows) % size == 0;
  };
  if (fits(16))
    body(uint4{}, bytes / 16);
  else if (fits(4))
    body(uint32_t{}, bytes / 4);
  else
    body(uint16_t{}, bytes / 2);
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
