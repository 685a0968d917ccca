// Built once per instruction set with -DPFL_ISA=<namespace>. No standard-library templates here: their instances
// have vague linkage, and the linker would keep one set's copy for all (see common/platform.h).
#include "cpu/kernels/sharpness.h"

#include "cpu/kernels/sums.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pfl::cpu::PFL_ISA {
namespace {

// Weights are copied and then changed block by block: the second loop finds them in the first-level cache.
constexpr int64_t kBlock = 2048;

// Writes around the caches where asked to: an ordinary store reads the line first, half as much traffic again.
void copy_bytes(const void* from, int64_t bytes, void* to, bool stream) {
#if defined(__SSE2__)
  if (stream) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    const int64_t to_alignment = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & 15);
    const int64_t head = to_alignment < bytes ? to_alignment : bytes;
    memcpy(target, source, head);
    int64_t i = head;
    for (; i + 64 <= bytes; i += 64) {
      for (int k = 0; k < 64; k += 16) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + k));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + k), value);
      }
    }
    memcpy(target + i, source + i, bytes - i);
    return;
  }
#endif
  (void)stream;
  memcpy(to, from, bytes);
}

// Streamed stores are not ordered with the stores that tell another thread that the work is done.
void finish_streaming(bool stream) {
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#endif
  (void)stream;
}

void copy(int64_t bytes, const void* from, void* to, bool stream) {
  copy_bytes(from, bytes, to, stream);
  finish_streaming(stream);
}

double squares(DType dtype, int64_t offset, int64_t n, const void* x, const void* y) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return sum_of_squares(static_cast<const T*>(x) + offset, y == nullptr ? nullptr : static_cast<const T*>(y) + offset,
                          n);
  });
}

template <typename T>
PowerSum powers(const T* x, int64_t n, double q) {
  using A = accumulate_t<T>;
  A maximum = A(0);
  for (int64_t i = 0; i < n; ++i) {
    const A value = to_accumulate(x[i]);
    maximum = larger(maximum, value < A(0) ? -value : value);
  }
  if (maximum == A(0)) return {0.0, 0.0};
  alignas(64) double lanes[kLanes] = {};
  add_to_lanes(
      n,
      [=](int64_t i) {
        const double value = static_cast<double>(to_accumulate(x[i]));
        return pow((value < 0.0 ? -value : value) / static_cast<double>(maximum), q);
      },
      lanes);
  return {static_cast<double>(maximum), sum_lanes(lanes)};
}

PowerSum powers(DType dtype, int64_t offset, int64_t n, const void* x, double q) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return powers(static_cast<const T*>(x) + offset, n, q);
  });
}

template <PerturbForm kForm, typename A>
void perturb_block(int64_t n, const A* __restrict grad, A scale, A maximum, A exponent, const A* weight, A* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = perturbed<kForm>(weight[i], grad[i], scale, maximum, exponent);
}

template <typename T, PerturbForm kForm>
void perturb(int64_t n, double scale, double maximum, double exponent, const T* grad, T* weight, T* backup,
             bool stream) {
  using A = accumulate_t<T>;
  alignas(64) A grad_buffer[kIsAccumulateType<T> ? 1 : kBlock];
  alignas(64) A weight_buffer[kIsAccumulateType<T> ? 1 : kBlock];
  const A s = to_scale<A>(scale);
  const A m = static_cast<A>(maximum);
  const A e = static_cast<A>(exponent);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t block = n - begin < kBlock ? n - begin : kBlock;
    copy_bytes(weight + begin, block * static_cast<int64_t>(sizeof(T)), backup + begin, stream);
    if (s == A(0)) continue;
    const A* g = as_accumulate(grad + begin, block, grad_buffer);
    if constexpr (kIsAccumulateType<T>) {
      perturb_block<kForm>(block, g, s, m, e, weight + begin, weight + begin);
    } else {
      as_accumulate(weight + begin, block, weight_buffer);
      perturb_block<kForm>(block, g, s, m, e, weight_buffer, weight_buffer);
      store_accumulated(weight_buffer, block, weight + begin);
    }
  }
  finish_streaming(stream);
}

void perturb(DType dtype, const Perturbation& how, int64_t offset, int64_t n, double scale, double maximum,
             const void* grad, void* weight, void* backup, bool stream) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = static_cast<const T*>(grad) + offset;
    T* w = static_cast<T*>(weight) + offset;
    T* b = static_cast<T*>(backup) + offset;
    switch (how.form) {
      case PerturbForm::kSign:
        return perturb<T, PerturbForm::kSign>(n, scale, maximum, how.exponent, g, w, b, stream);
      case PerturbForm::kEuclidean:
        return perturb<T, PerturbForm::kEuclidean>(n, scale, maximum, how.exponent, g, w, b, stream);
      default:
        return perturb<T, PerturbForm::kPower>(n, scale, maximum, how.exponent, g, w, b, stream);
    }
  });
}

}  // namespace

extern const SharpnessKernels sharpness;
const SharpnessKernels sharpness = {squares, powers, perturb, copy};

}  // namespace pfl::cpu::PFL_ISA
