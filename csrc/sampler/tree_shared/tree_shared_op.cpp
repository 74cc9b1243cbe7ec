// Schemas, checks and allocation of the shared draws of a tree:
//   tree_sample_shared    rows x [B, k] -> ids [m] int64, log_q [m] float32, from the mean of the rows' distributions;
//   independent
//                         draws, or stratified draws
//   tree_log_prob_shared  ids [n] -> [n] float32, the same distribution
#include <tuple>

#include "common/ids.h"
#include "common/philox.h"
#include "sampler/tree/tree_op.h"
#include "sampler/tree_shared/tree_shared_params.h"

namespace samplex::glue {
namespace {

Tensor run_shared(const char* op, TreeSharedParams p, const Tensor& x) {
  Tensor log_q = empty(x, {p.num_samples}, ScalarType::Float);
  if (p.num_samples == 0) return log_q;
  p.x = in<float>(x);
  p.log_q = out<float>(log_q);
  std::optional<Tensor> masses;
  if (p.batch > kTreeSharedRows && backend_of(op, x) != Backend::kCpu) {
    masses = empty(x, {tree_shared_blocks(p.batch, p.num_samples), 2 * p.batch}, ScalarType::Double);
    p.masses = out<double>(*masses);
  }
  SX_RUN(op, x, launch_tree_shared, p);
  return log_q;
}

std::tuple<Tensor, Tensor> tree_sample_shared(Tensor key, Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf,
                                              int64_t num_samples, bool stratified, std::optional<Tensor> base_table,
                                              std::optional<Tensor> base_prefix, double base_weight) {
  constexpr const char* op = "tree_sample_shared";
  begin_op();
  check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, x);
  TreeSharedParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, x, base_table, base_prefix, base_weight);
  p.batch = x.size(0);
  p.num_samples = num_samples;
  check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws, op, ": num_samples must be in [0, 2^24], got ",
              num_samples);
  p.key = in<int64_t>(key);
  p.stratified = stratified;
  Tensor ids = empty(x, {num_samples}, ScalarType::Long);
  p.ids = out<int64_t>(ids);
  return {ids, run_shared(op, p, x)};
}

Tensor tree_log_prob_shared(Tensor x, Tensor ids, Tensor nodes, Tensor leaf_class, Tensor class_leaf,
                            std::optional<Tensor> base_table, std::optional<Tensor> base_prefix, double base_weight) {
  constexpr const char* op = "tree_log_prob_shared";
  begin_op();
  TreeSharedParams p{};
  p.tree = tree_table_of(op, "x", x, nodes, leaf_class, class_leaf);
  p.base = tree_base_of(op, p.tree, x, base_table, base_prefix, base_weight);
  p.batch = x.size(0);
  check_tensor(op, "ids", ids, {-1}, "[n]", ScalarType::Long, x);
  check_value(ids.size(0) < int64_t(1) << 31, op, ": ids must be fewer than 2^31, got ", describe(ids));
  check_ids(op, "ids", ids, p.tree.num_classes);
  p.num_samples = ids.size(0);
  p.given = in<int64_t>(ids);
  return run_shared(op, p, x);
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  m.def(
      "tree_sample_shared(Tensor key, Tensor x, Tensor nodes, Tensor leaf_class, Tensor class_leaf, "
      "SymInt num_samples, bool stratified=False, Tensor? base_table=None, Tensor? base_prefix=None, float "
      "base_weight=0.0) -> "
      "(Tensor ids, Tensor log_q)",
      tags);
  m.def(
      "tree_log_prob_shared(Tensor x, Tensor ids, Tensor nodes, Tensor leaf_class, Tensor class_leaf, "
      "Tensor? base_table=None, Tensor? base_prefix=None, float base_weight=0.0) -> Tensor",
      tags);
}

#define SX_TREE_SHARED_IMPLS(m)                                                \
  m.impl("tree_sample_shared", TORCH_BOX(&samplex::glue::tree_sample_shared)); \
  m.impl("tree_log_prob_shared", TORCH_BOX(&samplex::glue::tree_log_prob_shared))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_TREE_SHARED_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_TREE_SHARED_IMPLS(m); }
