// The passes over half spectra on the GPU: the kernels, and the torch-free planning of their launches. The glue
// (cuda/spectral.cu) and the emulator (emulator/spectral.cpp) differ only in the `launch` they pass in. Awkward lengths
// need nothing here: cuFFT does chirps by itself.
#pragma once

#include "common/spectral.h"
#include "cuda/kernels/list_arguments.cuh"

namespace pfl::cuda {

// Bins of one block, and of one partial sum.
constexpr int64_t kSpectralChunk = 4096;

struct SpectralArguments {
  SpectrumRange range;
  int64_t rows;
  int64_t chunks;          // of a row, in this launch
  int64_t sum_chunks;      // of a row, in the launch that wrote the partial sums
  int64_t teacher_stride;  // bins from one row's teacher to the next: 0 if one serves all
  void* spectrum;          // complex, [rows, range.half()]
  void* log_q;             // [rows or 1, range.bins()]; written by teacher_kernel
  double* total;           // [rows or 1]; written by total_kernel
  double* partials;        // [rows, sum_chunks, 2]
  double* coefficients;    // [rows, 2]: scale and offset of the derivative
  void* loss;              // [rows]
  int32_t form;
};

struct Sums {
  double z, a;
};

// The block's sum, in thread 0, in the order of a fixed tree.
__device__ inline Sums sum_of_block(Sums mine) {
  __shared__ double z[kThreads], a[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  z[thread] = mine.z;
  a[thread] = mine.a;
  __syncthreads();
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    if (thread < distance) {
      z[thread] += z[thread + distance];
      a[thread] += a[thread + distance];
    }
    __syncthreads();
  }
  return {z[0], a[0]};
}

// The row's sum of partial sums, in thread 0.
__device__ inline Sums sum_of_row(const SpectralArguments& args, int64_t row) {
  Sums mine = {0, 0};
  const double* partials = args.partials + 2 * row * args.sum_chunks;
  for (int64_t c = threadIdx.x; c < args.sum_chunks; c += kThreads) {
    mine.z += partials[2 * c];
    mine.a += partials[2 * c + 1];
  }
  return sum_of_block(mine);
}

// Calls body(row, k) for the block's bins below `bins`.
template <typename Body>
__device__ inline void for_each_bin(const SpectralArguments& args, int64_t bins, Body body) {
  const int64_t row = blockIdx.x / args.chunks;
  const int64_t begin = blockIdx.x % args.chunks * kSpectralChunk;
  const int64_t end = begin + kSpectralChunk < bins ? begin + kSpectralChunk : bins;
  for (int64_t k = begin + threadIdx.x; k < end; k += kThreads) body(row, k);
}

// A bin's two parts, in one access.
template <typename A>
__device__ inline Pack<A, 2>* bin_of(const SpectralArguments& args, int64_t row, int64_t k) {
  return static_cast<Pack<A, 2>*>(args.spectrum) + row * args.range.half() + k;
}

template <typename A>
__device__ inline Polar<A> polar_of(const Pack<A, 2>* bin) {
  const Pack<A, 2> parts = *bin;
  return to_polar(Complex<A>{parts.values[0], parts.values[1]});
}

__device__ inline void store_partial(const SpectralArguments& args, Sums mine) {
  const Sums sums = sum_of_block(mine);
  if (threadIdx.x == 0) {
    args.partials[2 * static_cast<int64_t>(blockIdx.x)] = sums.z;
    args.partials[2 * static_cast<int64_t>(blockIdx.x) + 1] = sums.a;
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ SpectralArguments args) {
  Sums mine = {0, 0};
  for_each_bin(args, args.range.bins(), [&](int64_t row, int64_t k) {
    const Polar<A> p = polar_of(bin_of<A>(args, row, k));
    const A log_q = static_cast<const A*>(args.log_q)[row * args.teacher_stride + k];
    const A weight = static_cast<A>(args.range.weight(k));
    mine.z += static_cast<double>(weight * p.magnitude);
    mine.a += static_cast<double>(weight * (p.magnitude * (p.log - log_q)));
  });
  store_partial(args, mine);
}

template <typename A>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ SpectralArguments args) {
  const int64_t row = blockIdx.x;
  const Sums sums = sum_of_row(args, row);
  if (threadIdx.x != 0) return;
  const double total = args.total[args.teacher_stride == 0 ? 0 : row];
  const Divergence result =
      finish_divergence(static_cast<DivergenceForm>(args.form), sums.z, sums.a, total, args.range.count);
  static_cast<A*>(args.loss)[row] = static_cast<A>(result.loss);
  args.coefficients[2 * row] = result.scale;
  args.coefficients[2 * row + 1] = result.offset;
}

template <typename A>
__global__ void __launch_bounds__(kThreads) seed_kernel(const __grid_constant__ SpectralArguments args) {
  for_each_bin(args, args.range.half(), [&](int64_t row, int64_t k) {
    Pack<A, 2>* bin = bin_of<A>(args, row, k);
    if (k >= args.range.bins()) {
      *bin = {{A(0), A(0)}};
      return;
    }
    const Polar<A> p = polar_of(bin);
    const A log_q = static_cast<const A*>(args.log_q)[row * args.teacher_stride + k];
    const A scale = static_cast<A>(args.coefficients[2 * row]), offset = static_cast<A>(args.coefficients[2 * row + 1]);
    const A slope = scale * ((p.log - log_q) + offset) * static_cast<A>(args.range.share(k));
    *bin = {{slope * p.direction.re, slope * p.direction.im}};
  });
}

template <typename A>
__global__ void __launch_bounds__(kThreads) teacher_kernel(const __grid_constant__ SpectralArguments args) {
  Sums mine = {0, 0};
  for_each_bin(args, args.range.bins(), [&](int64_t row, int64_t k) {
    const Polar<A> q = polar_of(bin_of<A>(args, row, k));
    const bool zero = q.magnitude == A(0);
    static_cast<A*>(args.log_q)[row * args.range.bins() + k] = zero ? log_scaled<A>(A(1), 1) : q.log;
    const A weight = static_cast<A>(args.range.weight(k));
    mine.z += static_cast<double>(weight * (zero ? FloatTraits<A>::kTiny : q.magnitude));
  });
  store_partial(args, mine);
}

// A template like the others, so that each file that includes this may define it.
template <typename A>
__global__ void __launch_bounds__(kThreads) total_kernel(const __grid_constant__ SpectralArguments args) {
  const Sums sums = sum_of_row(args, blockIdx.x);
  if (threadIdx.x == 0) args.total[blockIdx.x] = sums.z;
}

inline int64_t spectral_chunks(int64_t bins) { return (bins + kSpectralChunk - 1) / kSpectralChunk; }

// Doubles that `partials` and `coefficients` take together.
inline int64_t spectral_workspace(const SpectrumRange& range, int64_t rows) {
  return 2 * rows * (spectral_chunks(range.bins()) + 1);
}

inline void place_workspace(double* workspace, SpectralArguments* args) {
  args->sum_chunks = spectral_chunks(args->range.bins());
  args->partials = workspace;
  args->coefficients = workspace + 2 * args->rows * args->sum_chunks;
}

// launch(kernel, grid, args) is called for each launch in order; all on one stream.
template <typename A, typename Launch>
void launch_divergence(SpectralArguments args, double* workspace, bool need_grad, Launch launch) {
  if (args.rows == 0) return;
  place_workspace(workspace, &args);
  args.chunks = args.sum_chunks;
  launch(sums_kernel<A>, args.rows * args.chunks, args);
  launch(finish_kernel<A>, args.rows, args);
  if (!need_grad) return;
  args.chunks = spectral_chunks(args.range.half());
  launch(seed_kernel<A>, args.rows * args.chunks, args);
}

template <typename A, typename Launch>
void launch_teacher(SpectralArguments args, double* workspace, Launch launch) {
  if (args.rows == 0) return;
  place_workspace(workspace, &args);
  args.chunks = args.sum_chunks;
  launch(teacher_kernel<A>, args.rows * args.chunks, args);
  launch(total_kernel<A>, args.rows, args);
}

}  // namespace pfl::cuda
