// Attention pooling over batch rows [begin, end): the body shared by the scalar and the SIMD translation units.
//
// One pass over the gathered rows: a tile of them is multiplied by p and v, enters the online softmax, and is added to
// the two sums that the gradients of p and v are made of while it is still in the L1 cache. Rows further down the list
// of tokens are prefetched meanwhile, over the border of a batch row too. Deterministic: the order of operations in a
// row depends on its tokens only.
#pragma once

#include <cstdlib>

#include "common/rows.h"
#include "loss/attention_pool/attention_pool_math.h"

namespace samplex {
inline namespace SX_ISA_NS {

template <typename T>
struct PoolRows {
  using A = acc_t<T>;

  // a[j] = w[j] . p and g[j] = w[j] . v for four table rows, each read once
  static void dot4(const A* p, const A* v, const T* const* w, int64_t d, A* a, A* g) {
    int64_t c = 0;
    A x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      Vec x0 = Vec::zero(), x1 = x0, x2 = x0, x3 = x0, y0 = x0, y1 = x0, y2 = x0, y3 = x0;
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        const Vec q = Vec::load(p + c), u = Vec::load(v + c);
        const Vec w0 = Vec::load(w[0] + c), w1 = Vec::load(w[1] + c), w2 = Vec::load(w[2] + c);
        const Vec w3 = Vec::load(w[3] + c);
        x0 = fma(q, w0, x0);
        x1 = fma(q, w1, x1);
        x2 = fma(q, w2, x2);
        x3 = fma(q, w3, x3);
        y0 = fma(u, w0, y0);
        y1 = fma(u, w1, y1);
        y2 = fma(u, w2, y2);
        y3 = fma(u, w3, y3);
      }
      x[0] = x0.sum();
      x[1] = x1.sum();
      x[2] = x2.sum();
      x[3] = x3.sum();
      y[0] = y0.sum();
      y[1] = y1.sum();
      y[2] = y2.sum();
      y[3] = y3.sum();
    }
#endif
    for (; c < d; ++c) {
      for (int j = 0; j < 4; ++j) {
        const A value = to_acc(w[j][c]);
        x[j] += p[c] * value;
        y[j] += v[c] * value;
      }
    }
    for (int j = 0; j < 4; ++j) a[j] = x[j], g[j] = y[j];
  }

  // x += sum_j e[j] w[j] and y += sum_j f[j] w[j]
  static void axpy4(A* x, A* y, const A* e, const A* f, const T* const* w, int64_t d) {
    int64_t c = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec e0 = Vec::all(e[0]), e1 = Vec::all(e[1]), e2 = Vec::all(e[2]), e3 = Vec::all(e[3]);
      const Vec f0 = Vec::all(f[0]), f1 = Vec::all(f[1]), f2 = Vec::all(f[2]), f3 = Vec::all(f[3]);
      for (; c + Vec::kSize <= d; c += Vec::kSize) {
        const Vec w0 = Vec::load(w[0] + c), w1 = Vec::load(w[1] + c), w2 = Vec::load(w[2] + c);
        const Vec w3 = Vec::load(w[3] + c);
        Vec s = fma(e0, w0, Vec::load(x + c)), t = fma(f0, w0, Vec::load(y + c));
        s = fma(e1, w1, s);
        t = fma(f1, w1, t);
        s = fma(e2, w2, s);
        t = fma(f2, w2, t);
        fma(e3, w3, s).store(x + c);
        fma(f3, w3, t).store(y + c);
      }
    }
#endif
    for (; c < d; ++c) {
      A s = x[c], t = y[c];
      for (int j = 0; j < 4; ++j) {
        const A value = to_acc(w[j][c]);
        s += e[j] * value;
        t += f[j] * value;
      }
      x[c] = s;
      y[c] = t;
    }
  }
};

