// Row updates on the GPU. A group of lanes (a power of two) shares a row: all 32 where it is wide, one lane a row for a
// bias. Gradients are given rows, or the sums of entries that row_reduce_device.cuh describes: no float atomics. Only
// partial sums of rows with many entries are written to memory.
//
// Every lane of a warp arrives at every function here.
#pragma once

#include "update/row_reduce/row_reduce_device.cuh"
#include "update/row_rules/row_rules_math.h"

namespace samplex {
namespace SX_BACKEND_NS {

// Blocks of a multiprocessor at the least. Not asked, ptxas takes fewer registers than it needs on some architectures,
// and spills; on others it takes so many that too few loads are under way.
constexpr int kOptimResident = 4;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
constexpr int kEntriesFewer = 1;
#else
constexpr int kEntriesFewer = 0;
#endif
template <typename T, int Width>
constexpr int kEntriesResident = sizeof(T) == 8   ? 4
                                 : sizeof(T) == 4 ? 6
                                                  : (Width == 8 ? 5 : 6) - kEntriesFewer;

// to[0 .. Width) = x, rounded: the columns from c on of row `id` of the whole table.
template <int Width, typename T, typename A>
SX_DEVICE inline void store_numbers(T* to, int c, const A* x, const int64_t* key, int64_t id) {
  if constexpr (sizeof(T) == sizeof(A)) {
    store_sums<Width>(to, x);
  } else {
    T out[Width];
    if (key != nullptr) {
      const PhiloxWords words = philox_at({uint64_t(key[0]), uint64_t(key[1])}, id, c / kNoiseColumns, 0);
#pragma unroll
      for (int i = 0; i < Width; ++i) out[i] = round_with(x[i], noise_of(words, c + i), T{});
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) out[i] = from_acc<T>(x[i]);
    }
    const auto pair = [&](int i) {
      return uint32_t(bit_copy<uint16_t>(out[i])) | uint32_t(bit_copy<uint16_t>(out[i + 1])) << 16;
    };
    if constexpr (Width == 1)
      to[0] = out[0];
    else if constexpr (Width == 4)
      *reinterpret_cast<uint2*>(to) = make_uint2(pair(0), pair(2));
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(pair(0), pair(2), pair(4), pair(6));
  }
}

// Updates row `id` where `here`, in the blocks [first, last) of 32 * Width columns; a group narrower than a warp has
// one block. load(block, c, g) makes the gradient of the lane's columns from c on. Row-wise Adagrad needs the whole row
// first, and so does a projected gradient; both load it twice if there are several blocks. Weight and states are read
// behind the gradient: they would take registers while it is summed, and with fewer warps there is less under way.
template <int Width, typename T, typename A, typename Load>
SX_DEVICE inline void update_row(const RowRulesParams& p, const RuleNumbers<A>& rule, int64_t id, bool here, int lane,
                                 int group, int first, int last, const Load& load) {
  const bool by_row = p.weight.rule.kind == RowRuleKind::kRowAdagrad;
  A squares = 0, rate = 0, dot = 0, norm = 0, along = 0;
  for (int pass = by_row || p.project ? 0 : 1; pass < 2; ++pass) {
    for (int block = first; block < last; ++block) {
      const int c = (block * kWarpSize + lane) * Width;
      const bool inside = here && c < p.dim;
      A g[Width] = {};
      load(block, c, g);
      RuleNumbers<A> r = rule;
      T* const row = static_cast<T*>(p.weight.values) + id * p.dim + c;
      A w[Width] = {};
      if (inside) load_numbers<Width>(row, w);
      if (pass == 0) {
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const A x = g[i] + r.weight_decay * w[i];
          if (!inside) continue;
          squares += x * x;
          dot += g[i] * w[i];
          norm += w[i] * w[i];
        }
        if (block + 1 < last) continue;
        for (int step = group / 2; step > 0; step /= 2) {
          squares += shuffle_xor(squares, step);
          dot += shuffle_xor(dot, step);
          norm += shuffle_xor(norm, step);
        }
        if (p.project && norm > A(0)) {
          along = dot / norm;  // see part_along of the CPU's side
          squares -= along * (A(2) * (dot + r.weight_decay * norm) - along * norm);
          squares = squares < A(0) ? A(0) : squares;
        }
        if (by_row) {
          A* const sum = static_cast<A*>(p.weight.state0) + id;
          const A next = here ? sum[0] + squares / A(p.dim) : A(0);
          warp_sync();  // all lanes have read the sum before one writes it
          if (here && lane == 0) sum[0] = next;
          rate = row_rate(r, next);
        }
        if (last - first > 1) continue;
        pass = 1;  // the only block is available
      }
      if (!inside) continue;
      r.weight_decay -= along;
      if (by_row) r.lr = rate;
      dispatch_rule(p.weight.rule.kind, [&](auto tag) {
        constexpr RowRuleKind kKind = decltype(tag)::kind;
        const int64_t at = id * p.dim + c;
        A s0[Width] = {}, s1[Width] = {};
        if constexpr (has_state0(kKind)) load_numbers<Width>(static_cast<const A*>(p.weight.state0) + at, s0);
        if constexpr (has_state1(kKind)) load_numbers<Width>(static_cast<const A*>(p.weight.state1) + at, s1);
#pragma unroll
        for (int i = 0; i < Width; ++i) w[i] = updated<kKind>(r, w[i], g[i], s0[i], s1[i]);
        if constexpr (has_state0(kKind)) store_sums<Width>(static_cast<A*>(p.weight.state0) + at, s0);
        if constexpr (has_state1(kKind)) store_sums<Width>(static_cast<A*>(p.weight.state1) + at, s1);
      });
      store_numbers<Width>(row, c, w, p.key, id + p.first_row);
    }
  }
}

