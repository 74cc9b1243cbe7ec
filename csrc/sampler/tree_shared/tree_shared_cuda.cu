#include "sampler/tree_shared/tree_shared_kernel.cuh"

namespace samplex::SX_BACKEND_NS {
namespace {

template <typename T, bool kStrata, int kGroups, bool kBase>
void shared(const TreeSharedParams& p, void* stream) {
  const unsigned grid = unsigned(tree_shared_blocks(p.batch, p.num_samples));
  constexpr int threads = kTreeSharedThreads<kGroups>;
  const size_t memory = kGroups > 1 ? 0 : size_t(p.batch) * 2 * sizeof(double);
  const bool wide = p.tree.dim % kTreeLanes == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  if (wide)
    SX_LAUNCH("tree_shared", (tree_shared_kernel<T, true, kStrata, kGroups, kBase>), grid, threads, memory, stream, p);
  else
    SX_LAUNCH("tree_shared", (tree_shared_kernel<T, false, kStrata, kGroups, kBase>), grid, threads, memory, stream, p);
}

template <typename T, bool kStrata, int kGroups>
void shared(const TreeSharedParams& p, void* stream) {
  if (p.base.prefix != nullptr)
    shared<T, kStrata, kGroups, true>(p, stream);
  else
    shared<T, kStrata, kGroups, false>(p, stream);
}

template <typename T, bool kStrata>
void shared(const TreeSharedParams& p, void* stream) {
  if (p.masses != nullptr)
    shared<T, kStrata, kTreeSharedGroups>(p, stream);
  else
    shared<T, kStrata, 1>(p, stream);
}

template <typename T>
void shared(const TreeSharedParams& p, void* stream) {
  if (p.stratified)
    shared<T, true>(p, stream);
  else
    shared<T, false>(p, stream);
}

}  // namespace

void launch_tree_shared(const TreeSharedParams& p, void* stream) {
  if (p.tree.dtype == DType::kBFloat16)
    shared<BFloat16>(p, stream);
  else
    shared<float>(p, stream);
}

}  // namespace samplex::SX_BACKEND_NS
