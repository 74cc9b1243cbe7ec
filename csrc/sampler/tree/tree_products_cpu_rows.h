// CPU products of the tree, compiled once per instruction set: w . x + b of nodes, and the projection of features.
#pragma once

#include "common/vec.h"
#include "sampler/tree/tree_base_math.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace samplex {
inline namespace SX_ISA_NS {

constexpr int kTreeBlock = 64;  // draws that go down together

// Always inlined: GCC takes a function that only prefetches for one without effect, and drops the call.
template <typename T>
SX_ALWAYS_INLINE void prefetch_node(const TreeTable& tree, int64_t node) {
  const char* bytes = reinterpret_cast<const char*>(tree_node<T>(tree, node));
  for (int64_t at = 0; at <= tree.dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at);
}

// Nodes that are scored next, by somebody else: asked for while others are scored, a few at a time. All at once would
// fill the miss buffers of the core, and it would wait.
template <typename T>
struct NodesAhead {
  const int64_t* nodes = nullptr;
  int count = 0;

  SX_ALWAYS_INLINE void prefetch(const TreeTable& tree, int from, int to) const {
    for (int g = from; g < to && g < count; ++g) prefetch_node<T>(tree, nodes[g]);
  }
};

// ------------------------------------------------------------------------------------------------ w . x + b
#if defined(__AVX2__)

// The first two halvings of tree_sum, which leave four partial sums. Zeros behind `dim`, as tree_logit has them.
#if defined(__AVX512F__)
inline __m512 tree_load(const float* p, __mmask16 some) { return _mm512_maskz_loadu_ps(some, p); }
inline __m512 tree_load(const BFloat16* p, __mmask16 some) {
  const __m256i bits = _mm256_maskz_loadu_epi16(some, p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <typename T>
inline __m128 tree_fours(const TreeTable& tree, int64_t node, const float* x) {
  const T* w = tree_node<T>(tree, node);
  __m512 lanes = _mm512_setzero_ps();
  for (int64_t c = 0; c < tree.dim; c += kTreeLanes) {
    const int64_t rest = tree.dim - c;
    const __mmask16 some = rest >= kTreeLanes ? __mmask16(0xFFFF) : __mmask16((1u << rest) - 1);
    lanes = _mm512_add_ps(lanes, _mm512_mul_ps(tree_load(w + c, some), _mm512_maskz_loadu_ps(some, x + c)));
  }
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
#else
inline __m256 tree_load(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 tree_load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// dim a multiple of 16
template <typename T>
inline __m128 tree_fours(const TreeTable& tree, int64_t node, const float* x) {
  const T* w = tree_node<T>(tree, node);
  __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
  for (int64_t c = 0; c < tree.dim; c += kTreeLanes) {
    low = _mm256_add_ps(low, _mm256_mul_ps(tree_load(w + c), _mm256_loadu_ps(x + c)));
    high = _mm256_add_ps(high, _mm256_mul_ps(tree_load(w + c + 8), _mm256_loadu_ps(x + c + 8)));
  }
  const __m256 eight = _mm256_add_ps(low, high);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
#endif

inline bool has_fours(const TreeTable& tree) {
#if defined(__AVX512F__)
  (void)tree;
  return true;
#else
  return tree.dim % kTreeLanes == 0;
#endif
}

template <typename T>
inline float tree_logit_fast(const TreeTable& tree, int64_t node, const float* x) {
  if (!has_fours(tree)) return tree_logit<T>(tree, node, x);
  const __m128 four = tree_fours<T>(tree, node, x);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1))) + to_acc(tree_node<T>(tree, node)[tree.dim]);
}

// out[g] = logit of nodes[g] for x[g]. Four at a time: the last halvings of four sums are three additions of columns.
template <typename T>
inline void tree_logits(const TreeTable& tree, const int64_t* nodes, const float* const* x, int count, float* out,
                        const NodesAhead<T>& ahead) {
  int g = 0;
  for (; has_fours(tree) && g + 4 <= count; g += 4) {
    ahead.prefetch(tree, g, g + 4);
    __m128 s0 = tree_fours<T>(tree, nodes[g], x[g]), s1 = tree_fours<T>(tree, nodes[g + 1], x[g + 1]);
    __m128 s2 = tree_fours<T>(tree, nodes[g + 2], x[g + 2]), s3 = tree_fours<T>(tree, nodes[g + 3], x[g + 3]);
    _MM_TRANSPOSE4_PS(s0, s1, s2, s3);
    float bias[4];
    for (int j = 0; j < 4; ++j) bias[j] = to_acc(tree_node<T>(tree, nodes[g + j])[tree.dim]);
    _mm_storeu_ps(out + g, _mm_add_ps(_mm_add_ps(_mm_add_ps(s0, s2), _mm_add_ps(s1, s3)), _mm_loadu_ps(bias)));
  }
  ahead.prefetch(tree, g, kTreeBlock);
  for (; g < count; ++g) out[g] = tree_logit_fast<T>(tree, nodes[g], x[g]);
}

#else

template <typename T>
inline float tree_logit_fast(const TreeTable& tree, int64_t node, const float* x) {
  return tree_logit<T>(tree, node, x);
}

template <typename T>
inline void tree_logits(const TreeTable& tree, const int64_t* nodes, const float* const* x, int count, float* out,
                        const NodesAhead<T>& ahead) {
  ahead.prefetch(tree, 0, kTreeBlock);
  for (int g = 0; g < count; ++g) out[g] = tree_logit<T>(tree, nodes[g], x[g]);
}

#endif

// ------------------------------------------------------------------------------------------------ projection
constexpr int kProjectRows = 4;  // that share the loads of the projection
constexpr int kProjectWide = 16;

// sum[r][j] = sum over i of centred[r][i] * weights[i][j]
inline void project_chunk(const float (*centred)[kTreeProjectChunk], const float* weights, int64_t stride, int length,
                          float (*sum)[kProjectWide]) {
#if defined(__AVX2__)
  constexpr int kVecs = kProjectWide / Vec::kSize;
  Vec total[kProjectRows][kVecs];
  for (auto& row : total) {
    for (Vec& v : row) v = Vec::zero();
  }
  for (int i = 0; i < length; ++i) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = Vec::load(weights + i * stride + v * Vec::kSize);
    for (int r = 0; r < kProjectRows; ++r) {
      const Vec x = Vec::all(centred[r][i]);
      for (int v = 0; v < kVecs; ++v) total[r][v] = total[r][v] + x * w[v];
    }
  }
  for (int r = 0; r < kProjectRows; ++r) {
    for (int v = 0; v < kVecs; ++v) total[r][v].store(sum[r] + v * Vec::kSize);
  }
#else
  for (int r = 0; r < kProjectRows; ++r) {
    for (int j = 0; j < kProjectWide; ++j) sum[r][j] = 0;
    for (int i = 0; i < length; ++i) {
      for (int j = 0; j < kProjectWide; ++j) sum[r][j] = sum[r][j] + centred[r][i] * weights[i * stride + j];
    }
  }
#endif
}

inline void tree_project_rows(const TreeProjectParams& p, int64_t begin, int64_t end) {
  float centred[kProjectRows][kTreeProjectChunk], sum[kProjectRows][kProjectWide], total[kProjectRows][kProjectWide];
  float padded[kTreeProjectChunk * kProjectWide];
  for (int64_t b = begin; b < end; b += kProjectRows) {
    for (int64_t first = 0; first < p.dim; first += kProjectWide) {
      const int width = int(p.dim - first < kProjectWide ? p.dim - first : kProjectWide);
      for (auto& row : total) {
        for (float& x : row) x = 0;
      }
      for (int64_t c = 0; c < p.features; c += kTreeProjectChunk) {
        const int length = int(p.features - c < kTreeProjectChunk ? p.features - c : kTreeProjectChunk);
        for (int r = 0; r < kProjectRows; ++r) {  // the last row is repeated
          const float* x = p.x + (b + r < end ? b + r : end - 1) * p.features + c;
          for (int i = 0; i < length; ++i) centred[r][i] = x[i] - p.mean[c + i];
        }
        const float* weights = p.projection + c * p.dim + first;
        int64_t stride = p.dim;
        if (width < kProjectWide) {
          for (int i = 0; i < length; ++i) {
            for (int j = 0; j < kProjectWide; ++j) {
              padded[i * kProjectWide + j] = j < width ? weights[i * stride + j] : 0.0f;
            }
          }
          weights = padded;
          stride = kProjectWide;
        }
        project_chunk(centred, weights, stride, length, sum);
        for (int r = 0; r < kProjectRows; ++r) {
          for (int j = 0; j < kProjectWide; ++j) total[r][j] = total[r][j] + sum[r][j];
        }
      }
      for (int64_t r = 0; r < kProjectRows && b + r < end; ++r) {
        for (int j = 0; j < width; ++j) p.z[(b + r) * p.dim + first + j] = total[r][j];
      }
    }
  }
}

}  // namespace SX_ISA_NS
}  // namespace samplex
