// Attention pooling on the GPU. Formulas in attention_pool_params.h.
//
//   attention_pool_kernel         float, half, bfloat16 storage; 0 < d <= 4096: one pass, a block has a batch row
//   attention_pool_any_kernel     any other d, and double: a second read of the rows where p and v need a gradient
//   attention_pool_scale_kernel   coefficients times the upstream gradient
//   attention_pool_rows_kernel    gradient rows from two coefficients each: a block a row
//   attention_pool_vectors_kernel gradients of p and v over a part of the batch: a thread has a column, or four
//   attention_pool_parts_kernel   their sum over the parts
//   attention_pool_check_kernel   SAMPLEX_DEBUG=1: stops with a message at the first id out of range
//
// One pass: a team of warps takes kRows tokens at a time, its lanes the columns of their rows, with the two running
// sums in registers and p and v in shared memory. A team is one warp, and each of the block's keeps an online softmax
// relative to its own maximum; the block rescales them to the common maximum and adds them in warp order. Rows that are
// too wide for that (d > 768; odd d > 256) have all warps of the block as their team: the warps add up their parts of
// the scores in shared memory, and every one keeps the same softmax. No float atomics: the same bits every time.
#pragma once

#include <cstdio>

#include "common/vec_load.cuh"
#include "common/warp.cuh"
#include "loss/attention_pool/attention_pool_math.h"

namespace samplex::SX_BACKEND_NS {

constexpr int kPoolWarps = 4;
constexpr int kPoolThreads = kPoolWarps * kWarpSize;
// From sm_100 on ptxas needs a few registers more for the same code: one resident block fewer, or it spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kPoolFewer = 1;
#else
constexpr int kPoolFewer = 0;
#endif

// Row of the table for a token: -1 for padding, num_rows for an id out of range. That reads no row, but has score and
// value nan, and so has what its batch row is pooled to.
SX_DEVICE inline int64_t pool_row(const AttentionPoolParams& p, int64_t id) {
  if (id == -1 || id == -100) return -1;
  return uint64_t(id) < uint64_t(p.num_rows) ? id : p.num_rows;
}

// ------------------------------------------------------------------------------------------------ a block's softmax
template <typename A>
struct PoolShared {
  A max[kPoolWarps], ref[kPoolWarps], sum[kPoolWarps], weighted[kPoolWarps];
  int present[kPoolWarps];
};

// What the block agrees on. `step` takes this warp's sums to the common reference.
template <typename A>
struct PoolResult {
  A max, ref, sum, offset;  // offset: F
  bool present;             // any token that is not padding
  PoolStep<A> step;
};

// Every warp brings its state; all threads of the block call it.
template <typename A>
SX_DEVICE inline PoolResult<A> pool_merge(PoolShared<A>& s, const PoolState<A>& mine, bool present) {
  const int w = warp_id();
  if (lane_id() == 0) {
    s.max[w] = mine.max;
    s.ref[w] = mine.ref;
    s.sum[w] = mine.sum;
    s.weighted[w] = mine.weighted;
    s.present[w] = present ? 1 : 0;
  }
  __syncthreads();
  PoolResult<A> r = {negative_infinity<A>(), A(0), A(0), A(0), false, {A(0), A(0)}};
  for (int i = 0; i < kPoolWarps; ++i) {
    if (s.max[i] > r.max) {
      r.max = s.max[i];
      r.ref = s.ref[i];
    }
    r.present = r.present || s.present[i] != 0;
  }
  A weighted = 0;
  for (int i = 0; i < kPoolWarps; ++i) {
    A x = s.sum[i], y = s.weighted[i];
    pool_step(s.max[i], s.ref[i], r.max, r.ref).apply(x, y);
    r.sum += x;
    weighted += y;
  }
  r.offset = weighted / r.sum;
  r.step = pool_step(mine.max, mine.ref, r.max, r.ref);
  return r;
}

// pooled, and scores and values of the row's tokens, which lie in `coefs`, become coefficients.
template <int kThreads, typename A>
SX_DEVICE inline void pool_finish(const AttentionPoolParams& p, int64_t b, const PoolResult<A>& r) {
  if (threadIdx.x == 0) static_cast<A*>(p.pooled)[b] = r.present ? r.ref + r.offset : A(0);
  if (p.coefs == nullptr) return;
  const A inverse = A(1) / r.sum, shift = pool_shift(r.max);
  for (int64_t i = b * p.length + threadIdx.x; i < (b + 1) * p.length; i += kThreads) {
    A* pair = static_cast<A*>(p.coefs) + 2 * i;
    const bool part = pool_row(p, p.ids[i]) >= 0;
    const A q = part ? exp_acc(pair[0] - shift) * inverse : A(0);
    pair[1] = part ? q * ((pair[1] - r.ref) - r.offset) : A(0);
    pair[0] = q;
  }
}

// ------------------------------------------------------------------------------------------------ one pass
// Columns are split into chunks of kWidth: lane i of a team has chunks i, i + 32 kTeam, … of a row.
template <typename T, int kWidth, int kChunks, int kTeam>
struct PoolPass {
  static constexpr int kWarps = kTeam > 1 ? kTeam : kPoolWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kTeams = kWarps / kTeam;
  static constexpr int kElements = kWidth * kChunks;
  static constexpr int kSpan = kElements * kWarpSize * kTeam;  // >= d
  // Rows in flight in a warp, and blocks of a multiprocessor that the registers must allow: what keeps most bytes in
  // flight. A 16-bit row takes half the bytes, but as many registers once it is used.
  static constexpr int kOwnRows = sizeof(T) == 4 ? (kElements > 8 ? 2 : 4) : kElements > 8 ? 3 : kWidth > 1 ? 6 : 7;
  static constexpr int kTeamRows = (kWidth == 1 ? 24 : sizeof(T) == 4 ? 32 : 48) / kElements;
  static constexpr int kRows = kTeam > 1 ? kTeamRows : kOwnRows;
  static constexpr int kGroups = kWarpSize / kRows;  // groups of rows whose ids one load brings
  static constexpr int kOwnResident = (kElements > 16 || (kWidth == 1 && sizeof(T) == 2) ? 3 : 4) - kPoolFewer;
  static constexpr int kTeamResident = 16 / kTeam;
  static constexpr int kResident = kTeam > 1 ? kTeamResident : kOwnResident;

