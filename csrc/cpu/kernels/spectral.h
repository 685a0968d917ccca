// The passes over half spectra over raw pointers, serial: the glue cuts the work.
// `dtype` is float32 or float64; complex numbers are pairs of it.
#pragma once

#include "common/spectral.h"
#include "cpu/isa.h"

namespace pfl::cpu {

// What a thread takes at once, and what one partial sum covers: results do not depend on the number of threads.
constexpr int64_t kBinsPerChunk = 4096;

struct SpectralKernels {
  // Over bins [begin, end) of one row, all within the range: sums[0] = sum p, sums[1] = sum p log(p / q).
  void (*sums)(DType dtype, SpectrumRange range, int64_t begin, int64_t end, const void* spectrum, const void* log_q,
               double* sums);
  // spectrum = share * scale * (log(p / q) + offset) * direction, zero beyond the range.
  void (*seed)(DType dtype, SpectrumRange range, int64_t begin, int64_t end, void* spectrum, const void* log_q,
               double scale, double offset);
  // log_q = log max(magnitude, tiny); sum = sum of the magnitudes so floored.
  void (*teacher)(DType dtype, SpectrumRange range, int64_t begin, int64_t end, const void* spectrum, void* log_q,
                  double* sum);
  // Bins [begin, end) of n / 2 + 1: DFTs of `pairs` pairs of interleaved rows, [pairs, n], to the half spectrum of
  // the whole, and from the half spectrum to those DFTs.
  void (*join_rows)(DType dtype, int64_t begin, int64_t end, int64_t n, int64_t pairs, const void* rows,
                    const void* twiddle, void* half_spectrum);
  void (*split_rows)(DType dtype, int64_t begin, int64_t end, int64_t n, int64_t pairs, const void* half_spectrum,
                     const void* twiddle, void* rows);
};

// Pairs of rows that join_rows and split_rows take at most.
constexpr int64_t kMaxPairs = 4;

PFL_DECLARE_KERNELS(SpectralKernels, spectral)

}  // namespace pfl::cpu
