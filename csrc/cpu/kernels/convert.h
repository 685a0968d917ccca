// Blocks of a storage type to and from its accumulate type.
#pragma once

#include <type_traits>

#include "common/numeric.h"

namespace pfl::cpu {

template <typename T>
constexpr bool kIsAccumulateType = sizeof(T) >= 4;

// The values themselves where no conversion is needed, otherwise `buffer` filled with them.
template <typename T>
[[maybe_unused]] static inline const accumulate_t<T>* as_accumulate(const T* x, int64_t n, accumulate_t<T>* buffer) {
  if constexpr (kIsAccumulateType<T>) {
    (void)n, (void)buffer;
    return x;
  } else {
    int64_t i = 0;
#if defined(__F16C__)
    // gcc 12 does not vectorise the scalar conversion.
    if constexpr (std::is_same_v<T, half>) {
      for (; i + 8 <= n; i += 8) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(packed));
      }
    }
#endif
    for (; i < n; ++i) buffer[i] = to_accumulate(x[i]);
    return buffer;
  }
}

template <typename T>
[[maybe_unused]] static inline void store_accumulated(const accumulate_t<T>* x, int64_t n, T* out) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, half>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), packed);
    }
  }
#endif
  for (; i < n; ++i) from_accumulate(x[i], out + i);
}

}  // namespace pfl::cpu
