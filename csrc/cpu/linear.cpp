// Glue of the linear family for the CPU key. Schemas: pfl_ext/ops/linear.py.
#include "cpu/kernels/linear.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/layers.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;

// What a thread takes at least, so that it fills registers.
constexpr int64_t kGrain = 64;

int64_t grain(int64_t tasks, const LinearShape& shape) {
  const int64_t products = shape.rows * shape.inputs * shape.outputs;
  return products < kFewestParallelProducts ? std::max<int64_t>(tasks, 1) : kGrain;
}

Tensor linear_relu_forward(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const char* op = "pfl_ext::linear_relu_forward";
  const DType dtype = checked_layer(op, "x", x, 2, x);
  checked_layer(op, "weight", weight, 2, x);
  checked_layer(op, "bias", bias, 1, x);
  const LinearShape shape{x.size(0), x.size(1), weight.size(0)};
  if (weight.size(1) != shape.inputs || bias.size(0) != shape.outputs) {
    glue::fail(op, ": x is ", glue::describe(x), ", weight ", glue::describe(weight), ", bias ", glue::describe(bias),
               "; they do not fit");
  }
  Tensor y = torch::stable::new_empty(x, {shape.rows, shape.outputs});
  const void* from = x.const_data_ptr();
  const void* weights = weight.const_data_ptr();
  const void* biases = bias.const_data_ptr();
  void* to = y.mutable_data_ptr();
  const LinearKernels& kernels = linear();
  torch::stable::parallel_for(0, shape.outputs, grain(shape.outputs, shape), [&](int64_t begin, int64_t end) {
    kernels.forward(dtype, shape, /*relu=*/true, begin, end, from, weights, biases, to);
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> linear_relu_backward(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                        const Tensor& weight, bool for_x) {
  const char* op = "pfl_ext::linear_relu_backward";
  const DType dtype = checked_layer(op, "x", x, 2, x);
  checked_layer(op, "grad", grad, 2, x);
  checked_layer(op, "y", y, 2, x);
  checked_layer(op, "weight", weight, 2, x);
  const LinearShape shape{x.size(0), x.size(1), weight.size(0)};
  if (weight.size(1) != shape.inputs || grad.size(0) != shape.rows || grad.size(1) != shape.outputs ||
      !glue::equal(y.sizes(), grad.sizes())) {
    glue::fail(op, ": grad is ", glue::describe(grad), ", y ", glue::describe(y), ", x ", glue::describe(x),
               ", weight ", glue::describe(weight), "; they do not fit");
  }
  Tensor masked = torch::stable::new_empty(grad, grad.sizes());
  Tensor to_weight = torch::stable::new_empty(weight, weight.sizes());
  Tensor to_bias = torch::stable::new_empty(weight, {shape.outputs});
  Tensor to_x =
      torch::stable::new_empty(x, for_x ? std::vector<int64_t>{shape.rows, shape.inputs} : std::vector<int64_t>{0});
  const LinearKernels& kernels = linear();
  kernels.mask(dtype, grad.numel(), grad.const_data_ptr(), y.const_data_ptr(), masked.mutable_data_ptr());
  const void* gradient = masked.const_data_ptr();
  void* for_weight = to_weight.mutable_data_ptr();
  void* for_bias = to_bias.mutable_data_ptr();
  torch::stable::parallel_for(0, shape.outputs, grain(shape.outputs, shape), [&](int64_t begin, int64_t end) {
    kernels.weight_gradient(dtype, shape, begin, end, gradient, x.const_data_ptr(), for_weight, for_bias);
  });
  if (for_x) {
    void* into = to_x.mutable_data_ptr();
    torch::stable::parallel_for(0, shape.inputs, grain(shape.inputs, shape), [&](int64_t begin, int64_t end) {
      kernels.input_gradient(dtype, shape, begin, end, gradient, weight.const_data_ptr(), into);
    });
  }
  return {to_x, to_weight, to_bias};
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("linear_relu_forward", TORCH_BOX(&pfl::cpu::linear_relu_forward));
  m.impl("linear_relu_backward", TORCH_BOX(&pfl::cpu::linear_relu_backward));
}
