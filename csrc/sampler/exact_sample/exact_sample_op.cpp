// Schemas, checks and allocation of exact_sample; see exact_sample_params.h.
//   exact_mass      writes into mass [B, ceil(C / 256)] float64
//   exact_product_mass  the same
//   exact_blocks    -> lse [B] float64, place [B, m] int64
//   exact_draw      -> ids [B, m] int64
//   exact_log_prob  -> log_q [B, n] float32
#include <algorithm>
#include <array>
#include <tuple>

#include "common/calls.h"
#include "common/ids.h"
#include "common/logits.h"
#include "common/numeric.h"
#include "common/philox.h"
#include "sampler/exact_sample/exact_sample_params.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kExactDrawBlocks = 512, kExactDrawWindow = 16;

int64_t blocks_of(int64_t num_classes) { return (num_classes - 1) / kExactBlock + 1; }

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

ExactLaw law_of(const char* op, ScalarType logits, int64_t num_classes, int64_t kind, double scale, double alpha,
                int64_t row, int64_t batch) {
  check_value(kind >= 0 && kind <= int(ExactKind::kQuartic), op,
              ": kind must be 0 (softmax), 1 (absolute) or 2 (quartic), got ", kind);
  check_value(is_finite(scale), op, ": scale must be finite, got ", scale);
  check_value(is_finite(alpha) && alpha >= 0.0, op, ": alpha must be finite and at least 0, got ", alpha);
  check_value(row >= 0 && row <= kPhiloxMaxRows - batch, op, ": row must be at least 0 and row + B at most 2^32, got ",
              row);
  ExactLaw law{};
  law.kind = ExactKind(kind);
  law.is_double = logits == ScalarType::Double;
  law.scale = scale;
  law.alpha = alpha;
  law.num_classes = num_classes;
  law.row = row;
  return law;
}

// CPU tensors only: on CUDA this would wait for the device, and the kernels skip what is not a class.
void check_exclude_values(const char* op, const ExactLaw& law, int64_t batch) {
  const int64_t* offsets = law.exclude_offsets;
  for (int64_t b = law.row; b < law.row + batch; ++b) {
    const int64_t begin = offsets != nullptr ? offsets[b] : b * law.exclude_width;
    const int64_t end = offsets != nullptr ? offsets[b + 1] : begin + law.exclude_width;
    check_value(begin >= 0 && begin <= end && end <= law.exclude_size, op, ": exclude_offsets must go from 0 to ",
                law.exclude_size, " without decreasing, got ", begin, " then ", end, " at row ", b);
    for (int64_t i = begin; i < end; ++i) {
      check_index(law.exclude[i] >= -1 && law.exclude[i] < law.num_classes, op, ": exclude must be -1 or in [0, ",
                  law.num_classes, "), got ", law.exclude[i], " in row ", b);
      check_value(i == begin || law.exclude[i - 1] <= law.exclude[i], op, ": exclude must ascend in each row, got ",
                  law.exclude[i > 0 ? i - 1 : 0], " before ", law.exclude[i], " in row ", b);
    }
  }
}

// Shapes and pointers; law.row and B say which rows are read.
void take_exclude(const char* op, ExactLaw& law, const MaybeTensor& exclude, const MaybeTensor& offsets, int64_t batch,
                  const Tensor& ref) {
  check_value(exclude.has_value() || !offsets.has_value(), op, ": exclude_offsets needs exclude, got None");
  if (!exclude) return;
  if (offsets) {
    check_tensor(op, "exclude", *exclude, {-1}, "[nnz]", ScalarType::Long, ref);
    check_tensor(op, "exclude_offsets", *offsets, {-1}, "[R + 1]", ScalarType::Long, ref);
    check_value(offsets->size(0) > law.row + batch, op,
                ": exclude_offsets must have at least row + B + 1 = ", law.row + batch + 1, " entries, got ",
                describe(*offsets));
  } else {
    check_tensor(op, "exclude", *exclude, {-1, -1}, "[R, P]", ScalarType::Long, ref);
    check_value(exclude->size(0) >= law.row + batch, op, ": exclude must have at least row + B = ", law.row + batch,
                " rows, got ", describe(*exclude));
    law.exclude_width = exclude->size(1);
  }
  law.exclude_size = exclude->numel();
  if (law.exclude_size == 0 || batch == 0) return;  // an empty list excludes nothing; its data pointer may be null
  law.exclude = in<int64_t>(*exclude);
  law.exclude_offsets = in<int64_t>(offsets);
  if (ref.is_cpu()) check_exclude_values(op, law, batch);
}

