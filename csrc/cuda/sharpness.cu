// Glue of the sharpness family for the CUDA key. Schemas: pfl_ext/ops/sharpness.py.
#include "cuda/kernels/sharpness.cuh"

#include <torch/csrc/stable/library.h>

#include "cuda/dtype_groups.h"
#include "cuda/record_buffer.h"
#include "cuda/stream.h"
#include "glue/sharpness.h"

namespace pfl::cuda {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

void lwsam_perturb_(const TensorList& params, const Tensor& backup, const TensorList& grads,
                    const std::optional<Tensor>& scores, const std::vector<int64_t>& groups, int64_t layers, double rho,
                    double p, bool literal, bool per_layer) {
  glue::PerturbProblem problem("pfl_ext::lwsam_perturb_", params, backup, grads, scores, groups, layers, p, literal,
                               per_layer, rho, /*on_cpu=*/false);
  if (params.empty()) return;
  const CurrentStream stream(params[0]);
  const auto launch = stream.launcher();
  const Perturbation& how = problem.how;
  const auto rows_of = [&](const std::vector<int64_t>& indices, const RecordBuffer* records) {
    PerturbRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(problem.lists->sizes[t]);
      rows.weight.push_back(problem.weight(t));
      rows.grad.push_back(problem.grad(t));
      rows.backup.push_back(problem.backup(t));
      rows.layer.push_back(groups[t]);
      rows.norm.push_back(problem.norm_of(t));
      rows.record.push_back(records == nullptr ? 0 : records->first[t]);
    }
    return rows;
  };
  const NormResult* norms = nullptr;
  std::optional<RecordBuffer> records;
  std::optional<Tensor> memory;
  if (how.form != PerturbForm::kSign) {
    records.emplace(params[0], problem.lists->sizes);
    memory.emplace(torch::stable::new_empty(params[0], {problem.norms * 2}, glue::ScalarType::Double));
    auto* results = static_cast<NormResult*>(memory->mutable_data_ptr());
    visit_groups(problem.lists->dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
      launch_gradient_sums<typename decltype(tag)::type>(rows_of(indices, &*records), how, records->data(), launch);
    });
    launch_group_sums(records->data(), records->count, Grouping(problem.norms, groups), how.q,
                      how.form == PerturbForm::kPower, FinishNorm{how, results}, launch);
    norms = results;
  }
  visit_groups(problem.lists->dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    launch_perturb<typename decltype(tag)::type>(rows_of(indices, nullptr), how, rho, norms, problem.scores, launch);
  });
  problem.lists->finish();
}

void restore_(const TensorList& params, const Tensor& backup) {
  glue::RestoreProblem problem("pfl_ext::restore_", params, backup, /*on_cpu=*/false);
  if (params.empty()) return;
  const CurrentStream stream(params[0]);
  visit_groups(problem.lists.dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    std::vector<int64_t> sizes;
    std::vector<void*> weight;
    std::vector<const void*> saved;
    for (int64_t t : indices) {
      sizes.push_back(problem.lists.sizes[t]);
      weight.push_back(problem.lists.pointer(0, t));
      saved.push_back(problem.backup_bytes + problem.offsets[t]);
    }
    launch_restore<typename decltype(tag)::type>(sizes, weight, saved, stream.launcher());
  });
  problem.lists.finish();
}

Tensor personalization_scores(const TensorList& a, const TensorList& b, const std::vector<int64_t>& groups,
                              int64_t layers) {
  const glue::ScoreProblem problem("pfl_ext::personalization_scores", a, b, groups, layers, /*on_cpu=*/false);
  const CurrentStream stream(a[0]);
  const RecordBuffer records(a[0], problem.lists->sizes);
  visit_groups(problem.lists->dtypes, [&](auto tag, const std::vector<int64_t>& indices) {
    SumRows rows;
    for (int64_t t : indices) {
      rows.sizes.push_back(problem.lists->sizes[t]);
      rows.x.push_back(problem.lists->pointer(0, t));
      rows.y.push_back(problem.lists->pointer(1, t));
      rows.record.push_back(records.first[t]);
      rows.group.push_back(groups[t]);
    }
    launch_chunk_sums<typename decltype(tag)::type, ChunkSum::kSquaredDifferences>(rows, records.data(), 2.0,
                                                                                   stream.launcher());
  });
  launch_scores(records.data(), records.count, Grouping(layers, groups), problem.out(), stream.launcher());
  return *problem.scores;
}

}  // namespace
}  // namespace pfl::cuda

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CUDA, m) {
  m.impl("lwsam_perturb_", TORCH_BOX(&pfl::cuda::lwsam_perturb_));
  m.impl("restore_", TORCH_BOX(&pfl::cuda::restore_));
  m.impl("personalization_scores", TORCH_BOX(&pfl::cuda::personalization_scores));
}
