// bigram_sample on the CPU. Every draw waits for three or four scattered reads; doing a block of draws stage by stage
// lets those of the block overlap.
#include "common/parallel.h"
#include "sampler/bigram_sample/bigram_sample_math.h"

namespace samplex {
namespace {

constexpr int kBlock = 64;

struct Pending {
  const BigramRow* row;
  const AliasEntry* entry;
  uint64_t bits1;
  int64_t column, id, position;
  bool unigram;
};

// Draws without excluded ids; the same as bigram_one.
void draw_block(const BigramSampleParams& p, PhiloxKey key, int64_t begin, int count) {
  const StaticSampleParams& u = p.unigram;
  Pending pending[kBlock];
  int64_t b = begin / u.num_samples, draw = begin - b * u.num_samples;
  for (int i = 0; i < count; ++i) {
    Pending& s = pending[i];
    s.row = &p.rows[b];
    const PhiloxWords choice = philox_at(key, b, draw, 0), words = philox_at(key, b, draw, 1);
    s.unigram = from_unigram(*s.row, philox_u64(choice, 0));
    s.bits1 = philox_u64(words, 1);
    s.column = uniform_below(philox_u64(words, 0), s.unigram ? u.num_classes : s.row->count);
    s.entry = (s.unigram ? u.table : p.pair_table + s.row->begin) + s.column;
    __builtin_prefetch(s.entry);
    if (++draw == u.num_samples) {
      draw = 0;
      ++b;
    }
  }
  for (int i = 0; i < count; ++i) {
    Pending& s = pending[i];
    const int64_t chosen = s.bits1 < s.entry->threshold ? s.column : s.entry->alias;
    s.position = s.unigram ? -1 : chosen;
    s.id = chosen;
    if (!in_range(chosen, s.unigram ? u.num_classes : s.row->count)) {
      s.id = kNoClass;
      s.unigram = true;  // nothing to read
    } else if (s.unigram) {
      __builtin_prefetch(p.pair_ids + s.row->begin + s.row->count / 2);
      __builtin_prefetch(u.prefix + chosen);
    } else {
      __builtin_prefetch(p.pair_ids + s.row->begin + chosen);
      __builtin_prefetch(p.pair_prefix + s.row->prefix + chosen);
    }
  }
  for (int i = 0; i < count; ++i) {
    Pending& s = pending[i];
    if (s.unigram) {
      s.position = s.id < 0 ? -1 : pair_position(p, *s.row, s.id);
    } else {
      s.id = pair_at(p, *s.row, s.position).id;
      __builtin_prefetch(u.prefix + s.id);
    }
  }
  for (int i = 0; i < count; ++i) {
    const Pending& s = pending[i];
    u.ids[begin + i] = s.id < 0 ? 0 : s.id;
    u.log_q[begin + i] = bigram_log_q(p, *s.row, s.id, s.position);
  }
}

}  // namespace

namespace cpu {

void launch_bigram_sample(const BigramSampleParams& p) {
  const StaticSampleParams& u = p.unigram;
  parallel_for(u.batch, 256, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) p.rows[b] = bigram_row(p, b);
  });
  PhiloxKey key = {0, 0};
  if (u.key != nullptr) key = {uint64_t(u.key[0]), uint64_t(u.key[1])};
  parallel_for(u.batch * u.num_samples, 1024, [&](int64_t begin, int64_t end) {
    if (u.given != nullptr || u.exclude != nullptr) {
      for (int64_t i = begin; i < end; ++i) bigram_one(p, key, i);
      return;
    }
    for (int64_t i = begin; i < end; i += kBlock) {
      draw_block(p, key, i, int(end - i < kBlock ? end - i : kBlock));
    }
  });
}

}  // namespace cpu
}  // namespace samplex