struct Checked {
  ExactLaw law;
  ExactTable table;
};

// hidden [B, d] in the type of the logits, weight [C, d], bias [C], lse [B].
Checked check_rows(const char* op, const Tensor& hidden, const Tensor& weight, const MaybeTensor& bias,
                   const Tensor& lse, int64_t kind, double scale, double alpha, int64_t row) {
  check_given(op, "hidden", hidden);
  const ScalarType logits = hidden.scalar_type();
  check_type(logits == ScalarType::Float || logits == ScalarType::Double, op,
             ": hidden must be [B, d] float32 or float64, got ", describe(hidden));
  Checked made{};
  made.table.dtype = dtype_tag(op, "weight", weight);
  check_tensor(op, "weight", weight, {-1, -1}, "[C, d]", weight.scalar_type(), hidden);
  check_tensor(op, "hidden", hidden, {-1, weight.size(1)}, "[B, d]", logits, weight);
  check_value(weight.size(0) >= 1, op, ": weight must have at least one class, got ", describe(weight));
  check_type(logits == ScalarType::Double || weight.scalar_type() != ScalarType::Double, op,
             ": hidden must be float64 if weight is, got ", describe(hidden));
  made.table.batch = hidden.size(0);
  made.table.dim = weight.size(1);
  check_tensor(op, "lse", lse, {made.table.batch}, "[B]", ScalarType::Double, hidden);
  if (bias) {
    made.table.bias.dtype = dtype_tag(op, "bias", *bias);
    check_tensor(op, "bias", *bias, {weight.size(0)}, "[C]", bias->scalar_type(), hidden);
  }
  made.law = law_of(op, logits, weight.size(0), kind, scale, alpha, row, made.table.batch);
  return made;
}

void take_rows(Checked& made, const Tensor& hidden, const Tensor& weight, const MaybeTensor& bias) {
  made.table.hidden = in_any(hidden);
  made.table.weight = in_any(weight);
  if (bias) made.table.bias.data = in_any(*bias);
  made.table.wide = !made.law.is_double && made.table.dim % (16 / int64_t(weight.element_size())) == 0 &&
                    aligned(made.table.hidden) && aligned(made.table.weight);
}

void exact_mass(Tensor dots, MaybeTensor bias, int64_t first, int64_t num_classes, int64_t kind, double scale,
                double alpha, MaybeTensor exclude, MaybeTensor exclude_offsets, int64_t row, Tensor mass) {
  constexpr const char* op = "exact_mass";
  begin_op();
  check_given(op, "dots", dots);
  const ScalarType logits = dots.scalar_type();
  check_type(logits == ScalarType::Float || logits == ScalarType::Double, op,
             ": dots must be [B, n] float32 or float64, got ", describe(dots));
  check_logits(op, "dots", dots, "[B, n]", logits);
  ExactMassParams p{};
  p.batch = dots.size(0);
  p.count = dots.size(1);
  p.stride = dots.stride(0);
  p.first = first;
  if (bias) check_tensor(op, "bias", *bias, {p.count}, "[n]", logits, dots);
  check_value(num_classes >= 1, op, ": num_classes must be at least 1, got ", num_classes);
  check_value(first >= 0 && first % kExactBlock == 0, op, ": first must be a multiple of ", kExactBlock, ", got ",
              first);
  check_value(p.count <= num_classes - first && (p.count % kExactBlock == 0 || p.count == num_classes - first), op,
              ": dots must have whole blocks of ", kExactBlock, " classes, or all those from first = ", first, " to ",
              num_classes, ", got ", describe(dots));
  p.law = law_of(op, logits, num_classes, kind, scale, alpha, row, p.batch);
  p.blocks = blocks_of(num_classes);
  check_tensor(op, "mass", mass, {p.batch, p.blocks}, "[B, ceil(C / 256)]", ScalarType::Double, dots);
  take_exclude(op, p.law, exclude, exclude_offsets, p.batch, dots);
  if (p.batch == 0 || p.count == 0) return;
  p.dots = in_logits(dots);
  p.bias = bias ? in_any(*bias) : nullptr;
  p.wide = !p.law.is_double && p.stride % 4 == 0 && aligned(p.dots) && aligned(p.bias);
  p.mass = out<double>(mass);
  SX_RUN(op, dots, launch_exact_mass, p);
}

