// Glue of the spectral family for the CUDA key. Schemas: pfl_ext/ops/spectral.py.
#include "cuda/kernels/spectral.cuh"

#include <tuple>

#include <torch/csrc/stable/library.h>

#include "cuda/stream.h"
#include "glue/spectral.h"

namespace pfl::cuda {
namespace {

using glue::Tensor;

template <typename F>
void visit(DType dtype, F f) {
  if (dtype == DType::kFloat64) {
    f(TypeTag<double>{});
  } else {
    f(TypeTag<float>{});
  }
}

void check_launch(const char* op, const glue::HalfSpectra& given, const Tensor& spectrum) {
  // Both parts of a bin are one access. Memory of torch's own is aligned; another library's need not be.
  if (reinterpret_cast<uintptr_t>(spectrum.const_data_ptr()) % (2 * item_size(given.dtype)) != 0) {
    glue::fail(op, ": the half spectrum does not begin at a multiple of its element's size in memory; clone it");
  }
  if (given.rows * spectral_chunks(given.range.half()) > kMaxGrid) {
    glue::fail(op, ": ", given.rows, " rows of ", given.range.half(), " bins are more than one launch takes");
  }
}

Tensor new_workspace(const Tensor& spectrum, const glue::HalfSpectra& given) {
  return torch::stable::new_empty(spectrum, {spectral_workspace(given.range, given.rows)}, glue::ScalarType::Double);
}

std::tuple<Tensor, Tensor> spectral_teacher(const Tensor& spectrum, int64_t length, int64_t count) {
  const char* op = "pfl_ext::spectral_teacher";
  const auto given = glue::HalfSpectra::of(op, spectrum, length, count);
  check_launch(op, given, spectrum);
  const CurrentStream stream(spectrum);
  Tensor log_q = torch::stable::new_empty(spectrum, {given.rows, given.range.bins()}, glue::real_type(given.dtype));
  Tensor total = torch::stable::new_empty(spectrum, {given.rows}, glue::ScalarType::Double);
  Tensor workspace = new_workspace(spectrum, given);
  SpectralArguments args = {};
  args.range = given.range;
  args.rows = given.rows;
  args.spectrum = const_cast<void*>(spectrum.const_data_ptr());
  args.log_q = log_q.mutable_data_ptr();
  args.total = static_cast<double*>(total.mutable_data_ptr());
  visit(given.dtype, [&](auto tag) {
    launch_teacher<typename decltype(tag)::type>(args, static_cast<double*>(workspace.mutable_data_ptr()),
                                                 stream.launcher());
  });
  return {log_q, total};
}

Tensor half_spectrum_divergence_(const Tensor& spectrum, const Tensor& log_q, const Tensor& total, int64_t length,
                                 int64_t count, int64_t form, bool need_grad) {
  const char* op = "pfl_ext::half_spectrum_divergence_";
  const glue::DivergenceProblem given(op, glue::HalfSpectra::of(op, spectrum, length, count), spectrum, log_q, total,
                                      form);
  check_launch(op, given, spectrum);
  const CurrentStream stream(spectrum);
  Tensor loss = torch::stable::new_empty(spectrum, {given.rows}, glue::real_type(given.dtype));
  Tensor workspace = new_workspace(spectrum, given);
  SpectralArguments args = {};
  args.range = given.range;
  args.rows = given.rows;
  args.teacher_stride = given.teachers == 1 ? 0 : given.range.bins();
  args.spectrum = spectrum.mutable_data_ptr();
  args.log_q = const_cast<void*>(log_q.const_data_ptr());
  args.total = static_cast<double*>(const_cast<void*>(total.const_data_ptr()));
  args.loss = loss.mutable_data_ptr();
  args.form = static_cast<int32_t>(given.form);
  visit(given.dtype, [&](auto tag) {
    launch_divergence<typename decltype(tag)::type>(args, static_cast<double*>(workspace.mutable_data_ptr()), need_grad,
                                                    stream.launcher());
  });
  return loss;
}

}  // namespace
}  // namespace pfl::cuda

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CUDA, m) {
  m.impl("spectral_teacher", TORCH_BOX(&pfl::cuda::spectral_teacher));
  m.impl("half_spectrum_divergence_", TORCH_BOX(&pfl::cuda::half_spectrum_divergence_));
}
