// Schemas, checks and allocation of
//   bigram_sample      -> ids [B, m] int64, log_q [B, m] float32
//   bigram_log_prob    ids [B, n] -> [B, n] float32, the same distribution
#include "common/glue.h"
#include "common/philox.h"
#include "sampler/bigram_sample/bigram_sample_params.h"
#include "sampler/static_sample/static_sample_math.h"
#include "sampler/static_sample/static_sample_op.h"

namespace samplex {
namespace {

using glue::ScalarType;
using glue::Tensor;

struct Tables {
  const Tensor &table, &prefix, &offsets, &pair_ids, &pair_table, &pair_prefix, &backoff;
};

const AliasEntry* entries(const char* op, const char* arg, const Tensor& t) {
  const AliasEntry* data = reinterpret_cast<const AliasEntry*>(glue::in<int64_t>(t));
  glue::check_value(reinterpret_cast<uintptr_t>(data) % alignof(AliasEntry) == 0, op, ": ", arg, " must be aligned to ",
                    alignof(AliasEntry), " bytes, got a view that is not");
  return data;
}

// Everything but key, given ids and outputs. `ref` is the tensor whose device the others must share.
BigramSampleParams checked(const char* op, const Tensor& ref, const Tensor& context, int64_t num_samples,
                           const Tables& t, const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  glue::check_tensor(op, "context", context, {-1}, "[B]", ScalarType::Long, ref);
  glue::check_tensor(op, "table", t.table, {-1, 4}, "[C, 4]", ScalarType::Long, ref);
  glue::check_tensor(op, "offsets", t.offsets, {-1}, "[N + 1]", ScalarType::Long, ref);
  glue::check_tensor(op, "pair_ids", t.pair_ids, {-1}, "[nnz]", ScalarType::Long, ref);
  const int64_t classes = t.table.size(0), contexts = t.offsets.size(0) - 1, pairs = t.pair_ids.size(0);
  glue::check_value(classes >= 1, op, ": table must have at least one class, got ", glue::describe(t.table));
  glue::check_value(contexts >= 0, op, ": offsets must be [N + 1], got ", glue::describe(t.offsets));
  glue::check_tensor(op, "prefix", t.prefix, {classes + 1}, "[C + 1]", ScalarType::Long, ref);
  glue::check_tensor(op, "pair_table", t.pair_table, {pairs, 4}, "[nnz, 4]", ScalarType::Long, ref);
  glue::check_tensor(op, "pair_prefix", t.pair_prefix, {pairs + contexts}, "[nnz + N]", ScalarType::Long, ref);
  glue::check_tensor(op, "backoff", t.backoff, {contexts}, "[N]", ScalarType::Double, ref);
  BigramSampleParams p = {};
  StaticSampleParams& u = p.unigram;
  u.law = StaticLaw::kAlias;
  u.batch = context.size(0);
  u.num_samples = num_samples;
  u.num_classes = classes;
  u.whole = whole_row(StaticLaw::kAlias, classes);
  p.num_contexts = contexts;
  p.num_pairs = pairs;
  glue::check_value(u.batch <= kPhiloxMaxRows, op, ": context must have at most 2^32 rows, got ", u.batch);
  check_exclude(op, u, exclude, exclude_offsets, ref);
  p.context = glue::in<int64_t>(context);
  if (glue::ids_on_host(context)) {
    for (int64_t b = 0; b < u.batch; ++b) {
      glue::check_index(p.context[b] >= -1 && p.context[b] < contexts, op, ": context must be -1 or in [0, ", contexts,
                        "), got ", p.context[b], " in row ", b);
    }
  }
  u.table = entries(op, "table", t.table);
  u.prefix = glue::in<int64_t>(t.prefix);
  p.offsets = glue::in<int64_t>(t.offsets);
  p.pair_ids = glue::in<int64_t>(t.pair_ids);
  p.pair_table = entries(op, "pair_table", t.pair_table);
  p.pair_prefix = glue::in<int64_t>(t.pair_prefix);
  p.backoff = glue::in<double>(t.backoff);
  take_exclude(u, exclude, exclude_offsets);
  return p;
}

void run(const char* op, BigramSampleParams& p, const Tensor& ref) {
  if (p.unigram.exclude != nullptr && glue::ids_on_host(ref)) check_exclude_values(op, p.unigram);
  if (p.unigram.batch == 0 || p.unigram.num_samples == 0) return;
  const Tensor rows = glue::empty(ref, {p.unigram.batch, int64_t(sizeof(BigramRow) / 8)}, ScalarType::Long);
  p.rows = reinterpret_cast<BigramRow*>(glue::out<int64_t>(rows));
  SX_RUN(op, ref, launch_bigram_sample, p);
}

// ------------------------------------------------------------------------------------------------ ops
std::tuple<Tensor, Tensor> bigram_sample(Tensor key, Tensor context, int64_t num_samples, Tensor table, Tensor prefix,
                                         Tensor offsets, Tensor pair_ids, Tensor pair_table, Tensor pair_prefix,
                                         Tensor backoff, MaybeTensor exclude, MaybeTensor exclude_offsets) {
  const char* op = "bigram_sample";
  glue::begin_op();
  glue::check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, key);
  glue::check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws, op, ": num_samples must be in [0, 2^24], got ",
                    num_samples);
  const Tables tables = {table, prefix, offsets, pair_ids, pair_table, pair_prefix, backoff};
  BigramSampleParams p = checked(op, key, context, num_samples, tables, exclude, exclude_offsets);
  p.unigram.key = glue::in<int64_t>(key);
  Tensor ids = glue::empty(key, {p.unigram.batch, num_samples}, ScalarType::Long);
  Tensor log_q = glue::empty(key, {p.unigram.batch, num_samples}, ScalarType::Float);
  p.unigram.ids = glue::out<int64_t>(ids);
  p.unigram.log_q = glue::out<float>(log_q);
  run(op, p, key);
  return {ids, log_q};
}

