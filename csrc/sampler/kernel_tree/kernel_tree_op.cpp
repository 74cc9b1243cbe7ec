// Schemas, checks and allocation of the kernel tree's ops:
//   kernel_tree_sample     -> ids [B, m] int64, log_q [B, m] float32, clipped [B] float32
//   kernel_tree_log_prob   ids [B, n] -> [B, n] float32, the same distribution
//   kernel_tree_build      leaf sums of a run of classes from their features, in place
//   kernel_tree_update     leaf sums of some classes by new minus old features, in place
//   kernel_tree_parents    sums of the nodes above all leaves or above some, in place
#include <cmath>
#include <tuple>
#include <utility>

#include "common/calls.h"
#include "common/ids.h"
#include "common/philox.h"
#include "sampler/kernel_tree/kernel_tree_params.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;

// [2^(depth + 1), stride] float32; returns the depth.
int depth_of(const char* op, const Tensor& sums) {
  check_tensor(op, "sums", sums, {-1, -1}, "[2 * leaves, stride]", ScalarType::Float, sums);
  int depth = 0;
  while (depth < kKernelTreeMostDepth && (int64_t(2) << depth) < sums.size(0)) ++depth;
  check_value(sums.size(0) == int64_t(2) << depth && sums.size(1) >= 1 && sums.size(1) % kKernelTreeAlign == 0, op,
              ": sums must be [2 * leaves, stride] with leaves a power of two and stride a multiple of ",
              kKernelTreeAlign, ", got ", describe(sums));
  check_value(reinterpret_cast<uintptr_t>(sums.const_data_ptr()) % 16 == 0, op,
              ": sums must be aligned to 16 bytes, got a view that is not");
  return depth;
}

KernelTree tree_of(const char* op, const Tensor& h, const Tensor& phi, const Tensor& rows, const Tensor& sums,
                   int64_t leaf_size, int64_t kernel, double scale, double epsilon) {
  KernelTree tree{};
  tree.depth = depth_of(op, sums);
  tree.stride = sums.size(1);
  check_tensor(op, "rows", rows, {-1, -1}, "[n, dim]", ScalarType::Float, sums);
  tree.num_classes = rows.size(0);
  tree.dim = rows.size(1);
  check_value(tree.num_classes >= 1 && tree.dim >= 1 && tree.dim % kKernelTreeRowAlign == 0, op,
              ": rows must be [n, dim] with n >= 1 and dim a multiple of ", kKernelTreeRowAlign, ", got ",
              describe(rows));
  check_value(reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0, op,
              ": rows must be aligned to 16 bytes, got a view that is not");
  check_tensor(op, "h", h, {-1, tree.dim}, "[B, dim]", ScalarType::Float, sums);
  check_tensor(op, "phi", phi, {h.size(0), tree.stride}, "[B, stride]", ScalarType::Float, sums);
  check_value(leaf_size >= 1 && leaf_size <= tree.num_classes, op, ": leaf_size must be in [1, n] = [1, ",
              tree.num_classes, "], got ", leaf_size);
  const int64_t buckets = (tree.num_classes + leaf_size - 1) / leaf_size, leaves = int64_t(1) << tree.depth;
  check_value(buckets <= leaves && (leaves == 1 || buckets > leaves / 2), op,
              ": sums must be [2 * leaves, stride] with the ", "power of two that holds ", buckets, " leaves of ",
              leaf_size, " classes, got ", describe(sums));
  check_value(kernel >= 0 && kernel <= 2, op, ": kernel must be 0 (gaussian), 1 (exponential) or 2 (quadratic), got ",
              kernel);
  check_value(std::isfinite(scale) && scale > 0.0, op, ": scale must be finite and positive, got ", scale);
  check_value(epsilon >= 0.0 && epsilon < 1.0, op, ": epsilon must be in [0, 1), got ", epsilon);
  tree.leaf_size = leaf_size;
  tree.kernel = LeafKernel(kernel);
  tree.scale = float(scale);
  tree.epsilon = epsilon;
  return tree;
}

