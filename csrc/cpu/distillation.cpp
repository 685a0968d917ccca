// Glue of the distillation family for the CPU key. Schemas: pfl_ext/ops/distillation.py.
#include "cpu/kernels/distillation.h"

#include <torch/csrc/stable/library.h>

#include <memory>
#include <new>
#include <tuple>

#include "glue/distillation.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;

// Logits a thread takes at once, the teachers' counted: large enough that starting a piece does not show.
constexpr int64_t kPieceElements = 32768;
// Fewer than this stay on the calling thread. 2640 samples of 10 classes from 8 teachers took 97 us on one thread and
// 61 on two; below half of that, waking the second one takes what it saves.
constexpr int64_t kFewestParallelElements = 131072;
constexpr std::align_val_t kAlignment{64};

struct Release {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};

// In an order of its own that no vector width changes, and in double: a batch has thousands of rows.
template <typename A>
double sum_of(const A* x, int64_t n) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  for (int64_t i = 0; i < n; ++i) sums[i % kSums] += static_cast<double>(x[i]);
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

template <typename A>
void reduce(const void* losses, int64_t rows, double divisor, void* loss, void* normalizer) {
  *static_cast<A*>(loss) = static_cast<A>(sum_of(static_cast<const A*>(losses), rows) / divisor);
  *static_cast<A*>(normalizer) = static_cast<A>(divisor);
}

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
  glue::DistillationProblem problem(student, teachers, weights, target, sample_weights, options, reduction,
                                    /*on_cpu=*/true);
  const DistillationKernels& kernels = distillation();
  DistillationRows rows;
  rows.dtype = problem.dtype;
  rows.options = options;
  rows.rows = problem.rows;
  rows.classes = problem.classes;
  rows.teachers = static_cast<int64_t>(problem.teachers.size());
  rows.student = problem.student;
  rows.teacher = problem.teachers.data();
  rows.teacher_weights = problem.teacher_weights.data();
  rows.target = problem.target;
  rows.row_weights = problem.row_weights;

  double divisor = problem.divisor();
  if (problem.target != nullptr || problem.must_count()) {
    double counted = 0;
    const int64_t wrong = kernels.count(rows, &counted);
    if (wrong >= 0) {
      glue::fail(problem.kOp, ": the target of row ", wrong, " is out of range; ",
                 multilabel ? "0 to 1" : "a class from 0 to ", multilabel ? "" : std::to_string(problem.classes - 1),
                 " or ignore_index ", ignore_index, " is accepted");
    }
    if (problem.must_count()) divisor = counted;
  }
  rows.gradient_scale = problem.divides_gradient() ? 1.0 / divisor : 1.0;

  const bool per_row = problem.reduction == Reduction::kNone;
  Tensor losses = problem.new_like(student, {problem.rows});
  Tensor loss = per_row ? losses : problem.new_like(student, {});
  Tensor normalizer = problem.new_like(student, {});
  Tensor gradient = torch::stable::new_empty(
      student, need_grad ? std::vector<int64_t>{problem.rows, problem.classes} : std::vector<int64_t>{0});
  rows.losses = losses.mutable_data_ptr();
  rows.gradient = need_grad ? gradient.mutable_data_ptr() : nullptr;

  const int64_t step = kernels.rows_at_once(problem.classes);
  const int64_t steps = (problem.rows + step - 1) / step;
  const int64_t step_elements = step * problem.classes * (rows.teachers + 2);
  const bool few = steps * step_elements < kFewestParallelElements;
  const int64_t grain = few ? steps : std::max<int64_t>(1, kPieceElements / step_elements);
  const int64_t bytes = kernels.workspace(problem.dtype, problem.classes);
  torch::stable::parallel_for(0, steps, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<void, Release> workspace(::operator new(bytes, kAlignment));
    kernels.run(rows, begin * step, std::min(end * step, problem.rows), workspace.get());
  });

  if (problem.dtype == DType::kFloat64) {
    double unused = 0;
    reduce<double>(rows.losses, problem.rows, divisor, per_row ? &unused : loss.mutable_data_ptr(),
                   normalizer.mutable_data_ptr());
  } else {
    float unused = 0;
    reduce<float>(rows.losses, problem.rows, divisor, per_row ? &unused : loss.mutable_data_ptr(),
                  normalizer.mutable_data_ptr());
  }
  return {loss, gradient, normalizer};
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) { m.impl("distillation_loss", TORCH_BOX(&pfl::cpu::distillation_loss)); }