  SX_DEVICE static int warp() { return kTeam > 1 ? warp_id() : 0; }  // of the team
  SX_DEVICE static int team() { return kTeam > 1 ? 0 : warp_id(); }
  SX_DEVICE static int column(int chunk) { return ((chunk * kTeam + warp()) * kWarpSize + lane_id()) * kWidth; }
};

// For a team of several warps: what the lanes have of the scores and values of kRows tokens -> the team's sums, in
// every lane. All threads of the block call it.
template <int kTeam, int kRows>
SX_DEVICE inline void pool_team_sums(float (&parts)[2][kTeam][2 * kRows], int& turn, float* a, float* g) {
  float x = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    a[r] = group_sum<kWarpSize>(a[r]);
    g[r] = group_sum<kWarpSize>(g[r]);
    x = lane_id() == r ? a[r] : lane_id() == kRows + r ? g[r] : x;
  }
  x = across_warps(parts, turn, x, lane_id() % (2 * kRows), lane_id() < 2 * kRows);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    a[r] = shuffle_from(x, r);
    g[r] = shuffle_from(x, kRows + r);
  }
}

template <typename T, int kWidth, int kChunks, int kTeam>
__global__ void __launch_bounds__((PoolPass<T, kWidth, kChunks, kTeam>::kThreads),
                                  (PoolPass<T, kWidth, kChunks, kTeam>::kResident))
    attention_pool_kernel(AttentionPoolParams p) {
  using Pass = PoolPass<T, kWidth, kChunks, kTeam>;
  constexpr int kElements = Pass::kElements, kRows = Pass::kRows, kSpan = Pass::kSpan, kThreads = Pass::kThreads;
  __shared__ PoolShared<float> shared;               // of teams of one warp,
  __shared__ float parts[2][kTeam][2 * kRows];       // and of a larger one
  __shared__ __align__(16) float vectors[2][kSpan];  // p and v: in registers they would take the place of rows
  const int64_t b = blockIdx.x;
  const int dim = int(p.dim), lane = lane_id();
  const int64_t* ids = p.ids + b * p.length;
  const bool with_sums = p.sums != nullptr;
  for (int c = int(threadIdx.x); c < kSpan; c += kThreads) {
    vectors[0][c] = c < dim ? static_cast<const float*>(p.query)[c] : 0.0f;
    vectors[1][c] = c < dim ? static_cast<const float*>(p.value)[c] : 0.0f;
  }
  float sum_q[kElements], sum_c[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum_q[i] = sum_c[i] = 0.0f;
  PoolState<float> state = pool_empty<float>();
  bool present = false;
  __syncthreads();

  // A team takes every kTeams-th group of kRows tokens.
  constexpr int64_t kStep = Pass::kTeams * kRows;
  int turn = 0;
  const int64_t length = p.num_rows > 0 ? p.length : 0;  // without rows every token is padding
  for (int64_t base = Pass::team() * kRows; base < length; base += Pass::kGroups * kStep) {
    const int64_t token = base + lane / kRows * kStep + lane % kRows;
    const int64_t own = lane < Pass::kGroups * kRows && token < p.length ? ids[token] : -1;
    for (int group = 0; group < Pass::kGroups && base + group * kStep < length; ++group) {
      const int64_t first = base + group * kStep;
      PackedValues<T, kWidth> rows[kRows][kChunks];
      float a[kRows], g[kRows];
      bool part[kRows], there[kRows];
      // All rows are requested before any is used: the gather is bound by latency. No branch around a load, or they
      // are issued one by one: where there is nothing to read, the first numbers of the table are read and dropped.
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t id = pool_row(p, shuffle_from(own, group * kRows + r));
        part[r] = id >= 0;
        there[r] = part[r] && id < p.num_rows;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const bool real = there[r] && Pass::column(chunk) < dim;
          rows[r][chunk].load(static_cast<const T*>(p.table) + (real ? id * p.dim + Pass::column(chunk) : 0));
        }
        a[r] = g[r] = part[r] && !there[r] ? quiet_nan<float>() : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          if (!(there[r] && Pass::column(chunk) < dim)) rows[r][chunk].clear();
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float query[kWidth], value[kWidth];
        load_floats<kWidth>(vectors[0] + Pass::column(chunk), query);
        load_floats<kWidth>(vectors[1] + Pass::column(chunk), value);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float x[kWidth];
          rows[r][chunk].unpack(x);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            a[r] += query[i] * x[i];
            g[r] += value[i] * x[i];
          }
        }
      }
      if constexpr (kTeam > 1) pool_team_sums<kTeam, kRows>(parts, turn, a, g);
      float top = negative_infinity<float>(), top_value = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kTeam == 1) {
          a[r] = group_sum<kWarpSize>(a[r]);
          g[r] = group_sum<kWarpSize>(g[r]);
        }
        if (p.coefs != nullptr && Pass::warp() == 0 && lane == r && first + r < p.length) {
          float* pair = static_cast<float*>(p.coefs) + 2 * (b * p.length + first + r);
          pair[0] = a[r];
          pair[1] = g[r];
        }
        if (part[r] && a[r] > top) {
          top = a[r];
          top_value = g[r];
        }
        present = present || part[r];
      }
      if (top > state.max) {  // the same in every lane
        const PoolStep<float> step = pool_step(state.max, state.ref, top, top_value);
        step.apply(state.sum, state.weighted);
#pragma unroll
        for (int i = 0; i < kElements; ++i) step.apply(sum_q[i], sum_c[i]);
        state.max = top;
        state.ref = top_value;
      }
      const float shift = pool_shift(state.max);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float e = part[r] ? exp_acc(a[r] - shift) : 0.0f;
        const float f = part[r] ? e * (g[r] - state.ref) : 0.0f;
        state.sum += e;
        state.weighted += f;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          float x[kWidth];
          rows[r][chunk].unpack(x);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            sum_q[chunk * kWidth + i] += e * x[i];
            sum_c[chunk * kWidth + i] += f * x[i];
          }
        }
      }
    }
  }

  float* const sums = static_cast<float*>(p.sums) + 2 * b * p.dim;
  if constexpr (kTeam > 1) {
    const PoolResult<float> result = {state.max, state.ref,   state.sum, state.weighted / state.sum,
                                      present,   {1.0f, 0.0f}};
    __syncthreads();  // scores and values of all tokens are there
    pool_finish<kThreads>(p, b, result);
    if (!with_sums) return;
    const float inverse = 1.0f / result.sum;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int c = Pass::column(chunk);
      if (c >= dim) continue;
      float x[kWidth], y[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float q = sum_q[chunk * kWidth + i], f = sum_c[chunk * kWidth + i];
        x[i] = present ? q * inverse : 0.0f;
        y[i] = present ? (f - result.offset * q) * inverse : 0.0f;
      }
      store_floats<kWidth>(sums + c, x);
      store_floats<kWidth>(sums + dim + c, y);
    }
  } else {
    const PoolResult<float> result = pool_merge(shared, state, present);
    pool_finish<kThreads>(p, b, result);
    if (!with_sums) return;      // the same in every thread; the barrier below is for all or none
    SX_DYN_SMEM(float, buffer);  // [warps, 2, span]
    float* mine = buffer + warp_id() * 2 * kSpan;
#pragma unroll
    for (int i = 0; i < kElements; ++i) result.step.apply(sum_q[i], sum_c[i]);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      store_floats<kWidth>(mine + Pass::column(chunk), sum_q + chunk * kWidth);
      store_floats<kWidth>(mine + kSpan + Pass::column(chunk), sum_c + chunk * kWidth);
    }
    __syncthreads();
    const float inverse = 1.0f / result.sum;
    for (int c = threadIdx.x; c < dim; c += kThreads) {
      float x = 0.0f, y = 0.0f;
#pragma unroll
      for (int w = 0; w < kPoolWarps; ++w) {
        x += buffer[w * 2 * kSpan + c];
        y += buffer[w * 2 * kSpan + kSpan + c];
      }
      sums[c] = result.present ? x * inverse : 0.0f;
      sums[dim + c] = result.present ? (y - result.offset * x) * inverse : 0.0f;
    }
  }
}

