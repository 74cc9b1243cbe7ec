// The tree on the CPU: the choice of the SIMD level, the scalar bodies, beam search.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampler/tree_cpu_impl.h"

namespace samplex::cpu {
namespace {

void sample_rows(const TreeSampleParams& p, int64_t begin, int64_t end) {
  if (p.tree.dtype == DType::kBFloat16)
    tree_sample_rows<BFloat16>(p, begin, end);
  else
    tree_sample_rows<float>(p, begin, end);
}

void all_rows(const TreeAllParams& p, int64_t begin, int64_t end, double* minor, double* product) {
  if (p.tree.dtype == DType::kBFloat16)
    tree_log_prob_all_rows<BFloat16>(p, begin, end, minor, product);
  else
    tree_log_prob_all_rows<float>(p, begin, end, minor, product);
}

struct Candidate {
  double log_p;
  int64_t node;  // or, at the end, the class
  TreePath path;
};

// Likelier first, then the lower number: a total order, so that a beam is the same set on every backend.
bool before(const Candidate& a, const Candidate& b) {
  return a.log_p > b.log_p || (a.log_p == b.log_p && a.node < b.node);
}

template <typename T>
void topk_rows(const TreeTopkParams& p, int64_t begin, int64_t end) {
  const TreeTable& tree = p.tree;
  const int64_t leaves = int64_t(1) << tree.depth;
  std::vector<Candidate> beam, next;
  for (int64_t b = begin; b < end; ++b) {
    const float* x = p.x + b * tree.dim;
    beam.assign(1, {0.0, 1, TreePath()});
    for (int level = 0; level < tree.depth; ++level) {
      next.clear();
      for (const Candidate& parent : beam) {
        const float z = tree_logit<T>(tree, parent.node, x), e = tree_exp(z < 0 ? -z : z);
        for (const bool right : {false, true}) {
          Candidate child = {0.0, 2 * parent.node + right, parent.path};
          child.path.step(z, e, right);
          child.log_p = child.path.log_p();
          if (child.log_p > negative_infinity<double>()) next.push_back(child);
        }
      }
      const size_t kept = std::min<size_t>(next.size(), size_t(p.beam));
      std::partial_sort(next.begin(), next.begin() + kept, next.end(), before);
      next.resize(kept);
      std::swap(beam, next);
    }
    // As the caller sees them: float, equal ones by class.
    for (Candidate& leaf : beam) {
      leaf.node = tree.leaf_class[leaf.node - leaves];
      leaf.log_p = double(float(leaf.log_p));
    }
    std::sort(beam.begin(), beam.end(), before);
    for (int64_t k = 0; k < p.k; ++k) {
      const bool found = k < int64_t(beam.size());
      p.ids[b * p.k + k] = found ? beam[k].node : -1;
      p.log_p[b * p.k + k] = found ? float(beam[k].log_p) : negative_infinity<float>();
    }
  }
}

}  // namespace

void launch_tree_sample(const TreeSampleParams& p) {
  auto body = &sample_rows;
#ifdef SAMPLEX_X86_SIMD
  if (simd_level() == SimdLevel::kAvx2) body = &tree_sample_rows_avx2;
  if (simd_level() == SimdLevel::kAvx512) body = &tree_sample_rows_avx512;
#endif
  const int64_t work = 1 + p.num_samples * (p.tree.depth + 1);
  parallel_for_shared(p.batch, 1 + 4096 / work, [&](int64_t begin, int64_t end) { body(p, begin, end); });
}

void launch_tree_log_prob_all(const TreeAllParams& p) {
  const size_t nodes = size_t(2) << p.tree.depth;
  parallel_for(p.batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(2 * nodes);
#ifdef SAMPLEX_X86_SIMD
    if (simd_level() == SimdLevel::kAvx512) {
      return tree_log_prob_all_rows_avx512(p, begin, end, scratch.data(), scratch.data() + nodes);
    }
    if (simd_level() == SimdLevel::kAvx2) {
      return tree_log_prob_all_rows_avx2(p, begin, end, scratch.data(), scratch.data() + nodes);
    }
#endif
    all_rows(p, begin, end, scratch.data(), scratch.data() + nodes);
  });
}

void launch_tree_topk(const TreeTopkParams& p) {
  parallel_for(p.batch, 1, [&](int64_t begin, int64_t end) {
    if (p.tree.dtype == DType::kBFloat16)
      topk_rows<BFloat16>(p, begin, end);
    else
      topk_rows<float>(p, begin, end);
  });
}

}  // namespace samplex::cpu
