// Storage types, the type each one is accumulated in, and the conversions between the two.
#pragma once

#include <cstring>

#include "common/platform.h"

#if !defined(__CUDACC__) && !defined(PFL_EMULATOR) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace pfl {

// Storage only: 16 bits that are converted to float before anything is computed with them.
struct half {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

// Arithmetic happens in float for the half types and in the type itself otherwise.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename AccumulateType<T>::type;

template <typename To, typename From>
PFL_HD To bit_copy(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

#if defined(__CUDA_ARCH__) || defined(PFL_EMULATOR)

PFL_HD float to_accumulate(half x) { return __half2float(__ushort_as_half(x.bits)); }
PFL_HD float to_accumulate(bfloat16 x) { return __bfloat162float(__ushort_as_bfloat16(x.bits)); }
PFL_HD void from_accumulate(float x, half* out) { out->bits = __half_as_ushort(__float2half_rn(x)); }
PFL_HD void from_accumulate(float x, bfloat16* out) { out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

#else

PFL_HD float to_accumulate(bfloat16 x) { return bit_copy<float>(static_cast<uint32_t>(x.bits) << 16); }

PFL_HD void from_accumulate(float x, bfloat16* out) {
  const uint32_t bits = bit_copy<uint32_t>(x);
  // Round to nearest even by adding just below half a unit, or half a unit when the kept part is odd. NaN is set
  // apart: the addition could carry it into infinity. Written without a branch so that loops over it vectorise.
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

#if defined(__F16C__) && !defined(__CUDACC__)

PFL_HD float to_accumulate(half x) { return _cvtsh_ss(x.bits); }
PFL_HD void from_accumulate(float x, half* out) {
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}

#else

PFL_HD float to_accumulate(half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_copy<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bit_copy<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24, exact
  return bit_copy<float>(sign | bit_copy<uint32_t>(subnormal));
}

PFL_HD void from_accumulate(float x, half* out) {
  const uint32_t bits = bit_copy<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  } else if (magnitude >= 0x477ff000u) {  // 65520: halfway between the largest half and the next step rounds to inf
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal
    const uint32_t rebased = magnitude - (112u << 23);
    out->bits = static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  } else {
    // Adding 0.5 lets the adder itself round to a multiple of 2^-24, the spacing of the subnormals.
    const float shifted = bit_copy<float>(magnitude) + 0.5f;
    out->bits = static_cast<uint16_t>(sign | (bit_copy<uint32_t>(shifted) - 0x3f000000u));
  }
}

#endif  // __F16C__
#endif  // device or emulator

PFL_HD float to_accumulate(float x) { return x; }
PFL_HD double to_accumulate(double x) { return x; }
PFL_HD void from_accumulate(float x, float* out) { *out = x; }
PFL_HD void from_accumulate(double x, double* out) { *out = x; }

// Infinity or NaN, by the exponent bits: no comparison, so that loops over it vectorise without fast-math.
PFL_HD bool is_nonfinite(half x) { return (x.bits & 0x7c00u) == 0x7c00u; }
PFL_HD bool is_nonfinite(bfloat16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }
PFL_HD bool is_nonfinite(float x) { return (bit_copy<uint32_t>(x) & 0x7f800000u) == 0x7f800000u; }
PFL_HD bool is_nonfinite(double x) { return (bit_copy<uint64_t>(x) & 0x7ff0000000000000ull) == 0x7ff0000000000000ull; }

// The floating types that the kernels are written for, as the glue and the planner name them.
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

constexpr int64_t item_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) for the storage type behind `dtype`.
template <typename F>
[[maybe_unused]] static inline auto visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(TypeTag<double>{});
    case DType::kFloat16:
      return f(TypeTag<half>{});
    case DType::kBFloat16:
      return f(TypeTag<bfloat16>{});
    default:
      return f(TypeTag<float>{});
  }
}

}  // namespace pfl
