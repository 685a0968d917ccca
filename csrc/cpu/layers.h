// What the glue of network layers shares.
#pragma once

#include "common/numeric.h"
#include "glue/tensor_list.h"

namespace pfl::cpu {

// Multiplications that are worth waking another thread for.
inline constexpr int64_t kFewestParallelProducts = 1 << 20;

// The type of a tensor of a layer; fails unless it is as the kernels take it.
inline DType checked_layer(const char* op, const char* role, const glue::Tensor& t, int64_t dims,
                           const glue::Tensor& like) {
  using glue::ScalarType;
  const bool floats = t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double;
  if (!floats || t.scalar_type() != like.scalar_type() || !t.is_cpu() || t.dim() != dims || !t.is_contiguous()) {
    glue::fail(op, ": ", role, " is ", glue::describe(t), "; a contiguous float32 or float64 tensor of ", dims,
               " dimensions on the CPU is accepted, of the type of the others");
  }
  return t.scalar_type() == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace pfl::cpu
