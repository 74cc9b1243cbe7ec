// `_native`: what torch's op registry cannot carry. Build info, SIMD level, test backend, memory hints, host-side
// builders. All state lives in the op library; this module only asks it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>

#include "common/backend.h"
#include "common/build_info.h"
#include "common/pages.h"
#include "common/pool.h"
#include "common/selftest.h"
#include "common/simd.h"
#include "sampler/alias_table.h"

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
  m.def(
      "set_simd_level", [](const char* name) { samplex::set_simd_level(samplex::parse_simd_level(name)); },
      py::arg("name"), "Use another SIMD level for the CPU kernels from now on.");
  m.def(
      "cpu_backend", [] { return samplex::backend_name(samplex::cpu_backend()); },
      "What serves CPU tensors: 'cpu', or in a test build 'simt' or 'cuda'.");
  m.def("set_cpu_backend", &samplex::set_cpu_backend, py::arg("name"), "Test builds: choose what serves CPU tensors.");
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
  m.def("build_alias", &build_alias, py::arg("weights"), py::arg("table").noconvert(), py::arg("prefix").noconvert(),
        "Fills table [C, 4] int64 and prefix [C + 1] int64 for alias_sample from weights [C] float64.");
  m.def("philox", &philox, py::arg("counter"), py::arg("key"), "Philox4x32-10: 4 and 2 words of 32 bits -> 4 words.");
  m.def("exact_math", &exact_math, py::arg("name"), py::arg("x"),
        "exp, log or log1p of common/numeric.h, elementwise.");
}
