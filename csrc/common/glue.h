// The torch side of an op: argument checks with one form of message, raw pointers, backend choice. Only *_op.cpp and
// bindings/library.cpp include this.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/backend.h"
#include "common/dtype.h"
#include "common/pool.h"

namespace samplex::glue {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Sizes of a tensor. Not a vector: an op makes a dozen of them, and each would allocate.
class Shape {
 public:
  static constexpr size_t kMost = 4;
  Shape(std::initializer_list<int64_t> sizes) : size_(sizes.size()) {
    if (size_ > kMost) throw std::runtime_error("samplex: a shape of more than four dimensions");
    std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  }
  size_t size() const { return size_; }
  const int64_t* data() const { return sizes_.data(); }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t operator[](size_t i) const { return sizes_[i]; }

 private:
  size_t size_;
  std::array<int64_t, kMost> sizes_{};
};

// Strides of a contiguous tensor of this shape.
inline std::array<int64_t, Shape::kMost> contiguous_strides(const Shape& shape) {
  std::array<int64_t, Shape::kMost> strides{};
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape[i] > 0 ? shape[i] : 1;
  }
  return strides;
}

// Bytes of gradient rows from which on they are written past the cache: fewer stay there for code that reads them next.
// Measured.
constexpr uint64_t kStreamRowsSmallest = uint64_t(4) << 20;

// ------------------------------------------------------------------------------------------------ messages
// The stable ABI has only RuntimeError. The Python error that is meant comes first in the message, and `op_error` of
// samplex_cuda/_checks.py raises it:
//
//   IndexError: sampled_softmax: target must be in [0, 10), got 12 at flat position 3
//
//   IndexError   an id, target or row id out of range
//   TypeError    a wrong dtype
//   ValueError   a wrong shape, device, layout or number, offsets that do not ascend
//   MemoryError  a result that does not fit into memory
//
// Not STD_TORCH_CHECK: that puts the build machine's path into the message.
template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <typename... Parts>
inline void check_index(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail("IndexError: ", parts...);
}

template <typename... Parts>
inline void check_type(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail("TypeError: ", parts...);
}

template <typename... Parts>
inline void check_value(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail("ValueError: ", parts...);
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline std::string device_name(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}

// Shape, dtype and device of a tensor. Written only when a check fails: to make the text takes longer than a small op.
struct Described {
  const Tensor* t;  // or nullptr, for None
};

inline std::ostream& operator<<(std::ostream& text, const Described& what) {
  if (what.t == nullptr || !what.t->defined()) return text << "None";
  const Tensor& t = *what.t;
  text << '[';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << "] " << dtype_name(t.scalar_type()) << " on " << device_name(t);
  return t.is_contiguous() ? text : text << " (not contiguous)";
}

inline Described describe(const Tensor& t) { return {&t}; }
inline Described describe(const std::optional<Tensor>& t) { return {t ? &*t : nullptr}; }

// None given for a tensor that is not optional arrives as one without anything: no question about it has an answer.
inline void check_given(const char* op, const char* arg, const Tensor& t) {
  if (!t.defined()) [[unlikely]]
    fail("TypeError: ", op, ": ", arg, " must be a tensor, got None");
}

// One dimension of a wanted shape: a fixed size, or -1 for any.
inline bool shape_matches(const Tensor& t, const Shape& wanted) {
  if (t.dim() != static_cast<int64_t>(wanted.size())) return false;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (wanted[i] >= 0 && t.size(i) != wanted[i]) return false;
  }
  return true;
}

