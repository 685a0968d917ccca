// Built once per instruction set with -DPFL_ISA=<namespace>. No standard-library templates here: their instances
// have vague linkage, and the linker would keep one set's copy for all (see common/platform.h).
#include "cpu/kernels/proximal.h"

#include "cpu/kernels/sums.h"

namespace pfl::cpu::PFL_ISA {
namespace {

// Elements converted at once from and to the half types: four such buffers leave room in 32 KB of first-level cache.
constexpr int64_t kBlock = 1024;

template <Momentum kMode, bool kAnchor, bool kDecay, typename A>
void step_block(int64_t n, const ProximalNumbers<A>& s, const A* __restrict grad, const A* __restrict anchor,
                A* __restrict weight, A* __restrict buffer) {
  for (int64_t i = 0; i < n; ++i) {
    A running = kMode == Momentum::kRunning ? buffer[i] : A(0);
    weight[i] = proximal_step<kMode, kAnchor, kDecay>(s, weight[i], grad[i], kAnchor ? anchor[i] : A(0), &running);
    if constexpr (kMode != Momentum::kNone) buffer[i] = running;
  }
}

template <typename T, Momentum kMode, bool kAnchor, bool kDecay>
void step(const ProximalStep& how, int64_t n, const T* grad, const T* anchor, T* weight, T* buffer) {
  using A = accumulate_t<T>;
  const ProximalNumbers<A> s = numbers_of<A>(how);
  if constexpr (kIsAccumulateType<T>) {
    step_block<kMode, kAnchor, kDecay>(n, s, grad, anchor, weight, buffer);
  } else {
#if defined(__AVX2__)
    // Without a detour through memory: the conversions alone take as long as the numbers take to come.
    int64_t i = 0;
    for (; i + kConvertedAtOnce<T> <= n; i += kConvertedAtOnce<T>) {
      converted_t<T> running = {};
      if constexpr (kMode == Momentum::kRunning) running = convert(buffer + i);
      converted_t<T> from = {};
      if constexpr (kAnchor) from = convert(anchor + i);
      const converted_t<T> moved =
          proximal_step<kMode, kAnchor, kDecay>(s, convert(weight + i), convert(grad + i), from, &running);
      convert_back(moved, weight + i);
      if constexpr (kMode != Momentum::kNone) convert_back(running, buffer + i);
    }
    n -= i, grad += i, weight += i;
    if constexpr (kAnchor) anchor += i;
    if constexpr (kMode != Momentum::kNone) buffer += i;
#endif
    alignas(64) A g[kBlock];
    alignas(64) A c[kBlock];
    alignas(64) A w[kBlock];
    alignas(64) A b[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t block = n - begin < kBlock ? n - begin : kBlock;
      as_accumulate(grad + begin, block, g);
      as_accumulate(weight + begin, block, w);
      if constexpr (kAnchor) as_accumulate(anchor + begin, block, c);
      if constexpr (kMode == Momentum::kRunning) as_accumulate(buffer + begin, block, b);
      step_block<kMode, kAnchor, kDecay>(block, s, g, c, w, b);
      store_accumulated(w, block, weight + begin);
      if constexpr (kMode != Momentum::kNone) store_accumulated(b, block, buffer + begin);
    }
  }
}

// Null stays null.
template <typename T>
T* shifted(void* pointer, int64_t offset) {
  return pointer == nullptr ? nullptr : static_cast<T*>(pointer) + offset;
}
template <typename T>
const T* shifted(const void* pointer, int64_t offset) {
  return pointer == nullptr ? nullptr : static_cast<const T*>(pointer) + offset;
}

void step(DType dtype, const ProximalStep& how, int64_t offset, int64_t n, const void* grad, const void* anchor,
          void* weight, void* buffer) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_step(how, [&](auto mode, auto anchored, auto decayed) {
      step<T, decltype(mode)::value, decltype(anchored)::value, decltype(decayed)::value>(
          how, n, shifted<T>(grad, offset), shifted<T>(anchor, offset), shifted<T>(weight, offset),
          shifted<T>(buffer, offset));
    });
  });
}

double distance(DType dtype, int64_t offset, int64_t n, const void* a, const void* b) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return sum_of_squares(static_cast<const T*>(a) + offset, static_cast<const T*>(b) + offset, n);
  });
}

template <typename A>
void differences(int64_t n, A scale, const A* __restrict a, const A* __restrict b, A* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = scale * (a[i] - b[i]);
}

void gradient(DType dtype, int64_t offset, int64_t n, double scale, const void* a, const void* b, void* to_a,
              void* to_b) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    const T* x = static_cast<const T*>(a) + offset;
    const T* y = static_cast<const T*>(b) + offset;
    alignas(64) A x_buffer[kIsAccumulateType<T> ? 1 : kBlock];
    alignas(64) A y_buffer[kIsAccumulateType<T> ? 1 : kBlock];
    alignas(64) A out[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t block = n - begin < kBlock ? n - begin : kBlock;
      const A* xs = as_accumulate(x + begin, block, x_buffer);
      const A* ys = as_accumulate(y + begin, block, y_buffer);
      if (to_a != nullptr) {
        differences(block, static_cast<A>(scale), xs, ys, out);
        store_accumulated(out, block, static_cast<T*>(to_a) + offset + begin);
      }
      if (to_b != nullptr) {
        differences(block, static_cast<A>(-scale), xs, ys, out);
        store_accumulated(out, block, static_cast<T*>(to_b) + offset + begin);
      }
    }
  });
}

}  // namespace

extern const ProximalKernels proximal;
const ProximalKernels proximal = {step, distance, gradient};

}  // namespace pfl::cpu::PFL_ISA
