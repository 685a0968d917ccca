// One element of the proximal SGD step; the order of operations is that of torch.optim.SGD.
#pragma once

#include "common/numeric.h"

namespace pfl {

enum class Momentum : int {
  kNone = 0,
  kFirst = 1,    // the buffer begins as the gradient
  kRunning = 2,  // buffer = momentum * buffer + (1 - dampening) * gradient
};

struct ProximalStep {
  double lr;
  double lam;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
  Momentum mode;
};

// The same in the type that elements are computed in.
template <typename A>
struct ProximalNumbers {
  A lr, lam, momentum, undamped, weight_decay;
  bool nesterov, maximize;
};

template <typename A>
PFL_HD ProximalNumbers<A> numbers_of(const ProximalStep& step) {
  return {static_cast<A>(step.lr),
          static_cast<A>(step.lam),
          static_cast<A>(step.momentum),
          static_cast<A>(1.0 - step.dampening),
          static_cast<A>(step.weight_decay),
          step.nesterov,
          step.maximize};
}

// The new weight; `buffer` is updated. A term whose number is zero is left out, not added as zero times a value.
// V is A, or a vector of it.
template <Momentum kMode, bool kAnchor, bool kDecay, typename A, typename V>
PFL_HD V proximal_step(const ProximalNumbers<A>& s, V weight, V grad, V anchor, V* buffer) {
  V d = s.maximize ? -grad : grad;
  if constexpr (kDecay) d = d + s.weight_decay * weight;
  if constexpr (kAnchor) d = d + s.lam * (weight - anchor);
  if constexpr (kMode == Momentum::kFirst) *buffer = d;
  if constexpr (kMode == Momentum::kRunning) *buffer = s.momentum * *buffer + s.undamped * d;
  if constexpr (kMode != Momentum::kNone) d = s.nesterov ? d + s.momentum * *buffer : *buffer;
  return weight - s.lr * d;
}

// f(Mode constant, anchor constant, decay constant) for what the step needs.
template <Momentum kValue>
struct MomentumTag {
  static constexpr Momentum value = kValue;
};
template <bool kValue>
struct BoolTag {
  static constexpr bool value = kValue;
};

template <typename F>
[[maybe_unused]] static inline void visit_step(const ProximalStep& step, F&& f) {
  const auto with_mode = [&](auto mode) {
    if (step.lam != 0 && step.weight_decay != 0) return f(mode, BoolTag<true>{}, BoolTag<true>{});
    if (step.lam != 0) return f(mode, BoolTag<true>{}, BoolTag<false>{});
    if (step.weight_decay != 0) return f(mode, BoolTag<false>{}, BoolTag<true>{});
    return f(mode, BoolTag<false>{}, BoolTag<false>{});
  };
  switch (step.mode) {
    case Momentum::kFirst:
      return with_mode(MomentumTag<Momentum::kFirst>{});
    case Momentum::kRunning:
      return with_mode(MomentumTag<Momentum::kRunning>{});
    default:
      return with_mode(MomentumTag<Momentum::kNone>{});
  }
}

}  // namespace pfl