// Excluded classes: rows ascending, -1 for none; values are checked on the CPU only.
void take_exclude(const char* op, KernelTreeSampleParams& p, const Tensor& h, const MaybeTensor& exclude,
                  const MaybeTensor& offsets) {
  check_value(exclude.has_value() || !offsets.has_value(), op, ": exclude_offsets needs exclude, got None");
  if (!exclude) return;
  if (offsets) {
    check_tensor(op, "exclude", *exclude, {-1}, "[nnz]", ScalarType::Long, h);
    check_tensor(op, "exclude_offsets", *offsets, {p.batch + 1}, "[B + 1]", ScalarType::Long, h);
  } else {
    check_tensor(op, "exclude", *exclude, {p.batch, -1}, "[B, P]", ScalarType::Long, h);
    p.exclude_width = exclude->size(1);
  }
  p.exclude_size = exclude->numel();
  check_value(p.exclude_size < int64_t(1) << 32, op, ": exclude must have fewer than 2^32 entries, got ",
              describe(*exclude));
  if (p.exclude_size == 0) return;
  p.exclude = in<int64_t>(*exclude);
  p.exclude_offsets = offsets ? in<int64_t>(*offsets) : nullptr;
  if (!ids_on_host(h)) return;
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
      check_index(p.exclude[i] >= -1 && p.exclude[i] < p.tree.num_classes, op, ": exclude must be -1 or in [0, ",
                  p.tree.num_classes, "), got ", p.exclude[i], " in row ", b);
      check_value(i == begin || p.exclude[i - 1] <= p.exclude[i], op, ": exclude must ascend in each row, got ",
                  p.exclude[i - (i > begin)], " before ", p.exclude[i], " in row ", b);
    }
  }
}

// a [n, k] times the transpose of b [p, k]. mm.out, which autocast leaves alone; draws have no gradient, and mm.out
// refuses tensors that want one.
Tensor product_transposed(const Tensor& a, const Tensor& b) {
  const Tensor result = empty(a, {a.size(0), b.size(0)}, ScalarType::Float);
  return tensor_of(call_op("aten::mm", "out", detached(a), detached(torch::stable::transpose(b, 0, 1)), result)[0]);
}

// Values of the top levels, scratch, outputs, launch. `p` holds key or given already.
void run(const char* op, KernelTreeSampleParams& p, const Tensor& any_h, const Tensor& any_phi, const Tensor& rows,
         Tensor sums, const Tensor* ids, const Tensor& log_q, const Tensor* clipped) {
  const Tensor h = aligned(any_h), phi = aligned(any_phi);
  p.top_levels = p.tree.depth < kKernelTreeTopLevels ? p.tree.depth : kKernelTreeTopLevels;
  const Tensor top = product_transposed(phi, torch::stable::narrow(sums, 0, 0, int64_t(2) << p.top_levels));
  p.h = in<float>(h);
  p.phi = in<float>(phi);
  p.top = in<float>(top);
  p.tree.rows = in<float>(rows);
  p.tree.sums = in<float>(sums);
  const Tensor states = empty(h, {p.batch, 6}, ScalarType::Long);
  p.rows = reinterpret_cast<KernelTreeRow*>(out<int64_t>(states));
  MaybeTensor left;
  if (p.exclude != nullptr) {
    left = empty(h, {p.exclude_size, p.tree.depth + 1, 2}, ScalarType::Double);
    p.left = out<double>(*left);
  }
  MaybeTensor leaf;
  if (p.tree.leaf_size > kKernelTreeSharedLeaf && backend_of(op, h) != Backend::kCpu) {
    const int64_t blocks = p.batch < kKernelTreeGrid ? p.batch : kKernelTreeGrid;
    leaf = empty(h, {blocks * kKernelTreeWarps, (p.tree.leaf_size + 31) / 32 * 48}, ScalarType::Double);
    p.leaf = out<double>(*leaf);
  }
  if (ids != nullptr) p.ids = out<int64_t>(*ids);
  p.log_q = out<float>(log_q);
  if (clipped != nullptr) p.clipped = out<float>(*clipped);
  SX_RUN(op, h, launch_kernel_tree_sample, p);
}

std::tuple<Tensor, Tensor, Tensor> kernel_tree_sample(Tensor key, Tensor h, Tensor phi, Tensor rows, Tensor sums,
                                                      int64_t leaf_size, int64_t kernel, double scale, double epsilon,
                                                      int64_t num_samples, MaybeTensor exclude,
                                                      MaybeTensor exclude_offsets) {
  constexpr const char* op = "kernel_tree_sample";
  begin_op();
  check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, h);
  KernelTreeSampleParams p{};
  p.tree = tree_of(op, h, phi, rows, sums, leaf_size, kernel, scale, epsilon);
  p.batch = h.size(0);
  p.num_samples = num_samples;
  check_value(p.batch <= kPhiloxMaxRows - 1, op, ": h must have fewer than 2^32 rows, got ", describe(h));
  check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws, op, ": num_samples must be in [0, 2^24], got ",
              num_samples);
  take_exclude(op, p, h, exclude, exclude_offsets);
  p.key = in<int64_t>(key);
  Tensor ids = empty(h, {p.batch, num_samples}, ScalarType::Long);
  Tensor log_q = empty(h, {p.batch, num_samples}, ScalarType::Float);
  Tensor clipped = empty(h, {p.batch}, ScalarType::Float);
  if (p.batch > 0 && num_samples > 0) {
    run(op, p, h, phi, rows, sums, &ids, log_q, &clipped);
  } else {
    torch::stable::zero_(clipped);
  }
  return {ids, log_q, clipped};
}

