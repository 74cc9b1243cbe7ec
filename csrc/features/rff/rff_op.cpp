// Schemas, checks and allocation of the feature maps:
//   rff      -> features [B, F], float32 (float64 for float64 x)
//   rff_bwd  -> d_x [B, d] like x, d_omega [D, d]; the one not asked for is empty
#include <tuple>

#include "common/calls.h"
#include "features/rff/rff_params.h"

namespace samplex::glue {
namespace {

using MaybeTensor = std::optional<Tensor>;

// From here on features are written past the cache: they would push out more than they leave for the next reader.
constexpr int64_t kStreamSmallest = int64_t(16) << 20;

struct Map {
  RffKind kind;
  int64_t num_features, width;
  double decay, shift, alpha;
};

Map map_of(const char* op, const Tensor& x, const MaybeTensor& omega, int64_t kind, double nu, double alpha,
           bool gaussian, double shift) {
  dtype_tag(op, "x", x);
  check_value(x.dim() == 2 && x.size(1) >= 1, op, ": x must be [B, d] with d >= 1, got ", describe(x));
  check_tensor(op, "x", x, {-1, -1}, "[B, d]", x.scalar_type(), x);
  check_value(kind >= 0 && kind <= 2, op, ": kind must be 0 (fourier), 1 (positive) or 2 (quadratic), got ", kind);
  Map map{RffKind(kind), 0, 0, 0.0, shift, alpha};
  const int64_t d = x.size(1);
  if (map.kind == RffKind::kQuadratic) {
    check_value(!omega.has_value(), op, ": omega must be None for kind 2 (quadratic), got a tensor");
    check_value(d <= kRffMostQuadratic, op, ": x must be [B, d] with d <= ", kRffMostQuadratic,
                " for kind 2 (quadratic), got ", describe(x));
    check_value(alpha > 0 && alpha < 1e30, op, ": alpha must be positive and finite, got ", alpha);
  } else {
    check_value(omega.has_value(), op, ": omega must be [D, ", d, "], got None");
    check_tensor(op, "omega", *omega, {-1, d}, "[D, d]", acc_type(x.scalar_type()), x);
    map.num_features = omega->size(0);
    check_value(map.num_features >= 1, op, ": omega must be [D, d] with D >= 1, got ", describe(*omega));
  }
  if (map.kind == RffKind::kPositive) {
    check_value(nu > 0 && nu < 1e30, op, ": nu must be positive and finite, got ", nu);
    check_value(shift > -1e30 && shift < 1e30, op, ": shift must be finite, got ", shift);
    map.decay = gaussian ? nu : nu / 2;
  }
  map.width = rff_num_numbers(map.kind, d, map.num_features);
  return map;
}

Tensor rff(Tensor x, MaybeTensor omega, int64_t kind, double nu, double alpha, bool gaussian, double shift) {
  constexpr const char* op = "rff";
  begin_op();
  const Map map = map_of(op, x, omega, kind, nu, alpha, gaussian, shift);
  const ScalarType acc = acc_type(x.scalar_type());
  Tensor features = empty_pooled(x, {x.size(0), map.width}, acc);
  if (x.size(0) == 0) return features;
  RffParams p{};
  p.x = in_any(x);
  p.omega = omega ? in_any(*omega) : nullptr;
  p.features = out_any(features);
  p.batch = x.size(0);
  p.dim = x.size(1);
  p.num_features = map.num_features;
  p.decay = map.decay;
  p.shift = map.shift;
  p.alpha = map.alpha;
  p.kind = map.kind;
  p.dtype = dtype_tag(op, "x", x);
  p.stream = acc == ScalarType::Float && p.num_features > 0 && p.num_features % kRffPanel == 0 &&
             reinterpret_cast<uintptr_t>(p.features) % 64 == 0 && p.batch * map.width * 4 >= kStreamSmallest;
  SX_RUN(op, x, launch_rff, p);
  return features;
}

// a [n, k] times b [k, p]. mm.out and not matmul: under autocast the functional overloads answer in half precision.
Tensor call_mm(const Tensor& a, const Tensor& b) {
  const Tensor result = empty(a, {a.size(0), b.size(1)}, a.scalar_type());
  return tensor_of(call_op("aten::mm", "out", detached(a), detached(b), result)[0]);
}

std::tuple<Tensor, Tensor> rff_bwd(Tensor grad, Tensor x, MaybeTensor omega, Tensor features, int64_t kind, double nu,
                                   double alpha, bool gaussian, bool need_x, bool need_omega) {
  constexpr const char* op = "rff_bwd";
  begin_op();
  const Map map = map_of(op, x, omega, kind, nu, alpha, gaussian, 0.0);
  const ScalarType acc = acc_type(x.scalar_type());
  const int64_t B = x.size(0), d = x.size(1), D = map.num_features;
  check_tensor(op, "grad", grad, {B, map.width}, "[B, F]", acc, x);
  check_tensor(op, "features", features, {B, map.width}, "[B, F]", acc, x);
  check_value(!need_omega || omega.has_value(), op, ": need_omega must be False for kind 2 (quadratic), got True");
  Tensor d_x = empty(x, {need_x ? B : 0, d}, x.scalar_type());
  Tensor d_omega = empty(x, {0, d}, acc);
  if (B == 0) {
    if (need_omega) {
      d_omega = empty(x, {D, d}, acc);
      torch::stable::zero_(d_omega);
    }
    return {d_x, d_omega};
  }
  const Tensor coefs = empty_pooled(x, {need_omega ? B : 0, D}, acc);
  RffBwdParams p{};
  p.grad = in_any(grad);
  p.features = in_any(features);
  p.x = in_any(x);
  p.omega = omega ? in_any(*omega) : nullptr;
  p.d_x = need_x ? out_any(d_x) : nullptr;
  p.coefs = need_omega ? out_any(coefs) : nullptr;
  p.batch = B;
  p.dim = d;
  p.num_features = D;
  p.decay = map.decay;
  p.alpha = map.alpha;
  p.kind = map.kind;
  p.dtype = dtype_tag(op, "x", x);
  if (need_x || need_omega) SX_RUN(op, x, launch_rff_bwd, p);
  if (need_omega) {
    d_omega = call_mm(torch::stable::transpose(coefs, 0, 1), x.scalar_type() == acc ? x : torch::stable::to(x, acc));
  }
  return {d_x, d_omega};
}

}  // namespace
}  // namespace samplex::glue

STABLE_TORCH_LIBRARY_FRAGMENT(samplex, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  m.def(
      "rff(Tensor x, Tensor? omega, int kind, float nu=1.0, float alpha=1.0, bool gaussian=False, float shift=0.0) -> "
      "Tensor",
      tags);
  m.def(
      "rff_bwd(Tensor grad, Tensor x, Tensor? omega, Tensor features, int kind, float nu, float alpha, bool gaussian, "
      "bool need_x, bool need_omega) -> (Tensor d_x, Tensor d_omega)",
      tags);
}

#define SX_RFF_IMPLS(m)                          \
  m.impl("rff", TORCH_BOX(&samplex::glue::rff)); \
  m.impl("rff_bwd", TORCH_BOX(&samplex::glue::rff_bwd))

STABLE_TORCH_LIBRARY_IMPL(samplex, CPU, m) { SX_RFF_IMPLS(m); }
STABLE_TORCH_LIBRARY_IMPL(samplex, CUDA, m) { SX_RFF_IMPLS(m); }