void exact_product_mass(Tensor hidden, Tensor weight, MaybeTensor bias, int64_t kind, double scale, MaybeTensor exclude,
                        MaybeTensor exclude_offsets, int64_t row, Tensor mass) {
  constexpr const char* op = "exact_product_mass";
  begin_op();
  check_given(op, "weight", weight);
  const ScalarType dtype = weight.scalar_type();
  check_type(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op,
             ": weight must be [C, d] bfloat16 or float16, got ", describe(weight));
  check_tensor(op, "weight", weight, {-1, -1}, "[C, d]", dtype, weight);
  check_tensor(op, "hidden", hidden, {-1, -1}, "[B, d] or [B, parts of d]", dtype, weight);
  check_value(weight.size(0) >= 1, op, ": weight must have at least one class, got ", describe(weight));
  ExactProductMassParams p{};
  p.table.batch = hidden.size(0);
  p.table.dim = weight.size(1);
  p.table.dtype = dtype_tag(op, "weight", weight);
  p.parts = p.table.dim > 0 ? hidden.size(1) / p.table.dim : 1;
  check_value(p.parts >= 1 && hidden.size(1) == p.parts * p.table.dim, op, ": hidden must have d = ", p.table.dim,
              " columns or a multiple of it, got ", describe(hidden));
  check_value(hidden.size(1) < int64_t(1) << 31, op, ": hidden must have fewer than 2^31 columns, got ",
              describe(hidden));
  if (bias) {
    p.table.bias.dtype = dtype_tag(op, "bias", *bias);
    check_tensor(op, "bias", *bias, {weight.size(0)}, "[C]", bias->scalar_type(), weight);
  }
  p.law = law_of(op, ScalarType::Float, weight.size(0), kind, scale, 0.0, row, p.table.batch);
  check_value(p.law.kind != ExactKind::kQuartic, op, ": kind must be 0 (softmax) or 1 (absolute), got ", kind);
  p.blocks = blocks_of(weight.size(0));
  check_tensor(op, "mass", mass, {p.table.batch, p.blocks}, "[B, ceil(C / 256)]", ScalarType::Double, weight);
  take_exclude(op, p.law, exclude, exclude_offsets, p.table.batch, weight);
  if (p.table.batch == 0) return;
  if (backend_of(op, weight) == Backend::kCpu) {  // a [B, C], for tests: samplers go by chunks there
    Tensor rows = torch::stable::to(detached(hidden), ScalarType::Float);
    if (p.parts > 1) {
      const std::array<int64_t, 1> over_parts{1};
      rows = torch::stable::sum(torch::stable::view(rows, {p.table.batch, p.parts, p.table.dim}), over_parts);
    }
    const Tensor dots = empty(weight, {p.table.batch, weight.size(0)}, ScalarType::Float);
    const Tensor table = torch::stable::transpose(torch::stable::to(detached(weight), ScalarType::Float), 0, 1);
    call_op("aten::mm", "out", rows, table, dots);
    const MaybeTensor wide = bias ? MaybeTensor(torch::stable::to(detached(*bias), ScalarType::Float)) : std::nullopt;
    return exact_mass(dots, wide, 0, weight.size(0), kind, scale, 0.0, exclude, exclude_offsets, row, mass);
  }
  p.table.hidden = in_any(hidden);
  p.table.weight = in_any(weight);
  if (bias) p.table.bias.data = in_any(*bias);
  p.table.wide = p.table.dim % 8 == 0 && aligned(p.table.hidden) && aligned(p.table.weight);
  p.mass = out<double>(mass);
  SX_RUN_DEVICE(op, weight, launch_exact_product_mass, p);
}

