// Glue of the distillation family for the CUDA key. Schemas: pfl_ext/ops/distillation.py.
#include "cuda/kernels/distillation.cuh"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cuda/stream.h"
#include "glue/distillation.h"

namespace pfl::cuda {
namespace {

using glue::Tensor;

std::tuple<Tensor, Tensor, Tensor> distillation_loss(const Tensor& student, const std::vector<Tensor>& teachers,
                                                     const std::optional<Tensor>& weights,
                                                     const std::optional<Tensor>& target,
                                                     const std::optional<Tensor>& sample_weights, double temperature,
                                                     double soft_scale, double hard_scale, double label_smoothing,
                                                     int64_t ignore_index, int64_t average, bool cross_entropy,
                                                     bool multilabel, int64_t reduction, bool need_grad) {
  const DistillationOptions options{static_cast<Average>(average),
                                    cross_entropy,
                                    multilabel,
                                    temperature,
                                    soft_scale,
                                    hard_scale,
                                    label_smoothing,
                                    ignore_index};
  const CurrentStream stream(student);  // first: copies of odd layouts are launched on its device too
  glue::DistillationProblem problem(student, teachers, weights, target, sample_weights, options, reduction,
                                    /*on_cpu=*/false);
  const int64_t count = static_cast<int64_t>(problem.teachers.size());
  if (count > kMaxTeachers) {
    glue::fail(problem.kOp, ": ", count, " teachers; at most ", kMaxTeachers,
               " are accepted at once on a GPU. Average them with ensemble_logits first");
  }
  const bool per_row = problem.reduction == Reduction::kNone;
  Tensor loss = problem.new_like(student, per_row ? std::vector<int64_t>{problem.rows} : std::vector<int64_t>{});
  Tensor normalizer = problem.new_like(student, {});
  Tensor gradient = torch::stable::new_empty(
      student, need_grad ? std::vector<int64_t>{problem.rows, problem.classes} : std::vector<int64_t>{0});
  Tensor pieces = torch::stable::new_empty(
      student, {workspace_doubles(problem.dtype, problem.rows, problem.classes, multilabel)}, glue::ScalarType::Double);

  DistillationArguments args;
  args.options = options;
  args.rows = problem.rows;
  args.classes = problem.classes;
  args.teachers = count;
  args.count_divisor = problem.must_count();
  args.divisor = problem.divisor();
  args.student = problem.student;
  args.target = problem.target;
  args.row_weights = problem.row_weights;
  args.losses = per_row ? loss.mutable_data_ptr() : nullptr;
  args.gradient = need_grad ? gradient.mutable_data_ptr() : nullptr;
  args.normalizer = normalizer.mutable_data_ptr();
  args.loss = per_row ? nullptr : loss.mutable_data_ptr();
  args.pieces = static_cast<double*>(pieces.mutable_data_ptr());
  for (int64_t m = 0; m < count; ++m) args.teacher[m] = {problem.teachers[m], problem.teacher_weights[m]};

  visit_dtype(problem.dtype, [&](auto tag) {
    launch_distillation<typename decltype(tag)::type>(
        problem.dtype, args, [&](auto kernel, int64_t grid, int block, int64_t shared, const auto&... arguments) {
          kernel<<<static_cast<unsigned>(grid), block, shared, stream.get()>>>(arguments...);
          STD_CUDA_KERNEL_LAUNCH_CHECK();
        });
  });
  return {loss, gradient, normalizer};
}

void distillation_scale_(const Tensor& gradient, const Tensor& incoming, const Tensor& normalizer) {
  const DType dtype = glue::checked_scale(gradient, incoming, normalizer);
  const CurrentStream stream(gradient);
  const ScaleArguments args{gradient.mutable_data_ptr(), gradient.numel(), incoming.const_data_ptr(),
                            normalizer.const_data_ptr()};
  visit_dtype(dtype, [&](auto tag) { launch_scale<typename decltype(tag)::type>(args, stream.launcher()); });
}

}  // namespace
}  // namespace pfl::cuda

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CUDA, m) {
  m.impl("distillation_loss", TORCH_BOX(&pfl::cuda::distillation_loss));
  m.impl("distillation_scale_", TORCH_BOX(&pfl::cuda::distillation_scale_));
}
