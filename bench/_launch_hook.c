/* Preloaded before an emulated CUDA runtime: hands every kernel launch to a callback, with the kernel's mangled name,
   so that profile_cuda.py can run it on a module whose counters it can read. What the callback does not take goes on to
   the runtime. Only the entry points nvcc's host stubs use. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

typedef struct {
  unsigned x, y, z;
} Dim3;
/* 0: done, 1: not mine, else a CUDA error code */
typedef int (*Callback)(const char* kernel, const unsigned* grid, const unsigned* block, unsigned smem, void** args);

enum { kMax = 4096 };
static struct {
  const void* host;   /* address of the host stub */
  const void* handle; /* what __cudaGetKernel gave for it */
  const char* name;
} kernels[kMax];
static int num_kernels;
static Callback callback;

__attribute__((visibility("default"))) void samplex_hook(Callback f) { callback = f; }

static const char* name_of(const void* key) {
  for (int i = num_kernels - 1; i >= 0; --i) {
    if (kernels[i].host == key || kernels[i].handle == key) return kernels[i].name;
  }
  return NULL;
}

void __cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int limit, void* tid,
                            void* bid, void* block, void* grid, int* warp) {
  void (*next)(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) =
      dlsym(RTLD_NEXT, "__cudaRegisterFunction");
  if (num_kernels < kMax) {
    kernels[num_kernels].host = host;
    kernels[num_kernels].name = strdup(name);
    ++num_kernels;
  }
  next(handle, host, device, name, limit, tid, bid, block, grid, warp);
}

int __cudaGetKernel(void** kernel, const void* host) {
  int (*next)(void**, const void*) = dlsym(RTLD_NEXT, "__cudaGetKernel");
  const int error = next(kernel, host);
  for (int i = 0; i < num_kernels; ++i) {
    if (kernels[i].host == host) kernels[i].handle = *kernel;
  }
  return error;
}

static int launch(const char* entry, const void* key, Dim3 grid, Dim3 block, void** args, size_t smem, void* stream) {
  const char* name = name_of(key);
  if (callback && name) {
    const int taken = callback(name, &grid.x, &block.x, (unsigned)smem, args);
    if (taken != 1) return taken;
  }
  int (*next)(const void*, Dim3, Dim3, void**, size_t, void*) = dlsym(RTLD_NEXT, entry);
  return next(key, grid, block, args, smem, stream);
}

int cudaLaunchKernel(const void* host, Dim3 grid, Dim3 block, void** args, size_t smem, void* stream) {
  return launch("cudaLaunchKernel", host, grid, block, args, smem, stream);
}

int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, size_t smem, void* stream) {
  return launch("__cudaLaunchKernel", kernel, grid, block, args, smem, stream);
}
