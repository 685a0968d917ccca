#include "cpu/isa.h"

#include <atomic>
#include <cstring>

namespace pfl::cpu {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

bool machine_has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512cd") && machine_has(Isa::kAvx2);
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
             __builtin_cpu_supports("bmi2");
    default:
      return true;
  }
#else
  return isa == Isa::kBaseline;
#endif
}

Isa best_isa() {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (machine_has(isa)) return isa;
  }
  return Isa::kBaseline;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

}  // namespace pfl::cpu

// Plain C, called through ctypes by pfl_ext/_native.py: csrc knows nothing of Python.
extern "C" {

__attribute__((visibility("default"))) const char* pfl_ext_isa() {
  return pfl::cpu::kNames[static_cast<int>(pfl::cpu::current_isa())];
}

__attribute__((visibility("default"))) int pfl_ext_has_isa(const char* name) {
  for (int i = 0; i < 3; ++i) {
    if (std::strcmp(name, pfl::cpu::kNames[i]) == 0) return pfl::cpu::machine_has(static_cast<pfl::cpu::Isa>(i));
  }
  return 0;
}

// 1 when the machine has the set and it is now in use; otherwise 0 and nothing is changed.
__attribute__((visibility("default"))) int pfl_ext_set_isa(const char* name) {
  if (!pfl_ext_has_isa(name)) return 0;
  for (int i = 0; i < 3; ++i) {
    if (std::strcmp(name, pfl::cpu::kNames[i]) == 0) pfl::cpu::chosen().store(static_cast<pfl::cpu::Isa>(i));
  }
  return 1;
}
}
