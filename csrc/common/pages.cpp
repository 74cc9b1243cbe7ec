#include "common/pages.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

#ifdef __linux__
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#endif

namespace samplex {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMoved = size_t(32) << 20;  // bytes that exist twice while a table is moved

size_t whole_pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage; }

struct Table {
  size_t bytes = 0;   // of the mapping
  size_t shared = 0;  // of them from the front, in `file`
  int file = -1;
#ifdef __linux__
  dev_t device = 0;
  ino_t inode = 0;
#endif
};

struct Tables {
  std::mutex mutex;
  std::unordered_map<void*, Table> by_address;
};

// Never destroyed: tensors may die after static objects.
Tables& tables();

#ifdef __linux__
// A program may have closed every descriptor, and the number may name another file now.
bool file_is_open(const Table& table) {
  struct stat found;
  return table.file >= 0 && fstat(table.file, &found) == 0 && found.st_dev == table.device &&
         found.st_ino == table.inode;
}

void close_file(Table& table) {
  if (file_is_open(table)) close(table.file);
  table.file = -1;
}

bool open_file(Table& table) {
  const int file = memfd_create("samplex table", MFD_CLOEXEC);
  if (file < 0) return false;
  struct stat found;
  if (ftruncate(file, off_t(table.bytes)) != 0 || fstat(file, &found) != 0) {
    close(file);
    return false;
  }
  table.file = file;
  table.device = found.st_dev;
  table.inode = found.st_ino;
  return true;
}

// An aligned mapping: one that is a huge page longer, cut at both ends.
char* map_aligned(size_t bytes, int flags, int file, size_t offset) {
  char* const all = static_cast<char*>(
      mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (all == MAP_FAILED) return nullptr;
  const size_t before = -reinterpret_cast<uintptr_t>(all) % kHugePage;
  char* const data = all + before;
  if (before > 0) munmap(all, before);
  munmap(data + bytes, kHugePage - before);
  if (mmap(data, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, off_t(offset)) == MAP_FAILED) {
    munmap(data, bytes);
    return nullptr;
  }
  return data;
}

// Memory behind a fresh part of a file, on huge pages if it can be: asked for explicitly, since the default of most
// systems is small pages for shared memory. A huge page can take the place of a small one, but not of none. False if
// there is no memory: a write would be a SIGBUS.
bool fill_part(int file, char* part, size_t offset, size_t bytes) {
  advise_huge_pages(part, bytes);
  for (size_t at = 0; at < bytes; at += kHugePage) {
    if (posix_fallocate(file, off_t(offset + at), 1) != 0) return false;
  }
  (void)madvise(part, bytes, MADV_COLLAPSE);
  return posix_fallocate(file, off_t(offset), off_t(bytes)) == 0;
}

// The whole table in a file, if the system gives huge pages for it.
void* map_shared(Table& table) {
  if (!open_file(table)) return nullptr;
  char* const data = map_aligned(table.bytes, MAP_SHARED, table.file, 0);
  if (data != nullptr && fill_part(table.file, data, 0, kHugePage) && madvise(data, kHugePage, MADV_COLLAPSE) == 0 &&
      fill_part(table.file, data, 0, table.bytes)) {
    table.shared = table.bytes;
    return data;
  }
  if (data != nullptr) munmap(data, table.bytes);
  close_file(table);
  return nullptr;
}

// Where a child cannot have its private view (the file was closed), it keeps the shared one.
void after_fork_in_child() {
  for (auto& [data, table] : tables().by_address) {
    if (table.shared > 0 && file_is_open(table)) {
      mmap(data, table.shared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, table.file, 0);
    }
    close_file(table);
    table.shared = 0;
  }
  tables().mutex.unlock();
}
#endif

Tables& tables() {
  static Tables* const instance = [] {
    Tables* const made = new Tables;
#ifdef __linux__
    pthread_atfork([] { tables().mutex.lock(); }, [] { tables().mutex.unlock(); }, after_fork_in_child);
#endif
    return made;
  }();
  return *instance;
}

}  // namespace

bool advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (end <= begin) return false;
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  (void)data, (void)bytes;
  return false;
#endif
}

void* table_take(size_t bytes, bool shared) {
  Table table;
  table.bytes = whole_pages(bytes);
  void* data = nullptr;
#ifdef __linux__
  if (shared) data = map_shared(table);
  if (data == nullptr) data = map_aligned(table.bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#else
  (void)shared;
  data = std::aligned_alloc(kHugePage, table.bytes);
  if (data != nullptr) std::memset(data, 0, table.bytes);
#endif
  if (data == nullptr) throw std::bad_alloc();
  if (table.shared == 0) advise_huge_pages(data, table.bytes);
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_address[data] = table;
  return data;
}

void table_give(void* data) {
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_address.find(data);
  if (found == all.by_address.end()) return;
#ifdef __linux__
  munmap(data, found->second.bytes);
  close_file(found->second);
#else
  std::free(data);
#endif
  all.by_address.erase(found);
}

int64_t table_share(void* data) {
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_address.find(data);
  if (found == all.by_address.end()) return -1;
  Table& table = found->second;
#ifdef __linux__
  if (table.shared == 0 && table.file < 0 && !open_file(table)) return 0;
  if (!file_is_open(table)) return int64_t(table.shared);
  // Part by part, so that memory never doubles. The pages move with their page tables: no fault later.
  while (table.shared < table.bytes) {
    const size_t bytes = std::min(kMoved, table.bytes - table.shared);
    char* const from = static_cast<char*>(data) + table.shared;
    char* const part = map_aligned(bytes, MAP_SHARED, table.file, table.shared);
    if (part == nullptr) break;
    if (!fill_part(table.file, part, table.shared, bytes)) {
      munmap(part, bytes);
      break;
    }
    std::memcpy(part, from, bytes);
    if (mremap(part, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, from) == MAP_FAILED) {
      munmap(part, bytes);
      break;
    }
    table.shared += bytes;
  }
  if (table.shared == 0) close_file(table);
#endif
  return int64_t(table.shared);
}

size_t table_shared_bytes(void* data) {
  Tables& all = tables();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_address.find(data);
  return found == all.by_address.end() ? 0 : found->second.shared;
}

}  // namespace samplex
