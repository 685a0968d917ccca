// Distillation losses over raw pointers, serial: the glue cuts the rows and calls these from its threads.
#pragma once

#include "common/distillation.h"
#include "cpu/isa.h"

namespace pfl::cpu {

// Rows of C logits. A is the accumulate type of `dtype`.
struct DistillationRows {
  DType dtype;
  DistillationOptions options;
  int64_t rows;
  int64_t classes;
  int64_t teachers;
  const void* student;
  const void* const* teacher;
  const double* teacher_weights;  // adding up to 1
  const void* target;       // null without a hard term; int64 [rows], or A [rows, classes] for the multi-label form
  const void* row_weights;  // A [rows] or null
  double gradient_scale;
  void* losses;    // A [rows]
  void* gradient;  // [rows, classes], or null
};

struct DistillationKernels {
  // Rows that are worked on together: ranges of rows must begin at a multiple of it.
  int64_t (*rows_at_once)(int64_t classes);
  // Bytes of scratch memory for one thread, 64-byte aligned.
  int64_t (*workspace)(DType dtype, int64_t classes);
  void (*run)(const DistillationRows& rows, int64_t begin, int64_t end, void* workspace);
  // Adds to *total the weights of rows [0, rows) that count (those of their labels, for the multi-label form) and
  // returns the first row with a target out of range, or -1.
  int64_t (*count)(const DistillationRows& rows, double* total);
};

PFL_DECLARE_KERNELS(DistillationKernels, distillation)

}  // namespace pfl::cpu
