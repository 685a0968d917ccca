// Averaging over raw pointers, serial: the glue cuts the work and calls these from its threads.
#pragma once

#include "common/numeric.h"
#include "cpu/isa.h"

namespace pfl::cpu {

struct AveragingKernels {
  // Elements [offset, offset + n) of
  //   out = sum_c weights[c] * x[c]                                without a server,
  //   out = server + lr * sum_c weights[c] * (x[c] - server)       with one.
  // Products are rounded before they are added, clients are added in order: the same bits on every instruction set.
  void (*average)(DType dtype, int64_t offset, int64_t n, int64_t clients, const void* const* x, const double* weights,
                  const void* server, double lr, void* out);
  // sum += weight * x, with `sum` in the accumulate type of `dtype`.
  void (*accumulate)(DType dtype, int64_t offset, int64_t n, const void* x, double weight, void* sum);
  bool (*any_nonfinite)(DType dtype, int64_t offset, int64_t n, const void* x);
};

PFL_DECLARE_KERNELS(AveragingKernels, averaging)

}  // namespace pfl::cpu