Tensor kernel_tree_log_prob(Tensor h, Tensor phi, Tensor ids, Tensor rows, Tensor sums, int64_t leaf_size,
                            int64_t kernel, double scale, double epsilon, MaybeTensor exclude,
                            MaybeTensor exclude_offsets) {
  constexpr const char* op = "kernel_tree_log_prob";
  begin_op();
  KernelTreeSampleParams p{};
  p.tree = tree_of(op, h, phi, rows, sums, leaf_size, kernel, scale, epsilon);
  p.batch = h.size(0);
  check_tensor(op, "ids", ids, {p.batch, -1}, "[B, n]", ScalarType::Long, h);
  check_value(p.batch <= kPhiloxMaxRows - 1 && ids.size(1) < int64_t(1) << 32, op,
              ": ids must have fewer than 2^32 rows ", "and columns, got ", describe(ids));
  p.num_samples = ids.size(1);
  check_ids(op, "ids", ids, p.tree.num_classes);
  take_exclude(op, p, h, exclude, exclude_offsets);
  Tensor log_q = empty(h, {p.batch, p.num_samples}, ScalarType::Float);
  if (p.batch > 0 && p.num_samples > 0) {
    p.given = in<int64_t>(ids);
    run(op, p, h, phi, rows, sums, nullptr, log_q, nullptr);
  }
  return log_q;
}

// ------------------------------------------------------------------------------------------------ sums
void kernel_tree_build(Tensor sums, Tensor phi, int64_t first, int64_t leaf_size) {
  constexpr const char* op = "kernel_tree_build";
  begin_op();
  KernelTreeLeavesParams p{};
  p.depth = depth_of(op, sums);
  p.stride = sums.size(1);
  check_tensor(op, "phi", phi, {-1, p.stride}, "[n, stride]", ScalarType::Float, sums);
  p.count = phi.size(0);
  check_value(leaf_size >= 1 && leaf_size < int64_t(1) << 31, op, ": leaf_size must be in [1, 2^31), got ", leaf_size);
  const int64_t leaves = int64_t(1) << p.depth, room = leaves > INT64_MAX / leaf_size ? INT64_MAX : leaves * leaf_size;
  check_value(first >= 0 && first % leaf_size == 0 && first <= room - p.count, op,
              ": first must be a multiple of leaf_size ", leaf_size, " and classes [first, first + ", p.count,
              ") must lie in ", leaves, " leaves, got ", first);
  p.first = first;
  p.leaf_size = leaf_size;
  if (p.count == 0) return;
  const Tensor features = aligned(phi);
  p.phi = in<float>(features);
  p.sums = out<float>(sums);
  SX_RUN(op, sums, launch_kernel_tree_leaves, p);
}

void kernel_tree_update(Tensor sums, Tensor phi, Tensor old, Tensor ids, int64_t leaf_size, MaybeTensor taken,
                        MaybeTensor rows, MaybeTensor fresh, MaybeTensor peaks) {
  constexpr const char* op = "kernel_tree_update";
  begin_op();
  KernelTreeLeavesParams p{};
  p.depth = depth_of(op, sums);
  p.stride = sums.size(1);
  check_tensor(op, "ids", ids, {-1}, "[n]", ScalarType::Long, sums);
  p.count = ids.size(0);
  check_tensor(op, "phi", phi, {p.count, p.stride}, "[n, stride]", ScalarType::Float, sums);
  check_tensor(op, "old", old, {p.count, p.stride}, "[n, stride]", ScalarType::Float, sums);
  check_value(leaf_size >= 1 && leaf_size < int64_t(1) << 31, op, ": leaf_size must be in [1, 2^31), got ", leaf_size);
  p.leaf_size = leaf_size;
  const int64_t leaves = int64_t(1) << p.depth;
  if (taken) check_tensor(op, "taken", *taken, {p.count}, "[n]", ScalarType::Bool, sums);
  check_value(rows.has_value() == fresh.has_value(), op, ": rows and fresh must be given together, got one of them");
  if (rows) {
    check_tensor(op, "rows", *rows, {-1, -1}, "[C, dim]", ScalarType::Float, sums);
    p.dim = rows->size(1);
    check_tensor(op, "fresh", *fresh, {p.count, p.dim}, "[n, dim]", ScalarType::Float, sums);
    check_value(p.dim % kKernelTreeRowAlign == 0, op, ": rows must have columns in a multiple of ", kKernelTreeRowAlign,
                ", got ", describe(*rows));
    for (const auto& [name, t] : {std::pair{"rows", *rows}, std::pair{"fresh", *fresh}}) {
      check_value(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op, ": ", name,
                  " must be aligned to 16 bytes, got a view that is not");
    }
  }
  if (peaks) check_tensor(op, "peaks", *peaks, {2, leaves + 1}, "[2, leaves + 1]", ScalarType::Float, sums);
  if (p.count == 0) return;
  p.ids = in<int64_t>(ids);
  if (ids_on_host(ids)) {
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t before = i == 0 ? -1 : p.ids[i - 1];
      check_index(p.ids[i] >= -1 && p.ids[i] / leaf_size < leaves && (before == -1 || before < p.ids[i]), op,
                  ": ids must ascend without repeats, after leading -1 for no id, and lie in ", leaves, " leaves of ",
                  leaf_size, " classes, got ", p.ids[i], " at position ", i);
      check_index(!rows || p.ids[i] < rows->size(0), op, ": ids must be below the number of rows, ",
                  rows ? rows->size(0) : 0, ", got ", p.ids[i], " at position ", i);
    }
  }
  if (taken) p.taken = in<bool>(*taken);
  if (rows) {
    p.rows = out<float>(*rows);
    p.fresh = in<float>(*fresh);
  }
  if (peaks) p.peaks = out<float>(*peaks);
  const Tensor features = aligned(phi), old_features = aligned(old);
  p.phi = in<float>(features);
  p.old = in<float>(old_features);
  p.sums = out<float>(sums);
  SX_RUN(op, sums, launch_kernel_tree_leaves, p);
}

