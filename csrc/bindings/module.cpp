// `_native`: what torch's op registry cannot carry. Build info, SIMD level, test backend, memory hints, host-side
// builders. All state lives in the op library; this module only asks it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "common/backend.h"
#include "common/build_info.h"
#include "common/pages.h"
#include "common/parallel.h"
#include "common/pool.h"
#include "common/selftest.h"
#include "common/simd.h"
#include "sampler/alias_table/alias_table.h"
#include "sampler/tree_fit/tree_fit.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = samplex::build_version();
  info["commit"] = samplex::build_commit();
  info["compiler"] = samplex::build_compiler();
  info["build_type"] = samplex::build_type();
  info["cuda"] = samplex::built_with_cuda();
  info["cuda_version"] = samplex::build_cuda_version();
  info["cuda_archs"] = samplex::build_cuda_archs();
  info["sanitizers"] = samplex::build_sanitizers();
  info["test_backends"] = samplex::built_with_test_backends();
  info["simd_detected"] = samplex::simd_level_name(samplex::detected_simd_level());
  info["simd_level"] = samplex::simd_level_name(samplex::simd_level());
  info["cpu_backend"] = samplex::backend_name(samplex::cpu_backend());
  return info;
}

// The memory of a table as a Python buffer, for torch.frombuffer: the tensor's storage keeps it alive.
class TableMemory {
 public:
  TableMemory(size_t bytes, bool shared) : data_(samplex::table_take(bytes, shared)), bytes_(bytes) {}
  ~TableMemory() { samplex::table_give(data_); }
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;

  py::buffer_info buffer() { return py::buffer_info(static_cast<uint8_t*>(data_), py::ssize_t(bytes_)); }

 private:
  void* data_;
  size_t bytes_;
};

using DoubleArray = py::array_t<double, py::array::c_style | py::array::forcecast>;

void build_alias(const DoubleArray& weights, py::array_t<int64_t> table, py::array_t<int64_t> prefix) {
  const py::ssize_t classes = weights.size();
  if (weights.ndim() != 1 || table.size() != 4 * classes || prefix.size() != classes + 1 ||
      !(table.flags() & prefix.flags() & py::array::c_style)) {
    throw py::value_error("build_alias: weights, table and prefix must be [C], [C, 4] and [C + 1], contiguous");
  }
  const double* in = weights.data();
  int64_t *table_data = table.mutable_data(), *prefix_data = prefix.mutable_data();
  {
    const py::gil_scoped_release release;
    samplex::build_alias(in, classes, table_data, prefix_data);
  }
}

void build_alias_rows(const DoubleArray& weights, const py::array_t<int64_t, py::array::c_style>& offsets,
                      py::array_t<int64_t> table, py::array_t<int64_t> prefix) {
  const py::ssize_t pairs = weights.size(), rows = offsets.size() - 1;
  if (rows < 0 || table.size() != 4 * pairs || prefix.size() != pairs + rows ||
      !(table.flags() & prefix.flags() & py::array::c_style)) {
    throw py::value_error("build_alias_rows: table and prefix must be [nnz, 4] and [nnz + rows], contiguous");
  }
  const int64_t* at = offsets.data();
  bool ok = at[0] == 0 && at[rows] == pairs;
  for (py::ssize_t c = 0; c < rows; ++c) ok &= at[c] <= at[c + 1];
  if (!ok) throw py::value_error("build_alias_rows: offsets must ascend from 0 to the number of weights");
  const double* in = weights.data();
  int64_t *table_data = table.mutable_data(), *prefix_data = prefix.mutable_data();
  {
    const py::gil_scoped_release release;
    samplex::build_alias_rows(in, at, rows, table_data, prefix_data);
  }
}

using FloatArray = py::array_t<float, py::array::c_style>;
using LongArray = py::array_t<int64_t, py::array::c_style>;

py::dict as_dict(const samplex::TreeFitLevel& level) {
  py::dict result;
  result["level"] = level.level;
  result["nodes"] = level.nodes;
  result["log_likelihood"] = level.log_likelihood;
  result["objective"] = level.objective;
  result["rounds"] = level.rounds;
  result["most_rounds"] = level.most_rounds;
  result["newton_steps"] = level.newton_steps;
  result["gradient_ratio"] = level.gradient_ratio;
  result["unfinished"] = level.unfinished;
  return result;
}

