// Glue of the convolution family for the CPU key. Schemas: pfl_ext/ops/convolution.py.
#include "cpu/kernels/convolution.h"

#include <torch/csrc/stable/library.h>

#include <memory>
#include <tuple>

#include "cpu/layers.h"

namespace pfl::cpu {
namespace {

using glue::ScalarType;
using glue::Tensor;

int64_t grain(int64_t tasks, int64_t products) {
  return products < kFewestParallelProducts ? std::max<int64_t>(tasks, 1) : 1;
}

ConvolutionShape shape_of(const Tensor& x, const Tensor& weight) {
  return {x.size(0), x.size(1), x.size(2), x.size(3), weight.size(0), weight.size(1), weight.size(2)};
}

bool fits(const ConvolutionShape& shape, const Tensor& weight) {
  return weight.size(3) == shape.inputs && 0 < shape.kernel_height && shape.kernel_height <= shape.height &&
         0 < shape.kernel_width && shape.kernel_width <= shape.width;
}

std::tuple<Tensor, Tensor> conv_pool_relu_forward(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const char* op = "pfl_ext::conv_pool_relu_forward";
  const DType dtype = checked_layer(op, "x", x, 4, x);
  checked_layer(op, "weight", weight, 4, x);
  checked_layer(op, "bias", bias, 1, x);
  const ConvolutionShape shape = shape_of(x, weight);
  if (!fits(shape, weight) || bias.size(0) != shape.outputs) {
    glue::fail(op, ": x is ", glue::describe(x), ", weight ", glue::describe(weight), ", bias ", glue::describe(bias),
               "; they do not fit");
  }
  const std::vector<int64_t> sizes{shape.samples, shape.cell_rows(), shape.cell_columns(), shape.outputs};
  Tensor y = torch::stable::new_empty(x, sizes);
  Tensor which = torch::stable::new_empty(x, sizes, ScalarType::Byte);
  if (y.numel() == 0) return {y, which};
  const ConvolutionKernels& kernels = convolution();
  const std::unique_ptr<char[]> packed(new char[kernels.packed_bytes(dtype, shape)]);
  kernels.pack(dtype, shape, weight.const_data_ptr(), bias.const_data_ptr(), packed.get());
  const int64_t rows = shape.samples * shape.cell_rows();
  const void* from = x.const_data_ptr();
  void* to = y.mutable_data_ptr();
  uint8_t* places = static_cast<uint8_t*>(which.mutable_data_ptr());
  torch::stable::parallel_for(0, rows, grain(rows, 4 * y.numel() * shape.taps()), [&](int64_t begin, int64_t end) {
    kernels.convolve(dtype, shape, begin, end, from, packed.get(), to, places);
  });
  return {y, which};
}

std::tuple<Tensor, Tensor, Tensor> conv_pool_relu_backward(const Tensor& grad, const Tensor& which, const Tensor& x,
                                                           const Tensor& weight, bool for_x) {
  const char* op = "pfl_ext::conv_pool_relu_backward";
  const DType dtype = checked_layer(op, "x", x, 4, x);
  checked_layer(op, "grad", grad, 4, x);
  checked_layer(op, "weight", weight, 4, x);
  const ConvolutionShape shape = shape_of(x, weight);
  if (!fits(shape, weight) || grad.size(0) != shape.samples || grad.size(1) != shape.cell_rows() ||
      grad.size(2) != shape.cell_columns() || grad.size(3) != shape.outputs ||
      which.scalar_type() != ScalarType::Byte || !which.is_cpu() || !which.is_contiguous() ||
      !glue::equal(which.sizes(), grad.sizes())) {
    glue::fail(op, ": grad is ", glue::describe(grad), ", which ", glue::describe(which), ", x ", glue::describe(x),
               ", weight ", glue::describe(weight), "; they do not fit");
  }
  Tensor to_weight = torch::stable::new_empty(weight, weight.sizes());
  Tensor to_bias = torch::stable::new_empty(weight, {shape.outputs});
  Tensor to_x = torch::stable::new_empty(
      x, for_x ? std::vector<int64_t>{x.size(0), x.size(1), x.size(2), x.size(3)} : std::vector<int64_t>{0});
  const ConvolutionKernels& kernels = convolution();
  const int64_t bytes = kernels.workspace(dtype, shape);
  const int64_t products = grad.numel() * shape.taps();
  const void* gradient = grad.const_data_ptr();
  const uint8_t* places = static_cast<const uint8_t*>(which.const_data_ptr());
  void* for_weight = to_weight.mutable_data_ptr();
  void* for_bias = to_bias.mutable_data_ptr();
  torch::stable::parallel_for(0, shape.outputs, grain(shape.outputs, products), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> workspace(new char[bytes]);
    kernels.weight_gradient(dtype, shape, begin, end, gradient, places, x.const_data_ptr(), workspace.get(), for_weight,
                            for_bias);
  });
  if (for_x) {
    void* into = to_x.mutable_data_ptr();
    torch::stable::parallel_for(0, shape.samples, grain(shape.samples, products), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> workspace(new char[bytes]);
      kernels.input_gradient(dtype, shape, begin, end, gradient, places, weight.const_data_ptr(), workspace.get(),
                             into);
    });
  }
  return {to_x, to_weight, to_bias};
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("conv_pool_relu_forward", TORCH_BOX(&pfl::cpu::conv_pool_relu_forward));
  m.impl("conv_pool_relu_backward", TORCH_BOX(&pfl::cpu::conv_pool_relu_backward));
}