Tensor bigram_log_prob(Tensor ids, Tensor context, Tensor table, Tensor prefix, Tensor offsets, Tensor pair_ids,
                       Tensor pair_table, Tensor pair_prefix, Tensor backoff, MaybeTensor exclude,
                       MaybeTensor exclude_offsets) {
  const char* op = "bigram_log_prob";
  glue::begin_op();
  glue::check_tensor(op, "ids", ids, {-1, -1}, "[B, n]", ScalarType::Long, ids);
  const Tables tables = {table, prefix, offsets, pair_ids, pair_table, pair_prefix, backoff};
  BigramSampleParams p = checked(op, ids, context, ids.size(1), tables, exclude, exclude_offsets);
  glue::check_value(ids.size(0) == p.unigram.batch, op, ": ids must be [B, n] with B = ", p.unigram.batch, ", got ",
                    glue::describe(ids));
  p.unigram.given = glue::in<int64_t>(ids);
  if (glue::ids_on_host(ids)) {
    for (int64_t i = 0; i < p.unigram.batch * p.unigram.num_samples; ++i) {
      glue::check_index(p.unigram.given[i] >= 0 && p.unigram.given[i] < p.unigram.num_classes, op,
                        ": ids must be in [0, ", p.unigram.num_classes, "), got ", p.unigram.given[i], " in row ",
                        i / p.unigram.num_samples);
    }
  }
  Tensor log_q = glue::empty(ids, {p.unigram.batch, p.unigram.num_samples}, ScalarType::Float);
  p.unigram.log_q = glue::out<float>(log_q);
  run(op, p, ids);
  return log_q;
}

#define SX_BIGRAM_TABLES                                                                                         \
  "Tensor table, Tensor prefix, Tensor offsets, Tensor pair_ids, Tensor pair_table, Tensor pair_prefix, Tensor " \
  "backoff, Tensor? exclude=None, Tensor? exclude_offsets=None) -> "

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("bigram_sample(Tensor key, Tensor context, SymInt num_samples, " SX_BIGRAM_TABLES "(Tensor ids, Tensor log_q)",
        tags);
  m.def("bigram_log_prob(Tensor ids, Tensor context, " SX_BIGRAM_TABLES "Tensor", tags);
}

#define SX_BIGRAM_IMPLS(m)                            \
  m.impl("bigram_sample", TORCH_BOX(&bigram_sample)); \
  m.impl("bigram_log_prob", TORCH_BOX(&bigram_log_prob))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_BIGRAM_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_BIGRAM_IMPLS(m); }

}  // namespace
}  // namespace samplex
