// Bindings with which the tests check types, conversions and device maths against numpy. Everything runs in a kernel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <utility>

#include "emulator/cuda_emulator.h"

namespace py = pybind11;

namespace {

using pfl::emulator::launch;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Function is the type of a lambda that captures nothing.
template <typename Function, typename Out, typename... In>
__global__ void map(std::int64_t n, Out* out, const In*... in) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = Function{}(in[i]...);
}

template <typename Function, typename Out, typename First, typename... In>
Array<Out> apply(Array<First> first, Array<In>... in) {
  constexpr unsigned kThreads = 256;
  Array<Out> out(first.size());
  launch(map<Function, Out, First, In...>, static_cast<unsigned>((first.size() + kThreads - 1) / kThreads), kThreads, 0,
         std::int64_t{first.size()}, out.mutable_data(), first.data(), in.data()...);
  return out;
}

// Binds a function of scalars as one of arrays, with the types of its signature.
template <typename Function, typename Out, typename... In>
void bind_signature(py::module_& m, const char* name, Out (Function::*)(In...) const) {
  m.def(name, &apply<Function, Out, In...>);
}

template <typename Function>
void bind(py::module_& m, const char* name, Function) {
  bind_signature<Function>(m, name, &Function::operator());
}

#define PFL_BIND_1(name, T) bind(m, #name, [](T x) { return name(x); })
#define PFL_BIND_2(name, T) bind(m, #name, [](T x, T y) { return name(x, y); })
#define PFL_BIND_3(name, T) bind(m, #name, [](T x, T y, T z) { return name(x, y, z); })

#define PFL_LAYOUT(T) layout[#T] = py::make_tuple(sizeof(T), alignof(T))

}  // namespace

