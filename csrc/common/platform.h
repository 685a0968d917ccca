// One spelling for code that is compiled four ways: per CPU instruction set, by nvcc for the host, by nvcc for the
// device, and by the host compiler for the emulator.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(PFL_EMULATOR)
#include "emulator/cuda_emulator.h"
#elif defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// Templates that each declare `extern __shared__ T x[]` clash over the type of x, hence one untyped symbol.
#define PFL_DYNAMIC_SHARED(Type, name)                                \
  extern __shared__ __align__(16) unsigned char pfl_dynamic_shared[]; \
  Type* name = reinterpret_cast<Type*>(pfl_dynamic_shared)
#endif

// Functions of the per-element maths. `static` gives every object file its own copy: with external linkage the linker
// would keep one of the copies built for different instruction sets, possibly the AVX-512 one, for all of them.
#if defined(__CUDACC__)
#define PFL_HD static __host__ __device__ __forceinline__
#define PFL_HD_MEMBER __host__ __device__ __forceinline__
#else
#define PFL_HD [[maybe_unused]] static inline __attribute__((always_inline))
// Always inlined, so that there is no copy for the linker to choose from.
#define PFL_HD_MEMBER inline __attribute__((always_inline))
#endif
