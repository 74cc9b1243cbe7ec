// Anchor of the op library: opens the namespace. Each <stem>_op.cpp adds its own fragment.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(samplex, m) { (void)m; }
