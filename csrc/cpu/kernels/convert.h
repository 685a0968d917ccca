// Blocks of a storage type to and from its accumulate type.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/numeric.h"

namespace pfl::cpu::PFL_ISA {
namespace {

template <typename T>
constexpr bool kIsAccumulateType = sizeof(T) >= 4;

#if defined(__AVX2__)
// Half types as vectors of floats. By hand: gcc 12 does not vectorise the conversion of halves, and widens that of
// bfloat16 in four steps.
template <typename T>
struct Converted {
  typedef float type __attribute__((vector_size(32)));
};
#if defined(__AVX512F__)
// Without intrinsics, which make gcc 12 warn of its own headers; halves have none but these.
template <>
struct Converted<bfloat16> {
  typedef float type __attribute__((vector_size(64)));
};
#endif
template <typename T>
using converted_t = typename Converted<T>::type;
template <typename T>
constexpr int kConvertedAtOnce = sizeof(converted_t<T>) / sizeof(float);

// As many of another type.
template <typename N>
using as_many_t __attribute__((vector_size(sizeof(N) * kConvertedAtOnce<bfloat16>))) = N;

[[maybe_unused]] inline converted_t<bfloat16> convert(const bfloat16* x) {
  as_many_t<uint16_t> packed;
  memcpy(&packed, x, sizeof(packed));
  return (converted_t<bfloat16>)(__builtin_convertvector(packed, as_many_t<uint32_t>) << 16);
}
[[maybe_unused]] inline converted_t<half> convert(const half* x) {
  return (converted_t<half>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// from_accumulate of common/numeric.h.
[[maybe_unused]] inline void convert_back(converted_t<bfloat16> x, bfloat16* out) {
  const auto bits = (as_many_t<uint32_t>)x;
  const as_many_t<uint32_t> upper = bits >> 16;
  const as_many_t<uint32_t> rounded = (bits + ((upper & 1) + 0x7fff)) >> 16;
  const as_many_t<uint32_t> kept = x != x ? upper | 0x40 : rounded;
  const auto packed = __builtin_convertvector(kept, as_many_t<uint16_t>);
  memcpy(out, &packed, sizeof(packed));
}
[[maybe_unused]] inline void convert_back(converted_t<half> x, half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// The values themselves where no conversion is needed, otherwise `buffer` filled with them.
template <typename T>
[[maybe_unused]] inline const accumulate_t<T>* as_accumulate(const T* x, int64_t n, accumulate_t<T>* buffer) {
  if constexpr (kIsAccumulateType<T>) {
    (void)n, (void)buffer;
    return x;
  } else {
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + kConvertedAtOnce<T> <= n; i += kConvertedAtOnce<T>) {
      const converted_t<T> values = convert(x + i);
      memcpy(buffer + i, &values, sizeof(values));
    }
#endif
    for (; i < n; ++i) buffer[i] = to_accumulate(x[i]);
    return buffer;
  }
}

template <typename T>
[[maybe_unused]] inline void store_accumulated(const accumulate_t<T>* x, int64_t n, T* out) {
  int64_t i = 0;
#if defined(__AVX2__)
  if constexpr (!kIsAccumulateType<T>) {
    for (; i + kConvertedAtOnce<T> <= n; i += kConvertedAtOnce<T>) {
      converted_t<T> values;
      memcpy(&values, x + i, sizeof(values));
      convert_back(values, out + i);
    }
  }
#endif
  for (; i < n; ++i) from_accumulate(x[i], out + i);
}

}  // namespace
}  // namespace pfl::cpu::PFL_ISA
