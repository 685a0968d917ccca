// Atomics, fences and loads and stores with a cache hint.
//
// One CUDA thread runs at a time, so that a plain read-modify-write is atomic; what is emulated is the order, by
// letting other threads run before some of the atomics. Alignment is checked in every build, as the device faults on
// it.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "emulator/half_types.h"
#include "emulator/scheduler.h"
#include "emulator/synchronization.h"

namespace pfl::emulator {

template <typename T>
void require_alignment(const CallSite& site, const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) {
    fail(site, "misaligned address: " + std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
                   " is not a multiple of " + std::to_string(alignof(T)));
  }
}

// Replaces *address by update(*address) and returns what was there.
template <typename T, typename Update>
T read_modify_write(const CallSite& site, T* address, Update update) {
  interleave(site);
  require_alignment(site, address);
  const T old = *address;
  *address = update(old);
  return old;
}

template <typename T, typename... Choices>
concept OneOf = (std::same_as<T, Choices> || ...);

template <typename T>
concept Word = OneOf<T, int, unsigned, unsigned long long>;

// atomicMin and atomicMax also exist for signed 64-bit integers.
template <typename T>
concept OrderedWord = Word<T> || OneOf<T, long long>;

}  // namespace pfl::emulator

// Keeps T from being deduced from the operands: atomicAdd(&float_counter, 1) is legal CUDA.
template <typename T>
using PflOperand = std::type_identity_t<T>;

template <typename T>
  requires(pfl::emulator::Word<T> || pfl::emulator::OneOf<T, float, double, __half, __nv_bfloat16>)
T atomicAdd(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicAdd", where}, address, [&](T old) -> T {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // integers wrap around on the device
      return static_cast<T>(static_cast<Unsigned>(old) + static_cast<Unsigned>(value));
    } else if constexpr (std::is_floating_point_v<T>) {
      return old + value;
    } else {
      return __hadd(old, value);
    }
  });
}

template <typename T>
  requires pfl::emulator::OneOf<T, int, unsigned>
T atomicSub(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicSub", where}, address, [&](T old) {
    return static_cast<T>(static_cast<unsigned>(old) - static_cast<unsigned>(value));
  });
}

template <pfl::emulator::OrderedWord T>
T atomicMin(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicMin", where}, address,
                                          [&](T old) { return value < old ? value : old; });
}

template <pfl::emulator::OrderedWord T>
T atomicMax(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicMax", where}, address,
                                          [&](T old) { return old < value ? value : old; });
}

template <typename T>
  requires(pfl::emulator::Word<T> || pfl::emulator::OneOf<T, float>)
T atomicExch(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicExch", where}, address, [&](T) { return value; });
}

template <typename T>
  requires(pfl::emulator::Word<T> || pfl::emulator::OneOf<T, unsigned short>)
T atomicCAS(T* address, PflOperand<T> expected, PflOperand<T> desired, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicCAS", where}, address,
                                          [&](T old) { return old == expected ? desired : old; });
}

template <pfl::emulator::Word T>
T atomicAnd(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicAnd", where}, address, [&](T old) { return old & value; });
}

template <pfl::emulator::Word T>
T atomicOr(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicOr", where}, address, [&](T old) { return old | value; });
}

template <pfl::emulator::Word T>
T atomicXor(T* address, PflOperand<T> value, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicXor", where}, address, [&](T old) { return old ^ value; });
}

inline unsigned atomicInc(unsigned* address, unsigned last, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicInc", where}, address,
                                          [&](unsigned old) { return old >= last ? 0u : old + 1; });
}

inline unsigned atomicDec(unsigned* address, unsigned last, PFL_HERE) {
  return pfl::emulator::read_modify_write({"atomicDec", where}, address,
                                          [&](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

// Memory is sequentially consistent here, see README.md.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// A polling loop must give the thread it waits for a chance to run.
inline void __nanosleep(unsigned, PFL_HERE) { pfl::emulator::interleave({"__nanosleep", where}); }

#define PFL_HINTED_LOAD(name)                                     \
  template <typename T>                                           \
  T name(const T* address, PFL_HERE) {                            \
    pfl::emulator::require_alignment<T>({#name, where}, address); \
    return *address;                                              \
  }
PFL_HINTED_LOAD(__ldg)
PFL_HINTED_LOAD(__ldca)
PFL_HINTED_LOAD(__ldcg)
PFL_HINTED_LOAD(__ldcs)
PFL_HINTED_LOAD(__ldcv)
PFL_HINTED_LOAD(__ldlu)
#undef PFL_HINTED_LOAD

#define PFL_HINTED_STORE(name)                                    \
  template <typename T>                                           \
  void name(T* address, PflOperand<T> value, PFL_HERE) {          \
    pfl::emulator::require_alignment<T>({#name, where}, address); \
    *address = value;                                             \
  }
PFL_HINTED_STORE(__stcg)
PFL_HINTED_STORE(__stcs)
PFL_HINTED_STORE(__stwb)
PFL_HINTED_STORE(__stwt)
#undef PFL_HINTED_STORE
