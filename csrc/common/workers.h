// A thread pool for machines that are shared with other busy processes. The caller waits for tasks that somebody has
// started, never for a thread that has not run yet, and both sides sleep after a short spin, which frees a core for
// whoever was descheduled.
#pragma once

#include <cstdint>

namespace samplex {

// Calls body(i, context) for every i in [0, count) on the caller and at most `threads - 1` workers, and returns when
// all calls are done. The first exception is rethrown; tasks that nobody has started by then are skipped. Returns false
// without a call if another thread is using the workers. count must be below 2^31.
bool run_on_workers(int64_t count, int threads, void (*body)(int64_t, void*), void* context);

// Whether this process is a fork. It has no workers of its parent, and an OpenMP team of the parent would never answer.
bool in_forked_child();

}  // namespace samplex
