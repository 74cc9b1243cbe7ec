// What the backends of exact_sample share: the weight of a class, excluded classes, and inversion in integers.
//
// Weights relative to the largest of their block lie in [0, 1]. As multiples of 2^-54 they are integers whose sum over
// a block fits 64 bits, so running sums are exact in every order: a class of weight zero has no width and is never
// drawn, and a running sum never falls. The weights of blocks are made integers in the same way, with a sum below 2^62.
#pragma once

#include "common/numeric.h"
#include "common/philox.h"
#include "sampler/exact_sample/exact_sample_params.h"
#include "sampler/static_sample/static_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// ------------------------------------------------------------------------------------------------ weights
// What the weight of a class grows with: s, or |s|.
template <typename A>
struct ExactMap {
  A scale;
  bool absolute;

  SX_HOST_DEVICE explicit ExactMap(const ExactLaw& law)
      : scale(A(law.scale)), absolute(law.kind != ExactKind::kSoftmax) {}
  SX_HOST_DEVICE A size(A dot, A bias) const {
    const A s = scale * (dot + bias);
    return absolute && s < A(0) ? -s : s;
  }
};

template <typename A>
SX_HOST_DEVICE constexpr A exact_none() {  // the size of a class that is excluded
  return negative_infinity<A>();
}

// Weights relative to that of the largest size in a block. A nan or +inf among the sizes makes their sum nan.
template <typename A>
struct ExactScale {
  A top;          // finite, or +inf or nan; of a block without a class left the smallest size there is
  A slope, rest;  // quartic: (alpha s^4 + 1) / (alpha top^4 + 1) = slope (s / top)^4 + rest
  bool quartic;
  double alpha;

  SX_HOST_DEVICE ExactScale(const ExactLaw& law, A largest)
      : top(largest), slope(0), rest(0), quartic(law.kind == ExactKind::kQuartic), alpha(law.alpha) {
    if (largest == exact_none<A>()) top = quartic ? A(0) : std::numeric_limits<A>::lowest();
    if (!quartic) return;
    const double power = top_power();
    slope = is_finite(power) ? A(power / (power + 1.0)) : A(1);
    rest = is_finite(power) ? A(1.0 / (power + 1.0)) : A(0);
  }
  SX_HOST_DEVICE double top_power() const {
    const double square = double(top) * double(top);
    return alpha == 0.0 ? 0.0 : alpha * square * square;
  }
  SX_HOST_DEVICE double log_top() const {
    if (!quartic) return double(top);
    const double power = top_power();
    return is_finite(power) ? log1p(power) : log(alpha) + 4.0 * log(double(top));
  }
  SX_HOST_DEVICE A weight(A size) const { return quartic ? power_weight(size) : exp_weight(size); }
  SX_HOST_DEVICE A exp_weight(A size) const { return exp_acc(size - top); }
  SX_HOST_DEVICE A power_weight(A size) const {
    if (size == exact_none<A>()) return A(0);
    const A ratio = top > A(0) ? size / top : size, square = ratio * ratio;  // not 0 for a nan
    return slope * (square * square) + rest;
  }
};

// log of the weight itself, in double.
SX_HOST_DEVICE inline double exact_log_weight(const ExactLaw& law, double size) {
  if (law.kind != ExactKind::kQuartic) return size;
  const double square = size * size, power = law.alpha == 0.0 ? 0.0 : law.alpha * square * square;
  return is_finite(power) || size != size ? log1p(power) : log(law.alpha) + 4.0 * log(size);
}

// log_q of a class: never above 0 by rounding; a nan stays.
SX_HOST_DEVICE inline float exact_log_q(double log_weight, double lse) {
  const double value = log_weight - lse;
  return float(value > 0.0 ? 0.0 : value);
}

// ------------------------------------------------------------------------------------------------ excluded classes
struct ExactList {
  const int64_t* ids;
  int64_t begin, end;