// ------------------------------------------------------------------------------------------------ any d, double
template <typename T>
__global__ void __launch_bounds__(kPoolThreads) attention_pool_any_kernel(AttentionPoolParams p) {
  using A = acc_t<T>;
  __shared__ PoolShared<A> shared;
  const int64_t b = blockIdx.x;
  const int64_t* ids = p.ids + b * p.length;
  const A *query = static_cast<const A*>(p.query), *value = static_cast<const A*>(p.value);
  PoolState<A> state = pool_empty<A>();
  bool present = false;
  for (int64_t i = warp_id(); i < p.length; i += kPoolWarps) {
    const int64_t id = pool_row(p, ids[i]);
    if (id < 0) continue;  // the same in every lane
    const bool there = id < p.num_rows;
    const T* row = static_cast<const T*>(p.table) + (there ? id : 0) * p.dim;
    A a = there ? A(0) : quiet_nan<A>(), g = a;
    for (int64_t c = lane_id(); there && c < p.dim; c += kWarpSize) {
      const A x = to_acc(row[c]);
      a += query[c] * x;
      g += value[c] * x;
    }
    a = group_sum<kWarpSize>(a);
    g = group_sum<kWarpSize>(g);
    if (p.coefs != nullptr && lane_id() == 0) {
      A* pair = static_cast<A*>(p.coefs) + 2 * (b * p.length + i);
      pair[0] = a;
      pair[1] = g;
    }
    present = true;
    if (a > state.max) {
      pool_step(state.max, state.ref, a, g).apply(state.sum, state.weighted);
      state.max = a;
      state.ref = g;
    }
    const A e = exp_acc(a - pool_shift(state.max));
    state.sum += e;
    state.weighted += e * (g - state.ref);
  }
  const PoolResult<A> result = pool_merge(shared, state, present);
  pool_finish<kPoolThreads>(p, b, result);
  if (p.sums == nullptr) return;
  __syncthreads();  // coefficients are there
  const A* coefs = static_cast<const A*>(p.coefs) + 2 * b * p.length;
  A* sums = static_cast<A*>(p.sums) + 2 * b * p.dim;
  for (int64_t c = threadIdx.x; c < p.dim; c += kPoolThreads) {
    A x = 0, y = 0;
    for (int64_t i = 0; i < p.length; ++i) {
      const int64_t id = pool_row(p, ids[i]);
      if (id < 0) continue;
      const A e = id < p.num_rows ? A(to_acc(static_cast<const T*>(p.table)[id * p.dim + c])) : quiet_nan<A>();
      x += coefs[2 * i] * e;
      y += coefs[2 * i + 1] * e;
    }
    sums[c] = x;
    sums[p.dim + c] = y;
  }
}

