// Which instruction set the CPU kernels use. Every kernel file is built once for each set into its own namespace; the
// choice is made at run time, so one library runs on every machine of an architecture.
#pragma once

namespace pfl::cpu {

enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The best set this machine has, unless pfl_ext_set_isa chose another.
Isa current_isa();

}  // namespace pfl::cpu

// Declares a family's kernel table in the namespace of each instruction set, and `name()`, the one to call.
#if defined(__x86_64__)
#define PFL_DECLARE_KERNELS(Table, name) \
  namespace baseline {                   \
  extern const Table name;               \
  }                                      \
  namespace avx2 {                       \
  extern const Table name;               \
  }                                      \
  namespace avx512 {                     \
  extern const Table name;               \
  }                                      \
  inline const Table& name() {           \
    switch (current_isa()) {             \
      case Isa::kAvx512:                 \
        return avx512::name;             \
      case Isa::kAvx2:                   \
        return avx2::name;               \
      default:                           \
        return baseline::name;           \
    }                                    \
  }
#else
#define PFL_DECLARE_KERNELS(Table, name) \
  namespace baseline {                   \
  extern const Table name;               \
  }                                      \
  inline const Table& name() { return baseline::name; }
#endif
