// A convolution with max-pooling and ReLU behind it, and its gradients, over raw pointers, serial: the glue calls these
// from its threads. All tensors are [samples, height, width, channels], channels next to each other.
#pragma once

#include "common/numeric.h"
#include "cpu/isa.h"

namespace pfl::cpu {

// A convolution of stride 1 without padding, then the largest of each 2x2 cell; an odd last row or column is left out.
struct ConvolutionShape {
  int64_t samples, height, width, inputs;  // of what is convolved
  int64_t outputs, kernel_height, kernel_width;

  PFL_HD_MEMBER int64_t cell_rows() const { return (height - kernel_height + 1) / 2; }
  PFL_HD_MEMBER int64_t cell_columns() const { return (width - kernel_width + 1) / 2; }
  PFL_HD_MEMBER int64_t cells() const { return cell_rows() * cell_columns(); }  // of a sample
  PFL_HD_MEMBER int64_t taps() const { return kernel_height * kernel_width * inputs; }
  // Where in a sample the patch of position 0 to 3 of a cell begins.
  PFL_HD_MEMBER int64_t patch(int64_t cell, int position) const {
    const int64_t row = 2 * (cell / cell_columns()) + position / 2;
    const int64_t column = 2 * (cell % cell_columns()) + position % 2;
    return (row * width + column) * inputs;
  }
};

// Of float32 and float64; `which` is where in its cell the largest number was, 0 to 3, or 4 where ReLU gave zero.
struct ConvolutionKernels {
  // Weight and bias as `convolve` reads them, and how many bytes that is.
  int64_t (*packed_bytes)(DType dtype, const ConvolutionShape& shape);
  void (*pack)(DType dtype, const ConvolutionShape& shape, const void* weight, const void* bias, void* packed);
  // The rows [begin, end) of cells of all samples together.
  void (*convolve)(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* x,
                   const void* packed, void* y, uint8_t* which);
  // Bytes that the two below need for themselves.
  int64_t (*workspace)(DType dtype, const ConvolutionShape& shape);
  // The gradients of weight [outputs, kernel height, kernel width, inputs] and bias, for the outputs [begin, end).
  void (*weight_gradient)(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                          const uint8_t* which, const void* x, void* workspace, void* to_weight, void* to_bias);
  // The gradient of x, for the samples [begin, end).
  void (*input_gradient)(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                         const uint8_t* which, const void* weight, void* workspace, void* to_x);
};

PFL_DECLARE_KERNELS(ConvolutionKernels, convolution)

}  // namespace pfl::cpu
