// Glue of the averaging family for the CPU key. Schemas: pfl_ext/ops/averaging.py.
#include <torch/csrc/stable/library.h>

#include "cpu/kernels/averaging.h"
#include "cpu/pieces.h"
#include "glue/averaging.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

// An element costs as many reads as there are clients, so two bundles are worth two threads sooner.
int64_t fewest_parallel(int64_t clients) { return clients >= kFewestParallelBundles ? 2 : kFewestParallelBundles; }

void average(const char* op, const TensorList& out, const TensorList& server, const TensorList& clients,
             const Tensor& weights, double lr) {
  const glue::GivenLists given(clients);
  glue::AverageProblem problem(op, out, server, given.tensors(), weights, /*on_cpu=*/true);
  const AveragingKernels& kernels = averaging();
  const auto average_piece = [&](int64_t, const Piece& piece) {
    const int64_t t = piece.tensor;
    kernels.average(problem.dtypes[t], piece.offset, piece.length, problem.clients, problem.x(t), problem.weights,
                    problem.server(t), lr, problem.out(t));
  };
  for_each_piece(plan_bundles(problem.sizes, kPieceElements), /*backwards=*/false, average_piece,
                 fewest_parallel(problem.clients));
  problem.finish();
}

void weighted_average_(const TensorList& out, const TensorList& clients, const Tensor& weights) {
  average("pfl_ext::weighted_average_", out, {}, clients, weights, 1.0);
}

void average_rows_(const Tensor& out, const Tensor& matrix, const Tensor& weights) {
  const glue::RowsProblem problem("pfl_ext::average_rows_", out, matrix, weights, /*on_cpu=*/true);
  const AveragingKernels& kernels = averaging();
  const int64_t clients = static_cast<int64_t>(problem.rows.size());
  void* sums = out.mutable_data_ptr();
  const auto average_piece = [&](int64_t, const Piece& piece) {
    kernels.average(problem.dtype, piece.offset, piece.length, clients, problem.rows.data(), problem.weights,
                    /*server=*/nullptr, 1.0, sums);
  };
  for_each_piece(plan_bundles({problem.size}, kPieceElements), /*backwards=*/false, average_piece,
                 fewest_parallel(clients));
}

TensorList weighted_average(const TensorList& clients, const Tensor& weights) {
  TensorList out = glue::empty_outputs(clients, weights);
  average("pfl_ext::weighted_average", out, {}, clients, weights, 1.0);
  return out;
}

void server_update_(const TensorList& out, const TensorList& server, const TensorList& clients, const Tensor& weights,
                    double lr) {
  glue::check_server("pfl_ext::server_update_", out, server);
  average("pfl_ext::server_update_", out, server, clients, weights, lr);
}

void accumulate_(const TensorList& sums, const TensorList& client, double weight, int64_t type) {
  const glue::AccumulateProblem problem("pfl_ext::accumulate_", sums, client, type, /*on_cpu=*/true);
  const AveragingKernels& kernels = averaging();
  for_each_piece(plan_bundles(problem.sizes, kPieceElements), /*backwards=*/false, [&](int64_t, const Piece& piece) {
    const int64_t t = piece.tensor;
    kernels.accumulate(problem.dtypes[t], piece.offset, piece.length, problem.values[t], weight, problem.sum(t));
  });
}

Tensor nonfinite(const TensorList& tensors) {
  const glue::NonfiniteProblem problem(tensors, /*on_cpu=*/true);
  bool* flags = static_cast<bool*>(problem.found.mutable_data_ptr());
  const AveragingKernels& kernels = averaging();
  for_each_piece(plan_bundles(problem.sizes, kPieceElements), /*backwards=*/false, [&](int64_t, const Piece& piece) {
    const int64_t t = piece.tensor;
    if (kernels.any_nonfinite(problem.dtypes[t], piece.offset, piece.length, problem.dense[t].const_data_ptr())) {
      __atomic_store_n(&flags[t], true, __ATOMIC_RELAXED);  // other threads may say the same of the same tensor
    }
  });
  return problem.found;
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("weighted_average", TORCH_BOX(&pfl::cpu::weighted_average));
  m.impl("weighted_average_", TORCH_BOX(&pfl::cpu::weighted_average_));
  m.impl("average_rows_", TORCH_BOX(&pfl::cpu::average_rows_));
  m.impl("server_update_", TORCH_BOX(&pfl::cpu::server_update_));
  m.impl("accumulate_", TORCH_BOX(&pfl::cpu::accumulate_));
  m.impl("nonfinite", TORCH_BOX(&pfl::cpu::nonfinite));
}
