// Declares the launchers of one params struct: SX_DECLARE_LAUNCHER(launch_x, XParams).
#pragma once

#define SX_DECLARE_LAUNCHER(name, Params)        \
  namespace cpu {                                \
  void name(const Params& params);               \
  }                                              \
  namespace cuda {                               \
  void name(const Params& params, void* stream); \
  }                                              \
  namespace simt {                               \
  void name(const Params& params, void* stream); \
  }
