// The arguments of the distillation op, checked in full before anything is written. Shared by the CPU and CUDA glue.
#pragma once

#include <cmath>
#include <optional>

#include "common/distillation.h"
#include "glue/tensor_list.h"

namespace pfl::glue {

// Rows of logits. Teachers are tensors [B, C], or one [M, B, C].
struct DistillationProblem {
  DistillationProblem(const Tensor& student_tensor, const std::vector<Tensor>& teacher_tensors,
                      const std::optional<Tensor>& weight_tensor, const std::optional<Tensor>& target_tensor,
                      const std::optional<Tensor>& row_weight_tensor, const DistillationOptions& given,
                      int64_t reduction_number, bool on_cpu)
      : options(given), reduction(static_cast<Reduction>(reduction_number)) {
    if (student_tensor.dim() != 2) {
      fail(kOp, ": student is ", describe(student_tensor), "; logits [batch, classes] are accepted");
    }
    dtype = dtype_of(student_tensor, kOp, "student", 0);
    if (student_tensor.is_cpu() != on_cpu) fail(kOp, ": student is ", describe(student_tensor));
    rows = student_tensor.size(0);
    classes = student_tensor.size(1);
    if (classes == 0) fail(kOp, ": student is ", describe(student_tensor), "; at least one class is needed");
    check_options(reduction_number);

    if (teacher_tensors.empty()) fail(kOp, ": no teachers given; at least one is needed");
    const bool stacked = teacher_tensors.size() == 1 && teacher_tensors[0].dim() == 3;
    for (size_t m = 0; m < teacher_tensors.size(); ++m) {
      const Tensor& t = teacher_tensors[m];
      const bool fits = stacked ? t.size(0) > 0 && t.size(1) == rows && t.size(2) == classes
                                : t.dim() == 2 && t.size(0) == rows && t.size(1) == classes;
      if (!fits || t.scalar_type() != student_tensor.scalar_type() || !same_device(t, student_tensor)) {
        fail(kOp, ": teacher ", m, " is ", describe(t), ", the student is ", describe(student_tensor),
             "; the same shape (or one stacked tensor [teachers, batch, classes]), type and device are accepted");
      }
    }
    const int64_t count = stacked ? teacher_tensors[0].size(0) : static_cast<int64_t>(teacher_tensors.size());
    if (weight_tensor.has_value()) {
      const Tensor& w = *weight_tensor;
      if (!w.is_cpu() || w.scalar_type() != ScalarType::Double || w.dim() != 1 || w.numel() != count ||
          !w.is_contiguous()) {
        fail(kOp, ": weights are ", describe(w), " for ", count,
             " teachers; a contiguous float64 vector on the CPU with one weight a teacher is accepted");
      }
      const double* values = static_cast<const double*>(w.const_data_ptr());
      teacher_weights.assign(values, values + count);
    } else {
      teacher_weights.assign(count, 1.0 / static_cast<double>(count));
    }
    const ScalarType accumulate = dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
    if (target_tensor.has_value()) {
      const Tensor& t = *target_tensor;
      const bool fits = options.multilabel
                            ? t.dim() == 2 && t.size(0) == rows && t.size(1) == classes && t.scalar_type() == accumulate
                            : t.dim() == 1 && t.size(0) == rows && t.scalar_type() == ScalarType::Long;
      if (!fits || !same_device(t, student_tensor)) {
        fail(kOp, ": target is ", describe(t), ", the student is ", describe(student_tensor), "; ",
             options.multilabel ? "the same shape in the accumulate type" : "int64 [batch]",
             " on the same device is accepted");
      }
    } else if (options.hard_scale != 0) {
      fail(kOp, ": the hard term has the scale ", options.hard_scale, " and no target");
    }
    if (row_weight_tensor.has_value()) {
      const Tensor& w = *row_weight_tensor;
      if (w.dim() != 1 || w.size(0) != rows || w.scalar_type() != accumulate || !same_device(w, student_tensor)) {
        fail(kOp, ": sample_weights are ", describe(w), "; ", name_of(accumulate), " [", rows,
             "] on the student's device is accepted");
      }
    }

    // Only now: the copies made for odd layouts must not happen for a call that is refused.
    student = keep(student_tensor);
    for (const Tensor& t : teacher_tensors) {
      const char* first = static_cast<const char*>(keep(t));
      for (int64_t m = 0; m < (stacked ? count : 1); ++m) {
        teachers.push_back(first + m * rows * classes * item_size(dtype));
      }
    }
    target = target_tensor.has_value() ? keep(*target_tensor) : nullptr;
    row_weights = row_weight_tensor.has_value() ? keep(*row_weight_tensor) : nullptr;
  }