std::tuple<Tensor, Tensor> exact_blocks(Tensor mass, Tensor key, int64_t row, int64_t num_samples) {
  constexpr const char* op = "exact_blocks";
  begin_op();
  check_tensor(op, "mass", mass, {-1, -1}, "[B, K]", ScalarType::Double, mass);
  check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, mass);
  ExactBlocksParams p{};
  p.batch = mass.size(0);
  p.blocks = mass.size(1);
  p.row = row;
  p.num_samples = num_samples;
  check_value(p.blocks >= 1, op, ": mass must have at least one column, got ", describe(mass));
  check_value(num_samples >= 0 && num_samples <= kPhiloxMaxDraws / 2, op, ": num_samples must be in [0, 2^23], got ",
              num_samples);
  check_value(row >= 0 && row <= kPhiloxMaxRows - p.batch, op,
              ": row must be at least 0 and row + B at most 2^32, got ", row);
  Tensor lse = empty(mass, {p.batch}, ScalarType::Double);
  Tensor place = empty(mass, {p.batch, num_samples}, ScalarType::Long);
  if (p.batch == 0) return {lse, place};
  p.mass = in<double>(mass);
  p.key = in<int64_t>(key);
  p.lse = out<double>(lse);
  p.place = num_samples > 0 ? out<int64_t>(place) : nullptr;
  MaybeTensor running;
  if (backend_of(op, mass) != Backend::kCpu) {
    running = empty(mass, {p.batch, p.blocks}, ScalarType::Long);
    p.running = reinterpret_cast<uint64_t*>(out<int64_t>(*running));
  }
  SX_RUN(op, mass, launch_exact_blocks, p);
  return {lse, place};
}

Tensor exact_draw(Tensor hidden, Tensor weight, MaybeTensor bias, Tensor lse, Tensor place, Tensor key, int64_t kind,
                  double scale, double alpha, MaybeTensor exclude, MaybeTensor exclude_offsets, int64_t row) {
  constexpr const char* op = "exact_draw";
  begin_op();
  Checked made = check_rows(op, hidden, weight, bias, lse, kind, scale, alpha, row);
  const int64_t batch = made.table.batch, places = blocks_of(made.law.num_classes) * batch;
  check_tensor(op, "key", key, {2}, "[2]", ScalarType::Long, hidden);
  check_tensor(op, "place", place, {batch, -1}, "[B, m]", ScalarType::Long, hidden);
  const int64_t num_samples = place.size(1);
  check_value(num_samples <= kPhiloxMaxDraws / 2, op, ": place must be [B, m] with m at most 2^23, got ",
              describe(place));
  take_exclude(op, made.law, exclude, exclude_offsets, batch, hidden);
  Tensor ids = empty(hidden, {batch, num_samples}, ScalarType::Long);
  if (batch == 0 || num_samples == 0) return ids;
  check_ids(op, "place", place, places);
  take_rows(made, hidden, weight, bias);
  ExactDrawParams p{};
  p.law = made.law;
  p.table = made.table;
  p.num_samples = num_samples;
  p.lse = in<double>(lse);
  p.key = in<int64_t>(key);
  // By block, then by row: draws that share a block and a row share its products, and rows that share a block find it
  // in the cache.
  const Tensor flat = torch::stable::view(place, {batch * num_samples});
  const auto sorted = call_op<2>("aten::sort", "stable", flat, std::optional<bool>(true), int64_t(0), false);
  const Tensor places_sorted = tensor_of(sorted[0]), order = tensor_of(sorted[1]);
  p.sorted = in<int64_t>(places_sorted);
  p.order = in<int64_t>(order);
  // A window of 16 has several rows for most blocks of classes; few draws go to as many thread blocks as there are.
  p.window = std::clamp<int64_t>(batch * num_samples / kExactDrawBlocks, 1, kExactDrawWindow);
  p.ids = out<int64_t>(ids);
  SX_RUN(op, hidden, launch_exact_draw, p);
  return ids;
}

