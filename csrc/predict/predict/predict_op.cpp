// Schemas and checks of the passes over a chunk of logits. They work in place: the caller's loop over chunks keeps the
// buffers. See predict_params.h.
#include <algorithm>
#include <utility>

#include "common/logits.h"
#include "common/numeric.h"
#include "predict/predict/predict_params.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kMostClasses = int64_t(1) << 52;

PredictChunk chunk_of(const char* op, const Tensor& dots, const MaybeTensor& bias, int64_t first, double scale,
                      bool absolute, bool by_class = false) {
  check_given(op, "dots", dots);
  const ScalarType acc = dots.scalar_type();
  const char* const shape = by_class ? "[n, B]" : "[B, n]";
  check_type(acc == ScalarType::Float || acc == ScalarType::Double, op, ": dots must be ", shape,
             " float32 or float64, got ", describe(dots));
  check_logits(op, "dots", dots, shape, acc);
  check_value(!by_class || backend_of(op, dots) == Backend::kCpu, op, ": by_class must be False on a GPU, got True");
  const int64_t batch = dots.size(by_class ? 1 : 0), count = dots.size(by_class ? 0 : 1);
  if (bias) check_tensor(op, "bias", *bias, {count}, "[n]", acc, dots);
  check_value(first >= 0 && first <= kMostClasses, op, ": first must be in [0, 2^52], got ", first);
  return {nullptr, nullptr, batch, count, dots.stride(0), first, scale, absolute, acc == ScalarType::Double, by_class};
}

void check_rows(const char* op, const char* arg, const Tensor& t, const PredictChunk& chunk, ScalarType dtype,
                const Tensor& dots) {
  check_tensor(op, arg, t, {chunk.batch}, "[B]", dtype, dots);
}

int64_t num_targets(const char* op, const Tensor& target, const PredictChunk& chunk, const Tensor& dots) {
  check_tensor(op, "target", target, {chunk.batch, -1}, "[B, P]", ScalarType::Long, dots);
  return target.size(1);
}

void check_class_weight(const char* op, const MaybeTensor& class_weight, const PredictChunk& chunk,
                        const Tensor& dots) {
  if (class_weight) check_tensor(op, "class_weight", *class_weight, {chunk.count}, "[n]", dots.scalar_type(), dots);
}

void fill(PredictChunk& chunk, const void* dots, const MaybeTensor& bias) {
  chunk.dots = const_cast<void*>(dots);
  chunk.bias = bias ? in_any(*bias) : nullptr;
}

bool nothing(const PredictChunk& chunk) { return chunk.batch == 0 || chunk.count == 0; }

// A matrix [rows, columns] whose numbers are float, with one of its strides 1.
void check_factor(const char* op, const char* arg, const Tensor& t, int64_t rows, int64_t columns) {
  check_given(op, arg, t);
  check_type(t.scalar_type() == ScalarType::Float, op, ": ", arg, " must be float32, got ", describe(t));
  check_value(t.is_cpu(), op, ": ", arg, " must be on cpu, got ", describe(t));
  check_value(shape_matches(t, {rows, columns}), op, ": ", arg, " must be [", rows, ", ", columns, "], got ",
              describe(t));
}

// Bytes from the first to behind the last number of a matrix that has numbers.
std::pair<uintptr_t, uintptr_t> span_of(const Tensor& t) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const int64_t last = (t.size(0) - 1) * t.stride(0) + (t.size(1) - 1) * t.stride(1);
  return {begin, begin + uintptr_t(last + 1) * sizeof(float)};
}

void check_apart(const char* op, const char* arg, const Tensor& t, const Tensor& out) {
  const auto [begin, end] = span_of(t);
  const auto [out_begin, out_end] = span_of(out);
  check_value(end <= out_begin || out_end <= begin, op, ": out must not share memory with ", arg,
              ", which is read while out is written; pass a clone of ", arg);
}

// A product of matrices with the kernels of common/panels.h, on the CPU alone: see `product` in
// samplex_cuda/products.py.
void predict_product(const Tensor& a, const Tensor& b, const Tensor& out, bool add) {
  constexpr const char* op = "predict_product";
  begin_op();
  check_given(op, "a", a);
  check_given(op, "b", b);
  check_value(a.dim() == 2, op, ": a must be [n, k], got ", describe(a));
  check_value(b.dim() == 2, op, ": b must be [k, p], got ", describe(b));
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1);
  check_factor(op, "a", a, rows, depth);
  check_factor(op, "b", b, depth, columns);
  check_factor(op, "out", out, rows, columns);
  check_value(depth >= 1, op, ": a must have at least one column, got ", describe(a));
  check_value(b.stride(0) == 1 || b.stride(1) == 1, op, ": b must have a dimension with stride 1, got ", b.stride(0),
              " and ", b.stride(1));
  check_value(out.stride(1) == 1 && out.stride(0) >= columns, op, ": out must have contiguous rows, got strides ",
              out.stride(0), " and ", out.stride(1));
  if (rows == 0 || columns == 0) return;
  check_apart(op, "a", a, out);
  check_apart(op, "b", b, out);
  const float* const of_a = static_cast<const float*>(a.const_data_ptr());
  const float* const of_b = static_cast<const float*>(b.const_data_ptr());
  const PackPanelsParams packed{of_b, b.stride(1) == 1 ? b.stride(0) : 1, b.stride(1), depth, columns, nullptr};
  cpu::launch_predict_product(
      packed, {of_a, a.stride(0), a.stride(1), nullptr, static_cast<float*>(out.mutable_data_ptr()), rows, depth,
               columns, out.stride(0), add});
}