void bind_selftest_numerics(py::module_& parent) {
  auto m = parent.def_submodule("numerics", "Device maths, applied to each element of an array.");

  // 16-bit types travel as their bits.
  bind(m, "half_to_float", [](unsigned short x) { return __half2float(__ushort_as_half(x)); });
  bind(m, "float_to_half", [](float x) { return __half_as_ushort(__float2half_rn(x)); });
  bind(m, "float_to_half_by_default", [](float x) { return __half_as_ushort(__float2half(x)); });
  bind(m, "double_to_half", [](double x) { return __half_as_ushort(__double2half(x)); });
  bind(m, "bfloat16_to_float", [](unsigned short x) { return __bfloat162float(__ushort_as_bfloat16(x)); });
  bind(m, "float_to_bfloat16", [](float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); });
  bind(m, "float_to_bfloat16_by_default", [](float x) { return __bfloat16_as_ushort(__float2bfloat16(x)); });
  bind(m, "double_to_bfloat16", [](double x) { return __bfloat16_as_ushort(__double2bfloat16(x)); });
  bind(m, "half_sum", [](unsigned short x, unsigned short y) {
    return __half_as_ushort(__hadd(__ushort_as_half(x), __ushort_as_half(y)));
  });
  bind(m, "half_product", [](unsigned short x, unsigned short y) {
    return __half_as_ushort(__hmul(__ushort_as_half(x), __ushort_as_half(y)));
  });
  bind(m, "half_of_neighbouring_lane",
       [](unsigned short x) { return __half_as_ushort(__shfl_xor_sync(0xFFFFFFFFu, __ushort_as_half(x), 1)); });
  bind(m, "bfloat16_of_neighbouring_lane",
       [](unsigned short x) { return __bfloat16_as_ushort(__shfl_xor_sync(0xFFFFFFFFu, __ushort_as_bfloat16(x), 1)); });

  // Pairs: back and forth through every pair intrinsic, low element first.
  bind(m, "low_of_half2", [](float x, float y) { return __low2float(__floats2half2_rn(x, y)); });
  bind(m, "high_of_half2", [](float x, float y) { return __high2float(__floats2half2_rn(x, y)); });
  bind(m, "x_of_half22float2", [](float x, float y) { return __half22float2(__float22half2_rn({x, y})).x; });
  bind(m, "y_of_half22float2", [](float x, float y) { return __half22float2(__float22half2_rn({x, y})).y; });
  bind(m, "low_of_bfloat162", [](float x, float y) { return __low2float(__floats2bfloat162_rn(x, y)); });
  bind(m, "high_of_bfloat162", [](float x, float y) { return __high2float(__floats2bfloat162_rn(x, y)); });
  bind(m, "x_of_bfloat1622float2",
       [](float x, float y) { return __bfloat1622float2(__float22bfloat162_rn({x, y})).x; });
  bind(m, "y_of_bfloat1622float2",
       [](float x, float y) { return __bfloat1622float2(__float22bfloat162_rn({x, y})).y; });

  PFL_BIND_1(rsqrtf, float);
  PFL_BIND_1(rsqrt, double);
  PFL_BIND_1(__expf, float);
  PFL_BIND_1(__exp10f, float);
  PFL_BIND_1(__logf, float);
  PFL_BIND_1(__log2f, float);
  PFL_BIND_1(__log10f, float);
  PFL_BIND_1(__sinf, float);
  PFL_BIND_1(__cosf, float);
  PFL_BIND_1(__tanf, float);
  PFL_BIND_2(__powf, float);
  PFL_BIND_1(__saturatef, float);
  PFL_BIND_1(__frcp_rn, float);
  PFL_BIND_1(__fsqrt_rn, float);
  PFL_BIND_2(__fdividef, float);
  PFL_BIND_2(__fadd_rn, float);
  PFL_BIND_2(__fsub_rn, float);
  PFL_BIND_2(__fmul_rn, float);
  PFL_BIND_2(__fdiv_rn, float);
  PFL_BIND_3(__fmaf_rn, float);
  PFL_BIND_3(fmaf, float);
  PFL_BIND_2(__dadd_rn, double);
  PFL_BIND_2(__dsub_rn, double);
  PFL_BIND_2(__dmul_rn, double);
  PFL_BIND_2(__ddiv_rn, double);
  PFL_BIND_3(__fma_rn, double);
  PFL_BIND_1(sinpi, double);
  PFL_BIND_1(cospi, double);
  PFL_BIND_1(sinpif, float);
  PFL_BIND_1(cospif, float);
  bind(m, "sin_of_sincospi", [](double x) {
    double sine, cosine;
    sincospi(x, &sine, &cosine);
    return sine;
  });
  bind(m, "cos_of_sincospi", [](double x) {
    double sine, cosine;
    sincospi(x, &sine, &cosine);
    return cosine;
  });
  bind(m, "sin_of_sincospif", [](float x) {
    float sine, cosine;
    sincospif(x, &sine, &cosine);
    return sine;
  });
  bind(m, "cos_of_sincospif", [](float x) {
    float sine, cosine;
    sincospif(x, &sine, &cosine);
    return cosine;
  });

  PFL_BIND_1(__popc, unsigned);
  PFL_BIND_1(__popcll, unsigned long long);
  PFL_BIND_1(__clz, int);
  PFL_BIND_1(__clzll, long long);
  PFL_BIND_1(__ffs, int);
  PFL_BIND_1(__ffsll, long long);
  PFL_BIND_1(__brev, unsigned);
  PFL_BIND_2(__mulhi, int);
  PFL_BIND_2(__umulhi, unsigned);
  PFL_BIND_2(__umul64hi, unsigned long long);

  PFL_BIND_1(__float_as_int, float);
  PFL_BIND_1(__int_as_float, int);
  PFL_BIND_1(__float_as_uint, float);
  PFL_BIND_1(__uint_as_float, unsigned);
  PFL_BIND_1(__double_as_longlong, double);
  PFL_BIND_1(__longlong_as_double, long long);
  PFL_BIND_1(__float2int_rn, float);
  PFL_BIND_1(__float2int_rz, float);
  PFL_BIND_1(__float2int_rd, float);
  PFL_BIND_1(__float2int_ru, float);
  PFL_BIND_1(__double2ll_rn, double);
  PFL_BIND_1(__double2ull_rz, double);

  bind(m, "min_int", [](int x, int y) { return min(x, y); });
  bind(m, "max_int", [](int x, int y) { return max(x, y); });
  bind(m, "min_float", [](float x, float y) { return min(x, y); });
  bind(m, "max_float", [](float x, float y) { return max(x, y); });
  bind(m, "max_mixed", [](float x, double y) { return max(x, y); });
  bind(m, "min_unsigned_and_int", [](unsigned x, int y) { return min(x, y); });
  bind(m, "max_long", [](long x, long y) { return max(x, y); });
  bind(m, "abs_float", [](float x) { return abs(x); });
  bind(m, "abs_long_long", [](long long x) { return abs(x); });
  bind(m, "clock_advances", [](int) { return clock64() < clock64() ? 1 : 0; });

  m.def("vector_layouts", [] {
    py::dict layout;
    PFL_LAYOUT(char2);
    PFL_LAYOUT(char4);
    PFL_LAYOUT(uchar4);
    PFL_LAYOUT(short2);
    PFL_LAYOUT(short4);
    PFL_LAYOUT(ushort4);
    PFL_LAYOUT(int2);
    PFL_LAYOUT(int3);
    PFL_LAYOUT(int4);
    PFL_LAYOUT(uint2);
    PFL_LAYOUT(uint3);
    PFL_LAYOUT(uint4);
    PFL_LAYOUT(longlong2);
    PFL_LAYOUT(ulonglong2);
    PFL_LAYOUT(float1);
    PFL_LAYOUT(float2);
    PFL_LAYOUT(float3);
    PFL_LAYOUT(float4);
    PFL_LAYOUT(double2);
    PFL_LAYOUT(double3);
    PFL_LAYOUT(__half);
    PFL_LAYOUT(__half2);
    PFL_LAYOUT(__nv_bfloat16);
    PFL_LAYOUT(__nv_bfloat162);
    return layout;
  });
}
