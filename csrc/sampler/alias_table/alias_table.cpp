#include "sampler/alias_table/alias_table.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/numeric.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {

namespace {

using Wide = unsigned __int128;  // C * weight < 2^64 * 2^62

int64_t to_integer(double weight, int shift) {
  if (weight == 0.0) return 0;
  const double scaled = std::nearbyint(std::ldexp(weight, shift));
  return scaled < 1.0 ? 1 : int64_t(scaled);
}

}  // namespace

void build_alias(const double* weights, int64_t num_classes, int64_t* table, int64_t* prefix) {
  if (num_classes < 1) throw std::runtime_error("build_alias: weights must have at least 1 entry, got 0");
  double largest = 0.0;
  for (int64_t k = 0; k < num_classes; ++k) {
    if (!(weights[k] >= 0.0) || !is_finite(weights[k])) {
      throw std::runtime_error("build_alias: weights must be finite and not negative, got " +
                               std::to_string(weights[k]) + " for class " + std::to_string(k));
    }
    largest = weights[k] > largest ? weights[k] : largest;
  }
  if (largest == 0.0) throw std::runtime_error("build_alias: weights must have a positive sum, got all zero");
  // Two steps, so that neither a sum of huge weights overflows nor one of tiny weights vanishes.
  int exponent = 0;
  std::frexp(largest, &exponent);
  double sum = 0.0;
  for (int64_t k = 0; k < num_classes; ++k) sum += std::ldexp(weights[k], -exponent);
  int sum_exponent = 0;
  std::frexp(sum, &sum_exponent);
  const int shift = 61 - sum_exponent - exponent;

  prefix[0] = 0;
  for (int64_t k = 0; k < num_classes; ++k) prefix[k + 1] = prefix[k] + to_integer(weights[k], shift);
  const int64_t total = prefix[num_classes];
  const auto weight = [&](int64_t k) { return prefix[k + 1] - prefix[k]; };
  const auto scaled = [&](int64_t k) { return Wide(weight(k)) * Wide(num_classes); };
  // Columns hold `total` units; a class of weight w brings C * w. The sums agree exactly, so nothing is left over.
  const Wide full = Wide(total);

  AliasEntry* entries = reinterpret_cast<AliasEntry*>(table);
  for (int64_t k = 0; k < num_classes; ++k) {
    const double log_weight = weight(k) == 0 ? negative_infinity<double>() : exact_log(double(weight(k)));
    entries[k] = {~uint64_t(0), k, log_weight, log_weight};  // a full column, whatever the uniform says
  }
  const auto set = [&](int64_t column, Wide own, int64_t alias) {
    entries[column].threshold = uint64_t((own << 64) / full);
    entries[column].alias = alias;
    entries[column].log_weight_alias = entries[alias].log_weight;
  };
  // Two cursors that only go up: the next light column and the next heavy one. The heavy column's rest fills light
  // columns until it is light itself; then the next heavy column fills that one.
  int64_t light = 0, heavy = 0;
  const auto next_light = [&] {
    while (light < num_classes && scaled(light) >= full) ++light;
  };
  const auto next_heavy = [&] {
    while (heavy < num_classes && scaled(heavy) <= full) ++heavy;
  };
  next_light();
  next_heavy();
  Wide rest = heavy < num_classes ? scaled(heavy) : 0;
  while (heavy < num_classes) {
    if (rest > full) {
      set(light, scaled(light), heavy);
      rest -= full - scaled(light);
      ++light;
      next_light();
    } else {
      const int64_t filled = heavy++;
      next_heavy();
      if (rest == full) {
        rest = heavy < num_classes ? scaled(heavy) : 0;
      } else {
        set(filled, rest, heavy);
        rest = scaled(heavy) - (full - rest);
      }
    }
  }
}

void build_alias_rows(const double* weights, const int64_t* offsets, int64_t rows, int64_t* table, int64_t* prefix) {
  for (int64_t c = 0; c < rows; ++c) {
    const int64_t begin = offsets[c], count = offsets[c + 1] - begin;
    if (count == 0) {
      prefix[begin + c] = 0;
      continue;
    }
    build_alias(weights + begin, count, table + 4 * begin, prefix + begin + c);
  }
}

}  // namespace samplex
