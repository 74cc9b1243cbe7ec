// Schemas, checks and allocation of the tree's ops:
//   tree_project       features [B, K] -> what the nodes see, [B, k] float32
//   tree_sample        -> ids [B, m] int64, log_q [B, m] float32
//   tree_log_prob      ids [B, n] -> [B, n] float32, the same distribution
//   tree_sample_and_score  features [B, K], ids [B] or [B, n] -> draws, log_q [B, m], scores as ids: the three in one
//   call tree_log_prob_all  -> [B, C] float32 tree_topk          -> log_p [B, k] float32, ids [B, k] int64
#include "sampler/tree/tree_op.h"

#include <tuple>

#include "common/check_key.h"
#include "common/ids.h"
#include "common/philox.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Excluded leaves: rows ascending, -1 for none; values are checked on the CPU only.
MaybeTensor take_exclude(const char* op, TreeSampleParams& p, const Tensor& x, const MaybeTensor& exclude,
                         const MaybeTensor& offsets) {
  check_value(exclude.has_value() || !offsets.has_value(), op, ": exclude_offsets needs exclude, got None");
  if (!exclude) return std::nullopt;
  if (offsets) {
    check_tensor(op, "exclude", *exclude, {-1}, "[nnz]", ScalarType::Long, x);
    check_tensor(op, "exclude_offsets", *offsets, {p.batch + 1}, "[B + 1]", ScalarType::Long, x);
  } else {
    check_tensor(op, "exclude", *exclude, {p.batch, -1}, "[B, P]", ScalarType::Long, x);
    p.exclude_width = exclude->size(1);
  }
  p.exclude_size = exclude->numel();
  if (p.exclude_size == 0) return std::nullopt;
  p.exclude = in<int64_t>(*exclude);
  p.exclude_offsets = offsets ? in<int64_t>(*offsets) : nullptr;
  if (ids_on_host(x)) {
    const int64_t leaves = int64_t(1) << p.tree.depth;
    if (offsets) {
      bool ok = p.exclude_offsets[0] == 0 && p.exclude_offsets[p.batch] == p.exclude_size;
      for (int64_t b = 0; b < p.batch; ++b) ok &= p.exclude_offsets[b] <= p.exclude_offsets[b + 1];
      check_value(ok, op, ": exclude_offsets must ascend from 0 to ", p.exclude_size, ", got ", p.exclude_offsets[0],
                  " … ", p.exclude_offsets[p.batch]);
    }
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t begin = offsets ? p.exclude_offsets[b] : b * p.exclude_width;
      const int64_t end = offsets ? p.exclude_offsets[b + 1] : begin + p.exclude_width;
      for (int64_t i = begin; i < end; ++i) {
        check_index(p.exclude[i] >= -1 && p.exclude[i] < leaves && (i == begin || p.exclude[i - 1] <= p.exclude[i]), op,
                    ": exclude must be leaves in [0, ", leaves, ") or -1, ascending in each row, got ", p.exclude[i],
                    " in row ", b);
      }
    }
  }
  Tensor left = empty(x, {p.exclude_size, p.tree.depth + 1}, ScalarType::Double);
  p.left = out<double>(left);
  return left;
}

Tensor project_features(const char* op, const Tensor& features, const Tensor& mean, const Tensor& projection) {
  check_tensor(op, "projection", projection, {-1, -1}, "[K, k]", ScalarType::Float, features);
  TreeProjectParams p{};
  p.features = projection.size(0);
  p.dim = projection.size(1);
  check_tensor(op, "features", features, {-1, p.features}, "[B, K]", ScalarType::Float, features);
  check_tensor(op, "mean", mean, {p.features}, "[K]", ScalarType::Float, features);
  p.batch = features.size(0);
  p.x = in<float>(features);
  p.mean = in<float>(mean);
  p.projection = in<float>(projection);
  Tensor z = empty(features, {p.batch, p.dim}, ScalarType::Float);
  p.z = out<float>(z);
  if (p.batch > 0 && p.dim > 0) SX_RUN(op, features, launch_tree_project, p);
  return z;
}

Tensor tree_project(Tensor features, Tensor mean, Tensor projection) {
  begin_op();
  return project_features("tree_project", features, mean, projection);
}

