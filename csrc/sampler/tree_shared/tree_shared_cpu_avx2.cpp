// A node of the shared distribution compiled for AVX2.
#include "sampler/tree_shared/tree_shared_cpu_rows.h"

namespace samplex::cpu {

void tree_shared_node_avx2(const TreeTable& tree, int64_t node, TreeSharedNode& at) { tree_shared_any(tree, node, at); }

}  // namespace samplex::cpu
