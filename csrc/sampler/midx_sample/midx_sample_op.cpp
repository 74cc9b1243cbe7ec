// Schemas, checks and allocation of
//   midx_sample      -> ids [B, m] int64, log_q [B, m] float32
//   midx_log_prob    ids [B, n] -> [B, n] float32, the same distribution
#include "common/glue.h"
#include "common/ids.h"
#include "common/philox.h"
#include "sampler/midx_sample/midx_sample_params.h"
#include "sampler/static_sample/static_sample_math.h"
#include "sampler/static_sample/static_sample_op.h"

namespace samplex {
namespace {

using glue::ScalarType;
using glue::Tensor;

struct Tables {
  const Tensor &weights, &mass, &omega, &cell, &place, &members, &starts;
  const MaybeTensor& prefix;
};

// Everything but key, given ids and outputs. `ref` is the tensor whose device the others must share.
MidxSampleParams checked(const char* op, const Tensor& ref, int64_t num_samples, const Tables& t, double epsilon,
                         const MaybeTensor& exclude, const MaybeTensor& exclude_offsets) {
  glue::check_tensor(op, "weights", t.weights, {-1, 2, -1}, "[B, 2, K]", ScalarType::Float, ref);
  glue::check_tensor(op, "cell", t.cell, {-1}, "[C]", ScalarType::Int, ref);
  const int64_t batch = t.weights.size(0), codes = t.weights.size(2), classes = t.cell.size(0);
  glue::check_value(codes >= 1 && codes <= kMidxMostCodes, op, ": weights must have K in [1, ", kMidxMostCodes,
                    "] codes, got ", glue::describe(t.weights));
  glue::check_value(classes >= 1 && classes < (int64_t(1) << 31), op, ": cell must have C in [1, 2^31) classes, got ",
                    glue::describe(t.cell));
  glue::check_value(batch <= kPhiloxMaxRows, op, ": weights must have at most 2^32 rows, got ", batch);
  glue::check_value(epsilon >= 0.0 && epsilon <= 1.0, op, ": epsilon must be in [0, 1], got ", epsilon);
  glue::check_tensor(op, "mass", t.mass, {batch, codes}, "[B, K]", ScalarType::Float, ref);
  glue::check_tensor(op, "omega", t.omega, {codes, codes}, "[K, K]", ScalarType::Float, ref);
  glue::check_tensor(op, "place", t.place, {classes}, "[C]", ScalarType::Int, ref);
  glue::check_tensor(op, "members", t.members, {classes}, "[C]", ScalarType::Int, ref);
  glue::check_tensor(op, "starts", t.starts, {codes * codes + 1}, "[K * K + 1]", ScalarType::Int, ref);
  if (t.prefix.has_value())
    glue::check_tensor(op, "prefix", *t.prefix, {classes + 1}, "[C + 1]", ScalarType::Long, ref);
  MidxSampleParams p = {};
  StaticSampleParams& u = p.uniform;
  u.law = StaticLaw::kUniform;
  u.batch = batch;
  u.num_samples = num_samples;
  u.num_classes = classes;
  u.whole = whole_row(StaticLaw::kUniform, classes);
  check_exclude(op, u, exclude, exclude_offsets, ref);
  p.codes = codes;
  p.weights = glue::in<float>(t.weights);
  p.mass = glue::in<float>(t.mass);
  p.omega = glue::in<float>(t.omega);
  p.cell = glue::in<int32_t>(t.cell);
  p.place = glue::in<int32_t>(t.place);
  p.members = glue::in<int32_t>(t.members);
  p.starts = glue::in<int32_t>(t.starts);
  p.prefix = glue::in<int64_t>(t.prefix);
  p.epsilon = epsilon;
  take_exclude(u, exclude, exclude_offsets);
  if (u.exclude != nullptr && glue::ids_on_host(ref)) check_exclude_values(op, u);
  return p;
}

void run(const char* op, MidxSampleParams& p, const Tensor& ref) {
  if (p.uniform.batch == 0 || p.uniform.num_samples == 0) return;
  Tensor gone;
  if (p.uniform.exclude != nullptr) {
    gone = glue::empty(ref, {p.uniform.exclude_size, int64_t(sizeof(MidxGone) / 8)}, ScalarType::Long);
    p.gone = reinterpret_cast<MidxGone*>(glue::out<int64_t>(gone));
  }
  SX_RUN(op, ref, launch_midx_sample, p);
}

// ------------------------------------------------------------------------------------------------ ops
std::tuple<Tensor, Tensor> midx_sample(Tensor key, int64_t num_samples, Tensor weights, Tensor mass, Tensor omega,
                                       Tensor cell, Tensor place, Tensor members, Tensor starts, MaybeTensor prefix,
                                       double epsilon, bool stratified, MaybeTensor exclude,
                                       MaybeTensor exclude_offsets) {
  const char* op = "midx_sample";
  glue::begin_op();
  glue::check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, key);
  glue::check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws, op, ": num_samples must be in [0, 2^24], got ",
                    num_samples);
  const Tables tables = {weights, mass, omega, cell, place, members, starts, prefix};
  MidxSampleParams p = checked(op, key, num_samples, tables, epsilon, exclude, exclude_offsets);
  p.stratified = stratified;
  p.uniform.key = glue::in<int64_t>(key);
  Tensor ids = glue::empty(key, {p.uniform.batch, num_samples}, ScalarType::Long);
  Tensor log_q = glue::empty(key, {p.uniform.batch, num_samples}, ScalarType::Float);
  p.uniform.ids = glue::out<int64_t>(ids);
  p.uniform.log_q = glue::out<float>(log_q);
  run(op, p, key);
  return {ids, log_q};
}

