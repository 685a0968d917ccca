// The maths of a bin of the half spectrum, for the CPU and the CUDA kernels.
#pragma once

#include <cmath>

#include "common/numeric.h"

namespace pfl {

template <typename A>
struct Complex {
  A re, im;
};

template <typename A>
PFL_HD Complex<A> operator*(Complex<A> a, Complex<A> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <typename A>
PFL_HD Complex<A> operator+(Complex<A> a, Complex<A> b) {
  return {a.re + b.re, a.im + b.im};
}
template <typename A>
PFL_HD Complex<A> operator-(Complex<A> a, Complex<A> b) {
  return {a.re - b.re, a.im - b.im};
}
template <typename A>
PFL_HD Complex<A> conjugate(Complex<A> a) {
  return {a.re, -a.im};
}

// What the code below needs to know of a type. ln 2 is split so that its product with an exponent is exact in the high
// part.
template <typename A>
struct FloatTraits;

template <>
struct FloatTraits<float> {
  using Bits = int32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr Bits kInteger = 0x4b000000;  // 2^23: its low bits are an integer
  static constexpr float kIntegerValue = 8388608.0f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kTiny = 1.17549435e-38f;
  static constexpr int kSeriesTerms = 6;  // the next is below 0.03^6 / 13 = 6e-11 of the sum
};

template <>
struct FloatTraits<double> {
  using Bits = int64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kBias = 1023;
  static constexpr Bits kInteger = 0x4330000000000000;
  static constexpr double kIntegerValue = 4503599627370496.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kTiny = 2.2250738585072014e-308;
  static constexpr int kSeriesTerms = 10;  // the next is below 0.03^10 / 21 = 3e-17 of the sum
};

// log(value * 2^(exponent - bias)) for value in [1/sqrt(2), 2 sqrt(2)]. Own code rather than the libraries': the same
// bits on every instruction set and on the GPU, and loops over it vectorise.
template <typename A>
PFL_HD A log_scaled(A value, typename FloatTraits<A>::Bits exponent) {
  using Traits = FloatTraits<A>;
  const bool large = value > A(1.4142135623730951);
  value = large ? value * A(0.5) : value;
  // Through the bits of 2^mantissa + exponent: AVX2 has no conversion from 64-bit integers.
  const A k =
      bit_copy<A>(Traits::kInteger | exponent) - (Traits::kIntegerValue + A(Traits::kBias)) + (large ? A(1) : A(0));
  // log(v) = 2 atanh(z) with z = (v - 1) / (v + 1), |z| <= 0.172.
  const A z = (value - A(1)) / (value + A(1));
  const A z2 = z * z;
  A series = A(1) / A(2 * Traits::kSeriesTerms - 1);
  for (int term = Traits::kSeriesTerms - 2; term >= 0; --term) series = series * z2 + A(1) / A(2 * term + 1);
  return k * Traits::kLn2High + (k * Traits::kLn2Low + A(2) * (z * series));
}

// A complex number as its magnitude, the magnitude's logarithm, and its direction. Magnitudes below the smallest
// normal number count as zero: then direction and logarithm are zero too. Scaled by a power of two, so that squares
// neither overflow nor vanish.
template <typename A>
struct Polar {
  A magnitude, log;
  Complex<A> direction;
};

template <typename A>
PFL_HD Polar<A> to_polar(Complex<A> x) {
  using Traits = FloatTraits<A>;
  using Bits = typename Traits::Bits;
  const A re = x.re < A(0) ? -x.re : x.re;
  const A im = x.im < A(0) ? -x.im : x.im;
  const A larger = re > im ? re : im;
  Bits exponent = bit_copy<Bits>(larger) >> Traits::kMantissa & (2 * Traits::kBias + 1);
  exponent = exponent < 1 ? 1 : exponent;
  exponent = exponent > 2 * Traits::kBias - 1 ? 2 * Traits::kBias - 1 : exponent;
  const A down = bit_copy<A>((2 * Traits::kBias - exponent) << Traits::kMantissa);
  const A up = bit_copy<A>(exponent << Traits::kMantissa);
  const Complex<A> scaled = {x.re * down, x.im * down};
  const A square = scaled.re * scaled.re + scaled.im * scaled.im;
  const bool zero = square < A(1);  // false for NaN, which is thus handed on
  const A length = sqrt(zero ? A(1) : square);
  const A inverse = zero ? A(0) : A(1) / length;
  const A log = log_scaled<A>(length, exponent);
  return {zero ? A(0) : length * up, zero ? A(0) : log, {scaled.re * inverse, scaled.im * inverse}};
}

// log of a positive normal number.
PFL_HD double log_positive(double x) {
  using Traits = FloatTraits<double>;
  const int64_t bits = bit_copy<int64_t>(x);
  const int64_t exponent = bits >> Traits::kMantissa;
  const int64_t one = Traits::kBias << Traits::kMantissa;
  if (!(x < 1.7976931348623157e308)) return x;  // infinity and NaN
  return log_scaled<double>(bit_copy<double>((bits & ((int64_t{1} << Traits::kMantissa) - 1)) | one), exponent);
}

// Which entries of a spectrum of `length` are compared: the first `count`.
struct SpectrumRange {
  int64_t length;
  int64_t count;

  PFL_HD_MEMBER int64_t half() const { return length / 2 + 1; }
  // Bins of the half spectrum that are among them.
  PFL_HD_MEMBER int64_t bins() const { return count < half() ? count : half(); }
  // The first and, for even lengths, the last bin stand for one entry of the spectrum, the others for two.
  PFL_HD_MEMBER bool stands_alone(int64_t k) const { return k == 0 || 2 * k == length; }
  // How many of a bin's entries are among the first `count`: entry k > length / 2 is bin length - k.
  PFL_HD_MEMBER int weight(int64_t k) const { return k > length - count && !stands_alone(k) ? 2 : 1; }
  // The same as a part of all its entries.
  PFL_HD_MEMBER double share(int64_t k) const { return stands_alone(k) ? 1.0 : 0.5 * weight(k); }
};

enum class DivergenceForm : int { kNormalized = 0, kPaper = 1, kGeneralized = 2, kMean = 3 };
constexpr int kDivergenceForms = 4;

// From the sums Z = sum p, A = sum p log(p / q) and T = sum q over `count` entries: the divergence, and its derivative
// in a magnitude, scale * (log(p / q) + offset). Spectra divided by their means have `count` times the divergence of
// those divided by their sums.
struct Divergence {
  double loss, scale, offset;
};

PFL_HD Divergence finish_divergence(DivergenceForm form, double z, double a, double t, int64_t count) {
  switch (form) {
    case DivergenceForm::kPaper:
      return {a, 1.0, 1.0};
    case DivergenceForm::kGeneralized:
      return {a - z + t, 1.0, 0.0};
    default:
      if (z == 0.0) return {0.0, 0.0, 0.0};
      const double factor = form == DivergenceForm::kMean ? static_cast<double>(count) : 1.0;
      return {factor * (a / z - log_positive(z) + log_positive(t)), factor / z, -(a / z)};
  }
}

}  // namespace pfl