// Fills weights, bias, leaf_class and, where it is not empty, exact; returns the trace.
std::vector<std::tuple<int64_t, int64_t, double>> fit_tree(const FloatArray& x, const LongArray& y, int64_t num_classes,
                                                           double reg, int64_t max_rounds, bool discrete,
                                                           FloatArray weights, FloatArray bias, LongArray leaf_class,
                                                           py::array_t<double, py::array::c_style> exact,
                                                           const py::object& progress, bool trace) {
  if (x.ndim() != 2 || y.ndim() != 1 || x.shape(0) != y.shape(0)) {
    throw py::value_error("fit_tree: x and y must be [N, k] and [N]");
  }
  const int64_t n = x.shape(0), k = x.shape(1), leaves = samplex::tree_num_leaves(num_classes);
  if (weights.size() != leaves * k || bias.size() != leaves || leaf_class.size() != leaves ||
      (exact.size() != 0 && exact.size() != leaves * (k + 1))) {
    throw py::value_error("fit_tree: weights, bias, leaf_class and exact must be [L, k], [L], [L] and [L, k + 1]");
  }
  samplex::TreeFitOptions options;
  options.reg = reg;
  options.max_rounds = max_rounds;
  options.discrete = discrete;
  const float* x_data = x.data();
  const int64_t* y_data = y.data();
  float *weights_data = weights.mutable_data(), *bias_data = bias.mutable_data();
  int64_t* leaf_data = leaf_class.mutable_data();
  double* exact_data = exact.size() == 0 ? nullptr : exact.mutable_data();
  const bool report = !progress.is_none();
  std::vector<samplex::TreeFitTrace> entries;
  {
    const py::gil_scoped_release release;
    const auto show = [&](const samplex::TreeFitLevel& level) {
      if (!report) return;
      const py::gil_scoped_acquire acquire;
      progress(as_dict(level));
    };
    samplex::fit_tree(x_data, y_data, n, k, num_classes, options, weights_data, bias_data, leaf_data, exact_data, show,
                      trace ? &entries : nullptr);
  }
  std::vector<std::tuple<int64_t, int64_t, double>> result;
  result.reserve(entries.size());
  for (const auto& entry : entries) result.emplace_back(entry.node, entry.round, entry.objective);
  return result;
}

std::vector<int> tree_split(const std::vector<double>& delta, const std::vector<int32_t>& ids, int64_t least,
                            int64_t most) {
  const int64_t m = int64_t(delta.size());
  if (int64_t(ids.size()) != m || least < 0 || least > most || most > m) {
    throw py::value_error("tree_split: ids must be [m] as delta, and 0 <= least <= most <= m");
  }
  std::vector<uint8_t> right(m);
  samplex::tree_split(delta.data(), ids.data(), m, least, most, right.data());
  return {right.begin(), right.end()};
}

py::tuple philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  uint32_t words[4];
  samplex::selftest_philox(counter.data(), key.data(), words);
  return py::make_tuple(words[0], words[1], words[2], words[3]);
}