// ------------------------------------------------------------------------------------------------ backward
template <typename A>
__global__ void __launch_bounds__(kPoolThreads) attention_pool_scale_kernel(AttentionPoolScaleParams p) {
  const int64_t i = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (i >= p.batch * p.length * 2) return;
  const A grad = static_cast<const A*>(p.grad)[i / (2 * p.length)];
  static_cast<A*>(p.scaled)[i] = grad == A(0) ? A(0) : grad * static_cast<const A*>(p.coefs)[i];
}

template <typename A, int kWidth>
__global__ void __launch_bounds__(kPoolThreads) attention_pool_rows_kernel(AttentionPoolRowsParams p) {
  const int64_t i = blockIdx.x;
  if (i >= p.count[0]) return;
  const A x = static_cast<const A*>(p.pairs)[2 * i], y = static_cast<const A*>(p.pairs)[2 * i + 1];
  A* row = static_cast<A*>(p.rows) + i * p.dim;
  for (int64_t c = threadIdx.x * kWidth; c < p.dim; c += kPoolThreads * kWidth) {
    A value[kWidth], query[kWidth];
    load_columns<kWidth>(static_cast<const A*>(p.value) + c, value);
    load_columns<kWidth>(static_cast<const A*>(p.query) + c, query);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) value[j] = x * value[j] + y * query[j];
    store_columns<kWidth>(row + c, value);
  }
}