// `wanted` is the shape to check, `text` the shape to print, e.g. "[B, d]". Device is that of `like`.
inline void check_tensor(const char* op, const char* arg, const Tensor& t, const Shape& wanted, const char* text,
                         ScalarType dtype, const Tensor& like) {
  check_given(op, arg, t);
  if (!like.defined()) [[unlikely]]
    fail("TypeError: ", op, ": every tensor besides ", arg, " must be given, got None");
  const bool device_ok = t.is_cpu() == like.is_cpu() && (t.is_cpu() || t.get_device_index() == like.get_device_index());
  if (shape_matches(t, wanted) && t.scalar_type() == dtype && device_ok && t.is_contiguous()) return;
  std::ostringstream sizes;
  for (size_t i = 0; i < wanted.size(); ++i) {
    sizes << (i ? ", " : "");
    if (wanted[i] >= 0)
      sizes << wanted[i];
    else
      sizes << '*';
  }
  fail(t.scalar_type() == dtype ? "ValueError: " : "TypeError: ", op, ": ", arg, " must be ", text, " = [", sizes.str(),
       "] ", dtype_name(dtype), " contiguous on ", device_name(like), ", got ", describe(t));
}

inline DType dtype_tag(const char* op, const char* arg, const Tensor& t) {
  check_given(op, arg, t);
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail("TypeError: ", op, ": ", arg, " must be float32, float64, float16 or bfloat16, got ", describe(t));
  }
}

inline ScalarType acc_type(ScalarType storage) {
  return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// ------------------------------------------------------------------------------------------------ backend
inline Backend backend_of(const char* op, const Tensor& t) {
  if (t.is_cpu()) return cpu_backend();
  check_value(t.is_cuda(), op, ": tensors must be on cpu or cuda, got ", device_name(t));
  if (!built_with_cuda()) {
    fail(op,
         ": this build of samplex-cuda has no CUDA kernels; rebuild with nvcc on PATH and SAMPLEX_CUDA=ON, or move ",
         "the tensors to the CPU");
  }
  return Backend::kCuda;
}

// Whether ids in `t` are checked on the host. Those of a device are left to the kernels: reading them would wait.
inline bool ids_on_host(const Tensor& t) { return t.is_cpu() && !device_ids(); }

// Call once at the top of an op, before data pointers are taken.
inline void begin_op() {
#ifdef SAMPLEX_TEST_BACKENDS
  if (cpu_backend() == Backend::kSimt) simt::forget_buffers();
#endif
}

inline void note_bytes(const Tensor& t, const void* data, size_t bytes, bool writable) {
#ifdef SAMPLEX_TEST_BACKENDS
  if (t.is_cpu() && cpu_backend() == Backend::kSimt) simt::note_buffer(data, bytes, writable);
#else
  (void)t, (void)data, (void)bytes, (void)writable;
#endif
}

inline void note(const Tensor& t, const void* data, size_t item, bool writable) {
#ifdef SAMPLEX_TEST_BACKENDS
  note_bytes(t, data, t.numel() * item, writable);
#else
  (void)t, (void)data, (void)item, (void)writable;
#endif
}

template <typename T>
inline const T* in(const Tensor& t) {
  const void* data = t.const_data_ptr();
  note(t, data, sizeof(T), false);
  return static_cast<const T*>(data);
}
template <typename T>
inline const T* in(const std::optional<Tensor>& t) {
  return t.has_value() ? in<T>(*t) : nullptr;
}
template <typename T>
inline T* out(const Tensor& t) {
  void* data = t.mutable_data_ptr();
  note(t, data, sizeof(T), true);
  return static_cast<T*>(data);
}
// Untyped: the storage type is in the params as a DType.
inline const void* in_any(const Tensor& t) {
  const void* data = t.const_data_ptr();
  note(t, data, t.element_size(), false);
  return data;
}
inline void* out_any(const Tensor& t) {
  void* data = t.mutable_data_ptr();
  note(t, data, t.element_size(), true);
  return data;
}

// `t`, or a copy of it that 16-byte loads can read: a contiguous view of a larger buffer may begin anywhere.
inline Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 ? t : torch::stable::clone(t);
}