// A thread makes the weight's rule, another the bias's. Powers and roots in double, once a step.
__global__ void __launch_bounds__(kWarpSize) row_rules_live_kernel(RowRulesParams p) {
  if (threadIdx.x == 0) *p.weight.live.rule = live_rule(p.weight);
  if (threadIdx.x == 1 && p.bias.live.rule != nullptr) *p.bias.live.rule = live_rule(p.bias);
}

// The numbers of the step, in shared memory: in registers they would be there while a gradient is summed.
template <typename A>
struct StepRules {
  RuleNumbers<A> weight, bias;
  bool skip;

  SX_DEVICE void read(const RowRulesParams& p) {
    if (threadIdx.x == 0) {
      weight = RuleNumbers<A>(p.weight);
      if (p.bias.values != nullptr) bias = RuleNumbers<A>(p.bias);
      skip = is_skipped(p.weight);
    }
    __syncthreads();
  }
};

template <typename T, int Width>
__global__ void __launch_bounds__(kUpdateThreads, kOptimResident)
    row_rules_rows_kernel(RowRulesParams p, int log_group) {
  using A = acc_t<T>;
  __shared__ StepRules<A> rules;
  rules.read(p);
  const int64_t i = (int64_t(blockIdx.x) * kUpdateThreads + threadIdx.x) >> log_group;
  const int group = 1 << log_group, lane = int(threadIdx.x) & (group - 1);
  int64_t n = p.n;
  if (p.count != nullptr && p.count[0] < n) n = p.count[0];
  const int64_t id = i >= n ? -1 : p.row_ids != nullptr ? p.row_ids[i] : i;
  const bool here = id >= 0 && id < p.num_rows && !rules.skip;
  const int blocks = int((p.dim + kWarpSize * Width - 1) / (kWarpSize * Width));
  update_row<Width, T, A>(p, rules.weight, here ? id : 0, here, lane, group, 0, blocks, [&](int, int c, A* g) {
    if (!here || c >= p.dim) return;
    if (p.rows_dtype == p.weight.dtype)
      load_numbers<Width>(static_cast<const T*>(p.rows) + i * p.dim + c, g);
    else
      load_numbers<Width>(static_cast<const A*>(p.rows) + i * p.dim + c, g);
  });
}

// Blocks of columns along the grid's second dimension; all of them are one warp's for row-wise Adagrad.
template <typename T, int Width>
__global__ void __launch_bounds__(kUpdateThreads, kEntriesResident<T, Width>)
    row_rules_entries_kernel(RowRulesParams p, int log_group, int blocks) {
  using A = acc_t<T>;
  __shared__ StepRules<A> rules;
  rules.read(p);
  const EntryWalk<T, A, Width> walk(p.entries, log_group);
  const int first = int(blockIdx.y);
  walk.for_parts(p.entries.chunks.arrived + first * p.entries.chunks.slots, [&](const auto& part) {
    const bool here = part.here && part.complete && !rules.skip, partial = part.here && !part.complete;
    const bool with_bias = p.bias.values != nullptr && first == 0;
    A bias = 0;
    update_row<Width, T, A>(p, rules.weight, part.here ? part.id : 0, here, part.lane, 1 << log_group, first,
                            first + blocks, [&](int block, int c, A* g) {
                              A sum;
                              walk.add(part, c, g, with_bias && block == 0, sum);
                              if (block == 0) bias = sum;
                              if (partial && c < p.dim) walk.store(part, c, g);
                            });
    if (!with_bias || part.lane != 0) return;
    if (here) update_bias<A>(p.bias, rules.bias, p.key, part.id, p.first_row, bias);
    if (partial) walk.store_bias(part, bias);
  });
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
