// The CPU bodies of exact_mass and exact_draw, compiled once per instruction set.
#pragma once

#include "common/rows.h"
#include "sampler/exact_sample/exact_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

// size[0 .. kExactBlock) becomes weights relative to the largest; returns their sum and how they are scaled.
template <typename A>
struct ExactSum {
  ExactScale<A> scale;
  A sum;
};
template <typename A>
ExactSum<A> exact_weigh(const ExactLaw& law, A* size, int64_t count) {
  const ExactScale<A> scale(law, Rows<A>::max_of(size, count));
  if (!scale.quartic) return {scale, Rows<A>::exp_sum(size, scale.top, size, count)};
  A lanes[8] = {};  // a fixed order that vectorizes
  for (int64_t c = 0; c < count; ++c) {
    size[c] = scale.weight(size[c]);
    lanes[c % 8] += size[c];
  }
  return {scale, ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))};
}

template <typename A>
void exact_mass_rows(const ExactMassParams& p, int64_t begin, int64_t end) {
  const ExactMap<A> map(p.law);
  const A* bias = static_cast<const A*>(p.bias);
  alignas(64) A size[kExactBlock];
  for (int64_t b = begin; b < end; ++b) {
    const ExactList list = exact_list(p.law, b);
    for (int64_t from = 0; from < p.count; from += kExactBlock) {
      const A* dots = static_cast<const A*>(p.dots) + b * p.count + from;
      const int64_t count = p.count - from < kExactBlock ? p.count - from : kExactBlock;
      if (bias == nullptr)
        for (int64_t c = 0; c < count; ++c) size[c] = map.size(dots[c], A(0));
      else
        for (int64_t c = 0; c < count; ++c) size[c] = map.size(dots[c], bias[from + c]);
      list.columns(p.first + from, count, [&](int column) { size[column] = exact_none<A>(); });
      const ExactSum<A> made = exact_weigh(p.law, size, count);
      p.mass[b * p.blocks + (p.first + from) / kExactBlock] = made.scale.log_top() + log(double(made.sum));
    }
  }
}

// dots[0 .. count) = h . rows of the classes from `first` on.
template <typename T, typename A>
void exact_block_dots(const ExactTable& table, const A* h, int64_t first, int64_t count, A* dots) {
  const T* rows = static_cast<const T*>(table.weight) + first * table.dim;
  if constexpr (sizeof(A) == sizeof(acc_t<T>)) {
    for (int64_t c = 0; c < count; c += 4) {
      const T* four[4];
      A out[4];
      for (int j = 0; j < 4; ++j) four[j] = rows + (c + j < count ? c + j : count - 1) * table.dim;
      Rows<T>::dot4(h, four, table.dim, out);
      for (int j = 0; j < 4 && c + j < count; ++j) dots[c + j] = out[j];
    }
  } else {  // queries in double, a table in less
    for (int64_t c = 0; c < count; ++c) {
      A dot = 0;
      for (int64_t i = 0; i < table.dim; ++i) dot += h[i] * A(to_acc(rows[c * table.dim + i]));
      dots[c] = dot;
    }
  }
}

// Sorted places [begin, end): each run of equal places is done once, by whoever has its first.
template <typename T, typename A>
void exact_draw_range(const ExactDrawParams& p, int64_t begin, int64_t end) {
  const ExactMap<A> map(p.law);
  const PhiloxKey key = {uint64_t(p.key[0]), uint64_t(p.key[1])};
  const int64_t total = p.table.batch * p.num_samples;
  alignas(64) A size[kExactBlock];
  uint64_t running[kExactBlock];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t place = p.sorted[i];
    if (i > 0 && p.sorted[i - 1] == place) continue;
    const int64_t b = p.order[i] / p.num_samples;
    const int64_t first = exact_first_class(place, p.table.batch, p.law.num_classes);
    const int64_t count = p.law.num_classes - first < kExactBlock ? p.law.num_classes - first : kExactBlock;
    const ExactList list = exact_list(p.law, b);
    exact_block_dots<T, A>(p.table, static_cast<const A*>(p.table.hidden) + b * p.table.dim, first, count, size);
    for (int64_t c = 0; c < count; ++c) size[c] = map.size(size[c], load_scalar<A>(p.table.bias, first + c, A(0)));
    list.columns(first, count, [&](int column) { size[column] = exact_none<A>(); });
    exact_weigh(p.law, size, count);
    uint64_t sum = 0;
    for (int64_t c = 0; c < count; ++c) running[c] = sum += exact_units(size[c]);
    // Nothing left of the row: the first excluded class stands in.
    const int64_t alone = p.lse[b] == negative_infinity<double>() ? list.first(p.law.num_classes) : -1;
    for (int64_t j = i; j < total && p.sorted[j] == place; ++j) {
      const int64_t draw = p.order[j] % p.num_samples;
      const uint64_t point = exact_point(key, p.law.row + b, draw, 1, sum);
      p.ids[p.order[j]] = alone >= 0 ? alone : first + exact_locate(running, count, point);
    }
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
