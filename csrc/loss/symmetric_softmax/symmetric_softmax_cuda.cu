// Launchers: a block per row, per 32 columns, and per row and tile of columns.
#include "loss/symmetric_softmax/symmetric_softmax_kernel.cuh"

namespace samplex {
namespace SX_BACKEND_NS {
namespace {

constexpr const char* kOp = "symmetric_softmax";

template <typename A>
void forward(const SymmetricSoftmaxParams& p, void* stream) {
  SX_LAUNCH(kOp, symmetric_rows_kernel<A>, unsigned(p.batch), kSymmetricThreads, 0, stream, p);
  SX_LAUNCH(kOp, symmetric_columns_kernel<A>, unsigned((p.batch + kWarpSize - 1) / kWarpSize), kSymmetricThreads, 0,
            stream, p);
}

template <typename A>
void backward(const SymmetricSoftmaxParams& p, void* stream) {
  const dim3 grid(unsigned((p.batch + kSymmetricThreads - 1) / kSymmetricThreads), unsigned(p.batch));
  SX_LAUNCH(kOp, symmetric_grad_kernel<A>, grid, kSymmetricThreads, 0, stream, p);
}

}  // namespace

void launch_symmetric_softmax(const SymmetricSoftmaxParams& params, void* stream) {
  params.double_acc ? forward<double>(params, stream) : forward<float>(params, stream);
}

void launch_symmetric_softmax_grad(const SymmetricSoftmaxParams& params, void* stream) {
  params.double_acc ? backward<double>(params, stream) : backward<float>(params, stream);
}

}  // namespace SX_BACKEND_NS
}  // namespace samplex
