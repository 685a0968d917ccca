// Vectors of the widest kind of the instruction set a file is built for.
#pragma once

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pfl::cpu::PFL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T, int kLanes>
struct Vector {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <typename T>
struct Vector<T, 1> {
  typedef T type;
};
template <typename T, int kLanes>
using vector_t = typename Vector<T, kLanes>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <typename T>
using wide_t = vector_t<T, kLanes<T>>;

template <typename V, typename T>
inline V load(const T* p) {
  V result;
  memcpy(&result, p, sizeof(V));
  return result;
}

// a * b + sum, rounded once wherever the instruction set can: for products of matrices that is a third faster, and
// torch's have no order of their own to keep to.
template <typename T>
inline wide_t<T> multiply_add(wide_t<T> a, wide_t<T> b, wide_t<T> sum) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (wide_t<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
  } else {
    return (wide_t<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    return (wide_t<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
  } else {
    return (wide_t<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
  }
#else
  return sum + a * b;
#endif
}

// All lanes the same number. By subtraction: adding to zeros would turn -0 into 0, and so take an instruction.
template <typename T>
inline wide_t<T> filled(T value) {
  return value - wide_t<T>{};
}

}  // namespace
}  // namespace pfl::cpu::PFL_ISA
