#include "common/selftest.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "common/numeric.h"
#include "common/parallel.h"
#include "common/philox.h"

namespace samplex {

void selftest_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
  const PhiloxWords result = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  std::memcpy(words, result.w, sizeof(result.w));
}

bool selftest_exact_math(const char* name, const double* x, double* result, int64_t count) {
  double (*function)(double) = nullptr;
  if (std::strcmp(name, "exp") == 0) function = &exact_exp;
  if (std::strcmp(name, "log") == 0) function = &exact_log;
  if (std::strcmp(name, "log1p") == 0) function = &exact_log1p;
  if (function == nullptr) return false;
  for (int64_t i = 0; i < count; ++i) result[i] = function(x[i]);
  return true;
}

void selftest_loop(const SelftestLoop& loop, int64_t* visits) {
  const auto body = [&](int64_t begin, int64_t end) {
    const auto here = [&](int64_t item) { return begin <= item && item < end; };
    const auto time = std::chrono::microseconds(loop.microseconds);
    if (here(loop.sleep_at)) std::this_thread::sleep_for(time);
    for (const auto from = std::chrono::steady_clock::now(); here(loop.spin_at);) {
      if (std::chrono::steady_clock::now() - from > time) break;
    }
    if (here(loop.throw_at)) throw std::runtime_error("selftest_loop: this call throws");
    const auto visit = [&](int64_t from, int64_t until) {
      for (int64_t i = begin + from; i < begin + until; ++i) ++visits[i];
    };
    if (loop.nested) return parallel_for(end - begin, 1, visit);
    visit(0, end - begin);
  };
  if (loop.shared) return parallel_for_shared(loop.n, loop.grain, body);
  parallel_for(loop.n, loop.grain, body);
}

}  // namespace samplex
