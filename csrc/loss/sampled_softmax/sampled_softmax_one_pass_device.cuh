// The one-pass body of the fused sampled softmax: a block has one batch row and reads each of its class rows once.
//
// A group of kGroup lanes owns a class row, every lane kElements of its columns, with h and the running unit gradient
// in registers; kRows class rows are in flight in a group. Their partial products change places through shared memory
// so that a lane ends with the product of one row, computes one exponential, and hands it back. All groups share one
// running maximum, so their partial gradients simply add up at the end. A row too wide for a warp is shared by several:
// each adds up its columns, and the sums meet in shared memory. No float atomics, no order that depends on scheduling:
// the same bits every time. What bounds it is the gather, d numbers per class row: a warp keeps 16 KiB of it in flight
// (one of several 4 or 8 KiB), so a few hundred rows fill a large GPU.
#pragma once

#include "common/vec_load.cuh"
#include "loss/sampled_softmax/sampled_softmax_device.cuh"

namespace samplex {
namespace SX_BACKEND_NS {

constexpr int kStage = 128;  // entries staged in shared memory at a time

// exp in the hot loop: two instructions and ex2; relative error below |x| 2^-23, and terms with large |x| have no
// weight.
SX_DEVICE inline float quick_exp(float x) { return exp2f(x * 1.44269504f); }

// Columns are split into chunks of kWidth: thread `seat` of those that share a class row has chunks seat, seat +
// kSeats, … of it. Those are the kGroup lanes of a group, or, of a wide row, all kWarps warps of the block (kGroup is
// 32 then). There are no branches around register arrays: an entry that takes no part reads h instead of a class row
// and has logit -inf, a column that is not there reads column 0 against h = 0.
//
// kUnit: class rows on the unit sphere, whose squares are summed beside their products; a margin needs a single target
// without smoothing.
template <typename T, int kWidth, int kChunks, int kGroup, bool kFull, int kWarps, bool kUnit>
struct OnePass {
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kElements = kWidth * kChunks;  // columns of a lane
  static constexpr int kSeats = kGroup * kWarps;      // threads that share a class row
  static constexpr int kSpan = kElements * kSeats;    // their columns, >= d
  static constexpr int kGroups = kWarpSize / kGroup;  // groups of a warp
  // Class rows in flight in a group: up to 128 registers of a lane; fewer where single columns take address registers.
  static constexpr int kRows = kElements > 16 || kWidth == 1 ? 4 : 8;
  static constexpr int kHolders = kGroup / kRows;  // lanes that end with the product of the same row
  static constexpr int kRound = kGroups * kRows;   // entries of a round
  // Exchange buffer [groups][kRows][lanes], padded so that writes by lane and 16-byte reads by row hit all banks
  // evenly.
  static constexpr int kStride = kGroup == 8 ? 12 : kGroup == 16 ? 24 : 48;
  static constexpr int kRegion = kRows * kStride + (kGroup == 32 ? 0 : kGroup);
  static_assert(kRows % 4 == 0 && kStage % kRound == 0 && (kWarps == 1 || kGroup == kWarpSize));
  // Numbers of dynamic shared memory, with gradients: pull, and where groups must add up, push.
  static constexpr int kBuffer = (kGroups == 1 ? 1 : 2) * kGroups * kSpan;

  struct Shared {
    const T* rows[kStage];
    float inside[kStage];   // scale * bias
    float outside[kStage];  // -log_q - log m; -inf for an entry that takes no part
    float shares[kStage];
    alignas(16) float products[kWarps * kGroups * kRegion];
    alignas(16) float coefs[kWarps * kRound];
    float parts[2][kWarps][kRows];  // products of a tile by warp; two of them in turn
    float scratch[kWarps];
  };

  const SampledSoftmaxParams& p;
  Shared& s;
  float* const pull;  // [groups, span] in shared memory: few entries pull, so it takes no registers
  const int64_t b;
  const int lane, group, place;  // lane in the warp, group, lane in the group
  const int warp, thread, seat;  // warp and thread in the block; among the threads that share a class row
  const int dim;
  const T* const hidden;
  float* const logits;  // where `coef_loss` of this row goes in the end
  const float scale;
  const bool absolute, need_grad;
  const bool seeded;  // one target and no smoothing: the target starts the row off, and only it pulls
  float h[kElements], push[kElements];
  float max, sum, pulled;
  int turn;  // which of s.parts is next

