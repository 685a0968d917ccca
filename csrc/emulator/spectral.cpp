// The spectral kernels on numpy arrays.
#include "cuda/kernels/spectral.cuh"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>

namespace py = pybind11;

namespace {

const auto emulate = [](auto kernel, int64_t grid, const pfl::cuda::SpectralArguments& args) {
  pfl::emulator::launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(pfl::cuda::kThreads), 0, args);
};

template <typename F>
void visit(const py::array& spectrum, F f) {
  if (spectrum.itemsize() == 16) {
    f(pfl::TypeTag<double>{});
  } else if (spectrum.itemsize() == 8) {
    f(pfl::TypeTag<float>{});
  } else {
    throw std::invalid_argument("complex64 and complex128 are accepted");
  }
}

pfl::cuda::SpectralArguments arguments(const py::array& spectrum, int64_t length, int64_t count) {
  pfl::cuda::SpectralArguments args = {};
  args.range = {length, count};
  args.rows = spectrum.shape(0);
  args.spectrum = const_cast<void*>(spectrum.data());
  return args;
}

// Writes into log_q [rows, bins] and total [rows].
void spectral_teacher(const py::array& spectrum, int64_t length, int64_t count, py::array log_q, py::array total) {
  pfl::cuda::SpectralArguments args = arguments(spectrum, length, count);
  args.log_q = log_q.mutable_data();
  args.total = static_cast<double*>(total.mutable_data());
  std::vector<double> workspace(pfl::cuda::spectral_workspace(args.range, args.rows));
  visit(spectrum,
        [&](auto tag) { pfl::cuda::launch_teacher<typename decltype(tag)::type>(args, workspace.data(), emulate); });
}

// Writes into loss [rows] and, with need_grad, into the spectrum.
void half_spectrum_divergence(py::array spectrum, const py::array& log_q, const py::array& total, int64_t length,
                              int64_t count, int form, bool need_grad, py::array loss) {
  pfl::cuda::SpectralArguments args = arguments(spectrum, length, count);
  args.spectrum = spectrum.mutable_data();
  args.teacher_stride = log_q.shape(0) == 1 ? 0 : args.range.bins();
  args.log_q = const_cast<void*>(log_q.data());
  args.total = static_cast<double*>(const_cast<void*>(total.data()));
  args.loss = loss.mutable_data();
  args.form = form;
  std::vector<double> workspace(pfl::cuda::spectral_workspace(args.range, args.rows));
  visit(spectrum, [&](auto tag) {
    pfl::cuda::launch_divergence<typename decltype(tag)::type>(args, workspace.data(), need_grad, emulate);
  });
}

}  // namespace

void bind_spectral(py::module_& m) {
  m.attr("SPECTRAL_CHUNK") = pfl::cuda::kSpectralChunk;
  m.def("spectral_teacher", &spectral_teacher);
  m.def("half_spectrum_divergence", &half_spectrum_divergence);
}
