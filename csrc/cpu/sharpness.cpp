// Glue of the sharpness family for the CPU key. Schemas: pfl_ext/ops/sharpness.py.
#include "cpu/kernels/sharpness.h"

#include <torch/csrc/stable/library.h>

#include "cpu/pieces.h"
#include "glue/sharpness.h"

namespace pfl::cpu {
namespace {

using glue::Tensor;
using TensorList = std::vector<Tensor>;

// From this many bytes of weights on, copies of them are written past the caches. Below it, weights, gradients and
// backup may all stay in a shared cache of 32 MB, and what was written past it would have to come back from memory.
constexpr int64_t kStreamBytes = int64_t{12} << 20;

void lwsam_perturb_(const TensorList& params, const Tensor& backup, const TensorList& grads,
                    const std::optional<Tensor>& scores, const std::vector<int64_t>& groups, int64_t layers, double rho,
                    double p, bool literal, bool per_layer) {
  glue::PerturbProblem problem("pfl_ext::lwsam_perturb_", params, backup, grads, scores, groups, layers, p, literal,
                               per_layer, rho, /*on_cpu=*/true);
  const SharpnessKernels& kernels = sharpness();
  const Perturbation& how = problem.how;
  const std::vector<DType>& dtypes = problem.lists->dtypes;
  const BundlePlan& plan = problem.lists->tensor_plan(kPieceElements);

  std::vector<PowerSum> norms(problem.norms, PowerSum{0.0, 0.0});
  if (how.form != PerturbForm::kSign) {
    std::vector<PowerSum> sums(plan.pieces.size());
    for_each_piece(plan, /*backwards=*/false, [&](int64_t i, const Piece& piece) {
      const int64_t t = piece.tensor;
      if (how.form == PerturbForm::kEuclidean) {
        sums[i] = {0.0, kernels.squares(dtypes[t], piece.offset, piece.length, problem.grad(t), nullptr)};
      } else {
        sums[i] = kernels.powers(dtypes[t], piece.offset, piece.length, problem.grad(t), how.q);
      }
    });
    for (size_t i = 0; i < sums.size(); ++i) {
      PowerSum& norm = norms[problem.norm_of(plan.pieces[i].tensor)];
      norm = how.form == PerturbForm::kEuclidean ? add_squares(norm, sums[i]) : add_powers(norm, sums[i], how.q);
    }
  }
  std::vector<double> factors;
  for (const PowerSum& norm : norms) factors.push_back(norm_factor(how, norm));

  const bool stream = problem.offsets.back() >= kStreamBytes;
  for_each_piece(plan, /*backwards=*/true, [&](int64_t, const Piece& piece) {
    const int64_t t = piece.tensor;
    const double score = problem.scores == nullptr ? 1.0 : problem.scores[groups[t]];
    const int64_t norm = problem.norm_of(t);
    kernels.perturb(dtypes[t], how, piece.offset, piece.length, rho * score * factors[norm], norms[norm].maximum,
                    problem.grad(t), problem.weight(t), problem.backup(t), stream);
  });
  problem.lists->finish();
}

void restore_(const TensorList& params, const Tensor& backup) {
  glue::RestoreProblem problem("pfl_ext::restore_", params, backup, /*on_cpu=*/true);
  const SharpnessKernels& kernels = sharpness();
  const bool stream = problem.offsets.back() >= kStreamBytes;
  for_each_piece(problem.lists.tensor_plan(kPieceElements), /*backwards=*/false, [&](int64_t, const Piece& piece) {
    const int64_t t = piece.tensor;
    const int64_t item = item_size(problem.lists.dtypes[t]);
    const int64_t begin = piece.offset * item;
    kernels.copy(piece.length * item, problem.backup_bytes + problem.offsets[t] + begin,
                 static_cast<char*>(problem.lists.pointer(0, t)) + begin, stream);
  });
  problem.lists.finish();
}

Tensor personalization_scores(const TensorList& a, const TensorList& b, const std::vector<int64_t>& groups,
                              int64_t layers) {
  const glue::ScoreProblem problem("pfl_ext::personalization_scores", a, b, groups, layers, /*on_cpu=*/true);
  const SharpnessKernels& kernels = sharpness();
  const BundlePlan plan = plan_bundles(problem.lists->sizes, kPieceElements);
  std::vector<double> sums(plan.pieces.size());
  for_each_piece(plan, /*backwards=*/false, [&](int64_t i, const Piece& piece) {
    const int64_t t = piece.tensor;
    sums[i] = kernels.squares(problem.lists->dtypes[t], piece.offset, piece.length, problem.lists->pointer(0, t),
                              problem.lists->pointer(1, t));
  });
  std::vector<double> raw(layers, 0.0);
  for (size_t i = 0; i < sums.size(); ++i) raw[groups[plan.pieces[i].tensor]] += sums[i];
  double total = 0.0;
  int64_t scored = 0;
  for (int64_t l = 0; l < layers; ++l) {
    raw[l] = raw_score(raw[l], problem.elements[l]);
    if (raw[l] == kNoScore) continue;
    total += raw[l];
    ++scored;
  }
  for (int64_t l = 0; l < layers; ++l) problem.out()[l] = score(raw[l], total, scored);
  return *problem.scores;
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("lwsam_perturb_", TORCH_BOX(&pfl::cpu::lwsam_perturb_));
  m.impl("restore_", TORCH_BOX(&pfl::cpu::restore_));
  m.impl("personalization_scores", TORCH_BOX(&pfl::cpu::personalization_scores));
}
