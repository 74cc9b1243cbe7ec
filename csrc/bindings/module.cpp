// `_native`: what torch's op registry cannot carry. Build info, SIMD level, test backend, memory hints, host-side
// builders. All state lives in the op library; this module only asks it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>

#include "common/backend.h"
#include "common/build_info.h"
#include "common/pages.h"
#include "common/simd.h"

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
  m.def(
      "advise_huge_pages",
      [](std::uintptr_t data, size_t bytes) { return samplex::advise_huge_pages(reinterpret_cast<void*>(data), bytes); },
      py::arg("data_ptr"), py::arg("nbytes"),
      "Ask for huge pages behind a buffer that was not touched yet; returns whether the system took the hint.");
}