  // Whether the mean divides by what only the targets and weights tell.
  bool must_count() const { return reduction == Reduction::kMean && (target != nullptr || row_weights != nullptr); }

  // What the sum is divided by, where that is known without counting.
  double divisor() const {
    const double batch = static_cast<double>(rows);
    if (reduction == Reduction::kBatchMean) return batch;
    if (reduction == Reduction::kMean) return options.multilabel ? batch * static_cast<double>(classes) : batch;
    return 1.0;
  }

  // Half types keep the gradient undivided: by 2048 rows, it would sink into their subnormal numbers before a loss
  // scale could lift it.
  bool divides_gradient() const { return item_size(dtype) >= 4; }

  Tensor new_like(const Tensor& tensor, std::vector<int64_t> sizes) const {
    return torch::stable::new_empty(tensor, sizes, dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float);
  }

  static constexpr const char* kOp = "pfl_ext::distillation_loss";

  DistillationOptions options;
  Reduction reduction;
  DType dtype;
  int64_t rows;
  int64_t classes;
  std::vector<double> teacher_weights;
  const void* student;
  std::vector<const void*> teachers;
  const void* target;
  const void* row_weights;

 private:
  static bool same_device(const Tensor& a, const Tensor& b) {
    return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
  }

  void check_options(int64_t reduction_number) const {
    const auto average = static_cast<int64_t>(options.average);
    if (average < 0 || average > 2 || reduction_number < 0 || reduction_number > 3) {
      fail(kOp, ": average is ", average, " and reduction ", reduction_number, "; 0 to 2 and 0 to 3 are accepted");
    }
    // Logits are divided by it and losses multiplied by its square, in the accumulate type.
    const double largest = std::ldexp(1.0, dtype == DType::kFloat64 ? 511 : 63);
    if (!(options.temperature >= 1 / largest && options.temperature <= largest)) {
      fail(kOp, ": temperature is ", options.temperature, "; a positive number from ", 1 / largest, " to ", largest,
           " is accepted");
    }
    if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
      fail(kOp, ": label_smoothing is ", options.label_smoothing, "; 0 to 1 is accepted");
    }
    if (!std::isfinite(options.soft_scale) || !std::isfinite(options.hard_scale)) {
      fail(kOp, ": the scales of the terms are ", options.soft_scale, " and ", options.hard_scale);
    }
  }

  const void* keep(const Tensor& t) {
    if (t.is_contiguous()) return t.const_data_ptr();
    copies_.push_back(torch::stable::contiguous(t));
    return copies_.back().const_data_ptr();
  }

  std::vector<Tensor> copies_;
};

// Checks what is given to scale a gradient on a GPU; the gradient's type.
inline DType checked_scale(const Tensor& gradient, const Tensor& incoming, const Tensor& normalizer) {
  const char* op = "pfl_ext::distillation_scale_";
  const DType dtype = dtype_of(gradient, op, "gradient", 0);
  if (!gradient.is_cuda() || !gradient.is_contiguous()) {
    fail(op, ": gradient is ", describe(gradient), "; a contiguous tensor on a GPU is accepted");
  }
  const ScalarType accumulate = dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  for (const Tensor* x : {&incoming, &normalizer}) {
    if (x->dim() != 0 || x->scalar_type() != accumulate || !x->is_cuda() ||
        x->get_device_index() != gradient.get_device_index()) {
      fail(op, ": ", x == &incoming ? "incoming" : "normalizer", " is ", describe(*x), ", the gradient is ",
           describe(gradient), "; one ", name_of(accumulate), " on the same device is accepted");
    }
    if (Span(gradient).overlaps(Span(*x))) fail(op, ": the gradient and a number that scales it overlap in memory");
  }
  return dtype;
}

}  // namespace pfl::glue
