// The sharpness kernels on numpy arrays.
#include "cuda/kernels/sharpness.cuh"

#include "emulator/numpy_lists.h"

namespace py = pybind11;

namespace {

using namespace pfl::emulator;

void perturb(const std::string& dtype, Arrays params, const Arrays& grads, Arrays backups, std::vector<double> scores,
             const std::vector<int64_t>& groups, double rho, double p, bool literal, bool per_layer) {
  const pfl::Perturbation how = pfl::make_perturbation(p, literal);
  Records records(sizes_of(params));
  int64_t layers = 0;
  for (int64_t group : groups) layers = group >= layers ? group + 1 : layers;
  std::vector<pfl::cuda::NormResult> norms(per_layer ? layers : 1);
  pfl::cuda::PerturbRows rows{sizes_of(params), outputs(params), inputs(grads), outputs(backups),
                              groups,           groups,          records.first};
  if (!per_layer) rows.norm.assign(groups.size(), 0);
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (how.form != pfl::PerturbForm::kSign) {
      pfl::cuda::launch_gradient_sums<T>(rows, how, records.memory.data(), emulate);
      pfl::cuda::launch_group_sums(records.memory.data(), static_cast<int64_t>(records.memory.size()),
                                   pfl::cuda::Grouping(static_cast<int64_t>(norms.size()), groups), how.q,
                                   how.form == pfl::PerturbForm::kPower, pfl::cuda::FinishNorm{how, norms.data()},
                                   emulate);
    }
    pfl::cuda::launch_perturb<T>(rows, how, rho, norms.data(), scores.empty() ? nullptr : scores.data(), emulate);
  });
}

void restore(const std::string& dtype, Arrays params, const Arrays& backups) {
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    pfl::cuda::launch_restore<typename decltype(tag)::type>(sizes_of(params), outputs(params), inputs(backups),
                                                            emulate);
  });
}

std::vector<double> scores(const std::string& dtype, const Arrays& a, const Arrays& b,
                           const std::vector<int64_t>& groups, int64_t layers) {
  Records records(sizes_of(a));
  std::vector<double> result(layers);
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    pfl::cuda::launch_chunk_sums<typename decltype(tag)::type, pfl::cuda::ChunkSum::kSquaredDifferences>(
        {sizes_of(a), inputs(a), inputs(b), records.first, groups}, records.memory.data(), 2.0, emulate);
  });
  pfl::cuda::launch_scores(records.memory.data(), static_cast<int64_t>(records.memory.size()),
                           pfl::cuda::Grouping(layers, groups), result.data(), emulate);
  return result;
}

}  // namespace

void bind_sharpness(py::module_& m) {
  m.def("perturb", &perturb, py::arg("dtype"), py::arg("params"), py::arg("grads"), py::arg("backups"),
        py::arg("scores"), py::arg("groups"), py::arg("rho"), py::arg("p") = 2.0, py::arg("literal") = false,
        py::arg("per_layer") = false);
  m.def("restore", &restore, py::arg("dtype"), py::arg("params"), py::arg("backups"));
  m.def("scores", &scores, py::arg("dtype"), py::arg("a"), py::arg("b"), py::arg("groups"), py::arg("layers"));
}
