// The kernel tree compiled for AVX2.
#include "sampler/kernel_tree/kernel_tree_cpu_rows.h"

namespace samplex::cpu {

void kernel_tree_top_avx2(const KernelTreeWork& work, int64_t begin, int64_t end) { kernel_tree_top(work, begin, end); }

void kernel_tree_subtree_avx2(const KernelTreeWork& work, KernelTreeGroup root, double* weights, float* scores) {
  kernel_tree_subtree(work, root, weights, scores);
}

void kernel_tree_add_avx2(float* to, const float* a, const float* b, int64_t width) {
  kernel_tree_add(to, a, b, width);
}

void kernel_tree_climb_avx2(float* to, float* kept, const float* a, const float* b, const float* next_a,
                            const float* next_b, int64_t width) {
  kernel_tree_climb(to, kept, a, b, next_a, next_b, width);
}

void kernel_tree_change_avx2(float* to, const float* a, const float* b, int64_t width) {
  kernel_tree_change(to, a, b, width);
}

float kernel_tree_peak_avx2(const float* sums, int64_t width) { return kernel_tree_peak(sums, width); }

void kernel_tree_total_avx2(float* to, const float* rows, int64_t count, int64_t width) {
  kernel_tree_total(to, rows, count, width);
}

}  // namespace samplex::cpu