void check_draws(const char* op, const TreeSampleParams& p, const Tensor& x) {
  check_value(p.batch <= kPhiloxMaxRows, op, ": x must have at most 2^32 rows, got ", describe(x));
  check_value(p.num_samples >= 0 && p.num_samples <= kPhiloxMaxDraws, op, ": num_samples must be in [0, 2^24], got ",
              p.num_samples);
}

std::tuple<Tensor, Tensor> run_draws(const char* op, TreeSampleParams p, const Tensor& key, const Tensor& x) {
  p.key = in<int64_t>(key);
  p.key_row = key.size(0) == 3;
  Tensor ids = empty(x, {p.batch, p.num_samples}, ScalarType::Long);
  Tensor log_q = empty(x, {p.batch, p.num_samples}, ScalarType::Float);
  p.ids = out<int64_t>(ids);
  p.log_q = out<float>(log_q);
  if (p.batch > 0 && p.num_samples > 0) SX_RUN(op, x, launch_tree_sample, p);
  return {ids, log_q};
}

Tensor run_scores(const char* op, TreeSampleParams p, const Tensor& ids, const Tensor& x) {
  p.num_samples = ids.dim() == 1 ? 1 : ids.size(1);
  p.given = in<int64_t>(ids);
  Tensor log_q =
      ids.dim() == 1 ? empty(x, {p.batch}, ScalarType::Float) : empty(x, {p.batch, p.num_samples}, ScalarType::Float);
  p.log_q = out<float>(log_q);
  if (p.batch > 0 && p.num_samples > 0) SX_RUN(op, x, launch_tree_sample, p);
  return log_q;
}

std::tuple<Tensor, Tensor> tree_sample(Tensor key, Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf,
                                       int64_t num_samples, MaybeTensor exclude, MaybeTensor exclude_offsets,
                                       MaybeTensor base_table, MaybeTensor base_prefix, double base_weight) {
  constexpr const char* op = "tree_sample";
  begin_op();
  check_key(op, key, x);
  TreeSampleParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, x, base_table, base_prefix, base_weight);
  p.batch = x.size(0);
  p.num_samples = num_samples;
  check_draws(op, p, x);
  const MaybeTensor left = take_exclude(op, p, x, exclude, exclude_offsets);
  p.x = in<float>(x);
  return run_draws(op, p, key, x);
}

Tensor tree_log_prob(Tensor x, Tensor ids, Tensor nodes, Tensor leaf_class, Tensor class_leaf, MaybeTensor exclude,
                     MaybeTensor exclude_offsets, MaybeTensor base_table, MaybeTensor base_prefix, double base_weight) {
  constexpr const char* op = "tree_log_prob";
  begin_op();
  TreeSampleParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, x, base_table, base_prefix, base_weight);
  p.batch = x.size(0);
  check_tensor(op, "ids", ids, {p.batch, -1}, "[B, n]", ScalarType::Long, x);
  check_ids(op, "ids", ids, p.tree.num_classes);
  const MaybeTensor left = take_exclude(op, p, x, exclude, exclude_offsets);
  p.x = in<float>(x);
  return run_scores(op, p, ids, x);
}

// What a step of training asks for, in one call: at a batch of hundreds of rows the calls cost as much as the walk.
std::tuple<Tensor, Tensor, Tensor> tree_sample_and_score(Tensor key, Tensor features, Tensor mean, Tensor projection,
                                                         Tensor nodes, Tensor leaf_class, Tensor class_leaf,
                                                         int64_t num_samples, Tensor ids, MaybeTensor base_table,
                                                         MaybeTensor base_prefix, double base_weight) {
  constexpr const char* op = "tree_sample_and_score";
  begin_op();
  check_key(op, key, features);
  TreeSampleParams p{};
  p.tree = tree_table_of(op, "projection", projection, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, features, base_table, base_prefix, base_weight);
  check_value(features.dim() == 2, op, ": features must be [B, K] float32, got ", describe(features));
  p.batch = features.size(0);
  p.num_samples = num_samples;
  check_draws(op, p, features);
  check_tensor(op, "ids", ids, ids.dim() == 1 ? Shape{p.batch} : Shape{p.batch, -1}, "[B] or [B, n]", ScalarType::Long,
               features);
  check_ids(op, "ids", ids, p.tree.num_classes);
  const Tensor x = project_features(op, features, mean, projection);
  p.x = in<float>(x);
  const Tensor scores = run_scores(op, p, ids, x);
  auto [draws, log_q] = run_draws(op, p, key, x);
  return {draws, log_q, scores};
}