Tensor midx_log_prob(Tensor ids, Tensor weights, Tensor mass, Tensor omega, Tensor cell, Tensor place, Tensor members,
                     Tensor starts, MaybeTensor prefix, double epsilon, MaybeTensor exclude,
                     MaybeTensor exclude_offsets) {
  const char* op = "midx_log_prob";
  glue::begin_op();
  glue::check_tensor(op, "ids", ids, {-1, -1}, "[B, n]", ScalarType::Long, ids);
  const Tables tables = {weights, mass, omega, cell, place, members, starts, prefix};
  MidxSampleParams p = checked(op, ids, ids.size(1), tables, epsilon, exclude, exclude_offsets);
  glue::check_value(ids.size(0) == p.uniform.batch, op, ": ids must be [B, n] with B = ", p.uniform.batch, ", got ",
                    glue::describe(ids));
  glue::check_ids(op, "ids", ids, p.uniform.num_classes);
  p.uniform.given = glue::in<int64_t>(ids);
  Tensor log_q = glue::empty(ids, {p.uniform.batch, p.uniform.num_samples}, ScalarType::Float);
  p.uniform.log_q = glue::out<float>(log_q);
  run(op, p, ids);
  return log_q;
}

#define SX_MIDX_TABLES                                                                                            \
  "Tensor weights, Tensor mass, Tensor omega, Tensor cell, Tensor place, Tensor members, Tensor starts, Tensor? " \
  "prefix, float epsilon, "

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("midx_sample(Tensor key, SymInt num_samples, " SX_MIDX_TABLES
        "bool stratified=False, Tensor? exclude=None, Tensor? exclude_offsets=None) -> (Tensor ids, Tensor log_q)",
        tags);
  m.def("midx_log_prob(Tensor ids, " SX_MIDX_TABLES "Tensor? exclude=None, Tensor? exclude_offsets=None) -> Tensor",
        tags);
}

#define SX_MIDX_IMPLS(m)                          \
  m.impl("midx_sample", TORCH_BOX(&midx_sample)); \
  m.impl("midx_log_prob", TORCH_BOX(&midx_log_prob))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_MIDX_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_MIDX_IMPLS(m); }

}  // namespace
}  // namespace samplex
