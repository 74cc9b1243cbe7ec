// Schemas, checks and allocation of the static samplers:
//   uniform_sample, log_uniform_sample, alias_sample             -> ids [B, m] int64, log_q [B, m] float32
//   uniform_log_prob, log_uniform_log_prob, alias_log_prob       ids [B, n] -> [B, n] float32, the same distribution
#include "sampler/static_sample/static_sample_op.h"

#include "common/calls.h"
#include "common/check_key.h"
#include "common/philox.h"
#include "sampler/static_sample/static_sample_math.h"
#include "sampler/static_sample/static_sample_params.h"

namespace samplex {
namespace {

using glue::ScalarType;
using glue::Tensor;

// Beyond this a double no longer holds every class number, and log-uniform would skip classes.
constexpr int64_t kMaxClasses = int64_t(1) << 52;

const char* op_name(StaticLaw law, bool given) {
  switch (law) {
    case StaticLaw::kUniform:
      return given ? "uniform_log_prob" : "uniform_sample";
    case StaticLaw::kLogUniform:
      return given ? "log_uniform_log_prob" : "log_uniform_sample";
    case StaticLaw::kAlias:
      break;
  }
  return given ? "alias_log_prob" : "alias_sample";
}

// `ref` is the tensor whose device the others must share.
StaticSampleParams checked_params(StaticLaw law, bool given, const Tensor& ref, int64_t batch, int64_t num_samples,
                                  int64_t num_classes, const Tensor* table, const Tensor* prefix,
                                  const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  const char* op = op_name(law, given);
  glue::check_value(batch >= 0 && batch <= kPhiloxMaxRows, op, ": batch must be in [0, 2^32], got ", batch);
  if (!given) {
    glue::check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws, op,
                      ": num_samples must be in [0, 2^24], got ", num_samples);
  }
  glue::check_value(num_classes >= 1 && num_classes <= kMaxClasses, op, ": num_classes must be in [1, 2^52], got ",
                    num_classes);
  StaticSampleParams p = {};
  p.law = law;
  p.batch = batch;
  p.num_samples = num_samples;
  p.num_classes = num_classes;
  p.whole = whole_row(law, num_classes);
  if (law == StaticLaw::kAlias) {
    glue::check_tensor(op, "table", *table, {num_classes, 4}, "[C, 4]", ScalarType::Long, ref);
    glue::check_tensor(op, "prefix", *prefix, {num_classes + 1}, "[C + 1]", ScalarType::Long, ref);
  }
  check_exclude(op, p, exclude, exclude_offsets, ref);
  return p;
}

// Data pointers; after the checks, before the outputs.
void take_pointers(StaticSampleParams& p, const Tensor* table, const Tensor* prefix, const MaybeTensor& exclude,
                   const MaybeTensor& exclude_offsets) {
  if (p.law == StaticLaw::kAlias) {
    p.table = reinterpret_cast<const AliasEntry*>(glue::in<int64_t>(*table));
    p.prefix = glue::in<int64_t>(*prefix);
    glue::check_value(reinterpret_cast<uintptr_t>(p.table) % alignof(AliasEntry) == 0, op_name(p.law, p.key == nullptr),
                      ": table must be aligned to ", alignof(AliasEntry), " bytes, got a view that is not");
  }
  take_exclude(p, exclude, exclude_offsets);
}

// Returns scratch of the kernels, to be kept as long as the op.
MaybeTensor run(StaticSampleParams& p, const Tensor& ref, const char* op, bool trusted = false) {
  if (p.exclude != nullptr && glue::ids_on_host(ref) && !trusted) check_exclude_values(op, p);
  MaybeTensor rows;
  if (p.batch * p.num_samples + p.num_scored == 0) return rows;
  if (p.exclude != nullptr) {
    rows = glue::empty(ref, {p.batch, 5}, ScalarType::Long);
    p.rows = reinterpret_cast<StaticRow*>(glue::out<int64_t>(*rows));
  }
  SX_RUN(op, ref, launch_static_sample, p);
  return rows;
}

std::tuple<Tensor, Tensor> sample(StaticLaw law, const Tensor& key, int64_t batch, int64_t num_samples,
                                  int64_t num_classes, const Tensor* table, const Tensor* prefix,
                                  const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  const char* op = op_name(law, false);
  glue::begin_op();
  const bool key_row = glue::check_key(op, key, key);
  StaticSampleParams p =
      checked_params(law, false, key, batch, num_samples, num_classes, table, prefix, exclude, exclude_offsets);
  p.key = glue::in<int64_t>(key);
  p.key_row = key_row;
  take_pointers(p, table, prefix, exclude, exclude_offsets);
  Tensor ids = glue::empty(key, {batch, num_samples}, ScalarType::Long);
  Tensor log_q = glue::empty(key, {batch, num_samples}, ScalarType::Float);
  p.ids = glue::out<int64_t>(ids);
  p.log_q = glue::out<float>(log_q);
  run(p, key, op);
  return {ids, log_q};
}

// For call_static_sample, below.
glue::StaticDraw draw_for_loss(StaticLaw law, const Tensor& key, int64_t num_samples, int64_t num_classes, bool shared,
                               const Tensor* table, const Tensor* prefix, const Tensor& target, bool noise,
                               GatherRowsParams& gather, const MaybeTensor& target_log_q) {
  const char* op = op_name(law, false);
  glue::check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, target);
  const int64_t batch = target.size(0);
  StaticSampleParams p = checked_params(law, false, key, shared ? 1 : batch, num_samples, num_classes, table, prefix,
                                        std::nullopt, std::nullopt);
  p.key = glue::in<int64_t>(key);
  take_pointers(p, table, prefix, std::nullopt, std::nullopt);
  if (!shared && !noise && batch > 0) {
    p.exclude = glue::in<int64_t>(target);
    p.exclude_width = 1;
    p.exclude_size = batch;
  }
  const glue::Shape shape = shared ? glue::Shape{num_samples} : glue::Shape{batch, num_samples};
  Tensor ids = glue::empty(key, shape, ScalarType::Long), log_q = glue::empty(key, shape, ScalarType::Float);
  p.ids = glue::out<int64_t>(ids);
  p.log_q = glue::out<float>(log_q);
  if (target_log_q) {
    p.scored = glue::in<int64_t>(target);
    p.scored_log_q = glue::out<float>(*target_log_q);
    p.num_scored = batch;
  }
  if (shared && gather.n > 0 && glue::backend_of(op, key) != Backend::kCpu) {
    gather.ids = p.ids;
    p.gather = gather;
  }
  return {ids, log_q, run(p, key, op, true)};
}