// Before torch is asked: an allocation that fails inside it prints a C++ stack.
inline void check_memory(const Tensor& like, const Shape& shape, size_t item) {
  constexpr size_t kProbed = size_t(1) << 32, kMost = size_t(1) << 46;
  size_t bytes = item;
  bool fits = true;
  for (int64_t size : shape) fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size_t(size), &bytes);
  fits = fits && bytes <= kMost;
  if (fits && bytes > kProbed && like.is_cpu()) {
    void* probe = std::malloc(bytes);
    fits = probe != nullptr;
    std::free(probe);
  }
  if (fits) return;
  std::ostringstream sizes;
  for (size_t i = 0; i < shape.size(); ++i) sizes << (i ? ", " : "") << shape[i];
  fail("MemoryError: samplex: can't allocate memory for a tensor of [", sizes.str(), "] numbers");
}

// Not torch::stable::new_empty: looking an operator up by its name costs more than the allocation.
inline Tensor empty(const Tensor& like, const Shape& shape, ScalarType dtype) {
  check_memory(like, shape, 8);
  const auto strides = contiguous_strides(shape);
  const torch::stable::Device device = like.device();
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(device.type())), device.index(), &handle));
  return Tensor(handle);
}

// The same, from the pool of reused memory where that pays: large tensors of the CPU kernels.
inline Tensor empty_pooled(const Tensor& like, const Shape& shape, ScalarType dtype) {
  check_memory(like, shape, 8);
  size_t bytes = dtype == ScalarType::Double || dtype == ScalarType::Long ? 8 : 4;
  for (int64_t size : shape) bytes *= size_t(size);
  if (!like.is_cpu() || cpu_backend() != Backend::kCpu || bytes < kPoolSmallest) return empty(like, shape, dtype);
  const auto strides = contiguous_strides(shape);
  return torch::stable::from_blob(pool_take(bytes), {shape.data(), shape.size()}, {strides.data(), shape.size()},
                                  like.device(), dtype, &pool_give);
}

// Calls `launcher` of the right backend. A CUDA launch runs on the tensor's device and torch's current stream.
#ifdef SAMPLEX_WITH_CUDA
#define SX_CALL_CUDA(ref, launcher, params)                                                                           \
  if ((ref).is_cuda()) {                                                                                              \
    const torch::stable::accelerator::DeviceGuard guard((ref).get_device_index());                                    \
    ::samplex::cuda::launcher(params,                                                                                 \
                              torch::stable::accelerator::getCurrentStream((ref).get_device_index()).nativeHandle()); \
  } else {                                                                                                            \
    ::samplex::cuda::launcher(params, nullptr);                                                                       \
  }
#else
#define SX_CALL_CUDA(ref, launcher, params)
#endif
#ifdef SAMPLEX_TEST_BACKENDS
#define SX_CALL_SIMT(launcher, params) ::samplex::simt::launcher(params, nullptr)
#else
#define SX_CALL_SIMT(launcher, params) (void)0
#endif
#define SX_RUN(op, ref, launcher, params)         \
  switch (::samplex::glue::backend_of(op, ref)) { \
    case ::samplex::Backend::kCpu:                \
      ::samplex::cpu::launcher(params);           \
      break;                                      \
    case ::samplex::Backend::kSimt:               \
      SX_CALL_SIMT(launcher, params);             \
      break;                                      \
    case ::samplex::Backend::kCuda:               \
      SX_CALL_CUDA(ref, launcher, params) break;  \
  }
// The same for launchers that the CPU has no part in (SX_DECLARE_CUDA_LAUNCHER).
#if defined(SAMPLEX_WITH_CUDA) || defined(SAMPLEX_TEST_BACKENDS)
#define SX_RUN_DEVICE(op, ref, launcher, params)                           \
  if (::samplex::glue::backend_of(op, ref) == ::samplex::Backend::kSimt) { \
    SX_CALL_SIMT(launcher, params);                                        \
  } else {                                                                 \
    SX_CALL_CUDA(ref, launcher, params)                                    \
  }
#else
#define SX_RUN_DEVICE(op, ref, launcher, params) (void)0
#endif

}  // namespace samplex::glue
