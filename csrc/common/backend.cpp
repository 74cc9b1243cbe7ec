#include "common/backend.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace samplex {
namespace {

bool available(Backend backend) {
  if (backend == Backend::kCpu) return true;
  if (!built_with_test_backends()) return false;
  return backend == Backend::kSimt || built_with_cuda();
}

Backend parse(const char* name, const char* who) {
  std::string choices;
  for (Backend backend : {Backend::kCpu, Backend::kSimt, Backend::kCuda}) {
    if (!available(backend)) continue;
    if (std::strcmp(name, backend_name(backend)) == 0) return backend;
    choices += (choices.empty() ? "'" : ", '") + std::string(backend_name(backend)) + "'";
  }
  throw std::runtime_error(std::string(who) + " must be one of " + choices + " in this build, got '" + name + "'");
}

std::atomic<int>& current() {
  static std::atomic<int> backend{[] {
    const char* name = std::getenv("SAMPLEX_CPU_BACKEND");
    return static_cast<int>(name == nullptr || *name == '\0' ? Backend::kCpu : parse(name, "SAMPLEX_CPU_BACKEND"));
  }()};
  return backend;
}

std::atomic<bool> ids_left_to_kernels{false};

}  // namespace

void set_device_ids(bool on) {
  if (!built_with_test_backends()) {
    throw std::runtime_error("set_device_ids: needs a build with SAMPLEX_TEST_BACKENDS=ON");
  }
  ids_left_to_kernels.store(on, std::memory_order_relaxed);
}

bool device_ids() { return ids_left_to_kernels.load(std::memory_order_relaxed) && cpu_backend() != Backend::kCpu; }

Backend cpu_backend() { return static_cast<Backend>(current().load(std::memory_order_relaxed)); }

void set_cpu_backend(const char* name) {
  current().store(static_cast<int>(parse(name, "set_cpu_backend: name")), std::memory_order_relaxed);
}

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::kSimt:
      return "simt";
    case Backend::kCuda:
      return "cuda";
    case Backend::kCpu:
      break;
  }
  return "cpu";
}

bool built_with_cuda() {
#ifdef SAMPLEX_WITH_CUDA
  return true;
#else
  return false;
#endif
}

bool built_with_test_backends() {
#ifdef SAMPLEX_TEST_BACKENDS
  return true;
#else
  return false;
#endif
}

bool debug_checks() {
  static const bool on = [] {
    const char* value = std::getenv("SAMPLEX_DEBUG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return on;
}

}  // namespace samplex
