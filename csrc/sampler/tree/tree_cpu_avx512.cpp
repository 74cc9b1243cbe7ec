// The tree compiled for AVX512.
#include "sampler/tree/tree_cpu_rows.h"

namespace samplex::cpu {

void tree_project_rows_avx512(const TreeProjectParams& p, int64_t begin, int64_t end) {
  tree_project_rows(p, begin, end);
}

void tree_sample_rows_avx512(const TreeSampleParams& p, int64_t begin, int64_t end) {
  if (p.tree.dtype == DType::kBFloat16) return tree_sample_rows<BFloat16>(p, begin, end);
  tree_sample_rows<float>(p, begin, end);
}

void tree_log_prob_all_rows_avx512(const TreeAllParams& p, int64_t begin, int64_t end, double* minor, double* product) {
  if (p.tree.dtype == DType::kBFloat16) return tree_log_prob_all_rows<BFloat16>(p, begin, end, minor, product);
  tree_log_prob_all_rows<float>(p, begin, end, minor, product);
}

const TreeBeamLevel& tree_beam_avx512(const TreeTopkParams& p, int64_t row, TreeBeamScratch& scratch) {
  if (p.tree.dtype == DType::kBFloat16) return tree_beam<BFloat16>(p, row, scratch);
  return tree_beam<float>(p, row, scratch);
}

}  // namespace samplex::cpu
