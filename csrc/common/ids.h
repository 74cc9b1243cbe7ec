// Range check of ids on the host, before anything is allocated. Device ids are not read here: that would wait for the
// device; see `debug` in the params for the check inside the kernels.
#pragma once

#include <atomic>

#include "common/glue.h"
#include "common/parallel.h"

namespace samplex::glue {

// allowed(id) says which ids are legal besides [0, num_classes).
template <typename F>
inline void check_ids(const char* op, const char* arg, const Tensor& t, int64_t num_classes, const char* also,
                      const F& allowed) {
  if (!ids_on_host(t)) return;
  const int64_t* ids = static_cast<const int64_t*>(t.const_data_ptr());
  std::atomic<int64_t> bad{-1};
  parallel_for(t.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    bool outside = false;
    for (int64_t i = begin; i < end; ++i) outside |= uint64_t(ids[i]) >= uint64_t(num_classes);
    if (!outside) return;
    for (int64_t i = begin; i < end; ++i) {
      if (uint64_t(ids[i]) >= uint64_t(num_classes) && !allowed(ids[i])) {
        bad.store(i);
        return;
      }
    }
  });
  if (bad.load() >= 0) {
    fail("IndexError: ", op, ": ", arg, " must be in [0, ", num_classes, ")", also, ", got ", ids[bad.load()],
         " at flat position ", bad.load());
  }
}

inline void check_ids(const char* op, const char* arg, const Tensor& t, int64_t num_classes) {
  check_ids(op, arg, t, num_classes, "", [](int64_t) { return false; });
}

// CSR rows: offsets [rows + 1] from 0 to ids.numel(), ascending; ids in [0, num_classes), or any with num_classes < 0.
inline void check_csr(const char* op, const char* arg, const Tensor& offsets, const Tensor& ids, int64_t rows,
                      int64_t num_classes) {
  if (!ids_on_host(offsets)) return;
  const int64_t* at = static_cast<const int64_t*>(offsets.const_data_ptr());
  bool ok = at[0] == 0 && at[rows] == ids.numel();
  for (int64_t b = 0; b < rows; ++b) ok &= at[b] <= at[b + 1];
  check_value(ok, op, ": ", arg, " offsets must ascend from 0 to ", ids.numel(), " = number of ids, got ", at[0], " … ",
              at[rows]);
  if (num_classes >= 0) check_ids(op, arg, ids, num_classes);
}

}  // namespace samplex::glue
