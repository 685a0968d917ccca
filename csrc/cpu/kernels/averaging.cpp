// Built once per instruction set with -DPFL_ISA=<namespace>. No standard-library templates here: their instances
// have vague linkage, and the linker would keep one set's copy for all (see common/platform.h).
#include "cpu/kernels/averaging.h"

#include "cpu/kernels/convert.h"

namespace pfl::cpu::PFL_ISA {
namespace {

// Elements that are summed over all clients before moving on: the sum stays in the first-level cache, so each
// client's values are read once from memory and the output is written once.
constexpr int64_t kBlock = 2048;
// Clients read side by side in one loop. Four streams hide more memory latency than one, and the running sum is
// loaded and stored a quarter as often.
constexpr int kGroup = 4;

template <typename A, int kClients, bool kFirst, bool kDelta>
void add_clients(int64_t n, const A* const* x, const A* w, const A* __restrict server, A* __restrict sum) {
  const A* __restrict x0 = x[0];
  const A* __restrict x1 = kClients > 1 ? x[1] : nullptr;
  const A* __restrict x2 = kClients > 2 ? x[2] : nullptr;
  const A* __restrict x3 = kClients > 3 ? x[3] : nullptr;
  const A w0 = w[0];
  const A w1 = kClients > 1 ? w[1] : A(0);
  const A w2 = kClients > 2 ? w[2] : A(0);
  const A w3 = kClients > 3 ? w[3] : A(0);
  for (int64_t i = 0; i < n; ++i) {
    const A s = kDelta ? server[i] : A(0);
    A a = kFirst ? A(0) : sum[i];
    a += w0 * (kDelta ? x0[i] - s : x0[i]);
    if constexpr (kClients > 1) a += w1 * (kDelta ? x1[i] - s : x1[i]);
    if constexpr (kClients > 2) a += w2 * (kDelta ? x2[i] - s : x2[i]);
    if constexpr (kClients > 3) a += w3 * (kDelta ? x3[i] - s : x3[i]);
    sum[i] = a;
  }
}

template <typename A, bool kFirst, bool kDelta>
void add_group(int64_t count, int64_t n, const A* const* x, const A* w, const A* server, A* sum) {
  switch (count) {
    case 1:
      return add_clients<A, 1, kFirst, kDelta>(n, x, w, server, sum);
    case 2:
      return add_clients<A, 2, kFirst, kDelta>(n, x, w, server, sum);
    case 3:
      return add_clients<A, 3, kFirst, kDelta>(n, x, w, server, sum);
    default:
      return add_clients<A, 4, kFirst, kDelta>(n, x, w, server, sum);
  }
}

template <typename T, bool kDelta>
void average(int64_t offset, int64_t n, int64_t clients, const void* const* x, const double* weights,
             const void* server, double lr, void* out) {
  using A = accumulate_t<T>;
  alignas(64) A sum[kBlock];
  alignas(64) A server_buffer[kDelta && !kIsAccumulateType<T> ? kBlock : 1];
  alignas(64) A client_buffer[kIsAccumulateType<T> ? 1 : kGroup][kIsAccumulateType<T> ? 1 : kBlock];
  for (int64_t begin = offset; begin < offset + n; begin += kBlock) {
    const int64_t block = offset + n - begin < kBlock ? offset + n - begin : kBlock;
    const A* s = nullptr;
    if constexpr (kDelta) s = as_accumulate(static_cast<const T*>(server) + begin, block, server_buffer);
    for (int64_t first = 0; first < clients; first += kGroup) {
      const int64_t count = clients - first < kGroup ? clients - first : kGroup;
      const A* rows[kGroup] = {};
      A w[kGroup] = {};
      for (int64_t c = 0; c < count; ++c) {
        rows[c] = as_accumulate(static_cast<const T*>(x[first + c]) + begin, block,
                                client_buffer[kIsAccumulateType<T> ? 0 : c]);
        w[c] = static_cast<A>(weights[first + c]);
      }
      if (first == 0) {
        add_group<A, true, kDelta>(count, block, rows, w, s, sum);
      } else {
        add_group<A, false, kDelta>(count, block, rows, w, s, sum);
      }
    }
    if constexpr (kDelta) {
      const A rate = static_cast<A>(lr);
      for (int64_t i = 0; i < block; ++i) sum[i] = s[i] + rate * sum[i];
    }
    store_accumulated(sum, block, static_cast<T*>(out) + begin);
  }
}

void average(DType dtype, int64_t offset, int64_t n, int64_t clients, const void* const* x, const double* weights,
             const void* server, double lr, void* out) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (server != nullptr) {
      average<T, true>(offset, n, clients, x, weights, server, lr, out);
    } else {
      average<T, false>(offset, n, clients, x, weights, server, lr, out);
    }
  });
}

void accumulate(DType dtype, int64_t offset, int64_t n, const void* x, double weight, void* sum) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = accumulate_t<T>;
    alignas(64) A buffer[kIsAccumulateType<T> ? 1 : kBlock];
    const A w = static_cast<A>(weight);
    for (int64_t begin = offset; begin < offset + n; begin += kBlock) {
      const int64_t block = offset + n - begin < kBlock ? offset + n - begin : kBlock;
      const A* row = as_accumulate(static_cast<const T*>(x) + begin, block, buffer);
      add_clients<A, 1, false, false>(block, &row, &w, nullptr, static_cast<A*>(sum) + begin);
    }
  });
}

bool any_nonfinite(DType dtype, int64_t offset, int64_t n, const void* x) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = static_cast<const T*>(x) + offset;
    // Whole blocks without an early exit vectorise; stopping between blocks keeps a bad client cheap.
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = begin + kBlock < n ? begin + kBlock : n;
      unsigned found = 0;
      for (int64_t i = begin; i < end; ++i) found |= static_cast<unsigned>(is_nonfinite(values[i]));
      if (found != 0) return true;
    }
    return false;
  });
}

}  // namespace

extern const AveragingKernels averaging;
const AveragingKernels averaging = {average, accumulate, any_nonfinite};

}  // namespace pfl::cpu::PFL_ISA
