// The check of a chunk of logits [B, n], for the ops that pass over one.
#pragma once

#include "common/glue.h"

namespace samplex::glue {

// On a device there may be space behind each row, so that all rows are aligned; see `logit_chunks` in
// samplex_cuda/chunking.py.
inline void check_logits(const char* op, const char* arg, const Tensor& t, const char* text, ScalarType dtype) {
  check_given(op, arg, t);
  const bool rows = t.dim() == 2 && t.stride(1) == 1 && t.stride(0) >= t.size(1);
  if (rows && t.scalar_type() == dtype && backend_of(op, t) != Backend::kCpu) return;
  check_tensor(op, arg, t, {-1, -1}, text, dtype, t);
}

// As in_any and out_any, up to the last number of the last row.
inline size_t logits_bytes(const Tensor& t) {
  return size_t((t.size(0) - 1) * t.stride(0) + t.size(1)) * size_t(t.element_size());
}
inline const void* in_logits(const Tensor& t) {
  const void* data = t.const_data_ptr();
  note_bytes(t, data, logits_bytes(t), false);
  return data;
}
inline void* out_logits(const Tensor& t) {
  void* data = t.mutable_data_ptr();
  note_bytes(t, data, logits_bytes(t), true);
  return data;
}

}  // namespace samplex::glue
