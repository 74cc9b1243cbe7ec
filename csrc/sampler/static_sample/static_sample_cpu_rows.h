// The CPU body of static_sample, compiled once per instruction set: blocks of draws, each stage a plain loop over the
// block that the compiler vectorizes, Philox by hand. Every lane does the arithmetic of static_sample_math.h.
#pragma once

#include "common/philox_many.h"
#include "sampler/static_sample/static_sample_math.h"

namespace samplex {
inline namespace SX_ISA_NS {
namespace static_sample_rows {

constexpr int kBlock = 128;  // the block's arrays, about 8 KiB, stay in the first cache

struct Block {
  int64_t first;  // flat index of the first draw
  int count;
  uint32_t row[kBlock], position[kBlock];  // Philox counter words 2 and 3 (attempt 0)
  int64_t b[kBlock];
  uint64_t bits0[kBlock], bits1[kBlock];
  double n[kBlock], log_weight[kBlock];
};

inline void philox_block(Block& s, PhiloxKey key) { philox_many(key, s.row, s.position, s.count, s.bits0, s.bits1); }

// The product's high half by one multiply; the same integer as uniform_below.
inline int64_t below(uint64_t bits, int64_t n) {
  return int64_t(uint64_t((static_cast<unsigned __int128>(bits) * uint64_t(n)) >> 64));
}

inline void log_step_block(Block& s) {
  for (int i = 0; i < kBlock; ++i) s.log_weight[i] = exact_log(log_step(s.n[i]));
}

// What attempt 0 gives where nothing is excluded.
inline void first_attempt(const StaticSampleParams& p, Block& s) {
  int64_t* ids = p.ids + s.first;
  switch (p.law) {
    case StaticLaw::kUniform:
      for (int i = 0; i < s.count; ++i) ids[i] = below(s.bits0[i], p.num_classes);
      for (int i = 0; i < s.count; ++i) s.log_weight[i] = 0.0;
      break;
    case StaticLaw::kLogUniform: {
      const double classes = double(p.num_classes), log_classes = p.whole.mass;
      for (int i = 0; i < kBlock; ++i) s.n[i] = uniform63(s.bits0[i]);
      for (int i = 0; i < kBlock; ++i) s.n[i] = log_uniform_n(s.n[i], classes, log_classes);
      for (int i = 0; i < s.count; ++i) ids[i] = int64_t(s.n[i]) - 1;
      log_step_block(s);
      break;
    }
    case StaticLaw::kAlias:
      for (int i = 0; i < s.count; ++i) {
        ids[i] = below(s.bits0[i], p.num_classes);
        __builtin_prefetch(p.table + ids[i]);
      }
      for (int i = 0; i < s.count; ++i) {
        const AliasEntry& entry = p.table[ids[i]];
        const bool own = s.bits1[i] < entry.threshold;
        s.log_weight[i] = own ? entry.log_weight : entry.log_weight_alias;
        const int64_t id = own ? ids[i] : entry.alias;
        const bool known = in_range(id, p.num_classes);
        ids[i] = known ? id : 0;
        if (!known) s.log_weight[i] = quiet_nan<double>();
      }
      break;
  }
}

// The block's draws, a row of the batch at a time: body(row, begin, end).
template <typename F>
inline void for_rows(const StaticSampleParams& p, const Block& s, const F& body) {
  for (int i = 0; i < s.count;) {
    const int64_t rest = (s.b[i] + 1) * p.num_samples - (s.first + i);  // of the row's draws
    const int end = rest < s.count - i ? i + int(rest) : s.count;
    body(p.rows[s.b[i]], i, end);
    i = end;
  }
}

// Uniform draws past excluded ids never meet one, and share one log_q a row.
inline void draw_uniform_excluding(const StaticSampleParams& p, const Block& s) {
  int64_t* const ids = p.ids + s.first;
  float* const log_q = p.log_q + s.first;
  for_rows(p, s, [&](const StaticRow& row, int begin, int end) {
    const float log_q_of_row = row.left == 0 ? 0.0f : float(0.0 - row.log_mass);
    if (row.left == 0) {
      for (int i = begin; i < end; ++i) ids[i] = stand_in(p, row);
    } else if (row.end - row.begin == 1) {  // the target alone, nearly always
      const int64_t out = p.exclude[row.begin], left = row.left;
      for (int i = begin; i < end; ++i) {
        const int64_t r = below(s.bits0[i], left);
        ids[i] = r + int64_t(r >= out);
      }
    } else {
      for (int i = begin; i < end; ++i) ids[i] = uniform_skip(p, row, below(s.bits0[i], row.left));
    }
    for (int i = begin; i < end; ++i) log_q[i] = log_q_of_row;
  });
}

// Draws [begin, end) of a row again where they are excluded.
inline void redraw_excluded(const StaticSampleParams& p, const StaticRow& row, PhiloxKey key, Block& s, int begin,
                            int end) {
  int64_t* const ids = p.ids + s.first;
  if (row.end - row.begin == 1) {  // the target alone, nearly always: one comparison for many draws
    const int64_t out = p.exclude[row.begin];
    int64_t met = 0;
    for (int i = begin; i < end; ++i) met += int64_t(ids[i] == out);
    if (met == 0) return;
  }
  for (int i = begin; i < end; ++i) {
    if (!is_excluded(p, row, ids[i])) continue;
    const StaticDraw drawn = draw_excluding(p, row, key, s.b[i], s.first + i - s.b[i] * p.num_samples, 1);
    ids[i] = class_of(drawn);
    s.log_weight[i] = drawn.log_weight;
  }
}

inline void draw_block(const StaticSampleParams& p, const StaticRow& whole, PhiloxKey key, Block& s) {
  philox_block(s, key);
  if (p.law == StaticLaw::kUniform && p.exclude != nullptr) return draw_uniform_excluding(p, s);
  first_attempt(p, s);
  int64_t* const ids = p.ids + s.first;
  float* const log_q = p.log_q + s.first;
  if (p.exclude == nullptr) {
    const double log_mass = whole.log_mass;
    for (int i = 0; i < s.count; ++i) log_q[i] = float(s.log_weight[i] - log_mass);
    return;
  }
  for_rows(p, s, [&](const StaticRow& row, int begin, int end) {
    if (row.left == 0) {
      for (int i = begin; i < end; ++i) {
        ids[i] = stand_in(p, row);
        log_q[i] = 0.0f;
      }
      return;
    }
    redraw_excluded(p, row, key, s, begin, end);
    const double log_mass = row.log_mass;
    for (int i = begin; i < end; ++i) log_q[i] = float(s.log_weight[i] - log_mass);
  });
}

// Draws (or given ids) begin <= i < end of the flat [B, m] result.
inline void sample_range(const StaticSampleParams& p, int64_t begin, int64_t end) {
  const StaticRow whole = whole_row_in_kernel(p);
  if (p.given != nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / p.num_samples;
      p.log_q[i] = log_q_of(p, p.exclude != nullptr ? p.rows[b] : whole, p.given[i]);
    }
    return;
  }
  const PhiloxKey key = philox_key(p.key, p.key_row);
  int64_t b = begin / p.num_samples, draw = begin - b * p.num_samples;
  Block s = {};  // zeroed: stages run over whole blocks, and lanes past `count` must hold harmless numbers
  for (s.first = begin; s.first < end; s.first += s.count) {
    s.count = int(end - s.first < kBlock ? end - s.first : kBlock);
    for (int i = 0; i < s.count; ++i) {
      s.b[i] = b;
      s.row[i] = uint32_t(b);
      s.position[i] = uint32_t(draw) << 8;
      if (++draw == p.num_samples) {
        draw = 0;
        ++b;
      }
    }
    draw_block(p, whole, key, s);
  }
}

}  // namespace static_sample_rows
}  // namespace SX_ISA_NS
}  // namespace samplex
