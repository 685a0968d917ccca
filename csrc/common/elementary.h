// exp and log in plain arithmetic: the same bits on every instruction set and on the GPU, and in a form that compilers
// vectorise (no branches, no tables, no calls). Coefficients: interpolation of the stated function in Chebyshev nodes,
// computed with 50 digits; the error of each fit is below a fifth of a unit in the last place. Measured over their
// whole domains (python_tests/common/test_elementary.py): below 1.5 units in the last place.
#pragma once

#include "common/numeric.h"

namespace pfl {

// e^x for x <= 0. NaN stays NaN; what would be subnormal is 0, and so is e^-infinity. Below kSmallest the arithmetic
// gives nonsense, which the last line throws away.
PFL_HD float exp_nonpositive(float x) {
  constexpr float kSmallest = -87.0f;    // e^-87 is 1.4 times the smallest normal number
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const float shifted = x * 1.44269504089f + kRound;
  const float n = shifted - kRound;
  // The first product is exact: log 2 in two parts, of which the larger has 10 bits.
  const float r = (x - n * 0.693359375f) - n * -2.12194440055e-4f;
  // (e^r - 1 - r) / r^2 on |r| <= log(2) / 2
  // In pairs of terms: half the steps that wait for one another.
  const float square = r * r;
  const float upper = (8.363179053e-3f * r + 4.166655462e-2f) + 1.392618359e-3f * square;
  const float p = (0.1666657699f * r + 0.5f) + upper * square;
  const float power = bit_copy<float>((bit_copy<uint32_t>(shifted) << 23) + 0x3f800000u);
  const float value = (p * square + r + 1.0f) * power;
  return x < kSmallest ? 0.0f : value;
}

PFL_HD double exp_nonpositive(double x) {
  constexpr double kSmallest = -708.0;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 1.4426950408889634 + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 2.0914686968086877233e-9;
  p = p * r + 2.5105217004720745164e-8;
  p = p * r + 2.7557273643110295328e-7;
  p = p * r + 2.755725540020642443e-6;
  p = p * r + 2.4801587325547741216e-5;
  p = p * r + 1.9841269874820625271e-4;
  p = p * r + 1.3888888888883748305e-3;
  p = p * r + 8.3333333333261351258e-3;
  p = p * r + 4.1666666666666669755e-2;
  p = p * r + 0.16666666666666670991;
  p = p * r + 0.5;
  const double power = bit_copy<double>((bit_copy<uint64_t>(shifted) << 52) + 0x3ff0000000000000ull);
  const double value = (p * (r * r) + r + 1.0) * power;
  return x < kSmallest ? 0.0 : value;
}

// log x for positive normal x; infinity and NaN stay what they are.
// With x = 2^e m, m in [1/sqrt 2, sqrt 2), f = m - 1 and s = f / (2 + f): log m = 2 atanh s = f - (f^2/2 - s (f^2/2 +
// R)), R = s^2 (2/3 + 2/5 s^2 + ...).
PFL_HD float log_positive(float x) {
  // Adding 1 - 1/sqrt 2, in bits, makes the exponent field step at 1/sqrt 2 instead of at 1.
  const uint32_t bits = bit_copy<uint32_t>(x) + (0x3f800000u - 0x3f3504f3u);
  const float e = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const float f = bit_copy<float>((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float s = f / (2.0f + f);
  const float w = s * s;
  float p = 0.2333104083f;
  p = p * w + 0.2855079973f;
  p = p * w + 0.4000012203f;
  p = p * w + 0.6666666655f;
  const float half_square = 0.5f * (f * f);
  const float value = e * 0.693359375f + (f - (half_square - (s * (half_square + p * w) + e * -2.12194440055e-4f)));
  return x < bit_copy<float>(0x7f800000u) ? value : x;
}

PFL_HD double log_positive(double x) {
  const uint64_t bits = bit_copy<uint64_t>(x) + (0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull);
  // By the bits of 2^52 + e: vector units without a conversion from 64-bit integers are common.
  const double e = bit_copy<double>((bits >> 52) | 0x4330000000000000ull) - (4503599627370496.0 + 1023.0);
  const double f = bit_copy<double>((bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull) - 1.0;
  const double s = f / (2.0 + f);
  const double w = s * s;
  double p = 0.14617128399807299883;
  p = p * w + 0.15331666676597174341;
  p = p * w + 0.18182890778026130313;
  p = p * w + 0.22222211112104947364;
  p = p * w + 0.28571428626114518292;
  p = p * w + 0.39999999999899197894;
  p = p * w + 0.66666666666666696969;
  const double half_square = 0.5 * (f * f);
  const double value = e * 6.93147180369123816490e-01 +
                       (f - (half_square - (s * (half_square + p * w) + e * 1.90821492927058770002e-10)));
  return x < bit_copy<double>(0x7ff0000000000000ull) ? value : x;
}

// log(1 + y) for 0 <= y <= 1: the rounding of 1 + y is made up for to first order.
template <typename A>
PFL_HD A log_one_plus(A y) {
  const A u = A(1) + y;
  return log_positive(u) + (y - (u - A(1))) / u;
}

}  // namespace pfl