Tensor log_prob(StaticLaw law, const Tensor& ids, int64_t num_classes, const Tensor* table, const Tensor* prefix,
                const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  const char* op = op_name(law, true);
  glue::begin_op();
  glue::check_tensor(op, "ids", ids, {-1, -1}, "[B, n]", ScalarType::Long, ids);
  StaticSampleParams p =
      checked_params(law, true, ids, ids.size(0), ids.size(1), num_classes, table, prefix, exclude, exclude_offsets);
  p.given = glue::in<int64_t>(ids);
  if (glue::ids_on_host(ids)) {
    for (int64_t i = 0; i < p.batch * p.num_samples; ++i) {
      glue::check_index(p.given[i] >= 0 && p.given[i] < num_classes, op, ": ids must be in [0, ", num_classes,
                        "), got ", p.given[i], " in row ", i / p.num_samples);
    }
  }
  take_pointers(p, table, prefix, exclude, exclude_offsets);
  Tensor log_q = glue::empty(ids, {p.batch, p.num_samples}, ScalarType::Float);
  p.log_q = glue::out<float>(log_q);
  run(p, ids, op);
  return log_q;
}

int64_t table_classes(const char* op, const Tensor& table) {
  glue::check_tensor(op, "table", table, {-1, 4}, "[C, 4]", ScalarType::Long, table);
  glue::check_value(table.size(0) >= 1, op, ": table must be [C, 4] with C >= 1, got ", glue::describe(table));
  return table.size(0);
}

// ------------------------------------------------------------------------------------------------ ops
std::tuple<Tensor, Tensor> uniform_sample(Tensor key, int64_t batch, int64_t num_samples, int64_t num_classes,
                                          MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return sample(StaticLaw::kUniform, key, batch, num_samples, num_classes, nullptr, nullptr, exclude, exclude_offsets);
}

