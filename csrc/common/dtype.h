// Storage types the kernels know, as a POD tag and one dispatch helper.
#pragma once

#include <stdexcept>
#include <string>

#include "common/numeric.h"

namespace samplex {

enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

constexpr size_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

template <typename T>
struct TypeTag {
  using type = T;
};

// body(TypeTag<T>{}) for the storage type T of `dtype`.
template <typename F>
inline void dispatch_dtype(const char* op, DType dtype, F&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(TypeTag<float>{});
    case DType::kFloat64:
      return body(TypeTag<double>{});
    case DType::kFloat16:
      return body(TypeTag<Half>{});
    case DType::kBFloat16:
      return body(TypeTag<BFloat16>{});
  }
  throw std::runtime_error(std::string(op) + ": internal: dtype tag " + std::to_string(int(dtype)) + " is not known");
}

// A [C] vector of scalars kept in its own storage type; read one element at a time in the accumulation type.
struct ScalarTable {
  const void* data;  // nullptr: absent
  DType dtype;
};

inline namespace SX_ISA_NS {

template <typename A>
SX_HOST_DEVICE inline A load_scalar(const ScalarTable& table, int64_t i, A absent) {
  if (table.data == nullptr) return absent;
  switch (table.dtype) {
    case DType::kFloat32:
      return A(static_cast<const float*>(table.data)[i]);
    case DType::kFloat64:
      return A(static_cast<const double*>(table.data)[i]);
    case DType::kFloat16:
      return A(to_acc(static_cast<const Half*>(table.data)[i]));
    default:
      return A(to_acc(static_cast<const BFloat16*>(table.data)[i]));
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
