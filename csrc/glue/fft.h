// torch's FFTs through the dispatcher: the one place that knows their names and schemas. All are of the rows of a
// matrix, without a factor in either direction.
#pragma once

#include <array>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace pfl::glue {

template <typename Last>
inline torch::stable::Tensor call_fft(const char* name, const torch::stable::Tensor& x, Last last) {
  const int64_t dim = 1;
  std::array<StableIValue, 4> stack{
      torch::stable::detail::from(x),
      torch::stable::detail::from(torch::headeronly::IntHeaderOnlyArrayRef(&dim, 1)),
      torch::stable::detail::from(int64_t{0}),  // no normalisation
      torch::stable::detail::from(last),
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

inline torch::stable::Tensor complex_fft(const torch::stable::Tensor& x, bool inverse) {
  return call_fft("aten::_fft_c2c", x, !inverse);
}

inline torch::stable::Tensor real_fft(const torch::stable::Tensor& x) { return call_fft("aten::_fft_r2c", x, true); }

inline torch::stable::Tensor inverse_real_fft(const torch::stable::Tensor& half_spectrum, int64_t length) {
  return call_fft("aten::_fft_c2r", half_spectrum, length);
}

}  // namespace pfl::glue
