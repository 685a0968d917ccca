// Norms, perturbation and restoration over raw pointers, serial: the glue cuts the work and calls these from its
// threads.
#pragma once

#include "common/sharpness.h"
#include "cpu/isa.h"

namespace pfl::cpu {

struct SharpnessKernels {
  // Sum of x^2, or of (x - y)^2 with y, over elements [offset, offset + n).
  double (*squares)(DType dtype, int64_t offset, int64_t n, const void* x, const void* y);
  PowerSum (*powers)(DType dtype, int64_t offset, int64_t n, const void* x, double q);
  // backup = weight, then weight += eps, over elements [offset, offset + n). A scale of zero leaves the weight alone.
  // `stream` writes the backup past the caches: right where it would not stay in them anyway.
  void (*perturb)(DType dtype, const Perturbation& how, int64_t offset, int64_t n, double scale, double maximum,
                  const void* grad, void* weight, void* backup, bool stream);
  void (*copy)(int64_t bytes, const void* from, void* to, bool stream);
};

PFL_DECLARE_KERNELS(SharpnessKernels, sharpness)

}  // namespace pfl::cpu