Tensor tree_log_prob_all(Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, MaybeTensor base_table,
                         MaybeTensor base_prefix, double base_weight) {
  constexpr const char* op = "tree_log_prob_all";
  begin_op();
  TreeAllParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, x, base_table, base_prefix, base_weight);
  p.batch = x.size(0);
  p.x = in<float>(x);
  Tensor log_p = empty(x, {p.batch, p.tree.num_classes}, ScalarType::Float);
  if (p.batch == 0) return log_p;
  p.log_p = out<float>(log_p);
  MaybeTensor logits;
  if (backend_of(op, x) != Backend::kCpu) {
    logits = empty(x, {p.batch, int64_t(1) << p.tree.depth}, ScalarType::Float);
    p.logits = out<float>(*logits);
  }
  SX_RUN(op, x, launch_tree_log_prob_all, p);
  return log_p;
}

std::tuple<Tensor, Tensor> tree_topk(Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, int64_t k,
                                     int64_t beam) {
  constexpr const char* op = "tree_topk";
  begin_op();
  TreeTopkParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.batch = x.size(0);
  check_value(beam >= 1 && beam <= kTreeMostBeam, op, ": beam must be in [1, ", kTreeMostBeam, "], got ", beam);
  check_value(k >= 1 && k <= beam && k <= p.tree.num_classes, op, ": k must be in [1, min(beam, C)] = [1, ",
              beam < p.tree.num_classes ? beam : p.tree.num_classes, "], got ", k);
  p.beam = beam;
  p.k = k;
  p.x = in<float>(x);
  Tensor log_p = empty(x, {p.batch, k}, ScalarType::Float);
  Tensor ids = empty(x, {p.batch, k}, ScalarType::Long);
  p.log_p = out<float>(log_p);
  p.ids = out<int64_t>(ids);
  if (p.batch > 0) SX_RUN(op, x, launch_tree_topk, p);
  return {log_p, ids};
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  m.def("tree_project(Tensor features, Tensor mean, Tensor projection) -> Tensor", tags);
  m.def(
      "tree_sample_and_score(Tensor key, Tensor features, Tensor mean, Tensor projection, Tensor nodes, "
      "Tensor leaf_class, Tensor class_leaf, SymInt num_samples, Tensor ids, "
      "Tensor? base_table=None, Tensor? base_prefix=None, float base_weight=0.0) -> (Tensor draws, Tensor log_q, "
      "Tensor scores)",
      tags);
  m.def(
      "tree_sample(Tensor key, Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, SymInt num_samples, "
      "Tensor? exclude=None, Tensor? exclude_offsets=None, Tensor? base_table=None, Tensor? base_prefix=None, float "
      "base_weight=0.0) -> "
      "(Tensor ids, Tensor log_q)",
      tags);
  m.def(
      "tree_log_prob(Tensor x, Tensor ids, Tensor nodes, Tensor leaf_class, Tensor class_leaf, Tensor? exclude=None, "
      "Tensor? exclude_offsets=None, Tensor? base_table=None, Tensor? base_prefix=None, float base_weight=0.0) -> "
      "Tensor",
      tags);
  m.def(
      "tree_log_prob_all(Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, "
      "Tensor? base_table=None, Tensor? base_prefix=None, float base_weight=0.0) -> Tensor",
      tags);
  m.def(
      "tree_topk(Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, int k, int beam) -> "
      "(Tensor log_p, Tensor ids)",
      tags);
}

#define SX_TREE_IMPLS(m)                                                             \
  m.impl("tree_project", TORCH_BOX(&samplex::glue::tree_project));                   \
  m.impl("tree_sample_and_score", TORCH_BOX(&samplex::glue::tree_sample_and_score)); \
  m.impl("tree_sample", TORCH_BOX(&samplex::glue::tree_sample));                     \
  m.impl("tree_log_prob", TORCH_BOX(&samplex::glue::tree_log_prob));                 \
  m.impl("tree_log_prob_all", TORCH_BOX(&samplex::glue::tree_log_prob_all));         \
  m.impl("tree_topk", TORCH_BOX(&samplex::glue::tree_topk))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_TREE_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_TREE_IMPLS(m); }