  SX_HOST_DEVICE bool holds(int64_t id) const {
    const int64_t at = lower_bound(ids, begin, end, id);
    return at < end && ids[at] == id;
  }
  // The smallest one that is a class, or -1.
  SX_HOST_DEVICE int64_t first(int64_t num_classes) const {
    return begin < end && ids[begin] < num_classes ? ids[begin] : -1;
  }
  // visit(column) for the excluded classes among [from, from + count).
  template <typename F>
  SX_HOST_DEVICE void columns(int64_t from, int64_t count, const F& visit) const {
    if (begin == end) return;
    for (int64_t at = lower_bound(ids, begin, end, from); at < end && ids[at] < from + count; ++at) {
      // On CUDA it is not checked that the ids ascend.
      if (ids[at] >= from) visit(int(ids[at] - from));
    }
  }
};

// Of row b of this call. Offsets are clamped: on CUDA they have not been checked.
SX_HOST_DEVICE inline ExactList exact_list(const ExactLaw& law, int64_t b) {
  if (law.exclude == nullptr) return {nullptr, 0, 0};
  const int64_t row = law.row + b;
  int64_t begin = row * law.exclude_width, end = begin + law.exclude_width;
  if (law.exclude_offsets != nullptr) {
    begin = law.exclude_offsets[row];
    end = law.exclude_offsets[row + 1];
    begin = begin < 0 ? 0 : begin > law.exclude_size ? law.exclude_size : begin;
    end = end < begin ? begin : end > law.exclude_size ? law.exclude_size : end;
  }
  return {law.exclude, lower_bound(law.exclude, begin, end, 0), end};
}

// log_q of a given class with logit size `size`. Where nothing is left, the first excluded class has probability 1.
SX_HOST_DEVICE inline float exact_given(const ExactLaw& law, const ExactList& list, int64_t id, double size,
                                        double lse) {
  if (lse == negative_infinity<double>() && list.begin < list.end) {
    return id == list.first(law.num_classes) ? 0.0f : negative_infinity<float>();
  }
  return list.holds(id) ? negative_infinity<float>() : exact_log_q(exact_log_weight(law, size), lse);
}

// ------------------------------------------------------------------------------------------------ inversion
// A weight in [0, 1] as an integer; a nan counts as nothing.
template <typename A>
SX_HOST_DEVICE inline uint64_t exact_units(A weight) {
  return weight > A(0) ? uint64_t(weight * A(0x1.0p54)) : 0;
}

// Units of a block whose weight relative to the largest block is `weight`, where `sum` of them lies in [1, 2^60).
SX_HOST_DEVICE inline uint64_t exact_block_units(double weight, double sum) {
  const int exponent = int((bit_copy<uint64_t>(sum) >> 52) & 0x7FF) - 1023;  // 2^exponent <= sum < 2^(exponent + 1)
  const double units = weight * bit_copy<double>(uint64_t(61 - exponent + 1023) << 52);
  return units > 0.0 ? uint64_t(units) : 0;
}

// Random number `which` (0: the block, 1: the class in it) of a draw, as a point in [0, total): u total with
// u = (its first 52 bits + 1/2) / 2^52.
SX_HOST_DEVICE inline uint64_t exact_point(PhiloxKey key, int64_t row, int64_t draw, int which, uint64_t total) {
  const uint64_t bits = philox_u64(philox_at(key, row, 2 * draw + which, 0), 0);
  return mul_high_u64((bits & ~uint64_t(0xFFF)) | 0x800, total);
}

// First class of the block of a place. Clamped: on CUDA the places have not been checked.
SX_HOST_DEVICE inline int64_t exact_first_class(int64_t place, int64_t batch, int64_t num_classes) {
  const int64_t block = place < 0 ? 0 : place / batch, last = (num_classes - 1) / kExactBlock;
  return (block < last ? block : last) * kExactBlock;
}

// First place of running sums that is above `point`; the last one if none is (a row without a distribution).
SX_HOST_DEVICE inline int64_t exact_locate(const uint64_t* running, int64_t count, uint64_t point) {
  int64_t begin = 0, end = count - 1;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (running[middle] > point)
      end = middle;
    else
      begin = middle + 1;
  }
  return begin;
}

}  // namespace SX_ISA_NS
}  // namespace samplex