  SX_DEVICE OnePass(const SampledSoftmaxParams& params, Shared& shared, float* buffer, int64_t row)
      : p(params),
        s(shared),
        pull(buffer + (kGroups == 1 ? 0 : kGroups * kSpan)),
        b(row),
        lane(lane_id()),
        group(lane_id() / kGroup),
        place(lane_id() % kGroup),
        warp(kWarps == 1 ? 0 : warp_id()),
        thread(kWarps == 1 ? lane_id() : int(threadIdx.x)),
        seat(kWarps == 1 ? lane_id() % kGroup : int(threadIdx.x)),
        dim(int(params.dim)),
        hidden(static_cast<const T*>(params.hidden) + row * params.dim),
        logits(static_cast<float*>(params.coef_loss) + row * (params.num_targets + params.num_samples)),
        scale(float(params.scale)),
        absolute(params.absolute),
        need_grad(params.need_grad),
        seeded(params.num_targets == 1 && params.label_smoothing == 0),
        max(-std::numeric_limits<float>::max()),  // not -inf: a masked entry minus it must stay -inf
        sum(0),
        pulled(0),
        turn(0) {}

  SX_DEVICE float* signs() const { return static_cast<float*>(p.signs) + (logits - static_cast<float*>(p.coef_loss)); }
  SX_DEVICE int column(int chunk) const { return (chunk * kSeats + seat) * kWidth; }

  // Warps differ only in the columns they read: each computes the same maximum, sum and logits.
  SX_DEVICE static void sync() {
    if constexpr (kWarps == 1)
      warp_sync();
    else
      __syncthreads();
  }
  SX_DEVICE float block_total(float x) const {
    if constexpr (kWarps == 1)
      return group_sum<kWarpSize>(x);
    else
      return block_sum<kWarps>(x, s.scratch);
  }

  SX_DEVICE void load_row(const T* row, float* out) const {
    const T* mine = row + seat * kWidth;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool real = kFull || column(chunk) < dim;
      load_values<kWidth>(real ? mine + chunk * kSeats * kWidth : row, out + chunk * kWidth);
      if constexpr (!kFull) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {  // 0 times an infinite number would be nan
          if (!real) out[chunk * kWidth + i] = 0;
        }
      }
    }
  }

  // Product of a row over this warp's columns -> over all of them.
  SX_DEVICE float whole_product(float x, int row, bool writes) {
    if constexpr (kWarps == 1)
      return x;
    else
      return across_warps(s.parts, turn, x, row, writes);
  }

  // kRows partial products of every lane -> the product of row `place / kHolders`, summed in a fixed order.
  SX_DEVICE float exchange(const float (&products)[kRows]) {
    float* region = s.products + (warp * kGroups + group) * kRegion;
#pragma unroll
    for (int r = 0; r < kRows; ++r) region[r * kStride + place] = products[r];
    warp_sync();
    const int row = place / kHolders, part = place % kHolders;
    const float* from = region + row * kStride + part * 4;
    float x = 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i * kHolders);
      x += (v.x + v.y) + (v.z + v.w);
    }
