// Lists of torch tensors as the kernels want them: checked, and each one a stretch of memory.
// Stable ABI only; shared by the CPU and the CUDA glue.
#pragma once

#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/numeric.h"

namespace pfl::glue {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return torch::headeronly::toString(type);
  }
}

// "float32 [3, 4] on cpu", for error messages.
inline std::string describe(const Tensor& t) {
  std::ostringstream text;
  text << name_of(t.scalar_type()) << " [";
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << "] on ";
  if (t.is_cpu()) {
    text << "cpu";
  } else {
    text << (t.is_cuda() ? "cuda:" : "device ") << t.get_device_index();
  }
  return text.str();
}

inline DType dtype_of(const Tensor& t, const char* op, const char* role, size_t index) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail(op, ": ", role, " tensor ", index, " is ", describe(t), "; float32, float64, float16 and bfloat16 are accepted");
  }
}

template <typename Array>
inline bool equal(const Array& a, const Array& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// The elements fill one stretch of memory without gap or overlap, in whatever order of dimensions.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (size_t d : order) {
    if (sizes[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

inline bool same_kind(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_cpu() == b.is_cpu() &&
         a.get_device_index() == b.get_device_index() && equal(a.sizes(), b.sizes());
}

// Tensors that correspond element by element, as pointers into memory of one common order. Where they share a dense
// layout (all contiguous, all channels-last) that memory is used as it is; otherwise inputs are copied to contiguous
// ones, and an output is computed aside and copied back by `finish`.
class Aligned {
 public:
  // `tensors[0]` is the output.
  explicit Aligned(const std::vector<const Tensor*>& tensors) : out_(tensors[0]) {
    const Tensor& first = *tensors[0];
    numel = first.numel();
    bool shared = is_dense(first);
    for (size_t i = 1; shared && i < tensors.size(); ++i) {
      shared = equal(tensors[i]->strides(), first.strides()) || (tensors[i]->is_contiguous() && first.is_contiguous());
    }
    pointers.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = *tensors[i];
      if (shared || t.is_contiguous()) {
        pointers.push_back(i == 0 ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr()));
      } else {
        copies_.push_back(i == 0 ? torch::stable::new_empty(t, t.sizes()) : torch::stable::contiguous(t));
        pointers.push_back(copies_.back().mutable_data_ptr());
        computed_aside_ = computed_aside_ || i == 0;
      }
    }
  }

  void finish() {
    if (computed_aside_) {
      Tensor out = *out_;
      torch::stable::copy_(out, copies_[0]);
    }
  }

  int64_t numel = 0;
  std::vector<void*> pointers;  // in the order of the tensors given

 private:
  const Tensor* out_;
  bool computed_aside_ = false;
  std::vector<Tensor> copies_;
};

}  // namespace pfl::glue
