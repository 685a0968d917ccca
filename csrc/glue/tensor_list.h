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
      fail(op, ": ", role, " tensor ", index, " is ", describe(t),
           "; float32, float64, float16 and bfloat16 are accepted");
  }
}

// Fails unless tensor t of a list is on the device of the first one, and that where the call runs: a kernel would touch
// memory that is not its own.
inline void check_device(const char* op, const char* role, const std::vector<Tensor>& tensors, size_t t, bool on_cpu) {
  const Tensor& x = tensors[t];
  const bool runs_here = x.is_cpu() == on_cpu;
  if (runs_here && x.get_device_index() == tensors[0].get_device_index()) return;
  fail(op, ": tensor ", t, " of ", role, " is ", describe(x), ", ",
       t > 0 ? "tensor 0 is " + describe(tensors[0]) : std::string("the call runs on ") + (on_cpu ? "cpu" : "cuda"),
       "; all tensors of one call must be on one device");
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

// What the checks compare, read once a tensor: lists hold thousands, and each question crosses the ABI.
struct Kind {
  explicit Kind(const Tensor& t) : sizes(t.sizes()) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
  }
  bool operator==(const Kind& other) const {
    return dtype == other.dtype && device_type == other.device_type && device_index == other.device_index &&
           equal(sizes, other.sizes);
  }

  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  torch::headeronly::IntHeaderOnlyArrayRef sizes;
};

// Its number in Kind::dtype.
inline int32_t number_of(DType dtype) {
  static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_float16(),
                                    aoti_torch_dtype_bfloat16()};
  return numbers[static_cast<int>(dtype)];
}

// The type with this number; false if it is none of ours.
inline bool find_dtype(int32_t number, DType* found) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    *found = dtype;
    if (number_of(dtype) == number) return true;
  }
  return false;
}

// The bytes between a tensor's first and last element.
struct Span {
  explicit Span(const Tensor& t, size_t index = 0)
      : begin(static_cast<const char*>(t.const_data_ptr())), tensor(index) {
    int64_t extent = t.numel();
    if (extent != 0 && !t.is_contiguous()) {
      extent = 1;
      for (int64_t d = 0; d < t.dim(); ++d) extent += (t.size(d) - 1) * t.stride(d);
    }
    end = begin + extent * t.element_size();
  }

  bool overlaps(const Span& other) const { return std::max(begin, other.begin) < std::min(end, other.end); }

  const char* begin;
  const char* end;
  size_t tensor;
};

// Fails for a tensor to be written of which elements share one place in memory: expanded, or strided over itself.
inline void check_places(const char* op, const char* role, size_t t, const Tensor& x) {
  if (x.is_contiguous()) return;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size, from the shortest on
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) steps.emplace_back(x.stride(d), x.size(d));
  }
  std::sort(steps.begin(), steps.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : steps) {
    if (stride < extent) {
      fail(op, ": tensor ", t, " of ", role, " is expanded or overlaps itself: elements share one place in memory");
    }
    extent += stride * (size - 1);
  }
}

// Which outputs share memory with an input in another way than being the very same tensor at the same place of its
// list. Those are computed aside, so that every input is read before any of it is overwritten.
class Overlaps {
 public:
  // Outputs that overlap each other are refused.
  Overlaps(const char* op, const std::vector<Tensor>& out) : out_(out), found_(out.size(), false) {
    for (size_t t = 0; t < out.size(); ++t) {
      if (out[t].numel() == 0) continue;
      check_places(op, "out", t, out[t]);
      spans_.emplace_back(out[t], t);
    }
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < spans_.size(); ++i) {
      if (spans_[i].overlaps(spans_[i - 1])) {
        fail(op, ": tensors ", spans_[i - 1].tensor, " and ", spans_[i].tensor, " of out overlap in memory");
      }
    }
  }

  void add_input(const Tensor& x, size_t index) {
    const Span span(x);
    auto after = std::lower_bound(spans_.begin(), spans_.end(), span.end,
                                  [](const Span& s, const char* end) { return s.begin < end; });
    while (after != spans_.begin() && (--after)->end > span.begin) {
      const bool same =
          after->tensor == index && after->begin == span.begin && equal(x.strides(), out_[index].strides());
      if (!same && span.begin != span.end) found_[after->tensor] = true;
    }
  }

  bool operator[](size_t tensor) const { return found_[tensor]; }

 private:
  const std::vector<Tensor>& out_;
  std::vector<Span> spans_;
  std::vector<bool> found_;
};

// Tensors that correspond element by element, as pointers into memory of one common order. Where they share a dense
// layout (all contiguous, all channels-last) that memory is used as it is; otherwise inputs are copied to contiguous
// ones, and an output is computed aside and copied back by `finish`.
class Aligned {
 public:
  // `tensors[0]` is the output; `aside` computes it aside in any case.
  Aligned(const std::vector<const Tensor*>& tensors, bool aside) : out_(tensors[0]) {
    const Tensor& first = *tensors[0];
    numel = first.numel();
    const bool contiguous = first.is_contiguous();
    bool shared = contiguous || (is_dense(first) && !aside);
    for (size_t i = 1; shared && i < tensors.size(); ++i) {
      shared = contiguous ? tensors[i]->is_contiguous() : equal(tensors[i]->strides(), first.strides());
    }
    computed_aside_ = aside || !(shared || contiguous);
    pointers.reserve(tensors.size());
    if (computed_aside_) {
      copies_.push_back(torch::stable::new_empty(first, first.sizes()));
      pointers.push_back(copies_.back().mutable_data_ptr());
    } else {
      pointers.push_back(first.mutable_data_ptr());
    }
    for (size_t i = 1; i < tensors.size(); ++i) {
      if (shared || tensors[i]->is_contiguous()) {
        pointers.push_back(const_cast<void*>(tensors[i]->const_data_ptr()));
      } else {
        copies_.push_back(torch::stable::contiguous(*tensors[i]));
        pointers.push_back(copies_.back().mutable_data_ptr());
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
