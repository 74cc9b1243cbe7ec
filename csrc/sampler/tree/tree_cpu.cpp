// The tree on the CPU: the choice of the SIMD level, the scalar bodies, beam search.
#include <algorithm>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/tree/tree_cpu_rows.h"

namespace samplex::cpu {
namespace {

void tree_project_rows_scalar(const TreeProjectParams& p, int64_t begin, int64_t end) {
  tree_project_rows(p, begin, end);
}

void tree_sample_rows_scalar(const TreeSampleParams& p, int64_t begin, int64_t end) {
  if (p.tree.dtype == DType::kBFloat16)
    tree_sample_rows<BFloat16>(p, begin, end);
  else
    tree_sample_rows<float>(p, begin, end);
}

void tree_log_prob_all_rows_scalar(const TreeAllParams& p, int64_t begin, int64_t end, double* minor, double* product) {
  if (p.tree.dtype == DType::kBFloat16)
    tree_log_prob_all_rows<BFloat16>(p, begin, end, minor, product);
  else
    tree_log_prob_all_rows<float>(p, begin, end, minor, product);
}

const TreeBeamLevel& tree_beam_scalar(const TreeTopkParams& p, int64_t row, TreeBeamScratch& scratch) {
  if (p.tree.dtype == DType::kBFloat16) return tree_beam<BFloat16>(p, row, scratch);
  return tree_beam<float>(p, row, scratch);
}

// As the caller sees it: float, equal ones by class.
struct Found {
  float log_p;
  int64_t id;
};

void write_topk(const TreeTopkParams& p, int64_t b, const TreeBeamLevel& leaves, std::vector<Found>& found) {
  found.clear();
  for (int64_t i = 0; i < leaves.count; ++i) {
    const int64_t id = class_at(p.tree, leaves.node[i] - (int64_t(1) << p.tree.depth));
    if (id >= 0) found.push_back({float(leaves.log_p[i]), id});
  }
  const int64_t count = std::min(p.k, int64_t(found.size()));
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Found& a, const Found& b) {
    return a.log_p > b.log_p || (a.log_p == b.log_p && a.id < b.id);
  });
  for (int64_t k = 0; k < p.k; ++k) {
    p.ids[b * p.k + k] = k < count ? found[k].id : -1;
    p.log_p[b * p.k + k] = k < count ? found[k].log_p : negative_infinity<float>();
  }
}

}  // namespace

void launch_tree_project(const TreeProjectParams& p) {
  const auto body = SX_SIMD_BODY(simd_level(), tree_project_rows);
  parallel_for(p.batch, 1 + (1 << 17) / (1 + p.features * p.dim),
               [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

void launch_tree_sample(const TreeSampleParams& p) {
  const auto body = SX_SIMD_BODY(simd_level(), tree_sample_rows);
  const int64_t work = 1 + p.num_samples * (p.tree.depth + 1);
  parallel_for_shared(p.batch, 1 + 4096 / work, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

void launch_tree_log_prob_all(const TreeAllParams& p) {
  const auto body = SX_SIMD_BODY(simd_level(), tree_log_prob_all_rows);
  const size_t nodes = size_t(2) << p.tree.depth;
  parallel_for(p.batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(2 * nodes);
    body(p, begin, end, scratch.data(), scratch.data() + nodes);
  });
}

void launch_tree_topk(const TreeTopkParams& p) {
  const auto body = SX_SIMD_BODY(simd_level(), tree_beam);
  parallel_for(p.batch, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique<TreeBeamScratch>();
    std::vector<Found> found;
    for (int64_t b = begin; b < end; ++b) write_topk(p, b, body(p, b, *scratch), found);
  });
}

}  // namespace samplex::cpu
