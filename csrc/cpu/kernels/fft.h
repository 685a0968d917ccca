// Complex DFTs in two steps of short ones that stay in the cache, over raw pointers, serial: the caller cuts the work
// into tiles. Numbers in the caller's memory are pairs (re, im); in between they lie in tiles.
//
// A tile holds kLanes sequences side by side, each place as kLanes real parts and then kLanes imaginary parts: every
// operation of a short DFT is one on whole vectors, with no shuffles. An inverse DFT is a forward one of numbers with
// real and imaginary part exchanged, exchanged again at the end.
#pragma once

#include "common/platform.h"
#include "cpu/isa.h"

namespace pfl::cpu {

constexpr int64_t kLanes = 8;
constexpr int64_t kPlace = 2 * kLanes;  // numbers in a place of a tile
constexpr int64_t kLargestRadix = 127;  // prime factors above it make a length awkward
constexpr int64_t kMostPasses = 40;

// A short DFT by Stockham's algorithm: one pass for each radix, whose product is the length.
template <typename A>
struct ShortFft {
  int64_t length = 1;
  int64_t passes = 0;
  struct Pass {
    int64_t radix;
    const A* twiddles;  // [length left / radix][radix - 1] complex
    const A* roots;     // [h][h] pairs cos, sin of 2 pi j k / radix, j and k from 1 to h = radix / 2; above radix 5
  } pass[kMostPasses];
};

// The DFT of a * b numbers, as a matrix [a, b]: of its columns, times exp(-2 pi i k c / (a b)), then of its rows.
template <typename A>
struct TwoStepFft {
  int64_t a = 1, b = 1;
  ShortFft<A> columns, rows;  // of length a and b
  const A* tile_phase;        // [column tiles][a] complex: the factors of a tile's first column
  const A* lane_phase;        // [a] places: what the other columns' factors are of that

  PFL_HD_MEMBER int64_t column_tiles() const { return (b + kLanes - 1) / kLanes; }
  PFL_HD_MEMBER int64_t row_tiles() const { return (a + kLanes - 1) / kLanes; }
  // Numbers between the steps: tiles of kLanes rows, each tile in one piece.
  PFL_HD_MEMBER int64_t between() const { return row_tiles() * b * kPlace; }
  // Numbers of scratch memory that each kernel below needs.
  PFL_HD_MEMBER int64_t scratch() const { return 3 * (a > b ? a : b) * kPlace + kPlace; }
};

// The DFT of n numbers as a convolution with a chirp, through FFTs of another length (see cpu/real_dft.cpp).
template <typename A>
struct ChirpTables {
  int64_t n;
  TwoStepFft<A> fft;
  const A* chirp;         // [n] complex, exp(-i pi k^2 / n)
  const A* chirp_ahead;   // [n], times exp(-i pi k / m)
  const A* chirp_behind;  // [n], times exp(+i pi k / m)
  const A* kernel[2];     // transforms of the conjugate chirp, cyclic and negacyclic, as they lie between the steps
};

template <typename A>
struct FftKernels {
  // A tile of columns of x: x to `between`. The rows of a tile: `between` to out, which may be x.
  void (*columns)(const TwoStepFft<A>& fft, int64_t tile, bool inverse, const A* x, A* between, A* scratch);
  void (*rows)(const TwoStepFft<A>& fft, int64_t tile, bool inverse, A* between, A* out, A* scratch);
  // The rows of a tile in place: transformed; or transformed, multiplied by `kernel` and transformed back, with real
  // and imaginary parts exchanged.
  void (*spread)(const TwoStepFft<A>& fft, int64_t tile, A* between, A* scratch);
  void (*convolve)(const TwoStepFft<A>& fft, int64_t tile, const A* kernel, A* between, A* scratch);
  // The ends of a chirp DFT. x and out have `stride` complex numbers from one to the next; `conjugate` for an inverse.
  void (*chirp_load)(const ChirpTables<A>& chirps, int64_t tile, bool conjugate, const A* x, int64_t stride,
                     A* const* between, A* scratch);
  void (*chirp_store)(const ChirpTables<A>& chirps, int64_t tile, bool conjugate, const A* const* between, A* out,
                      int64_t stride, A* scratch);
};

PFL_DECLARE_KERNELS(FftKernels<float>, fft_float)
PFL_DECLARE_KERNELS(FftKernels<double>, fft_double)

}  // namespace pfl::cpu
