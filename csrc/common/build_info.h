// What was built, as text the op library exports to `_native`.
#pragma once

#include "common/export.h"

namespace samplex {

SX_EXPORT const char* build_version();
SX_EXPORT const char* build_commit();
SX_EXPORT const char* build_compiler();
SX_EXPORT const char* build_type();
SX_EXPORT const char* build_cuda_version();  // "" without CUDA
SX_EXPORT const char* build_cuda_archs();    // "" without CUDA
SX_EXPORT const char* build_sanitizers();    // "" without

}  // namespace samplex