DoubleArray exact_math(const std::string& name, const DoubleArray& x) {
  DoubleArray result(x.size());
  if (!samplex::selftest_exact_math(name.c_str(), x.data(), result.mutable_data(), x.size())) {
    throw py::value_error("exact_math: name must be exp, log or log1p, got " + name);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
  m.doc() = "Build info, SIMD level and host-side builders of samplex-cuda.";
  m.def("build_info", &build_info, "What was built and what is in use now, as a dict.");
  m.def(
      "simd_level", [] { return samplex::simd_level_name(samplex::simd_level()); },
      "SIMD level in use: 'scalar', 'avx2' or 'avx512'.");
  m.def("panels_beat_blas", &samplex::panels_beat_blas,
        "Whether `predict_product` is faster than torch's products on this processor.");
  m.def(
      "set_simd_level", [](const char* name) { samplex::set_simd_level(samplex::parse_simd_level(name)); },
      py::arg("name"), "Use another SIMD level for the CPU kernels from now on.");
  m.def(
      "cpu_backend", [] { return samplex::backend_name(samplex::cpu_backend()); },
      "What serves CPU tensors: 'cpu', or in a test build 'simt' or 'cuda'.");
  m.def("set_cpu_backend", &samplex::set_cpu_backend, py::arg("name"), "Test builds: choose what serves CPU tensors.");
  m.def("set_device_ids", &samplex::set_device_ids, py::arg("on"),
        "Test builds: leave ids of CPU tensors to the kernels of 'simt' and 'cuda', as those of a device are.");
  m.def(
      "thread_mode", [] { return samplex::thread_mode_name(samplex::thread_mode()); },
      "How the CPU kernels run their loops: 'auto', 'openmp' (torch's team) or 'pool' (separate workers).");
  m.def(
      "set_thread_mode", [](const char* name) { samplex::set_thread_mode(samplex::parse_thread_mode(name)); },
      py::arg("name"), "Choose how the CPU kernels run their loops from now on.");
  m.def(
      "thread_counts",
      [] {
        const samplex::ThreadCounts counts = samplex::thread_counts();
        py::dict found;
        found["openmp"] = counts.openmp;
        found["pool"] = counts.pool;
        found["late"] = counts.late;
        return found;
      },
      "Loops so far by where they ran, and how many of the OpenMP team's had a thread that was descheduled.");
  m.def("release_memory", &samplex::pool_release,
        "Give cached gradient buffers of the CPU kernels back to the system; returns their bytes.");
  m.def("cached_memory", &samplex::pool_unused_bytes, "Bytes of gradient buffers kept for the next step.");
  m.def(
      "advise_huge_pages",
      [](std::uintptr_t data, size_t bytes) {
        return samplex::advise_huge_pages(reinterpret_cast<void*>(data), bytes);
      },
      py::arg("data_ptr"), py::arg("nbytes"),
      "Ask for huge pages behind a buffer that was not touched yet; returns whether the system took the hint.");
  py::class_<TableMemory>(
      m, "TableMemory", py::buffer_protocol(),
      "Zeroed memory for a table, on huge pages; shared: if there are such pages, a fork does not copy it.")
      .def(py::init<size_t, bool>(), py::arg("nbytes"), py::arg("shared"))
      .def_buffer(&TableMemory::buffer);
  m.def(
      "share_table",
      [](std::uintptr_t data) {
        const py::gil_scoped_release release;
        return samplex::table_share(reinterpret_cast<void*>(data));
      },
      py::arg("data_ptr"),
      "Move a table of TableMemory to memory that a fork does not copy; returns how many of its bytes are there, -1 "
      "for memory of another kind.");
  m.def(
      "table_shared_bytes",
      [](std::uintptr_t data) { return samplex::table_shared_bytes(reinterpret_cast<void*>(data)); },
      py::arg("data_ptr"), "How many bytes of a table a fork does not copy; 0 for any other memory.");
  m.def("build_alias", &build_alias, py::arg("weights"), py::arg("table").noconvert(), py::arg("prefix").noconvert(),
        "Fills table [C, 4] int64 and prefix [C + 1] int64 for alias_sample from weights [C] float64.");
  m.def("build_alias_rows", &build_alias_rows, py::arg("weights"), py::arg("offsets").noconvert(),
        py::arg("table").noconvert(), py::arg("prefix").noconvert(),
        "Fills table [nnz, 4] and prefix [nnz + rows] with one alias table for each CSR row of weights [nnz].");
  m.def("fit_tree", &fit_tree, py::arg("x").noconvert(), py::arg("y").noconvert(), py::arg("num_classes"),
        py::arg("reg"), py::arg("max_rounds"), py::arg("discrete"), py::arg("weights").noconvert(),
        py::arg("bias").noconvert(), py::arg("leaf_class").noconvert(), py::arg("exact").noconvert(),
        py::arg("progress"), py::arg("trace"),
        "Fills weights [L, k], bias [L], leaf_class [L] (and exact [L, k + 1] fp64) from x [N, k] fp32 and y [N]; "
        "progress(dict) after each level. Returns (node, round, objective) of every step if trace.");
  m.def("tree_split", &tree_split, py::arg("delta"), py::arg("ids"), py::arg("least"), py::arg("most"),
        "The discrete step of the tree fit: 1 for each class that goes right, else 0.");
  m.def("philox", &philox, py::arg("counter"), py::arg("key"), "Philox4x32-10: 4 and 2 words of 32 bits -> 4 words.");
  m.def("exact_math", &exact_math, py::arg("name"), py::arg("x"),
        "exp, log or log1p of common/numeric.h, elementwise.");
  m.def(
      "run_loop",
      [](int64_t n, int64_t grain, bool shared, bool nested, int64_t throw_at, int64_t sleep_at, int64_t spin_at,
         int64_t microseconds) {
        std::vector<int64_t> visits(static_cast<size_t>(n), 0);
        {
          const py::gil_scoped_release release;
          samplex::selftest_loop({n, grain, shared, nested, throw_at, sleep_at, spin_at, microseconds}, visits.data());
        }
        return visits;
      },
      py::arg("n"), py::arg("grain") = 1, py::kw_only(), py::arg("shared") = false, py::arg("nested") = false,
      py::arg("throw_at") = -1, py::arg("sleep_at") = -1, py::arg("spin_at") = -1, py::arg("microseconds") = 0,
      "A parallel loop of the CPU kernels for tests: how often each item was visited.");
}