// The scratch of a thread: two sums, and of the tokens of a row that count their scores, values and shares.
template <typename A>
struct PoolScratch {
  A *sum_q, *sum_c, *scores, *values, *shares;
  int64_t *ids, *places;
  void* memory;

  PoolScratch(int64_t d, int64_t length) {
    const int64_t row = (d + 15) / 16 * 16, list = (length + kTile + 15) / 16 * 16;
    const size_t bytes = size_t(2 * row + 3 * list) * sizeof(A) + size_t(2 * list) * sizeof(int64_t);
    memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    sum_q = static_cast<A*>(memory);
    sum_c = sum_q + row;
    scores = sum_c + row;
    values = scores + list;
    shares = values + list;
    ids = reinterpret_cast<int64_t*>(shares + list);
    places = ids + list;
  }
  ~PoolScratch() { std::free(memory); }
  PoolScratch(const PoolScratch&) = delete;
  PoolScratch& operator=(const PoolScratch&) = delete;
};

template <typename T>
struct PoolRow {
  using A = acc_t<T>;
  const AttentionPoolParams& p;
  PoolScratch<A> s;
  const A *query, *value;
  const int64_t tile_rows, tokens;
  const RowPrefetch ahead_of;

  explicit PoolRow(const AttentionPoolParams& params)
      : p(params),
        s(params.dim, params.length),
        query(static_cast<const A*>(params.query)),
        value(static_cast<const A*>(params.value)),
        tile_rows(rows_of_tile<T>(params.dim)),
        tokens(params.batch * params.length),
        ahead_of(row_prefetch<T>(params.dim)) {}

  const T* table_row(int64_t id) const { return static_cast<const T*>(p.table) + id * p.dim; }

  SX_ALWAYS_INLINE void prefetch(int64_t token) const {
    if (token >= tokens) return;
    const int64_t id = p.ids[token];
    if (id >= 0) prefetch_row(table_row(id), ahead_of);
  }

  // The sums seen from a token with a larger score.
  void step_to(PoolState<A>& state, A max, A ref) {
    const PoolStep<A> step = pool_step(state.max, state.ref, max, ref);
    step.apply(state.sum, state.weighted);
    if (p.sums != nullptr && state.max != negative_infinity<A>()) {
      for (int64_t c = 0; c < p.dim; ++c) step.apply(s.sum_q[c], s.sum_c[c]);
    }
    state.max = max;
    state.ref = ref;
  }

  // Tokens first .. first + n - 1 of the list.
  void tile(int64_t b, int64_t first, int64_t n, PoolState<A>& state) {
    const T* rows[kTile];
    A e[kTile], f[kTile];
    // Four rows at a time; the last one is repeated, with coefficient 0 and without a read of its own.
    for (int64_t j = 0; j < kTile; ++j) {
      rows[j] = table_row(s.ids[first + (j < n ? j : n - 1)]);
      e[j] = f[j] = 0;
    }
    A* scores = s.scores + first;
    A* values = s.values + first;
    for (int64_t j = 0; j < n; j += 4) {
      const int64_t at = b * p.length + s.places[first + j] + ahead_of.rows;
      for (int64_t ahead = 0; ahead < 4; ++ahead) prefetch(at + ahead);
      PoolRows<T>::dot4(query, value, rows + j, p.dim, scores + j, values + j);
    }
    int64_t top = 0;
    A most = negative_infinity<A>();
    for (int64_t j = 0; j < n; ++j) {
      if (scores[j] > most) most = scores[j], top = j;
    }
    if (most > state.max) step_to(state, most, values[top]);
    state.sum += Rows<T>::exp_sum(scores, pool_shift(state.max), e, n);
    for (int64_t j = 0; j < n; ++j) {
      f[j] = e[j] * (values[j] - state.ref);
      state.weighted += f[j];
    }
    if (p.sums == nullptr) return;
    for (int64_t j = 0; j < n; j += 4) PoolRows<T>::axpy4(s.sum_q, s.sum_c, e + j, f + j, rows + j, p.dim);
  }

