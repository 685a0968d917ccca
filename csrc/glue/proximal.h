// The arguments of the proximal ops, checked in full before anything is written. Shared by the CPU and CUDA glue.
#pragma once

#include <cmath>
#include <optional>

#include "common/proximal.h"
#include "glue/matched_lists.h"

namespace pfl::glue {

inline void check_step(const char* op, const ProximalStep& step) {
  if (!(step.lr >= 0) || !(step.lam >= 0) || !(step.momentum >= 0) || !(step.weight_decay >= 0) ||
      std::isinf(step.lr + step.lam + step.momentum + step.weight_decay)) {
    fail(op, ": lr ", step.lr, ", lam ", step.lam, ", momentum ", step.momentum, ", weight_decay ", step.weight_decay,
         "; finite numbers that are not negative are accepted");
  }
}

struct ProximalProblem {
  ProximalProblem(const char* op, const GivenList& params, const GivenList& buffers, const GivenList& grads,
                  const GivenList& anchors, const ProximalStep& step, bool on_cpu)
      : how(step), has_anchors(step.lam != 0), has_buffers(step.mode != Momentum::kNone) {
    check_step(op, step);
    if (step.nesterov && (!has_buffers || step.dampening != 0)) {
      fail(op, ": nesterov needs momentum and no dampening; momentum is ", step.momentum, ", dampening ",
           step.dampening);
    }
    if (has_buffers != !buffers.empty() && !params.empty()) {
      fail(op, ": ", buffers.size(), " momentum buffers with momentum ", step.momentum);
    }
    std::vector<ListRole> roles{{"params", params, true}, {"grads", grads, false}};
    if (has_anchors) roles.push_back({"anchors", anchors, false});
    if (has_buffers) roles.push_back({"momentum_buffers", buffers, true});
    lists = match(op, roles, on_cpu);
  }

  void* weight(int64_t t) const { return lists->pointer(0, t); }
  const void* grad(int64_t t) const { return lists->pointer(1, t); }
  const void* anchor(int64_t t) const { return has_anchors ? lists->pointer(2, t) : nullptr; }
  void* buffer(int64_t t) const { return has_buffers ? lists->pointer(has_anchors ? 3 : 2, t) : nullptr; }

  ProximalStep how;
  bool has_anchors;
  bool has_buffers;
  std::shared_ptr<const MatchedLists> lists;
};

inline ProximalStep proximal_step_of(double lr, double lam, double momentum, double dampening, double weight_decay,
                                     bool nesterov, bool maximize, bool first) {
  const Momentum mode = momentum == 0 ? Momentum::kNone : first ? Momentum::kFirst : Momentum::kRunning;
  return {lr, lam, momentum, dampening, weight_decay, nesterov, maximize, mode};
}

// The type of a sum over lists: double if one tensor is.
inline ScalarType sum_type(const std::vector<DType>& dtypes) {
  const bool wide = std::find(dtypes.begin(), dtypes.end(), DType::kFloat64) != dtypes.end();
  return wide ? ScalarType::Double : ScalarType::Float;
}

inline MatchedLists distance_lists(const char* op, const std::vector<Tensor>& a, const std::vector<Tensor>& b,
                                   bool on_cpu) {
  if (a.empty()) fail(op, ": no tensors given");
  return MatchedLists(op, {{"a", a, false}, {"b", b, false}}, on_cpu);
}

// The gradients of the squared distance: for each tensor of a, then for each of b, in the layout of the tensor of a.
struct DistanceGradient {
  DistanceGradient(const char* op, const std::vector<Tensor>& a, const std::vector<Tensor>& b, bool for_a, bool for_b,
                   bool on_cpu)
      : lists(distance_lists(op, a, b, on_cpu)) {
    for (int side = 0; side < 2; ++side) {
      if (!(side == 0 ? for_a : for_b)) continue;
      first[side] = static_cast<int64_t>(out.size());
      for (const Tensor& x : a) {
        out.push_back(is_dense(x) ? torch::stable::empty_like(x) : torch::stable::new_empty(x, x.sizes()));
      }
    }
  }

  void* to(int side, int64_t t) const { return first[side] < 0 ? nullptr : out[first[side] + t].mutable_data_ptr(); }

  MatchedLists lists;
  std::vector<Tensor> out;
  int64_t first[2] = {-1, -1};
};

}  // namespace pfl::glue
