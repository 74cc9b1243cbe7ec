// Marks what the op library exports to `_native`; everything else in it is hidden.
#pragma once

#define SX_EXPORT __attribute__((visibility("default")))
