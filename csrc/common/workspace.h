// Scratch memory that outlives a call: fresh megabytes cost a page fault per 4 KiB, more than the work done in them.
// One buffer is kept per process, up to kKeep bytes; a concurrent caller gets a separate buffer.
#pragma once

#include <cstddef>

namespace samplex {

class Workspace {
 public:
  explicit Workspace(size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }  // 64-byte aligned

 private:
  static constexpr size_t kKeep = size_t(64) << 20;
  void* data_;
  size_t bytes_;
};

}  // namespace samplex
