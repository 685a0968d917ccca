// The perturbation of SAM and LWSAM, element by element, and what it needs of the gradient's norm.
//
// With 1/p + 1/q = 1, M = max |g| and S = sum (|g| / M)^q, the perturbation (5) of PLGU reads
//   eps = rho xi sign(g) |g|^(q-1) / (||g||_q^q)^(1/p) = rho xi sign(g) (|g| / M)^(q-1) / S^(1/p),
// because q - 1 = q / p. In this form nothing overflows or vanishes however large q is, and both limits are included:
// q = 1 (p = infinity) is the sign, q = infinity (p = 1) moves the largest elements alone, in equal parts.
#pragma once

#include <math.h>

#include "common/numeric.h"

namespace pfl {

enum class PerturbForm : int {
  kSign = 0,       // q = 1: needs no norm
  kEuclidean = 1,  // q = 2: S holds sum g^2 and M is not used; doubles hold the square of every float
  kPower = 2,
};

struct Perturbation {
  PerturbForm form;
  double p;
  double q;
  double exponent;  // q - 1, which q itself may be too large to tell
  bool literal;     // (||g||_q^q)^(p-1) as printed, not ^(1/p)
};

// p in [1, infinity]; 1 < p < infinity for the literal form.
[[maybe_unused]] static inline Perturbation make_perturbation(double p, bool literal) {
  const double exponent = 1.0 / (p - 1.0);
  const double q = p == 1.0 ? exponent : isinf(p) ? 1.0 : p / (p - 1.0);
  const PerturbForm form = p == 2.0 ? PerturbForm::kEuclidean : isinf(p) ? PerturbForm::kSign : PerturbForm::kPower;
  return {form, p, q, exponent, literal};
}

// A sum over some elements: of squares with `maximum` unused, or of (|x| / maximum)^q.
struct PowerSum {
  double maximum;
  double sum;
};

// The larger one, and NaN if there is one. Written so that loops over it vectorise.
template <typename A>
PFL_HD A larger(A a, A b) {
  return a > b || a != a ? a : b;
}

PFL_HD PowerSum add_squares(PowerSum a, PowerSum b) { return {0.0, a.sum + b.sum}; }

PFL_HD PowerSum add_powers(PowerSum a, PowerSum b, double q) {
  const double maximum = larger(a.maximum, b.maximum);
  if (maximum == 0.0) return {0.0, 0.0};
  const double first = a.maximum == maximum ? a.sum : a.sum * pow(a.maximum / maximum, q);
  const double second = b.maximum == maximum ? b.sum : b.sum * pow(b.maximum / maximum, q);
  return {maximum, first + second};
}

// What rho * xi is multiplied with: the norm's share of the formula. Zero, so no perturbation, for a gradient of zeros
// and for an infinite norm, which has no direction; NaN for NaN.
PFL_HD double norm_factor(const Perturbation& how, PowerSum norm) {
  switch (how.form) {
    case PerturbForm::kSign:
      return 1.0;
    case PerturbForm::kEuclidean:
      if (norm.sum == 0.0) return 0.0;
      return how.literal ? 1.0 / norm.sum : 1.0 / sqrt(norm.sum);
    default:
      if (norm.maximum == 0.0 || isinf(norm.maximum)) return 0.0;
      // |g|^(q-1) / (M^q S)^(p-1) with q (p - 1) = p.
      if (how.literal) return pow(norm.maximum, how.exponent - how.p) * pow(norm.sum, 1.0 - how.p);
      return pow(norm.sum, -1.0 / how.p);
  }
}

// The scale in the type that the elements are computed in. A gradient so small that the scale has no place there
// (its norm is subnormal) is perturbed by less than rho, not by infinity.
template <typename A>
PFL_HD A to_scale(double scale) {
  if constexpr (sizeof(A) == 4) {
    constexpr double kLargest = 3.4028234663852886e38;
    if (scale > kLargest) return static_cast<A>(kLargest);
  }
  return static_cast<A>(scale);
}

PFL_HD float power(float x, float y) { return powf(x, y); }
PFL_HD double power(double x, double y) { return pow(x, y); }

template <PerturbForm kForm, typename A>
PFL_HD A perturbed(A weight, A g, A scale, A maximum, A exponent) {
  if constexpr (kForm == PerturbForm::kEuclidean) {
    (void)maximum, (void)exponent;
    return weight + scale * g;
  } else if constexpr (kForm == PerturbForm::kSign) {
    (void)maximum, (void)exponent;
    // Zero stays zero and NaN stays NaN. Without arithmetic in the choice, loops over it vectorise.
    return weight + (g > A(0) ? scale : g < A(0) ? -scale : g);
  } else {
    const A magnitude = scale * power((g > A(0) ? g : -g) / maximum, exponent);
    // Zero where g is zero, unless the norm is NaN.
    return weight + (g > A(0) ? magnitude : g < A(0) ? -magnitude : g * magnitude);
  }
}

// raw_l of the personalisation score: ||a_l - b_l|| / dim. A layer without elements has none; -1 stands for that.
constexpr double kNoScore = -1.0;

PFL_HD double raw_score(double squares, int64_t elements) {
  return elements == 0 ? kNoScore : sqrt(squares) / static_cast<double>(elements);
}

// xi_l. Where nothing has moved, all layers count the same.
PFL_HD double score(double raw, double total, int64_t layers) {
  if (raw == kNoScore) return 0.0;
  return total == 0.0 ? 1.0 / static_cast<double>(layers) : raw / total;
}

}  // namespace pfl
