// Glue of the proximal family for the CPU key. Schemas: pfl_ext/ops/proximal.py.
#include "cpu/kernels/proximal.h"

#include <torch/csrc/stable/library.h>

#include "cpu/pieces.h"
#include "glue/proximal.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

void step(const glue::ProximalProblem& problem) {
  const ProximalKernels& kernels = proximal();
  const glue::MatchedLists& lists = *problem.lists;
  for_each_piece(lists.run_plan(kPieceElements), /*backwards=*/false, [&](int64_t, const Piece& piece) {
    const int64_t t = lists.run_tensors[piece.tensor];
    kernels.step(lists.dtypes[t], problem.how, piece.offset, piece.length, problem.grad(t), problem.anchor(t),
                 problem.weight(t), problem.buffer(t));
  });
  lists.finish();
}

void proximal_sgd_step_(const TensorList& params, const TensorList& buffers, const TensorList& grads,
                        const TensorList& anchors, double lr, double lam, double momentum, double dampening,
                        double weight_decay, bool nesterov, bool maximize, bool first) {
  const ProximalStep how =
      glue::proximal_step_of(lr, lam, momentum, dampening, weight_decay, nesterov, maximize, first);
  step({"pfl_ext::proximal_sgd_step_", params, buffers, grads, anchors, how, /*on_cpu=*/true});
}

// The same with all arguments in one tensor: the dispatcher takes 0.3 us for a list and 0.15 us for a number, together
// as long as a step of LeNet. Words: the mark of tickets, the prepared lists in the order of the schema (0: none), the
// numbers as the bits of doubles, the flags.
void proximal_sgd_step_again_(const Tensor& call) {
  const char* op = "pfl_ext::proximal_sgd_step_again_";
  constexpr int64_t kWords = 13;
  if (!glue::Tickets::instance().is_ticket(call, kWords)) {
    glue::fail(op, ": the call is ", glue::describe(call), "; pfl_ext.ops makes these");
  }
  const int64_t* words = glue::Tickets::words_of(call);
  const auto number = [&](int i) { return bit_copy<double>(words[i]); };
  const ProximalStep how = glue::proximal_step_of(number(5), number(6), number(7), number(8), number(9), words[10] != 0,
                                                  words[11] != 0, words[12] != 0);
  step({op, {op, words[1]}, {op, words[2]}, {op, words[3]}, {op, words[4]}, how, /*on_cpu=*/true});
}

Tensor squared_distance(const TensorList& a, const TensorList& b) {
  const glue::MatchedLists lists = glue::distance_lists("pfl_ext::squared_distance", a, b, /*on_cpu=*/true);
  const ProximalKernels& kernels = proximal();
  const BundlePlan plan = plan_bundles(lists.sizes, kPieceElements);
  std::vector<double> sums(plan.pieces.size());
  for_each_piece(plan, /*backwards=*/false, [&](int64_t i, const Piece& piece) {
    const int64_t t = piece.tensor;
    sums[i] = kernels.distance(lists.dtypes[t], piece.offset, piece.length, lists.pointer(0, t), lists.pointer(1, t));
  });
  double total = 0.0;
  for (double sum : sums) total += sum;
  const glue::ScalarType type = glue::sum_type(lists.dtypes);
  Tensor result = torch::stable::new_empty(a[0], {}, type);
  if (type == glue::ScalarType::Double) {
    *static_cast<double*>(result.mutable_data_ptr()) = total;
  } else {
    *static_cast<float*>(result.mutable_data_ptr()) = static_cast<float>(total);
  }
  return result;
}

TensorList squared_distance_backward(const Tensor& grad, const TensorList& a, const TensorList& b, bool for_a,
                                     bool for_b) {
  const char* op = "pfl_ext::squared_distance_backward";
  const glue::DistanceGradient problem(op, a, b, for_a, for_b, /*on_cpu=*/true);
  if (!grad.is_cpu() || grad.numel() != 1 || grad.scalar_type() != glue::sum_type(problem.lists.dtypes)) {
    glue::fail(op, ": the gradient is ", glue::describe(grad), "; one number of the distance's type is expected");
  }
  const double upstream = grad.scalar_type() == glue::ScalarType::Double
                              ? *static_cast<const double*>(grad.const_data_ptr())
                              : *static_cast<const float*>(grad.const_data_ptr());
  const ProximalKernels& kernels = proximal();
  for_each_piece(
      plan_bundles(problem.lists.sizes, kPieceElements), /*backwards=*/false, [&](int64_t, const Piece& piece) {
        const int64_t t = piece.tensor;
        kernels.gradient(problem.lists.dtypes[t], piece.offset, piece.length, 2.0 * upstream,
                         problem.lists.pointer(0, t), problem.lists.pointer(1, t), problem.to(0, t), problem.to(1, t));
      });
  return problem.out;
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("proximal_sgd_step_", TORCH_BOX(&pfl::cpu::proximal_sgd_step_));
  m.impl("proximal_sgd_step_again_", TORCH_BOX(&pfl::cpu::proximal_sgd_step_again_));
  m.impl("squared_distance", TORCH_BOX(&pfl::cpu::squared_distance));
  m.impl("squared_distance_backward", TORCH_BOX(&pfl::cpu::squared_distance_backward));
}
