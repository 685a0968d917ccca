// The proximal kernels on numpy arrays.
#include "cuda/kernels/proximal.cuh"

#include "emulator/numpy_lists.h"

namespace py = pybind11;

namespace {

using namespace pfl::emulator;

void proximal_step(const std::string& dtype, Arrays params, const Arrays& grads, const Arrays& anchors, Arrays buffers,
                   double lr, double lam, double momentum, double dampening, double weight_decay, bool nesterov,
                   bool maximize, bool first) {
  const pfl::Momentum mode = momentum == 0 ? pfl::Momentum::kNone
                             : first       ? pfl::Momentum::kFirst
                                           : pfl::Momentum::kRunning;
  const pfl::ProximalStep step{lr, lam, momentum, dampening, weight_decay, nesterov, maximize, mode};
  pfl::cuda::StepRows rows{sizes_of(params), outputs(params), inputs(grads), inputs(anchors), outputs(buffers)};
  rows.anchor.resize(params.size(), nullptr);
  rows.buffer.resize(params.size(), nullptr);
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    pfl::cuda::launch_proximal_step<typename decltype(tag)::type>(rows, step, emulate);
  });
}

// As the op gives it: in double for double, otherwise in float.
double squared_distance(const std::string& dtype, const Arrays& a, const Arrays& b) {
  Records records(sizes_of(a));
  const int64_t count = static_cast<int64_t>(records.memory.size());
  const std::vector<int64_t> groups(a.size(), 0);
  double result = 0;
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    using T = typename decltype(tag)::type;
    pfl::accumulate_t<T> out;
    pfl::cuda::launch_chunk_sums<T, pfl::cuda::ChunkSum::kSquaredDifferences>(
        {sizes_of(a), inputs(a), inputs(b), records.first, groups}, records.memory.data(), 2.0, emulate);
    pfl::cuda::launch_group_sums(records.memory.data(), count, 1, 2.0, false,
                                 pfl::cuda::FinishDistance<pfl::accumulate_t<T>>{&out}, emulate);
    result = static_cast<double>(out);
  });
  return result;
}

// `to_a` or `to_b` may be empty: not wanted.
void distance_gradient(const std::string& dtype, double upstream, const Arrays& a, const Arrays& b, Arrays to_a,
                       Arrays to_b) {
  pfl::cuda::GradientRows rows{sizes_of(a), inputs(a), inputs(b), outputs(to_a), outputs(to_b)};
  rows.to_a.resize(a.size(), nullptr);
  rows.to_b.resize(a.size(), nullptr);
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto given = static_cast<pfl::accumulate_t<T>>(upstream);
    pfl::cuda::launch_distance_gradient<T>(rows, &given, sizeof(given) == 8, emulate);
  });
}

}  // namespace

void bind_proximal(py::module_& m) {
  m.def("proximal_step", &proximal_step, py::arg("dtype"), py::arg("params"), py::arg("grads"), py::arg("anchors"),
        py::arg("buffers"), py::arg("lr"), py::arg("lam"), py::arg("momentum") = 0.0, py::arg("dampening") = 0.0,
        py::arg("weight_decay") = 0.0, py::arg("nesterov") = false, py::arg("maximize") = false,
        py::arg("first") = false);
  m.def("squared_distance", &squared_distance, py::arg("dtype"), py::arg("a"), py::arg("b"));
  m.def("distance_gradient", &distance_gradient, py::arg("dtype"), py::arg("upstream"), py::arg("a"), py::arg("b"),
        py::arg("to_a"), py::arg("to_b"));
}
