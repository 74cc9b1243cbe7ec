#include "common/selftest.h"

#include <cstring>

#include "common/numeric.h"
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

}  // namespace samplex
