// __half and __nv_bfloat16 with their conversion intrinsics.
//
// They have no operators and no implicit conversions: torch's build helper compiles CUDA with
// __CUDA_NO_HALF_OPERATORS__ and its siblings, so a kernel that used them here would not compile there.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "emulator/vector_types.h"

struct __half_raw {
  unsigned short x;
};

struct alignas(2) __half {
  __half() = default;
  constexpr __half(__half_raw raw) : bits_(raw.x) {}
  constexpr operator __half_raw() const { return {bits_}; }

 private:
  unsigned short bits_;
};

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(__nv_bfloat16_raw raw) : bits_(raw.x) {}
  constexpr operator __nv_bfloat16_raw() const { return {bits_}; }

 private:
  unsigned short bits_;
};

struct alignas(4) __half2 {
  __half x, y;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

namespace pfl::emulator {

// Rounds to the nearest value of a 16-bit format, ties to even. A double holds every float exactly, so there is one
// rounding for both.
template <int fraction_bits, int min_exponent>
unsigned short round_to_16_bits(double value) {
  constexpr int kInfinity = ((1 << (15 - fraction_bits)) - 1) << fraction_bits;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7FFF;  // the one NaN that the device's conversions return
  if (std::isinf(value)) return static_cast<unsigned short>(sign | kInfinity);

  // Below min_exponent the spacing no longer shrinks: those are the subnormals. In units of the spacing, the mantissa
  // with its leading one, added to one less than the biased exponent, is the encoding; a mantissa that rounds up to the
  // next power of two carries into the exponent as it should, up to infinity.
  const double magnitude = std::fabs(value);
  const int exponent = magnitude == 0 ? min_exponent : std::max(std::ilogb(magnitude), min_exponent);
  const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  const std::int64_t encoding = units + (static_cast<std::int64_t>(exponent - min_exponent) << fraction_bits);
  return static_cast<unsigned short>(sign | std::min<std::int64_t>(encoding, kInfinity));
}

inline constexpr int kHalfFractionBits = 10, kHalfMinExponent = -14;
inline constexpr int kBfloat16FractionBits = 7, kBfloat16MinExponent = -126;

}  // namespace pfl::emulator

inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __half_as_ushort(__half value) { return static_cast<__half_raw>(value).x; }
inline __half __short_as_half(short bits) { return __half_raw{static_cast<unsigned short>(bits)}; }
inline short __half_as_short(__half value) { return static_cast<short>(__half_as_ushort(value)); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return static_cast<__nv_bfloat16_raw>(value).x; }
inline __nv_bfloat16 __short_as_bfloat16(short bits) { return __nv_bfloat16_raw{static_cast<unsigned short>(bits)}; }
inline short __bfloat16_as_short(__nv_bfloat16 value) { return static_cast<short>(__bfloat16_as_ushort(value)); }

inline __half __double2half(double value) {
  using namespace pfl::emulator;
  return __ushort_as_half(round_to_16_bits<kHalfFractionBits, kHalfMinExponent>(value));
}
inline __half __float2half_rn(float value) { return __double2half(value); }
inline __half __float2half(float value) { return __double2half(value); }

inline float __half2float(__half value) {
  using namespace pfl::emulator;
  const int bits = __half_as_ushort(value);
  const int exponent_field = bits >> kHalfFractionBits & 0x1F;
  const int fraction = bits & ((1 << kHalfFractionBits) - 1);
  float magnitude;
  if (exponent_field == 0x1F) {
    magnitude = fraction == 0 ? INFINITY : NAN;
  } else if (exponent_field == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), kHalfMinExponent - kHalfFractionBits);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + (1 << kHalfFractionBits)),
                           exponent_field - 1 + kHalfMinExponent - kHalfFractionBits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

inline __nv_bfloat16 __double2bfloat16(double value) {
  using namespace pfl::emulator;
  return __ushort_as_bfloat16(round_to_16_bits<kBfloat16FractionBits, kBfloat16MinExponent>(value));
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __double2bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __double2bfloat16(value); }

// A bfloat16 is the upper half of a float.
inline float __bfloat162float(__nv_bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(__bfloat16_as_ushort(value)) << 16);
}

// The two halves of a pair. x is the low one.
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline float __low2float(__half2 pair) { return __half2float(pair.x); }
inline float __high2float(__half2 pair) { return __half2float(pair.y); }
inline float2 __half22float2(__half2 pair) { return {__low2float(pair), __high2float(pair)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 pair) { return __floats2half2_rn(pair.x, pair.y); }
inline __half2 __float2half2_rn(float value) { return __floats2half2_rn(value, value); }

inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__low2float(pair), __high2float(pair)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return __floats2bfloat162_rn(pair.x, pair.y); }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __floats2bfloat162_rn(value, value); }

// Double has more than twice the precision of either format plus two bits, so that rounding to it first does not change
// the result of a sum or a product.
inline __half __hadd(__half a, __half b) {
  return __double2half(static_cast<double>(__half2float(a)) + __half2float(b));
}
inline __half __hmul(__half a, __half b) {
  return __double2half(static_cast<double>(__half2float(a)) * __half2float(b));
}
inline bool __hisnan(__half value) { return std::isnan(__half2float(value)); }

inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __double2bfloat16(static_cast<double>(__bfloat162float(a)) + __bfloat162float(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __double2bfloat16(static_cast<double>(__bfloat162float(a)) * __bfloat162float(b));
}
inline bool __hisnan(__nv_bfloat16 value) { return std::isnan(__bfloat162float(value)); }
