// The static shared memory of the kernels is what the linker lays between shared_begin.cpp and shared_end.cpp: zero-
// initialized thread-local storage follows link order, and nothing else in a kernel file is thread-local. The marker is
// also a red zone of its own size.
extern "C" {
__attribute__((visibility("hidden"))) __thread unsigned char sx_simt_shared_begin[256] __attribute__((aligned(64)));
}