#pragma unroll
    for (int step = kHolders / 2; step > 0; step /= 2) x += shuffle_xor(x, step);
    return whole_product(x, row, part == 0);
  }

  // Slope of the logit of a row of a length whose square this is: 1 / |w|, or 1.
  SX_DEVICE static float slope_of([[maybe_unused]] float squares) {
    if constexpr (kUnit)
      return inverse_norm(squares);
    else
      return 1.0f;
  }

  // Scores entries first .. first + kCount - 1 of the stage for this lane's group; kCount is kRows, or 1 for the rest.
  template <int kCount>
  SX_DEVICE void tile(int first, int stage_begin) {
    constexpr int kSame = kCount == 1 ? kGroup : kHolders;  // lanes that speak for the same entry
    float rows[kCount][kElements];
    float products[kCount];
    [[maybe_unused]] float squares[kCount];
    // All class rows are requested before any is used: the gather is bound by latency.
#pragma unroll
    for (int r = 0; r < kCount; ++r) load_row(s.rows[first + r], rows[r]);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      products[r] = h[0] * rows[r][0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) products[r] += h[i] * rows[r][i];
      if constexpr (kUnit) {
        squares[r] = rows[r][0] * rows[r][0];
#pragma unroll
        for (int i = 1; i < kElements; ++i) squares[r] += rows[r][i] * rows[r][i];
      }
    }
    float dot, square = 0;
    if constexpr (kCount == 1) {
      dot = whole_product(group_sum<kGroup>(products[0]), 0, lane == 0);
      if constexpr (kUnit) square = whole_product(group_sum<kGroup>(squares[0]), 0, lane == 0);
    } else {
      dot = exchange(products);
      if constexpr (kUnit) {
        warp_sync();  // the products have been read
        square = exchange(squares);
      }
    }

    // From here on a lane speaks for one entry of its group.
    const int mine = first + place / kSame;
    float sign = slope_of(square);
    float value = scale * (kUnit ? dot * sign : dot) + s.inside[mine];
    if (absolute) {
      sign *= sign_of(value);
      value = fabsf(value);
    }
    const float logit = value + s.outside[mine];
    // One maximum for the warp, raised rarely. A nan never raises it: exp carries the nan into the sum.
    if (warp_any(logit > max)) {
      float new_max = fmaxf(max, logit);
#pragma unroll
      for (int step = kWarpSize / 2; step >= kSame; step /= 2) new_max = fmaxf(new_max, shuffle_xor(new_max, step));
      const float shrink = quick_exp(max - new_max);
      sum *= shrink;
#pragma unroll
      for (int i = 0; i < kElements; ++i) push[i] *= shrink;
      max = new_max;
    }
    const float mass = quick_exp(logit - max);
    // Every holder counts its entry; the sums are divided by kHolders, a power of two, at the end.
    sum += mass * (float(kHolders) / kSame);
    const float share = s.shares[mine];
    if (!seeded && warp_any(share != 0)) {
      pulled += share != 0 ? share * value * (float(kHolders) / kSame) : 0.0f;
      if (need_grad) add_pull<kCount>(rows, share * sign);
    }
    float* coefs = s.coefs + warp * kRound + group * kRows;
    if (need_grad && place % kSame == 0) {
      if (warp == 0 && (kCount > 1 || stage_begin + mine < p.num_targets + p.num_samples)) {
        logits[stage_begin + mine] = logit;
        if (kUnit || absolute) signs()[stage_begin + mine] = sign;
      }
      if (kCount > 1) coefs[place / kSame] = mass * sign;
    }
    // Also without gradients: the next tile writes the exchange buffer again, and a vote orders no memory.
    if (kCount > 1) warp_sync();
    if (!need_grad) return;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float c = kCount == 1 ? mass * sign : coefs[r];
