// CPU launchers of the row updates: given rows in chunks that the threads share, and the sorted ranges of row_reduce.
#include <cstddef>
#include <vector>

#include "common/parallel.h"
#include "common/pool.h"
#include "common/simd.h"
#include "update/optim_cpu_rows.h"

namespace samplex::cpu {
namespace {

// Rows of a thread: gradients that are summed, and scratch.
void* buffer_of(const OptimParams& params) {
  static thread_local std::vector<std::max_align_t> memory;
  const size_t numbers = size_t(kUpdateBuffer * params.dim),
               wanted = numbers * sizeof(double) / sizeof(std::max_align_t) + 1;
  if (memory.size() < wanted) memory.resize(wanted);
  return memory.data();
}

void run_range(const RowReduceRange& range, void* context) {
  const OptimParams& params = *static_cast<const OptimParams*>(context);
  void* const buffer = buffer_of(params);
#ifdef SAMPLEX_X86_SIMD
  if (simd_level() == SimdLevel::kAvx512) return optim_range_avx512(params, range, buffer);
  if (simd_level() == SimdLevel::kAvx2) return optim_range_avx2(params, range, buffer);
#endif
  optim_range_by_type(params, range, buffer);
}

// Source rows of 16 bits in fp32, once and not for each of their entries: a gradient coef * row is then never stored.
class WideRows {
 public:
  explicit WideRows(RowReduceParams& p) {
    const void* from[2] = {p.source[0].rows, p.source[1].rows};
    int64_t rows[2];
    for (const int which : {0, 1}) {
      RowReduceSource& source = p.source[which];
      rows[which] = source.entries / source.entries_per_row;
      if (source.dtype != DType::kFloat16 && source.dtype != DType::kBFloat16) continue;
      // Targets and draws of a loss have the same h.
      const bool same = which == 1 && memory_[0] != nullptr && from[0] == from[1] && rows[0] == rows[1];
      source.rows = same ? memory_[0] : widened(which, source, rows[which] * p.dim);
      source.dtype = DType::kFloat32;
    }
  }
  ~WideRows() {
    for (void* memory : memory_) {
      if (memory != nullptr) pool_give(memory);
    }
  }
  WideRows(const WideRows&) = delete;
  WideRows& operator=(const WideRows&) = delete;

 private:
  const void* widened(int which, const RowReduceSource& source, int64_t numbers) {
    if (numbers == 0) return nullptr;
    memory_[which] = pool_take(size_t(numbers) * sizeof(float));
    float* const to = static_cast<float*>(memory_[which]);
    parallel_for(numbers, 1 << 17,
                 [&](int64_t begin, int64_t end) { widen(source.dtype, source.rows, to, begin, end); });
    return to;
  }

  static void widen(DType dtype, const void* from, float* to, int64_t begin, int64_t end) {
#ifdef SAMPLEX_X86_SIMD
    if (simd_level() == SimdLevel::kAvx512) return widen_avx512(dtype, from, to, begin, end);
    if (simd_level() == SimdLevel::kAvx2) return widen_avx2(dtype, from, to, begin, end);
#endif
    widen_by_type(dtype, from, to, begin, end);
  }

  void* memory_[2] = {nullptr, nullptr};
};

}  // namespace

void launch_optim_rows(const OptimParams& params) {
  const int64_t n = params.count == nullptr || params.count[0] > params.n ? params.n : params.count[0];
  const int64_t chunk = 1 + (1 << 15) / (params.dim + 1);
  parallel_for_shared(n, chunk, [&](int64_t begin, int64_t end) {
    void* const buffer = buffer_of(params);
#ifdef SAMPLEX_X86_SIMD
    if (simd_level() == SimdLevel::kAvx512) return optim_rows_avx512(params, begin, end, buffer);
    if (simd_level() == SimdLevel::kAvx2) return optim_rows_avx2(params, begin, end, buffer);
#endif
    optim_rows_by_type(params, begin, end, buffer);
  });
}

void launch_optim_entries(const OptimParams& params) {
  OptimParams wide = params;
  const WideRows rows(wide.entries);
  for_sorted_ranges(wide.entries, run_range, &wide);
}

}  // namespace samplex::cpu
