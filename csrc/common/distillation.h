// What a distillation loss is made of, shared by the CPU and the CUDA kernels. The equations are in
// pfl_ext/ops/distillation.py.
#pragma once

#include "common/elementary.h"

namespace pfl {

// The numbers are those of the schema.
enum class Average : int64_t { kLogits = 0, kProbs = 1, kLosses = 2 };
enum class Reduction : int64_t { kNone = 0, kSum = 1, kMean = 2, kBatchMean = 3 };

// What holds for all rows of a call.
struct DistillationOptions {
  Average average;
  bool cross_entropy;  // of the soft term: cross-entropy instead of divergence
  bool multilabel;
  double temperature;
  double soft_scale;
  double hard_scale;
  double label_smoothing;
  int64_t ignore_index;
};

// A probability below this counts as zero: its logarithm would need subnormal numbers.
template <typename A>
PFL_HD A smallest_probability() {
  return sizeof(A) == 8 ? A(2.2250738585072014e-308) : A(1.17549435e-38f);
}

// q log q, 0 for q = 0.
template <typename A>
PFL_HD A entropy_term(A q) {
  const A safe = q < smallest_probability<A>() ? A(1) : q;
  return q * log_positive(safe);
}

// A logit as a probability, with what its logarithms need: softplus(x) = max(x, 0) + tail.
template <typename A>
struct Sigmoid {
  A x;
  A p;           // sigmoid(x)
  A complement;  // sigmoid(-x), without the cancellation of 1 - p
  A tail;        // log(1 + e^-|x|)
};

template <typename A>
PFL_HD Sigmoid<A> sigmoid_of(A logit) {
  // Infinite logits become large ones, so that infinity - infinity and 0 * infinity do not come up.
  constexpr A kLarge = A(1e30);
  Sigmoid<A> s;
  s.x = logit < -kLarge ? -kLarge : (logit > kLarge ? kLarge : logit);
  const A e = exp_nonpositive(s.x < A(0) ? s.x : -s.x);
  const A larger = A(1) / (A(1) + e);
  const A smaller = e * larger;
  s.p = s.x < A(0) ? smaller : larger;
  s.complement = s.x < A(0) ? larger : smaller;
  s.tail = log_one_plus(e);
  return s;
}

// -q log p - (1 - q) log(1 - p) for p = sigmoid(s.x); `complement` is 1 - q.
template <typename A>
PFL_HD A binary_cross_entropy(A q, A complement, const Sigmoid<A>& s) {
  return (s.x < A(0) ? -(q * s.x) : complement * s.x) + s.tail;
}

}  // namespace pfl