#pragma unroll
      for (int i = 0; i < kElements; ++i) push[i] += c * rows[r][i];
    }
  }

  // The only target as the first entry, and all that pulls. Every group computes it, group 0 counts it.
  SX_DEVICE void seed(const RowSetup<float>& row) {
    const int64_t id = class_or_unknown(p.target[b], p.num_classes);
    float w[kElements];
    load_row(row_of(id), w);
    const auto product = [&](const float (&a)[kElements], const float (&b)[kElements]) {
      float sum = a[0] * b[0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) sum += a[i] * b[i];
      return whole_product(group_sum<kGroup>(sum), 0, lane == 0);
    };
    float dot = product(h, w), sign = 1, radial = 0;
    if constexpr (kUnit) {
      sign = slope_of(product(w, w));
      dot *= sign;
      if (p.has_margin) {
        const float length = sqrt_of(product(h, h)), of_hidden = length > 0 ? 1.0f / length : 0.0f;
        const MarginValue<float> margin = margin_value(p.margin, dot * of_hidden);
        dot = length * margin.value;
        sign *= margin.slope;
        radial = margin.radial * of_hidden;
      }
    }
    float value = scale * (dot + class_scalar(p.bias, id, p.num_classes, 0.0f));
    if (absolute) {
      sign *= sign_of(value);
      value = fabsf(value);
    }
    if (value > max) max = value;
    const float mass = quick_exp(value - max);  // 1, or nan for a bad row
    const float share = entry_share(p, row, b, 0, id);
    sum = group == 0 ? mass * (float(kHolders) / kGroup) : 0.0f;
    pulled = lane == 0 && share != 0 ? share * value * float(kHolders) : 0.0f;
    if (!need_grad) return;
    const float c = group == 0 ? mass * sign : 0.0f, a = share * sign;
    // With a margin both directions of the target's slope: along its class row, and along h.
    [[maybe_unused]] const float along_c = group == 0 ? mass * radial : 0.0f, along_a = share * radial;
    if (thread == 0) {
      logits[0] = value;
      if (kUnit || absolute) signs()[0] = sign;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float pulled_by[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        push[chunk * kWidth + i] = c * w[chunk * kWidth + i];
        pulled_by[i] = a * w[chunk * kWidth + i];
        if constexpr (kUnit) {
          push[chunk * kWidth + i] += along_c * h[chunk * kWidth + i];
          pulled_by[i] += along_a * h[chunk * kWidth + i];
        }
      }
      if (chunk % kGroups == group) store_floats<kWidth>(pull + column(chunk), pulled_by);
    }
  }

  // pull += amount * row, for the entries of this group's tile
  template <int kCount>
  SX_DEVICE void add_pull(const float (&rows)[kCount][kElements], float amount) {
    constexpr int kSame = kCount == 1 ? kGroup : kHolders;
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float a = shuffle_from(amount, (lane & ~(kGroup - 1)) + r * kSame);
      if (a != 0) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          float* at = pull + group * kSpan + column(chunk);
          float sums[kWidth];
          load_floats<kWidth>(at, sums);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sums[i] += a * rows[r][chunk * kWidth + i];
          store_floats<kWidth>(at, sums);
        }
      }
    }
  }

  // h stands in for the row of an entry that takes no part and for one out of range.
  SX_DEVICE const T* row_of(int64_t id) const {
    return uint64_t(id) < uint64_t(p.num_classes) ? static_cast<const T*>(p.weight) + id * dim : hidden;
  }

  SX_DEVICE void put(int j, int64_t id, float inside, float outside, float share) {
    s.rows[j] = row_of(id);
    s.inside[j] = inside;
    s.outside[j] = outside;
    s.shares[j] = share;
  }

  // Entries [begin, begin + n) into shared memory, and empty ones up to `padded`. Targets and draws in loops of their
  // own: a warp's worth of draws then takes no detour for the few targets.
  SX_DEVICE void stage(const RowSetup<float>& row, int begin, int n, int padded, bool& drawn) {
    constexpr float kNone = negative_infinity<float>();
    const int targets = int(p.num_targets);
    const int staged_targets = targets > begin ? (targets < begin + n ? targets - begin : n) : 0;
    // Targets and the empty entries behind the last share a loop: neither fills a warp.
    for (int i = thread; i < staged_targets + padded - n; i += kThreads) {
      const bool target = i < staged_targets;
      const int k = begin + i;
      const int64_t id = target ? target_id(p, b, k) : -1;
      const bool part = id >= 0;
      const float share = part ? entry_share(p, row, b, k, id) : 0.0f;
      const float inside = part ? scale * class_scalar(p.bias, id, p.num_classes, 0.0f) : 0.0f;
      put(target ? i : n + i - staged_targets, id, inside, part ? 0.0f : kNone, share);
      drawn = drawn || id == p.num_classes;  // such a row is not one without draws, whose loss is 0
    }
    const int64_t first_draw = p.shared ? 0 : b * p.num_samples;
    const int64_t* ids = p.ids + first_draw;
    const float* log_q = static_cast<const float*>(p.log_q) + first_draw;
    const float log_m = float(p.log_num_samples);
    const int64_t target = p.target[b * targets];
    const bool simple = targets == 1 && p.known_offsets == nullptr;
    for_entries<kThreads>(begin > targets ? begin : targets, begin + n, [&](int64_t at, bool there) {
      const int k = there ? int(at) : begin + n - 1;
      const int64_t given = ids[k - targets], id = class_or_unknown(given, p.num_classes);
      const float q = log_q[k - targets];
      const bool part = !(simple ? given == target : draw_masked(p, b, given, there));
      const float outside = is_finite(q) ? -q - log_m : quiet_nan<float>();
      float share = row.every_share;
      const float inside = part ? scale * class_scalar(p.bias, id, p.num_classes, 0.0f) : 0.0f;
      if (share != 0 && part) share = entry_share(p, row, b, k, id);
      if (!there) return;
      put(k - begin, part ? id : -1, inside, part ? outside : kNone, part ? share : 0.0f);
      drawn = drawn || part;
    });
  }

  // One number of both gradients: `pushed` is divided by the sum already.
  template <int kStep>
  SX_DEVICE void store_gradient(int c, float* pushed, const float* pulled_by, float total) const {
    if (p.d_lse != nullptr) store_floats<kStep>(static_cast<float*>(p.d_lse) + b * dim + c, pushed);
#pragma unroll
    for (int i = 0; i < kStep; ++i) pushed[i] = weighted(total, pushed[i]) - scale * pulled_by[i];
    store_floats<kStep>(static_cast<float*>(p.d_loss) + b * dim + c, pushed);
  }

  // d_loss and d_lse where no two threads share a column.
  SX_DEVICE void finish_columns(bool pulls, float total) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float pulled_by[kWidth];
      load_floats<kWidth>(pull + column(chunk), pulled_by);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) pulled_by[i] = pulls ? pulled_by[i] : 0.0f;
      if (kFull || column(chunk) < dim) store_gradient<kWidth>(column(chunk), push + chunk * kWidth, pulled_by, total);
    }
  }

  // d_loss and d_lse from the groups' parts: push in `buffer`, and pull.
  SX_DEVICE void finish_gradient(const float* buffer, int pullers, float total) const {
    constexpr int kStep = kWidth == 1 ? 1 : 4;  // d is a multiple of kWidth
    for (int c = lane * kStep; c < dim; c += kWarpSize * kStep) {
      float pushed[kStep], pulled_by[kStep], more[kStep];
      load_floats<kStep>(buffer + c, pushed);
      for (int g = 1; g < kGroups; ++g) {
        load_floats<kStep>(buffer + g * kSpan + c, more);
#pragma unroll
        for (int i = 0; i < kStep; ++i) pushed[i] += more[i];
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) pulled_by[i] = 0;
      for (int g = 0; g < pullers; ++g) {
        load_floats<kStep>(pull + g * kSpan + c, more);
#pragma unroll
        for (int i = 0; i < kStep; ++i) pulled_by[i] += more[i];
      }
      store_gradient<kStep>(c, pushed, pulled_by, total);
    }
  }

  // Logits become coefficients. An entry that takes no part holds -inf, or anything in a nan row: then it is asked
  // again.
  SX_DEVICE void finish_coefs(const RowSetup<float>& row, int entries, float lse, float total, bool trivial) const {
    if (lse == lse && !kUnit && !absolute && p.coef_lse == nullptr) {
      const float factor = total * scale;
      for (int k = thread; k < entries; k += kThreads) logits[k] = factor * quick_exp(logits[k] - lse);
    } else {
      for_entries<kThreads>(0, entries, [&](int64_t k, bool there) {
        float x = there ? quick_exp(logits[k] - lse) * scale : 0.0f;
        if (there && (kUnit || absolute)) x *= signs()[k];
        if (lse != lse) x = entry_id(p, b, k, there) < 0 ? 0.0f : quiet_nan<float>();  // the whole block
        if (!there) return;
        if (p.coef_lse != nullptr) static_cast<float*>(p.coef_lse)[b * entries + k] = x;
        logits[k] = weighted(total, x);
      });
    }
    if (trivial) return;
    const int pulling = row.every_share != 0 ? entries : int(p.num_targets);
    for_entries<kThreads>(0, pulling, [&](int64_t k, bool there) {
      const int64_t id = entry_id(p, b, k, there);
      if (there) logits[k] -= entry_pull(p, row, b, k, id);
    });
  }

  SX_DEVICE void run([[maybe_unused]] float* buffer) {
    const RowSetup<float> row = setup_row<kWarps, float>(p, b, s.scratch);
    if (row.num_targets == 0) return zero_row<kThreads, float>(p, b);  // the whole block
    load_row(hidden, h);
#pragma unroll
    for (int i = 0; i < kElements; ++i) push[i] = 0;
    // Without smoothing only targets pull; target k is in group k / kRows of a round, or alone in group k.
    const int pullers = p.label_smoothing > 0 || p.num_targets > kGroups ? kGroups : int(p.num_targets);
    if (seeded) {
      seed(row);
    } else if (need_grad) {
      const float zeros[4] = {0, 0, 0, 0};
      for (int i = 4 * thread; i < pullers * kSpan; i += 4 * kThreads) store_floats<4>(pull + i, zeros);
    }

    const int entries = int(p.num_targets + p.num_samples);
    bool drawn = seeded && class_or_unknown(p.target[b], p.num_classes) == p.num_classes;
    for (int begin = seeded ? 1 : 0; begin < entries; begin += kStage) {
      const int n = entries - begin < kStage ? entries - begin : kStage;
      // Whole rounds of kRows rows a group, then rounds of one row a group.
      const int whole = n / kRound * kRound;
      const int padded = (n + kGroups - 1) / kGroups * kGroups;
      sync();
      stage(row, begin, n, padded, drawn);
      sync();
      for (int first = 0; first < whole; first += kRound) tile<kRows>(first + group * kRows, begin);
      for (int first = whole; first < n; first += kGroups) tile<1>(first + group, begin);
    }

    // Both sums in one reduction: half of the warp each after the first step.
    const bool high = lane >= kWarpSize / 2;
    float x = (high ? pulled : sum) + shuffle_xor(high ? sum : pulled, kWarpSize / 2);
    x = group_sum<kWarpSize / 2>(x) / float(kHolders);
    const float total_sum = shuffle_from(x, 0), total_pulled = shuffle_from(x, kWarpSize - 1);
    const bool trivial = kWarps == 1 ? !warp_any(drawn) : block_total(drawn ? 1.0f : 0.0f) == 0.0f;
    const bool nothing = max == -std::numeric_limits<float>::max();
    const float lse = nothing ? quiet_nan<float>() : max + log2f(total_sum) * 0.693147181f;

    float total = row.weight_sum * row.target_share;
    if (p.label_smoothing > 0) {
      float mine = 0;
      for_entries<kThreads>(0, entries, [&](int64_t k, bool there) {
        const int64_t id = entry_id(p, b, k, there);
        if (id >= 0) mine += entry_share(p, row, b, k, id);
      });
      total = block_total(mine);
    }
    if (trivial) total = 0;
    if (thread == 0) {
      static_cast<float*>(p.loss)[b] = trivial ? 0.0f : total * lse - total_pulled;
      static_cast<float*>(p.lse)[b] = lse;
      static_cast<float*>(p.denom)[b] = row.denom;
    }
    if (!need_grad) return;  // the whole block
    // A sum of nothing but -inf is nan here, as lse is.
    const float factor = nothing ? quiet_nan<float>() : scale / total_sum;
#pragma unroll
    for (int i = 0; i < kElements; ++i) push[i] *= factor;
    if constexpr (kGroups > 1) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        store_floats<kWidth>(buffer + group * kSpan + column(chunk), push + chunk * kWidth);
      }
    }
    sync();
    if constexpr (kGroups > 1)
      finish_gradient(buffer, trivial ? 0 : pullers, total);
    else
      finish_columns(!trivial, total);
    finish_coefs(row, entries, lse, total, trivial);
  }
};

}  // namespace SX_BACKEND_NS
}  // namespace samplex
