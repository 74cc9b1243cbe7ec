# Target samplex_torch: headers and libtorch_cpu of the torch that the building interpreter imports.
# Not find_package(Torch): that looks for CUDA libraries the op library does not need, since it uses only the stable ABI,
# whose shims all live in libtorch_cpu.
find_package(Python COMPONENTS Interpreter REQUIRED)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py
  OUTPUT_VARIABLE SAMPLEX_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT SAMPLEX_TORCH_DIR)
  message(FATAL_ERROR "samplex-cuda: torch >= 2.13 must be installed in ${Python_EXECUTABLE} before the build. "
    "Run: pip install torch==2.13.0, then pip install --no-build-isolation .")
endif()
file(READ "${SAMPLEX_TORCH_DIR}/version.py" _torch_version_py)
string(REGEX MATCH "__version__ = '([0-9]+\\.[0-9]+)[^']*'" _ "${_torch_version_py}")
if(CMAKE_MATCH_1 VERSION_LESS 2.13)
  message(FATAL_ERROR "samplex-cuda: torch must be >= 2.13, got ${CMAKE_MATCH_1}")
endif()
set(SAMPLEX_TORCH_LIB_DIR "${SAMPLEX_TORCH_DIR}/lib")
add_library(samplex_torch INTERFACE)
target_include_directories(samplex_torch SYSTEM INTERFACE "${SAMPLEX_TORCH_DIR}/include")
target_compile_definitions(samplex_torch INTERFACE TORCH_TARGET_VERSION=0x020d000000000000)
target_link_directories(samplex_torch INTERFACE "${SAMPLEX_TORCH_LIB_DIR}")
target_link_libraries(samplex_torch INTERFACE torch_cpu)