void kernel_tree_parents(Tensor sums, MaybeTensor leaves) {
  constexpr const char* op = "kernel_tree_parents";
  begin_op();
  KernelTreeParentsParams p{};
  p.depth = depth_of(op, sums);
  p.stride = sums.size(1);
  p.count = int64_t(1) << p.depth;
  if (leaves) {
    check_tensor(op, "leaves", *leaves, {-1}, "[k]", ScalarType::Long, sums);
    if (leaves->size(0) == 0) return;
    const int64_t most = p.count;
    p.count = leaves->size(0);
    p.leaves = in<int64_t>(*leaves);
    if (ids_on_host(*leaves)) {
      for (int64_t i = 0; i < p.count; ++i) {
        check_index(p.leaves[i] >= -1 && p.leaves[i] < most && (i == 0 || p.leaves[i - 1] <= p.leaves[i]), op,
                    ": leaves must ascend in [0, ", most, "), after leading -1 for no leaf, got ", p.leaves[i],
                    " at position ", i);
      }
    }
  }
  if (p.depth == 0) return;
  p.sums = out<float>(sums);
  SX_RUN(op, sums, launch_kernel_tree_parents, p);
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  m.def(
      "kernel_tree_sample(Tensor key, Tensor h, Tensor phi, Tensor rows, Tensor sums, int leaf_size, int kernel, "
      "float scale, float epsilon, SymInt num_samples, Tensor? exclude=None, Tensor? exclude_offsets=None) -> "
      "(Tensor ids, Tensor log_q, Tensor clipped)",
      tags);
  m.def(
      "kernel_tree_log_prob(Tensor h, Tensor phi, Tensor ids, Tensor rows, Tensor sums, int leaf_size, int kernel, "
      "float scale, float epsilon, Tensor? exclude=None, Tensor? exclude_offsets=None) -> Tensor",
      tags);
  m.def("kernel_tree_build(Tensor(a!) sums, Tensor phi, int first, int leaf_size) -> ()", tags);
  m.def(
      "kernel_tree_update(Tensor(a!) sums, Tensor phi, Tensor old, Tensor ids, int leaf_size, Tensor? taken=None, "
      "Tensor(b!)? rows=None, Tensor? fresh=None, Tensor(c!)? peaks=None) -> ()",
      tags);
  m.def("kernel_tree_parents(Tensor(a!) sums, Tensor? leaves=None) -> ()", tags);
}

#define SX_KERNEL_TREE_IMPLS(m)                                                    \
  m.impl("kernel_tree_sample", TORCH_BOX(&samplex::glue::kernel_tree_sample));     \
  m.impl("kernel_tree_log_prob", TORCH_BOX(&samplex::glue::kernel_tree_log_prob)); \
  m.impl("kernel_tree_build", TORCH_BOX(&samplex::glue::kernel_tree_build));       \
  m.impl("kernel_tree_update", TORCH_BOX(&samplex::glue::kernel_tree_update));     \
  m.impl("kernel_tree_parents", TORCH_BOX(&samplex::glue::kernel_tree_parents))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_KERNEL_TREE_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_KERNEL_TREE_IMPLS(m); }