void predict_lse(Tensor dots, MaybeTensor bias, Tensor target, MaybeTensor class_weight, int64_t first, double scale,
                 bool absolute, Tensor lse, Tensor positive, MaybeTensor total, bool by_class) {
  constexpr const char* op = "predict_lse";
  begin_op();
  PredictLseParams p{};
  p.chunk = chunk_of(op, dots, bias, first, scale, absolute, by_class);
  p.num_targets = num_targets(op, target, p.chunk, dots);
  check_class_weight(op, class_weight, p.chunk, dots);
  check_rows(op, "lse", lse, p.chunk, ScalarType::Double, dots);
  check_tensor(op, "positive", positive, {p.chunk.batch, p.num_targets}, "[B, P]", dots.scalar_type(), dots);
  if (total) check_rows(op, "total", *total, p.chunk, ScalarType::Double, dots);
  if (nothing(p.chunk)) return;
  fill(p.chunk, in_logits(dots), bias);
  p.target = in<int64_t>(target);
  p.class_weight = class_weight ? in_any(*class_weight) : nullptr;
  p.lse = out<double>(lse);
  p.positive = out_any(positive);
  p.total = total ? out<double>(*total) : nullptr;
  Tensor sums;
  if (backend_of(op, dots) != Backend::kCpu) {
    p.cut = predict_cut(p.chunk.batch, p.chunk.count, kPredictLseUnit, kPredictLseUnit);
    const int64_t pieces = (p.chunk.count + kPredictLseWarp - 1) / kPredictLseWarp;
    sums = empty(dots, {p.chunk.batch, pieces, 3}, dots.scalar_type());
    p.sums = out_any(sums);
  }
  SX_RUN(op, dots, launch_predict_lse, p);
}

void predict_grad(Tensor dots, MaybeTensor bias, Tensor target, MaybeTensor class_weight, int64_t first, double scale,
                  bool absolute, Tensor lse, Tensor coef, Tensor target_coef, MaybeTensor smooth, MaybeTensor parts,
                  bool by_class) {
  constexpr const char* op = "predict_grad";
  begin_op();
  PredictGradParams p{};
  p.chunk = chunk_of(op, dots, bias, first, scale, absolute, by_class);
  const ScalarType acc = dots.scalar_type();
  p.num_targets = num_targets(op, target, p.chunk, dots);
  check_class_weight(op, class_weight, p.chunk, dots);
  check_rows(op, "lse", lse, p.chunk, ScalarType::Double, dots);
  check_rows(op, "coef", coef, p.chunk, acc, dots);
  check_tensor(op, "target_coef", target_coef, {p.chunk.batch, p.num_targets}, "[B, P]", acc, dots);
  if (smooth) check_rows(op, "smooth", *smooth, p.chunk, acc, dots);
  if (parts) {
    check_tensor(op, "parts", *parts, {2 * dots.size(0), -1}, "[2 B, at least n]", ScalarType::BFloat16, dots);
    check_value(parts->size(1) >= dots.size(1), op, ": parts must have at least n = ", dots.size(1), " columns, got ",
                describe(*parts));
    check_value(acc == ScalarType::Float, op, ": parts must be None with float64 dots, got ", describe(*parts));
    check_value(backend_of(op, dots) != Backend::kCpu, op, ": parts must be None on the CPU, got ", describe(*parts));
  }
  if (nothing(p.chunk)) return;
  fill(p.chunk, parts ? in_logits(dots) : out_logits(dots), bias);
  if (parts) {
    p.parts = out_any(*parts);
    p.parts_width = parts->size(1);
  }
  p.target = in<int64_t>(target);
  p.class_weight = class_weight ? in_any(*class_weight) : nullptr;
  p.lse = in<double>(lse);
  p.coef = in_any(coef);
  p.target_coef = in_any(target_coef);
  p.smooth = smooth ? in_any(*smooth) : nullptr;
  p.cut = predict_cut(p.chunk.batch, p.chunk.count, kPredictUnit, kPredictUnit);
  SX_RUN(op, dots, launch_predict_grad, p);
}