template <typename A>
SX_DEVICE inline void pool_put_vectors(const AttentionPoolVectorsParams& p, int64_t c, double total) {
  if (c < p.dim)
    static_cast<A*>(p.d_value)[c] = A(total);
  else
    static_cast<A*>(p.d_query)[c - p.dim] = A(total);
}

// Part blockIdx.y of the rows, a thread kWidth columns. Zero gradients win over nan; no branch, so that loads go ahead.
template <typename A, int kWidth>
__global__ void __launch_bounds__(kPoolThreads) attention_pool_vectors_kernel(AttentionPoolVectorsParams p) {
  const int64_t c = (int64_t(blockIdx.x) * kPoolThreads + threadIdx.x) * kWidth, width = 2 * p.dim;
  if (c >= width) return;
  const int64_t parts = gridDim.y, part = blockIdx.y, step = (p.batch + parts - 1) / parts;
  const int64_t end = (part + 1) * step < p.batch ? (part + 1) * step : p.batch;
  double total[kWidth] = {};
#pragma unroll 8
  for (int64_t b = part * step; b < end; ++b) {
    const double grad = double(static_cast<const A*>(p.grad)[b]);
    A sums[kWidth];
    load_columns<kWidth>(static_cast<const A*>(p.sums) + b * width + c, sums);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double product = grad * double(sums[i]);
      total[i] += grad != 0 ? product : 0.0;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (p.partial != nullptr)
      p.partial[part * width + c + i] = total[i];
    else
      pool_put_vectors<A>(p, c + i, total[i]);
  }
}

// The sum of `parts` parts, a thread a column.
template <typename A>
__global__ void __launch_bounds__(kPoolThreads)
    attention_pool_parts_kernel(AttentionPoolVectorsParams p, int64_t parts) {
  const int64_t c = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x, width = 2 * p.dim;
  if (c >= width) return;
  double total = 0;
#pragma unroll 8
  for (int64_t part = 0; part < parts; ++part) total += p.partial[part * width + c];
  pool_put_vectors<A>(p, c, total);
}

// ------------------------------------------------------------------------------------------------ debug check
// A separate kernel: a printf in the hot kernels costs them a stack frame and registers.
__global__ void __launch_bounds__(kPoolThreads) attention_pool_check_kernel(AttentionPoolParams p) {
  const int64_t i = int64_t(blockIdx.x) * kPoolThreads + threadIdx.x;
  if (i >= p.batch * p.length) return;
  const int64_t id = p.ids[i];
  if ((id >= 0 && id < p.num_rows) || id == -1 || id == -100) return;
  printf("attention_pool: ids must be in [0, %lld) or -1, -100 for padding, got %lld at flat position %lld\n",
         (long long)p.num_rows, (long long)id, (long long)i);
  __trap();
}

}  // namespace samplex::SX_BACKEND_NS
