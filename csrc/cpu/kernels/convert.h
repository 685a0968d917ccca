// Blocks of a storage type to and from its accumulate type.
#pragma once

#include <type_traits>

#include "common/numeric.h"

namespace pfl::cpu {

template <typename T>
constexpr bool kIsAccumulateType = sizeof(T) >= 4;

#if defined(__AVX2__)
// Half types as vectors of floats. By hand: gcc 12 does not vectorise the conversion of halves, and widens that of
// bfloat16 in four steps. By eight on AVX-512 too, whose intrinsics make gcc 12 warn of its own headers.
constexpr int kConvertedAtOnce = 8;
typedef __m256 Converted;

[[maybe_unused]] static inline Converted load_converted(const float* x) { return _mm256_loadu_ps(x); }
[[maybe_unused]] static inline void store_converted(float* out, Converted x) { _mm256_storeu_ps(out, x); }

[[maybe_unused]] static inline Converted convert(const bfloat16* x) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
}
[[maybe_unused]] static inline Converted convert(const half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// from_accumulate of common/numeric.h.
[[maybe_unused]] static inline void convert_back(Converted x, bfloat16* out) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i half_unit = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_unit), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i kept = _mm256_blendv_epi8(rounded, quiet, is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
}
[[maybe_unused]] static inline void convert_back(Converted x, half* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// The values themselves where no conversion is needed, otherwise `buffer` filled with them.
template <typename T>
[[maybe_unused]] static inline const accumulate_t<T>* as_accumulate(const T* x, int64_t n, accumulate_t<T>* buffer) {
  if constexpr (kIsAccumulateType<T>) {
    (void)n, (void)buffer;
    return x;
  } else {
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + kConvertedAtOnce <= n; i += kConvertedAtOnce) store_converted(buffer + i, convert(x + i));
#endif
    for (; i < n; ++i) buffer[i] = to_accumulate(x[i]);
    return buffer;
  }
}

template <typename T>
[[maybe_unused]] static inline void store_accumulated(const accumulate_t<T>* x, int64_t n, T* out) {
  int64_t i = 0;
#if defined(__AVX2__)
  if constexpr (!kIsAccumulateType<T>) {
    for (; i + kConvertedAtOnce <= n; i += kConvertedAtOnce) convert_back(load_converted(x + i), out + i);
  }
#endif
  for (; i < n; ++i) from_accumulate(x[i], out + i);
}

}  // namespace pfl::cpu
