#include "sampler/subset_sample_cpu_impl.h"
