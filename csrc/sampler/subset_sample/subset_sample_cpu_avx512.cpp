#include "sampler/subset_sample/subset_sample_cpu_rows.h"
