// Sums over stretches of memory, in double and in one fixed order: element i goes to lane i modulo kLanes, whatever the
// instruction set's vectors hold.
#pragma once

#include "cpu/kernels/convert.h"

namespace pfl::cpu::PFL_ISA {
namespace {

constexpr int kLanes = 16;
// Elements converted at once; a multiple of kLanes.
constexpr int64_t kSumBlock = 2048;

// Adds term(i) of [0, n) to the lanes; i = 0 is of lane 0.
template <typename Term>
[[maybe_unused]] inline void add_to_lanes(int64_t n, const Term& term, double* __restrict lanes) {
  double sum[kLanes];
  for (int l = 0; l < kLanes; ++l) sum[l] = lanes[l];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) sum[l] += term(i + l);
  }
  for (int l = 0; i + l < n; ++l) sum[l] += term(i + l);
  for (int l = 0; l < kLanes; ++l) lanes[l] = sum[l];
}

[[maybe_unused]] inline double sum_lanes(double* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

// sum x^2, or sum (x - y)^2 with y. In double neither difference nor square of floats can overflow.
template <typename T>
[[maybe_unused]] inline double sum_of_squares(const T* x, const T* y, int64_t n) {
  using A = accumulate_t<T>;
  alignas(64) A x_buffer[kIsAccumulateType<T> ? 1 : kSumBlock];
  alignas(64) A y_buffer[kIsAccumulateType<T> ? 1 : kSumBlock];
  alignas(64) double lanes[kLanes] = {};
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t block = n - begin < kSumBlock ? n - begin : kSumBlock;
    const A* __restrict a = as_accumulate(x + begin, block, x_buffer);
    if (y == nullptr) {
      add_to_lanes(
          block,
          [a](int64_t i) {
            const double value = static_cast<double>(a[i]);
            return value * value;
          },
          lanes);
    } else {
      const A* __restrict b = as_accumulate(y + begin, block, y_buffer);
      add_to_lanes(
          block,
          [a, b](int64_t i) {
            const double value = static_cast<double>(a[i]) - static_cast<double>(b[i]);
            return value * value;
          },
          lanes);
    }
  }
  return sum_lanes(lanes);
}

}  // namespace
}  // namespace pfl::cpu::PFL_ISA
