#include "common/workspace.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

namespace samplex {
namespace {

std::mutex mutex;
void* kept = nullptr;
size_t kept_bytes = 0;

}  // namespace

Workspace::Workspace(size_t bytes) : data_(nullptr), bytes_((bytes + 4095) / 4096 * 4096) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (kept_bytes >= bytes_) {
      data_ = std::exchange(kept, nullptr);
      bytes_ = std::exchange(kept_bytes, 0);
    }
  }
  if (data_ == nullptr && bytes_ > 0) data_ = std::aligned_alloc(4096, bytes_);
  if (data_ == nullptr && bytes_ > 0) throw std::bad_alloc();
}

Workspace::~Workspace() {
  if (bytes_ <= kKeep) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (bytes_ > kept_bytes) {
      std::swap(kept, data_);
      kept_bytes = bytes_;
    }
  }
  std::free(data_);
}

}  // namespace samplex