Tensor exact_log_prob(Tensor hidden, Tensor weight, MaybeTensor bias, Tensor lse, Tensor ids, int64_t kind,
                      double scale, double alpha, MaybeTensor exclude, MaybeTensor exclude_offsets, int64_t row) {
  constexpr const char* op = "exact_log_prob";
  begin_op();
  Checked made = check_rows(op, hidden, weight, bias, lse, kind, scale, alpha, row);
  const int64_t batch = made.table.batch;
  check_tensor(op, "ids", ids, {batch, -1}, "[B, n]", ScalarType::Long, hidden);
  take_exclude(op, made.law, exclude, exclude_offsets, batch, hidden);
  Tensor log_q = empty(hidden, {batch, ids.size(1)}, ScalarType::Float);
  if (batch == 0 || ids.size(1) == 0) return log_q;
  check_ids(op, "ids", ids, made.law.num_classes);
  take_rows(made, hidden, weight, bias);
  ExactLogProbParams p{};
  p.law = made.law;
  p.table = made.table;
  p.num_ids = ids.size(1);
  p.lse = in<double>(lse);
  p.ids = in<int64_t>(ids);
  p.log_q = out<float>(log_q);
  SX_RUN(op, hidden, launch_exact_log_prob, p);
  return log_q;
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  m.def(
      "exact_mass(Tensor dots, Tensor? bias, SymInt first, SymInt num_classes, int kind, float scale, float alpha, "
      "Tensor? exclude, Tensor? exclude_offsets, SymInt row, Tensor(a!) mass) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "exact_product_mass(Tensor hidden, Tensor weight, Tensor? bias, int kind, float scale, Tensor? exclude, "
      "Tensor? exclude_offsets, SymInt row, Tensor(a!) mass) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def("exact_blocks(Tensor mass, Tensor key, SymInt row, SymInt num_samples) -> (Tensor lse, Tensor place)",
        {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "exact_draw(Tensor hidden, Tensor weight, Tensor? bias, Tensor lse, Tensor place, Tensor key, int kind, "
      "float scale, float alpha, Tensor? exclude, Tensor? exclude_offsets, SymInt row) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
  m.def(
      "exact_log_prob(Tensor hidden, Tensor weight, Tensor? bias, Tensor lse, Tensor ids, int kind, float scale, "
      "float alpha, Tensor? exclude, Tensor? exclude_offsets, SymInt row) -> Tensor",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) {
  m.impl("exact_mass", TORCH_BOX(&samplex::glue::exact_mass));
  m.impl("exact_product_mass", TORCH_BOX(&samplex::glue::exact_product_mass));
  m.impl("exact_blocks", TORCH_BOX(&samplex::glue::exact_blocks));
  m.impl("exact_draw", TORCH_BOX(&samplex::glue::exact_draw));
  m.impl("exact_log_prob", TORCH_BOX(&samplex::glue::exact_log_prob));
}
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) {
  m.impl("exact_mass", TORCH_BOX(&samplex::glue::exact_mass));
  m.impl("exact_product_mass", TORCH_BOX(&samplex::glue::exact_product_mass));
  m.impl("exact_blocks", TORCH_BOX(&samplex::glue::exact_blocks));
  m.impl("exact_draw", TORCH_BOX(&samplex::glue::exact_draw));
  m.impl("exact_log_prob", TORCH_BOX(&samplex::glue::exact_log_prob));
}
