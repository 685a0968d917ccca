// CUDA's device maths on top of the host's: intrinsics, bit operations, reinterpretations, min and max.
//
// The approximate intrinsics (__expf and its like) are computed accurately, so a tolerance that holds here may still be
// too tight for the device.
#pragma once

// The C headers rather than <cmath>: CUDA has sqrt, abs, isnan ... with their float overloads in the global namespace.
#include <math.h>
#include <stdlib.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// --- functions that C libraries may declare too
// ----------------------------------------------------------------------- glibc's math.h declares __expf and its
// siblings (without exporting them), newer ones the C23 functions as well. These definitions agree with such
// declarations: same linkage, same exception specification.

namespace pfl::emulator {

// sin(pi x) and cos(pi x). The remainder of x to the nearest half is exact, so that integers give exact zeros and ones.
struct SinCosPi {
  double sin, cos;

  explicit SinCosPi(double x) noexcept {
    const double halves = std::nearbyint(2 * x);
    const double angle = (x - halves / 2) * 3.14159265358979323846;
    const double s = std::sin(angle), c = std::cos(angle);
    const double quadrant = std::fmod(halves, 4);
    if (quadrant == 1 || quadrant == -3) {
      sin = c, cos = -s;
    } else if (quadrant == 2 || quadrant == -2) {
      sin = -s, cos = -c;
    } else if (quadrant == 3 || quadrant == -1) {
      sin = -c, cos = s;
    } else {
      sin = s, cos = c;
    }
  }
};

}  // namespace pfl::emulator

extern "C" {
inline float __expf(float x) noexcept { return expf(x); }
inline float __exp10f(float x) noexcept { return exp10f(x); }
inline float __logf(float x) noexcept { return logf(x); }
inline float __log2f(float x) noexcept { return log2f(x); }
inline float __log10f(float x) noexcept { return log10f(x); }
inline float __powf(float x, float y) noexcept { return powf(x, y); }
inline float __sinf(float x) noexcept { return sinf(x); }
inline float __cosf(float x) noexcept { return cosf(x); }
inline float __tanf(float x) noexcept { return tanf(x); }
inline void __sincosf(float x, float* sine, float* cosine) noexcept { sincosf(x, sine, cosine); }

inline double rsqrt(double x) noexcept { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) noexcept { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline double sinpi(double x) noexcept { return pfl::emulator::SinCosPi(x).sin; }
inline double cospi(double x) noexcept { return pfl::emulator::SinCosPi(x).cos; }
inline float sinpif(float x) noexcept { return static_cast<float>(sinpi(x)); }
inline float cospif(float x) noexcept { return static_cast<float>(cospi(x)); }
}

inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return static_cast<float>(1 / std::cbrt(static_cast<double>(x))); }
inline double rcbrt(double x) { return 1 / std::cbrt(x); }

inline void sincospi(double x, double* sine, double* cosine) {
  const pfl::emulator::SinCosPi both(x);
  *sine = both.sin;
  *cosine = both.cos;
}
inline void sincospif(float x, float* sine, float* cosine) {
  const pfl::emulator::SinCosPi both(x);
  *sine = static_cast<float>(both.sin);
  *cosine = static_cast<float>(both.cos);
}

// --- arithmetic with a named rounding
// ----------------------------------------------------------------------------------- The build sets -ffp-contract=off,
// so that these are never merged into a fused multiply-add.

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN becomes 0, as on the device

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __drcp_rn(double x) { return 1 / x; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }

// --- conversions
// --------------------------------------------------------------------------------------------------------

namespace pfl::emulator {

// The device clamps what the integer cannot hold and turns NaN into 0; in C++ both are undefined.
template <typename Integer>
Integer saturate(double integral) {
  if (std::isnan(integral)) return 0;
  constexpr double kTooLarge = static_cast<double>(std::numeric_limits<Integer>::max() / 2 + 1) * 2;
  if (integral >= kTooLarge) return std::numeric_limits<Integer>::max();
  if (integral < static_cast<double>(std::numeric_limits<Integer>::min())) return std::numeric_limits<Integer>::min();
  return static_cast<Integer>(integral);
}

}  // namespace pfl::emulator

#define PFL_CONVERSIONS(prefix, Source, suffix, Integer)                                                       \
  inline Integer prefix##suffix##_rn(Source x) { return pfl::emulator::saturate<Integer>(std::nearbyint(x)); } \
  inline Integer prefix##suffix##_rz(Source x) { return pfl::emulator::saturate<Integer>(std::trunc(x)); }     \
  inline Integer prefix##suffix##_rd(Source x) { return pfl::emulator::saturate<Integer>(std::floor(x)); }     \
  inline Integer prefix##suffix##_ru(Source x) { return pfl::emulator::saturate<Integer>(std::ceil(x)); }
PFL_CONVERSIONS(__float2, float, int, int)
PFL_CONVERSIONS(__float2, float, uint, unsigned)
PFL_CONVERSIONS(__float2, float, ll, long long)
PFL_CONVERSIONS(__float2, float, ull, unsigned long long)
PFL_CONVERSIONS(__double2, double, int, int)
PFL_CONVERSIONS(__double2, double, uint, unsigned)
PFL_CONVERSIONS(__double2, double, ll, long long)
PFL_CONVERSIONS(__double2, double, ull, unsigned long long)
#undef PFL_CONVERSIONS

inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

// --- integers
// -----------------------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1; }

inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}

inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>((static_cast<Wide>(a) * b) >> 64);
}

// --- min and max
// -------------------------------------------------------------------------------------------------------- The
// overloads CUDA has, mixed ones included. A call that is ambiguous there should be ambiguous here.

#define PFL_MIN_MAX(A, B, Result)                                                                             \
  inline Result min(A a, B b) {                                                                               \
    return static_cast<Result>(a) < static_cast<Result>(b) ? static_cast<Result>(a) : static_cast<Result>(b); \
  }                                                                                                           \
  inline Result max(A a, B b) {                                                                               \
    return static_cast<Result>(a) > static_cast<Result>(b) ? static_cast<Result>(a) : static_cast<Result>(b); \
  }
#define PFL_MIN_MAX_OF_INTEGER(Signed)                           \
  PFL_MIN_MAX(Signed, Signed, Signed)                            \
  PFL_MIN_MAX(unsigned Signed, unsigned Signed, unsigned Signed) \
  PFL_MIN_MAX(Signed, unsigned Signed, unsigned Signed)          \
  PFL_MIN_MAX(unsigned Signed, Signed, unsigned Signed)
PFL_MIN_MAX_OF_INTEGER(int)
PFL_MIN_MAX_OF_INTEGER(long)
PFL_MIN_MAX_OF_INTEGER(long long)
#undef PFL_MIN_MAX_OF_INTEGER
#undef PFL_MIN_MAX

// A NaN loses against a number.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
