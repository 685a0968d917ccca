// A linear layer with ReLU behind it for batches of few rows, and its gradients, over raw pointers, serial: the glue
// calls these from its threads.
#pragma once

#include "common/numeric.h"
#include "common/proximal.h"
#include "cpu/isa.h"

namespace pfl::cpu {

struct LinearShape {
  int64_t rows, inputs, outputs;
};

// Of float32 and float64; all matrices row by row, the weights [outputs, inputs].
struct LinearKernels {
  // y = max(0, x w^T + b), or without the maximum, for the outputs [begin, end).
  void (*forward)(DType dtype, const LinearShape& shape, bool relu, int64_t begin, int64_t end, const void* x,
                  const void* weight, const void* bias, void* y);
  // The gradient where ReLU let it through.
  void (*mask)(DType dtype, int64_t count, const void* grad, const void* y, void* masked);
  // The gradients of weight and bias, for the outputs [begin, end), from the masked one of y.
  void (*weight_gradient)(DType dtype, const LinearShape& shape, int64_t begin, int64_t end, const void* masked,
                          const void* x, void* to_weight, void* to_bias);
  // The same with a step of the weights by their gradient, which is in registers only: one without momentum, anchor and
  // weight decay. The bias is left as it is.
  void (*weight_step)(DType dtype, const ProximalStep& how, const LinearShape& shape, int64_t begin, int64_t end,
                      const void* masked, const void* x, void* weight, void* to_bias);
  // The gradient of x, for its columns [begin, end).
  void (*input_gradient)(DType dtype, const LinearShape& shape, int64_t begin, int64_t end, const void* masked,
                         const void* weight, void* to_x);
};

PFL_DECLARE_KERNELS(LinearKernels, linear)

}  // namespace pfl::cpu
