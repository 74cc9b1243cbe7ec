#include "common/pool.h"

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "common/pages.h"

namespace samplex {
namespace {

constexpr size_t kBlock = size_t(2) << 20;
constexpr size_t kMostUnused = size_t(512) << 20;

struct Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> unused;  // by size
  std::unordered_map<void*, size_t> in_use;
  size_t unused_bytes = 0;
};

// Never destroyed: tensors may die after static objects.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

void* pool_take(size_t bytes) {
  const size_t size = (bytes + kBlock - 1) / kBlock * kBlock;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.unused.lower_bound(size);
    // A block up to twice as large serves; a larger one waits for a larger tensor.
    if (found != p.unused.end() && found->first <= 2 * size) {
      void* data = found->second;
      p.in_use[data] = found->first;
      p.unused_bytes -= found->first;
      p.unused.erase(found);
      return data;
    }
  }
  void* data = std::aligned_alloc(kBlock, size);
  if (data == nullptr) throw std::bad_alloc();
  advise_huge_pages(data, size);
  const std::lock_guard<std::mutex> lock(p.mutex);
  p.in_use[data] = size;
  return data;
}

void pool_give(void* data) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  const auto it = p.in_use.find(data);
  if (it == p.in_use.end()) return;
  const size_t size = it->second;
  p.in_use.erase(it);
  p.unused.emplace(size, data);
  p.unused_bytes += size;
  while (p.unused_bytes > kMostUnused) {
    const auto largest = std::prev(p.unused.end());
    p.unused_bytes -= largest->first;
    std::free(largest->second);
    p.unused.erase(largest);
  }
}

size_t pool_release() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  for (const auto& [size, data] : p.unused) std::free(data);
  p.unused.clear();
  return std::exchange(p.unused_bytes, 0);
}

size_t pool_unused_bytes() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  return p.unused_bytes;
}

}  // namespace samplex