std::tuple<Tensor, Tensor> log_uniform_sample(Tensor key, int64_t batch, int64_t num_samples, int64_t num_classes,
                                              MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return sample(StaticLaw::kLogUniform, key, batch, num_samples, num_classes, nullptr, nullptr, exclude,
                exclude_offsets);
}

std::tuple<Tensor, Tensor> alias_sample(Tensor key, int64_t batch, int64_t num_samples, Tensor table, Tensor prefix,
                                        MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return sample(StaticLaw::kAlias, key, batch, num_samples, table_classes("alias_sample", table), &table, &prefix,
                exclude, exclude_offsets);
}

Tensor uniform_log_prob(Tensor ids, int64_t num_classes, MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return log_prob(StaticLaw::kUniform, ids, num_classes, nullptr, nullptr, exclude, exclude_offsets);
}

Tensor log_uniform_log_prob(Tensor ids, int64_t num_classes, MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return log_prob(StaticLaw::kLogUniform, ids, num_classes, nullptr, nullptr, exclude, exclude_offsets);
}

Tensor alias_log_prob(Tensor ids, Tensor table, Tensor prefix, MaybeTensor exclude, MaybeTensor exclude_offsets) {
  return log_prob(StaticLaw::kAlias, ids, table_classes("alias_log_prob", table), &table, &prefix, exclude,
                  exclude_offsets);
}

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "uniform_sample(Tensor key, SymInt batch, SymInt num_samples, SymInt num_classes, Tensor? exclude=None, "
      "Tensor? exclude_offsets=None) -> (Tensor ids, Tensor log_q)",
      tags);
  m.def(
      "log_uniform_sample(Tensor key, SymInt batch, SymInt num_samples, SymInt num_classes, Tensor? exclude=None, "
      "Tensor? exclude_offsets=None) -> (Tensor ids, Tensor log_q)",
      tags);
  m.def(
      "alias_sample(Tensor key, SymInt batch, SymInt num_samples, Tensor table, Tensor prefix, Tensor? exclude=None, "
      "Tensor? exclude_offsets=None) -> (Tensor ids, Tensor log_q)",
      tags);
  m.def(
      "uniform_log_prob(Tensor ids, SymInt num_classes, Tensor? exclude=None, Tensor? exclude_offsets=None) -> Tensor",
      tags);
  m.def(
      "log_uniform_log_prob(Tensor ids, SymInt num_classes, Tensor? exclude=None, Tensor? exclude_offsets=None) "
      "-> Tensor",
      tags);
  m.def(
      "alias_log_prob(Tensor ids, Tensor table, Tensor prefix, Tensor? exclude=None, Tensor? exclude_offsets=None) "
      "-> Tensor",
      tags);
}

#define SX_STATIC_IMPLS(m)                                          \
  m.impl("uniform_sample", TORCH_BOX(&uniform_sample));             \
  m.impl("log_uniform_sample", TORCH_BOX(&log_uniform_sample));     \
  m.impl("alias_sample", TORCH_BOX(&alias_sample));                 \
  m.impl("uniform_log_prob", TORCH_BOX(&uniform_log_prob));         \
  m.impl("log_uniform_log_prob", TORCH_BOX(&log_uniform_log_prob)); \
  m.impl("alias_log_prob", TORCH_BOX(&alias_log_prob))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_STATIC_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_STATIC_IMPLS(m); }

}  // namespace

namespace glue {

StaticDraw call_static_sample(int64_t law, const Tensor& key, int64_t num_samples, int64_t num_classes, bool shared,
                              const std::optional<Tensor>& table, const std::optional<Tensor>& prefix,
                              const Tensor& target, bool noise, GatherRowsParams& gather,
                              const std::optional<Tensor>& target_log_q) {
  const bool alias = law == int64_t(StaticLaw::kAlias);
  check_value(law >= 0 && law <= int64_t(StaticLaw::kAlias), "static draws: law must be in [0, 2], got ", law);
  check_value(!alias || (table.has_value() && prefix.has_value()),
              "static draws: table and prefix must be given with an alias table, got None");
  return draw_for_loss(StaticLaw(law), key, num_samples, num_classes, shared, alias ? &*table : nullptr,
                       alias ? &*prefix : nullptr, target, noise, gather, target_log_q);
}

}  // namespace glue
}  // namespace samplex
