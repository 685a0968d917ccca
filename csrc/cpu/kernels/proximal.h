// The proximal step and the squared distance over raw pointers, serial: the glue calls these from its threads.
#pragma once

#include "common/proximal.h"
#include "cpu/isa.h"

namespace pfl::cpu {

// All over elements [offset, offset + n).
struct ProximalKernels {
  // `anchor` is not read with lam = 0, `buffer` not with Momentum::kNone.
  void (*step)(DType dtype, const ProximalStep& how, int64_t offset, int64_t n, const void* grad, const void* anchor,
               void* weight, void* buffer);
  // sum (a - b)^2
  double (*distance)(DType dtype, int64_t offset, int64_t n, const void* a, const void* b);
  // to_a = scale * (a - b), to_b = -to_a; either may be null.
  void (*gradient)(DType dtype, int64_t offset, int64_t n, double scale, const void* a, const void* b, void* to_a,
                   void* to_b);
};

PFL_DECLARE_KERNELS(ProximalKernels, proximal)

}  // namespace pfl::cpu
