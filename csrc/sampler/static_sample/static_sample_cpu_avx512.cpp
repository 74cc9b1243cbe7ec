#include "sampler/static_sample/static_sample_cpu_rows.h"
