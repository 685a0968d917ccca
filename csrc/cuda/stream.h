// The device of a tensor made current, and torch's stream on it.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/kernels/list_arguments.cuh"

namespace pfl::cuda {

class CurrentStream {
 public:
  explicit CurrentStream(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  // For the launch_* functions of kernels/: launch(kernel, grid, args).
  auto launcher() const {
    return [stream = stream_](auto kernel, int64_t grid, const auto& args) {
      kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(args);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    };
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace pfl::cuda