  void run(int64_t b) {
    const int64_t* ids = p.ids + b * p.length;
    int64_t n = 0;
    for (int64_t i = 0; i < p.length; ++i) {  // no branch: a padding is overwritten by the next token
      s.ids[n] = ids[i];
      s.places[n] = i;
      n += ids[i] >= 0;
    }
    A* coefs = p.coefs == nullptr ? nullptr : static_cast<A*>(p.coefs) + 2 * b * p.length;
    A* sums = p.sums == nullptr ? nullptr : static_cast<A*>(p.sums) + 2 * b * p.dim;
    if (coefs != nullptr && n < p.length) {
      for (int64_t i = 0; i < 2 * p.length; ++i) coefs[i] = 0;
    }
    if (n == 0) {
      static_cast<A*>(p.pooled)[b] = 0;
      if (sums != nullptr) {
        for (int64_t c = 0; c < 2 * p.dim; ++c) sums[c] = 0;
      }
      return;
    }
    if (sums != nullptr) {
      for (int64_t c = 0; c < p.dim; ++c) s.sum_q[c] = s.sum_c[c] = 0;
    }
    PoolState<A> state = pool_empty<A>();
    for (int64_t done = 0; done < n; done += tile_rows) {
      tile(b, done, n - done < tile_rows ? n - done : tile_rows, state);
    }
    // Every score -inf: 0 / 0, so that the bad row shows.
    const A offset = state.weighted / state.sum;
    static_cast<A*>(p.pooled)[b] = state.ref + offset;
    if (coefs != nullptr) {
      Rows<T>::exp_to(s.scores, pool_shift(state.max), A(1) / state.sum, s.shares, n);
      for (int64_t k = 0; k < n; ++k) {
        const int64_t at = 2 * s.places[k];
        coefs[at] = s.shares[k];
        coefs[at + 1] = s.shares[k] * ((s.values[k] - state.ref) - offset);
      }
    }
    if (sums != nullptr) {
      const A inverse = A(1) / state.sum;
      for (int64_t c = 0; c < p.dim; ++c) sums[c] = s.sum_q[c] * inverse;
      for (int64_t c = 0; c < p.dim; ++c) sums[p.dim + c] = (s.sum_c[c] - offset * s.sum_q[c]) * inverse;
    }
  }
};

template <typename T>
inline void attention_pool_range(const AttentionPoolParams& params, int64_t begin, int64_t end) {
  PoolRow<T> row(params);
  for (int64_t b = begin; b < end; ++b) row.run(b);
}

// ------------------------------------------------------------------------------------------------ gradient rows
template <typename A>
inline void attention_pool_rows(const AttentionPoolRowsParams& p, int64_t begin, int64_t end) {
  const A *pairs = static_cast<const A*>(p.pairs), *query = static_cast<const A*>(p.query);
  const A* value = static_cast<const A*>(p.value);
  for (int64_t i = begin; i < end; ++i) {
    const A x = pairs[2 * i], y = pairs[2 * i + 1];
    A* row = static_cast<A*>(p.rows) + i * p.dim;
    int64_t c = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(A) == 4) {
      const Vec vx = Vec::all(x), vy = Vec::all(y);
      if (p.stream) {
        for (; c < p.dim; c += Vec::kSize) fma(vx, Vec::load(value + c), vy * Vec::load(query + c)).stream(row + c);
      } else {
        for (; c + Vec::kSize <= p.dim; c += Vec::kSize) {
          fma(vx, Vec::load(value + c), vy * Vec::load(query + c)).store(row + c);
        }
      }
    }
#endif
    for (; c < p.dim; ++c) row[c] = x * value[c] + y * query[c];
  }
#if defined(__AVX2__)
  _mm_sfence();  // streamed rows are visible before the thread says that it is done
#endif
}

}  // namespace SX_ISA_NS
}  // namespace samplex
