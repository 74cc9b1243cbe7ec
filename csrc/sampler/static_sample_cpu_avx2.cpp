#include "sampler/static_sample_cpu_impl.h"
