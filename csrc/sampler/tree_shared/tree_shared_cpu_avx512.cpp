// A node of the shared distribution compiled for AVX512.
#include "sampler/tree_shared/tree_shared_cpu_rows.h"

namespace samplex::cpu {

void tree_shared_node_avx512(const TreeTable& tree, int64_t node, TreeSharedNode& at) {
  tree_shared_any(tree, node, at);
}

}  // namespace samplex::cpu
