// Glue of the averaging family for the CUDA key. Schemas: pfl_ext/ops/averaging.py.
#include "cuda/kernels/averaging.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/dtype_groups.h"
#include "cuda/stream.h"
#include "glue/averaging.h"

namespace pfl::cuda {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

void average(const char* op, const TensorList& out, const TensorList& server, const TensorList& clients,
             const Tensor& weights, double lr) {
  glue::AverageProblem problem(op, out, server, clients, weights, /*on_cpu=*/false);
  if (out.empty()) return;
  const CurrentStream stream(out[0]);
  TensorList carries;
  visit_groups(problem.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    using T = typename decltype(tag)::type;
    AverageRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(problem.sizes[t]);
      rows.out.push_back(problem.out(t));
      if (problem.has_server) rows.server.push_back(problem.server(t));
      rows.clients.push_back(problem.x(t));
      if (carry_needed(problem.clients)) {
        const auto type = sizeof(accumulate_t<T>) == 8 ? glue::ScalarType::Double : glue::ScalarType::Float;
        carries.push_back(torch::stable::new_empty(out[t], {problem.sizes[t]}, type));
        rows.carry.push_back(carries.back().mutable_data_ptr());
      }
    }
    if (problem.has_server) {
      launch_average<T, true>(rows, problem.clients, problem.weights, lr, stream.launcher());
    } else {
      launch_average<T, false>(rows, problem.clients, problem.weights, lr, stream.launcher());
    }
  });
  problem.finish();
}

void weighted_average_(const TensorList& out, const TensorList& clients, const Tensor& weights) {
  average("pfl_ext::weighted_average_", out, {}, clients, weights, 1.0);
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

void accumulate_(const TensorList& sum, const TensorList& client, double weight, int64_t type) {
  const glue::AccumulateProblem problem("pfl_ext::accumulate_", sum, client, type, /*on_cpu=*/false);
  if (sum.empty()) return;
  const CurrentStream stream(sum[0]);
  visit_groups(problem.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    std::vector<int64_t> sizes;
    std::vector<void*> sums;
    std::vector<const void*> x;
    for (int64_t t : indices) {
      sizes.push_back(problem.sizes[t]);
      sums.push_back(problem.sum(t));
      x.push_back(problem.values[t]);
    }
    launch_accumulate<typename decltype(tag)::type>(sizes, sums, x, weight, stream.launcher());
  });
}

Tensor nonfinite(const TensorList& tensors) {
  const glue::NonfiniteProblem problem(tensors, /*on_cpu=*/false);
  const CurrentStream stream(tensors[0]);
  bool* found = static_cast<bool*>(problem.found.mutable_data_ptr());
  visit_groups(problem.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    std::vector<int64_t> sizes;
    std::vector<const void*> x;
    std::vector<bool*> flags;
    for (int64_t t : indices) {
      sizes.push_back(problem.sizes[t]);
      x.push_back(problem.dense[t].const_data_ptr());
      flags.push_back(found + t);
    }
    launch_nonfinite<typename decltype(tag)::type>(sizes, x, flags, stream.launcher());
  });
  return problem.found;
}

}  // namespace
}  // namespace pfl::cuda

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CUDA, m) {
  m.impl("weighted_average", TORCH_BOX(&pfl::cuda::weighted_average));
  m.impl("weighted_average_", TORCH_BOX(&pfl::cuda::weighted_average_));
  m.impl("server_update_", TORCH_BOX(&pfl::cuda::server_update_));
  m.impl("accumulate_", TORCH_BOX(&pfl::cuda::accumulate_));
  m.impl("nonfinite", TORCH_BOX(&pfl::cuda::nonfinite));
}
