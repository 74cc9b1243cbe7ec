// 16-byte loads of storage types into accumulation registers, and their stores.
#pragma once

#include "common/macros.h"
#include "common/numeric.h"

namespace samplex {

// Numbers of one 16-byte load; 1 for double, whose kernels are for gradient checks.
template <typename T>
constexpr int vector_width = sizeof(T) == 8 ? 1 : 16 / int(sizeof(T));

// Whether rows from here on can be read 16 bytes at a time, where their length is a multiple of that.
inline bool vector_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// out[0 .. Width) = row[0 .. Width). Width is 1, or 16 / sizeof(T) with `row` 16-byte aligned.
template <int Width, typename T>
SX_DEVICE inline void load_values(const T* row, float* out) {
  if constexpr (Width == 1) {
    out[0] = to_acc(row[0]);
  } else if constexpr (sizeof(T) == 4) {
    const float4 x = *reinterpret_cast<const float4*>(row);
    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
  } else {
    const uint4 x = *reinterpret_cast<const uint4*>(row);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = to_acc(bit_copy<T>(uint16_t(words[i])));
      out[2 * i + 1] = to_acc(bit_copy<T>(uint16_t(words[i] >> 16)));
    }
  }
}

// `Width` numbers as stored in memory: a 16-bit one takes half a register until it is used. Width as above.
template <typename T, int Width>
struct PackedValues {
  static_assert(Width == 1 || Width * sizeof(T) == 16);
  uint4 word;

  SX_DEVICE void clear() { word = make_uint4(0u, 0u, 0u, 0u); }

  SX_DEVICE void load(const T* row) { word = *reinterpret_cast<const uint4*>(row); }

  SX_DEVICE void unpack(float* out) const {
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = bit_copy<float>(words[i]);
      } else {
        out[2 * i] = to_acc(bit_copy<T>(uint16_t(words[i])));
        out[2 * i + 1] = to_acc(bit_copy<T>(uint16_t(words[i] >> 16)));
      }
    }
  }
};

template <typename T>
struct PackedValues<T, 1> {
  T word;

  SX_DEVICE void clear() { word = T{}; }
  SX_DEVICE void load(const T* row) { word = *row; }
  SX_DEVICE void unpack(float* out) const { out[0] = to_acc(word); }
};

// row[0 .. Width) = in[0 .. Width), float in shared or global memory. Width is 1 or a multiple of 4 with 16-byte
// alignment.
template <int Width>
SX_DEVICE inline void store_floats(float* row, const float* in) {
  if constexpr (Width == 1) {
    row[0] = in[0];
  } else {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      *reinterpret_cast<float4*>(row + i) = make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
    }
  }
}

template <int Width>
SX_DEVICE inline void load_floats(const float* row, float* out) {
  if constexpr (Width == 1) {
    out[0] = row[0];
  } else {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(row + i);
      out[i] = x.x;
      out[i + 1] = x.y;
      out[i + 2] = x.z;
      out[i + 3] = x.w;
    }
  }
}

// Rows of any storage type to the accumulation type, and back to memory of that type.
template <int Width, typename T, typename A>
SX_DEVICE inline void load_columns(const T* row, A* out) {
  if constexpr (sizeof(A) == 8)
    out[0] = row[0];
  else
    load_values<Width>(row, out);
}

template <int Width, typename A>
SX_DEVICE inline void store_columns(A* row, const A* in) {
  if constexpr (sizeof(A) == 8)
    row[0] = in[0];
  else
    store_floats<Width>(row, in);
}

}  // namespace samplex
