// Glue of the proximal family for the CUDA key. Schemas: pfl_ext/ops/proximal.py.
#include "cuda/kernels/proximal.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/dtype_groups.h"
#include "cuda/record_buffer.h"
#include "cuda/stream.h"
#include "glue/proximal.h"

namespace pfl::cuda {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

void proximal_sgd_step_(const TensorList& params, const TensorList& buffers, const TensorList& grads,
                        const TensorList& anchors, double lr, double lam, double momentum, double dampening,
                        double weight_decay, bool nesterov, bool maximize, bool first) {
  const ProximalStep step =
      glue::proximal_step_of(lr, lam, momentum, dampening, weight_decay, nesterov, maximize, first);
  glue::ProximalProblem problem("pfl_ext::proximal_sgd_step_", params, buffers, grads, anchors, step, /*on_cpu=*/false);
  if (params.empty()) return;
  const CurrentStream stream(params[0]);
  visit_groups(problem.lists->dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    StepRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(problem.lists->sizes[t]);
      rows.weight.push_back(problem.weight(t));
      rows.grad.push_back(problem.grad(t));
      rows.anchor.push_back(problem.anchor(t));
      rows.buffer.push_back(problem.buffer(t));
    }
    launch_proximal_step<typename decltype(tag)::type>(rows, step, stream.launcher());
  });
  problem.lists->finish();
}

Tensor squared_distance(const TensorList& a, const TensorList& b) {
  const glue::MatchedLists lists = glue::distance_lists("pfl_ext::squared_distance", a, b, /*on_cpu=*/false);
  const CurrentStream stream(a[0]);
  const RecordBuffer records(a[0], lists.sizes);
  visit_groups(lists.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    SumRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(lists.sizes[t]);
      rows.x.push_back(lists.pointer(0, t));
      rows.y.push_back(lists.pointer(1, t));
      rows.record.push_back(records.first[t]);
      rows.group.push_back(0);
    }
    launch_chunk_sums<typename decltype(tag)::type, ChunkSum::kSquaredDifferences>(rows, records.data(), 2.0,
                                                                                   stream.launcher());
  });
  const glue::ScalarType type = glue::sum_type(lists.dtypes);
  Tensor result = torch::stable::new_empty(a[0], {}, type);
  if (type == glue::ScalarType::Double) {
    launch_group_sums(records.data(), records.count, 1, 2.0, /*powers=*/false,
                      FinishDistance<double>{static_cast<double*>(result.mutable_data_ptr())}, stream.launcher());
  } else {
    launch_group_sums(records.data(), records.count, 1, 2.0, /*powers=*/false,
                      FinishDistance<float>{static_cast<float*>(result.mutable_data_ptr())}, stream.launcher());
  }
  return result;
}

TensorList squared_distance_backward(const Tensor& grad, const TensorList& a, const TensorList& b, bool for_a,
                                     bool for_b) {
  const char* op = "pfl_ext::squared_distance_backward";
  const glue::DistanceGradient problem(op, a, b, for_a, for_b, /*on_cpu=*/false);
  const glue::ScalarType type = glue::sum_type(problem.lists.dtypes);
  if (!grad.is_cuda() || grad.get_device_index() != a[0].get_device_index() || grad.numel() != 1 ||
      grad.scalar_type() != type) {
    glue::fail(op, ": the gradient is ", glue::describe(grad), "; one number of the distance's type is expected");
  }
  if (problem.out.empty()) return problem.out;
  const CurrentStream stream(a[0]);
  visit_groups(problem.lists.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    GradientRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(problem.lists.sizes[t]);
      rows.a.push_back(problem.lists.pointer(0, t));
      rows.b.push_back(problem.lists.pointer(1, t));
      rows.to_a.push_back(problem.to(0, t));
      rows.to_b.push_back(problem.to(1, t));
    }
    launch_distance_gradient<typename decltype(tag)::type>(rows, grad.const_data_ptr(),
                                                           type == glue::ScalarType::Double, stream.launcher());
  });
  return problem.out;
}

}  // namespace
}  // namespace pfl::cuda

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CUDA, m) {
  m.impl("proximal_sgd_step_", TORCH_BOX(&pfl::cuda::proximal_sgd_step_));
  m.impl("squared_distance", TORCH_BOX(&pfl::cuda::squared_distance));
  m.impl("squared_distance_backward", TORCH_BOX(&pfl::cuda::squared_distance_backward));
}