void predict_topk(Tensor dots, MaybeTensor bias, int64_t first, double scale, bool absolute, Tensor values,
                  Tensor ids) {
  constexpr const char* op = "predict_topk";
  begin_op();
  PredictTopkParams p{};
  p.chunk = chunk_of(op, dots, bias, first, scale, absolute);
  check_tensor(op, "values", values, {dots.size(0), -1}, "[B, k]", dots.scalar_type(), dots);
  p.k = values.size(1);
  check_value(p.k >= 1 && p.k <= kPredictMostK, op, ": values must be [B, k] with k in [1, ", kPredictMostK, "], got ",
              describe(values));
  check_tensor(op, "ids", ids, {dots.size(0), p.k}, "[B, k]", ScalarType::Long, dots);
  if (nothing(p.chunk)) return;
  fill(p.chunk, in_logits(dots), bias);
  p.values = out_any(values);
  p.ids = out<int64_t>(ids);
  // Each part of a row has k entries to give: it is worth many more columns than that.
  p.cut = predict_cut(p.chunk.batch, p.chunk.count, kPredictUnit, std::max(kPredictTopkLeast, 32 * p.k));
  Tensor part_values, part_ids;
  if (backend_of(op, dots) != Backend::kCpu && p.cut.parts > 1) {
    part_values = empty(dots, {p.chunk.batch, p.cut.parts, p.k}, dots.scalar_type());
    part_ids = empty(dots, {p.chunk.batch, p.cut.parts, p.k}, ScalarType::Long);
    p.part_values = out_any(part_values);
    p.part_ids = out<int64_t>(part_ids);
  }
  SX_RUN(op, dots, launch_predict_topk, p);
}

Tensor predict_dots(Tensor hidden, Tensor weight, Tensor ids) {
  constexpr const char* op = "predict_dots";
  begin_op();
  PredictDotsParams p{};
  p.dtype = dtype_tag(op, "weight", weight);
  check_tensor(op, "weight", weight, {-1, -1}, "[C, d]", weight.scalar_type(), weight);
  check_tensor(op, "hidden", hidden, {-1, weight.size(1)}, "[B, d]", weight.scalar_type(), weight);
  check_tensor(op, "ids", ids, {hidden.size(0), -1}, "[B, n]", ScalarType::Long, weight);
  p.batch = ids.size(0);
  p.num_ids = ids.size(1);
  p.dim = weight.size(1);
  p.num_classes = weight.size(0);
  Tensor dots = empty(weight, {p.batch, p.num_ids}, acc_type(weight.scalar_type()));
  if (p.batch == 0 || p.num_ids == 0) return dots;
  if (p.num_classes == 0) {  // no id is a class, and there is no row to read instead
    torch::stable::fill_(dots, negative_infinity<double>());
    return dots;
  }
  p.hidden = in_any(hidden);
  p.weight = in_any(weight);
  p.ids = in<int64_t>(ids);
  p.dots = out_logits(dots);
  SX_RUN(op, weight, launch_predict_dots, p);
  return dots;
}

// Memory of the loop over chunks, used again by the next step: fresh pages would cost more than the passes.
Tensor predict_buffer(Tensor like, int64_t rows, int64_t columns) {
  constexpr const char* op = "predict_buffer";
  check_given(op, "like", like);
  check_value(rows >= 0 && columns >= 0, op, ": rows and columns must be at least 0, got ", rows, " and ", columns);
  return empty_pooled(like, {rows, columns}, like.scalar_type());
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def("predict_product(Tensor a, Tensor b, Tensor(a!) out, bool add=False) -> ()", {at::Tag::pt2_compliant_tag});
  m.def("predict_buffer(Tensor like, SymInt rows, SymInt columns) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("predict_dots(Tensor hidden, Tensor weight, Tensor ids) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "predict_lse(Tensor dots, Tensor? bias, Tensor target, Tensor? class_weight, int first, float scale, "
      "bool absolute, Tensor(a!) lse, Tensor(b!) positive, Tensor(c!)? total, bool by_class=False) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "predict_grad(Tensor(a!) dots, Tensor? bias, Tensor target, Tensor? class_weight, int first, float scale, "
      "bool absolute, Tensor lse, Tensor coef, Tensor target_coef, Tensor? smooth, Tensor(b!)? parts=None, "
      "bool by_class=False) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "predict_topk(Tensor dots, Tensor? bias, int first, float scale, bool absolute, Tensor(a!) values, "
      "Tensor(b!) ids) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("predict_product", TORCH_BOX(&samplex::glue::predict_product));
  m.impl("predict_buffer", TORCH_BOX(&samplex::glue::predict_buffer));
  m.impl("predict_dots", TORCH_BOX(&samplex::glue::predict_dots));
  m.impl("predict_lse", TORCH_BOX(&samplex::glue::predict_lse));
  m.impl("predict_grad", TORCH_BOX(&samplex::glue::predict_grad));
  m.impl("predict_topk", TORCH_BOX(&samplex::glue::predict_topk));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("predict_buffer", TORCH_BOX(&samplex::glue::predict_buffer));
  m.impl("predict_dots", TORCH_BOX(&samplex::glue::predict_dots));
  m.impl("predict_lse", TORCH_BOX(&samplex::glue::predict_lse));
  m.impl("predict_grad", TORCH_BOX(&samplex::glue::predict_grad));
  m.impl("predict_topk", TORCH_BOX(&samplex::glue::predict_topk));
}
