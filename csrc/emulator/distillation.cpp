// The distillation kernels on numpy arrays, and the elementary functions, which have no other way into a test.
#include "cuda/kernels/distillation.cuh"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

pfl::DType dtype_named(const std::string& name) {
  if (name == "float32") return pfl::DType::kFloat32;
  if (name == "float64") return pfl::DType::kFloat64;
  if (name == "float16") return pfl::DType::kFloat16;
  if (name == "bfloat16") return pfl::DType::kBFloat16;
  throw std::invalid_argument("unknown dtype " + name);
}

using MaybeArray = std::optional<py::array>;

const void* data_of(const MaybeArray& array) { return array.has_value() ? array->data() : nullptr; }
void* mutable_data_of(MaybeArray& array) { return array.has_value() ? array->mutable_data() : nullptr; }

// bfloat16, which numpy has not, comes as uint16. A divisor of 0 is counted by the kernels.
void distillation(const std::string& dtype_name, const py::array& student, const std::vector<py::array>& teachers,
                  const std::vector<double>& weights, const MaybeArray& target, const MaybeArray& row_weights,
                  double temperature, double soft_scale, double hard_scale, double label_smoothing,
                  int64_t ignore_index, int64_t average, bool cross_entropy, bool multilabel, double divisor,
                  MaybeArray loss, py::array losses, MaybeArray gradient, py::array normalizer) {
  const pfl::DType dtype = dtype_named(dtype_name);
  pfl::cuda::DistillationArguments args;
  args.options = {static_cast<pfl::Average>(average),
                  cross_entropy,
                  multilabel,
                  temperature,
                  soft_scale,
                  hard_scale,
                  label_smoothing,
                  ignore_index};
  args.rows = student.shape(0);
  args.classes = student.shape(1);
  args.teachers = static_cast<int64_t>(teachers.size());
  args.count_divisor = divisor == 0;
  args.divisor = divisor;
  args.student = student.data();
  args.target = data_of(target);
  args.row_weights = data_of(row_weights);
  args.losses = loss.has_value() ? nullptr : losses.mutable_data();
  args.gradient = mutable_data_of(gradient);
  args.normalizer = normalizer.mutable_data();
  args.loss = mutable_data_of(loss);
  std::vector<double> pieces(pfl::cuda::workspace_doubles(dtype, args.rows, args.classes, multilabel));
  args.pieces = pieces.data();
  for (size_t m = 0; m < teachers.size(); ++m) args.teacher[m] = {teachers[m].data(), weights[m]};
  pfl::visit_dtype(dtype, [&](auto tag) {
    pfl::cuda::launch_distillation<typename decltype(tag)::type>(
        dtype, args, [](auto kernel, int64_t grid, int block, int64_t shared, const auto&... arguments) {
          pfl::emulator::launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(static_cast<unsigned>(block)),
                                static_cast<size_t>(shared), arguments...);
        });
  });
}

void scale_gradient(const std::string& dtype_name, py::array gradient, const py::array& incoming,
                    const py::array& normalizer) {
  const pfl::cuda::ScaleArguments args{gradient.mutable_data(), gradient.size(), incoming.data(), normalizer.data()};
  pfl::visit_dtype(dtype_named(dtype_name), [&](auto tag) {
    pfl::cuda::launch_scale<typename decltype(tag)::type>(args, [](auto kernel, int64_t grid, const auto& given) {
      pfl::emulator::launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(pfl::cuda::kThreads), 0, given);
    });
  });
}

template <typename A, typename F>
py::array_t<A> mapped(const py::array_t<A>& x, F f) {
  py::array_t<A> result(x.size());
  for (py::ssize_t i = 0; i < x.size(); ++i) result.mutable_data()[i] = f(x.data()[i]);
  return result;
}

template <typename A>
void bind_elementary(py::module_& m) {
  using Array = py::array_t<A>;
  m.def(
      "exp_nonpositive", [](const Array& x) { return mapped(x, [](A v) { return pfl::exp_nonpositive(v); }); },
      py::arg("x").noconvert());
  m.def(
      "log_positive", [](const Array& x) { return mapped(x, [](A v) { return pfl::log_positive(v); }); },
      py::arg("x").noconvert());
  m.def(
      "log_one_plus", [](const Array& x) { return mapped(x, [](A v) { return pfl::log_one_plus(v); }); },
      py::arg("x").noconvert());
}

}  // namespace

void bind_distillation(py::module_& m) {
  m.attr("MOST_WARP_CLASSES") = pfl::cuda::kMostWarpClasses;
  m.attr("MAX_SHARED_CACHE") = pfl::cuda::kMaxSharedCache;
  m.def("distillation", &distillation);
  m.def("scale_gradient", &scale_gradient);
  bind_elementary<float>(m);
  bind_elementary<double>(m);
}
