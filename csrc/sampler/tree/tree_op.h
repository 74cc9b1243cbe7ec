// What the ops on a tree share: the checks of its tensors.
#pragma once

#include "common/glue.h"
#include "sampler/tree/tree_params.h"

namespace samplex::glue {

// The tree for rows x [B, k], or projected by x [K, k].
inline TreeTable tree_table_of(const char* op, const char* arg, const Tensor& x, const Tensor& nodes,
                               const Tensor& leaf_class, const Tensor& class_leaf) {
  check_given(op, "nodes", nodes);
  check_given(op, arg, x);
  check_type(nodes.scalar_type() == ScalarType::Float || nodes.scalar_type() == ScalarType::BFloat16, op,
             ": nodes must be float32 or bfloat16, got ", describe(nodes));
  check_value(x.dim() == 2, op, ": ", arg, " must be [B, k] float32, got ", describe(x));
  const int64_t k = x.size(1);
  check_value(k >= 1 && k <= kTreeMostFeatures, op, ": ", arg, " must be [B, k] with k in [1, ", kTreeMostFeatures,
              "], got ", describe(x));
  check_tensor(op, arg, x, {-1, k}, "[B, k]", ScalarType::Float, nodes);
  check_tensor(op, "nodes", nodes, {-1, -1}, "[2^depth, stride]", nodes.scalar_type(), nodes);
  const int64_t leaves = nodes.size(0), item = nodes.scalar_type() == ScalarType::Float ? 4 : 2;
  int depth = 0;
  while (depth < kTreeMostDepth && (int64_t(1) << depth) < leaves) ++depth;
  check_value(leaves == int64_t(1) << depth, op, ": nodes must have 2^depth rows, got ", describe(nodes));
  const int64_t stride = (k + 1) * item + 31;
  check_value(nodes.size(1) == stride / 32 * 32 / item, op, ": nodes must be [2^depth, ", stride / 32 * 32 / item,
              "] for ", arg, " [B, ", k, "], got ", describe(nodes));
  check_tensor(op, "leaf_class", leaf_class, {leaves}, "[2^depth]", ScalarType::Long, nodes);
  check_tensor(op, "class_leaf", class_leaf, {-1}, "[C]", ScalarType::Long, nodes);
  const int64_t classes = class_leaf.size(0);
  check_value(classes >= 1 && classes <= leaves, op, ": class_leaf must be [C] with C in [1, ", leaves, "], got ",
              describe(class_leaf));
  TreeTable table{};
  table.nodes = in_any(nodes);
  // Kernels read nodes 16 bytes at a time. CPU code takes them from any address.
  check_value((nodes.is_cpu() && cpu_backend() == Backend::kCpu) || reinterpret_cast<uintptr_t>(table.nodes) % 32 == 0,
              op, ": nodes must be aligned to 32 bytes on a GPU, got a view that ", "is not");
  table.leaf_class = in<int64_t>(leaf_class);
  table.class_leaf = in<int64_t>(class_leaf);
  table.num_classes = classes;
  table.dim = k;
  table.stride = nodes.size(1);
  table.depth = depth;
  table.dtype = item == 4 ? DType::kFloat32 : DType::kBFloat16;
  return table;
}

// The base of a tree, or none.
inline TreeBase tree_base_of(const char* op, const TreeTable& tree, const Tensor& ref,
                             const std::optional<Tensor>& table, const std::optional<Tensor>& prefix, double weight) {
  check_value(table.has_value() == prefix.has_value(), op,
              ": base_table and base_prefix must be given together, got one");
  if (!table) return {};
  const int64_t leaves = int64_t(1) << tree.depth;
  check_tensor(op, "base_table", *table, {leaves, 4}, "[2^depth, 4]", ScalarType::Long, ref);
  check_tensor(op, "base_prefix", *prefix, {leaves + 1}, "[2^depth + 1]", ScalarType::Long, ref);
  check_value(weight > 0.0 && weight <= 1.0, op, ": base_weight must be in (0, 1], got ", weight);
  TreeBase base;
  base.table = reinterpret_cast<const AliasEntry*>(in<int64_t>(*table));
  base.prefix = in<int64_t>(*prefix);
  base.weight = weight;
  check_value(reinterpret_cast<uintptr_t>(base.table) % alignof(AliasEntry) == 0, op,
              ": base_table must be aligned to ", alignof(AliasEntry), " bytes, got a view that is not");
  return base;
}

}  // namespace samplex::glue
