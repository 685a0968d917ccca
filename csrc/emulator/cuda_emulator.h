// Makes a CUDA kernel file compile as ordinary C++ and run on the host. See README.md.
#pragma once

#include "emulator/device_math.h"
#include "emulator/half_types.h"
#include "emulator/launch.h"
#include "emulator/memory_access.h"
#include "emulator/scheduler.h"
#include "emulator/synchronization.h"
#include "emulator/vector_types.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __constant__ inline
#define __forceinline__ inline __attribute__((always_inline))
// Not alignas: CUDA allows it after the storage class too.
#define __align__(bytes) __attribute__((aligned(bytes)))

// One variable for all threads of a block: they run on one host thread. A static variable would do as well, but the
// thread-local ones lie together in one segment which the emulator finds and poisons before each block; a section
// attribute, the other way to collect them, is ignored on the static variables of templates.
#define __shared__ static thread_local

// Declares `Type* name`, the block's dynamic shared memory.
#define PFL_DYNAMIC_SHARED(Type, name) Type* name = static_cast<Type*>(pfl::emulator::dynamic_shared_memory())

// References, so that kernels can read but not write them, and cannot use them as constants (warpSize is none on the
// device either).
inline const uint3& threadIdx = pfl::emulator::builtin::thread_index;
inline const uint3& blockIdx = pfl::emulator::builtin::block_index;
inline const dim3& blockDim = pfl::emulator::builtin::block_dim;
inline const dim3& gridDim = pfl::emulator::builtin::grid_dim;
inline const int& warpSize = pfl::emulator::builtin::warp_size;

inline long long clock64() {
  static long long readings = 0;  // monotonic, and the same in every run
  return ++readings;
}

[[noreturn]] inline void __trap(PFL_HERE) { pfl::emulator::fail({"__trap", where}, "the kernel gave up"); }
