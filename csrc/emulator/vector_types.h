// CUDA's built-in vector types with the alignment CUDA gives them, so that a vector access which is
// misaligned on the device is misaligned here too and UBSan reports it.
#pragma once

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

namespace pfl::emulator {

// Only vectors of 2 and 4 are one access on the device; it never needs more than 16 bytes of alignment.
template <typename T, int n>
inline constexpr unsigned long vector_alignment = n * sizeof(T) < 16 ? n * sizeof(T) : 16;

}  // namespace pfl::emulator

#define PFL_VECTORS_OF_1_AND_3(T, name)                 \
  struct name##1 { T x; };                              \
  struct name##3 { T x, y, z; };                        \
  constexpr name##1 make_##name##1(T x) { return {x}; } \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }

#define PFL_VECTOR_OF_2(T, name)                                             \
  struct alignas(pfl::emulator::vector_alignment<T, 2>) name##2 { T x, y; }; \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }

#define PFL_VECTOR_OF_4(T, name)                                                   \
  struct alignas(pfl::emulator::vector_alignment<T, 4>) name##4 { T x, y, z, w; }; \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

#define PFL_VECTORS(T, name)      \
  PFL_VECTORS_OF_1_AND_3(T, name) \
  PFL_VECTOR_OF_2(T, name)        \
  PFL_VECTOR_OF_4(T, name)

PFL_VECTORS(signed char, char)
PFL_VECTORS(unsigned char, uchar)
PFL_VECTORS(short, short)
PFL_VECTORS(unsigned short, ushort)
PFL_VECTORS(int, int)
PFL_VECTORS(float, float)

// uint3 is defined above because dim3 needs it.
struct uint1 {
  unsigned x;
};
constexpr uint1 make_uint1(unsigned x) { return {x}; }
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
PFL_VECTOR_OF_2(unsigned, uint)
PFL_VECTOR_OF_4(unsigned, uint)

// No vectors of four 8-byte elements: CUDA 13 deprecates double4 and longlong4 because their alignment is
// about to change, so kernels here must not depend on them.
PFL_VECTORS_OF_1_AND_3(long long, longlong)
PFL_VECTOR_OF_2(long long, longlong)
PFL_VECTORS_OF_1_AND_3(unsigned long long, ulonglong)
PFL_VECTOR_OF_2(unsigned long long, ulonglong)
PFL_VECTORS_OF_1_AND_3(double, double)
PFL_VECTOR_OF_2(double, double)

#undef PFL_VECTORS
#undef PFL_VECTORS_OF_1_AND_3
#undef PFL_VECTOR_OF_2
#undef PFL_VECTOR_OF_4
