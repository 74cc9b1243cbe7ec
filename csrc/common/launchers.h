// Declares the launchers of one params struct: SX_DECLARE_LAUNCHER(launch_x, XParams). Where the CPU takes another path
// than the GPU (one call instead of kernels around torch's sort), SX_DECLARE_CUDA_LAUNCHER declares the GPU's alone.
#pragma once

#define SX_DECLARE_CUDA_LAUNCHER(name, Params)   \
  namespace cuda {                               \
  void name(const Params& params, void* stream); \
  }                                              \
  namespace simt {                               \
  void name(const Params& params, void* stream); \
  }

#define SX_DECLARE_LAUNCHER(name, Params) \
  namespace cpu {                         \
  void name(const Params& params);        \
  }                                       \
  SX_DECLARE_CUDA_LAUNCHER(name, Params)
