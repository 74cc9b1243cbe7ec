// The SAMPLEX_BUILD_* strings come from CMake, for this file only: a new commit recompiles nothing else.
#include "common/build_info.h"

namespace samplex {

const char* build_version() { return SAMPLEX_BUILD_VERSION; }
const char* build_commit() { return SAMPLEX_BUILD_COMMIT; }
const char* build_compiler() { return SAMPLEX_BUILD_COMPILER; }
const char* build_type() { return SAMPLEX_BUILD_TYPE; }
const char* build_cuda_version() { return SAMPLEX_BUILD_CUDA_VERSION; }
const char* build_cuda_archs() { return SAMPLEX_BUILD_CUDA_ARCHS; }
const char* build_sanitizers() { return SAMPLEX_BUILD_SANITIZERS; }

}  // namespace samplex
