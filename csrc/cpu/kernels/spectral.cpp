// Built once per instruction set with -DPFL_ISA=<namespace>. No standard-library templates here (see averaging.cpp).
#include "cpu/kernels/spectral.h"

namespace pfl::cpu::PFL_ISA {
namespace {

// Bins worked on at once, in arrays that stay in the first-level cache: loops over them vectorise, loops over
// interleaved real and imaginary parts do not.
constexpr int kBlock = 256;
// Partial sums side by side, added in this order at the end: a vector register or two on every instruction set.
constexpr int kLanes = 8;

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename A>
struct Block {
  alignas(64) A re[kBlock];
  alignas(64) A im[kBlock];

  // Values beyond n are zero, so that loops always run over the whole block.
  void load(const A* __restrict x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      re[i] = x[2 * i];
      im[i] = x[2 * i + 1];
    }
    for (int64_t i = n; i < kBlock; ++i) re[i] = im[i] = A(0);
  }

  void load_reversed(const A* last, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      re[i] = last[-2 * i];
      im[i] = last[-2 * i + 1];
    }
    for (int64_t i = n; i < kBlock; ++i) re[i] = im[i] = A(0);
  }

  void store(A* __restrict x, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      x[2 * i] = re[i];
      x[2 * i + 1] = im[i];
    }
  }

  void store_reversed(A* last, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      last[-2 * i] = re[i];
      last[-2 * i + 1] = im[i];
    }
  }

  Complex<A> operator[](int i) const { return {re[i], im[i]}; }
  void set(int i, Complex<A> value) {
    re[i] = value.re;
    im[i] = value.im;
  }
};

template <typename A>
void fill_weights(SpectrumRange range, int64_t begin, int64_t n, A* __restrict weights) {
  // All of a block on one side of the point from which bins count twice: the rule. Otherwise bin by bin.
  const int64_t twice = range.length - range.count + 1;
  if (begin != 0 && 2 * (begin + n) < range.length && (begin >= twice || begin + n <= twice)) {
    const A weight = begin >= twice ? A(2) : A(1);
    for (int64_t i = 0; i < n; ++i) weights[i] = weight;
  } else {
    for (int64_t i = 0; i < n; ++i) weights[i] = static_cast<A>(range.weight(begin + i));
  }
  for (int64_t i = n; i < kBlock; ++i) weights[i] = A(0);
}

struct Lanes {
  double values[kLanes] = {};

  template <typename A>
  void add(const A* __restrict terms) {
    for (int i = 0; i < kBlock; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) values[lane] += static_cast<double>(terms[i + lane]);
    }
  }

  double total() const {
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
    return sum;
  }
};

template <typename A>
void copy_block(const A* __restrict x, int64_t n, A* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i];
  for (int64_t i = n; i < kBlock; ++i) out[i] = A(0);
}

template <typename A>
void sums(SpectrumRange range, int64_t begin, int64_t end, const A* spectrum, const A* log_q, double* result) {
  Block<A> block;
  alignas(64) A weights[kBlock], logs[kBlock], magnitudes[kBlock], products[kBlock];
  Lanes z, a;
  for (int64_t k = begin; k < end; k += kBlock) {
    const int64_t n = smaller(kBlock, end - k);
    block.load(spectrum + 2 * k, n);
    copy_block(log_q + k, n, logs);
    fill_weights(range, k, n, weights);
    for (int i = 0; i < kBlock; ++i) {
      const Polar<A> p = to_polar(block[i]);
      magnitudes[i] = weights[i] * p.magnitude;
      products[i] = weights[i] * (p.magnitude * (p.log - logs[i]));
    }
    z.add(magnitudes);
    a.add(products);
  }
  result[0] = z.total();
  result[1] = a.total();
}

template <typename A>
void seed(SpectrumRange range, int64_t begin, int64_t end, A* spectrum, const A* log_q, A scale, A offset) {
  Block<A> block;
  alignas(64) A weights[kBlock], logs[kBlock];
  const int64_t used = end < range.bins() ? end : range.bins();
  int64_t k = begin;
  for (; k < used; k += kBlock) {
    const int64_t n = smaller(kBlock, used - k);
    block.load(spectrum + 2 * k, n);
    copy_block(log_q + k, n, logs);
    fill_weights(range, k, n, weights);
    for (int i = 0; i < kBlock; ++i) weights[i] *= A(0.5);
    if (k == 0) weights[0] = A(1);
    if (2 * (k + n - 1) == range.length) weights[n - 1] = A(1);
    for (int i = 0; i < kBlock; ++i) {
      const Polar<A> p = to_polar(block[i]);
      const A slope = scale * ((p.log - logs[i]) + offset) * weights[i];
      block.set(i, {slope * p.direction.re, slope * p.direction.im});
    }
    block.store(spectrum + 2 * k, n);
  }
  for (k = begin > used ? begin : used; k < end; ++k) spectrum[2 * k] = spectrum[2 * k + 1] = A(0);
}

template <typename A>
void teacher(SpectrumRange range, int64_t begin, int64_t end, const A* spectrum, A* log_q, double* sum) {
  Block<A> block;
  alignas(64) A weights[kBlock], logs[kBlock], magnitudes[kBlock];
  Lanes total;
  const A tiny = FloatTraits<A>::kTiny;
  const A log_tiny = log_scaled<A>(A(1), 1);  // 2^(1 - bias)
  for (int64_t k = begin; k < end; k += kBlock) {
    const int64_t n = smaller(kBlock, end - k);
    block.load(spectrum + 2 * k, n);
    fill_weights(range, k, n, weights);
    for (int i = 0; i < kBlock; ++i) {
      const Polar<A> q = to_polar(block[i]);
      const bool zero = q.magnitude == A(0);
      logs[i] = zero ? log_tiny : q.log;
      magnitudes[i] = weights[i] * (zero ? tiny : q.magnitude);
    }
    total.add(magnitudes);
    for (int64_t i = 0; i < n; ++i) log_q[k + i] = logs[i];
  }
  *sum = total.total();
}

// exp(2 pi i k / 24) for the roots that 2, 4, 6 and 8 rows need; 24 is their least common multiple.
template <typename A>
Complex<A> root(int64_t k, int64_t count) {
  constexpr double kHalf = 0.5, kSqrt3 = 0.86602540378443864676, kSqrt2 = 0.70710678118654752440;
  constexpr double kCosine[24] = {1,  0, kSqrt3,  kSqrt2,  kHalf,  0, 0, 0, -kHalf, -kSqrt2, -kSqrt3, 0,
                                  -1, 0, -kSqrt3, -kSqrt2, -kHalf, 0, 0, 0, kHalf,  kSqrt2,  kSqrt3,  0};
  const int64_t index = (k % count + count) % count * (24 / count);
  return {static_cast<A>(kCosine[index]), static_cast<A>(kCosine[(index + 18) % 24])};
}

// Rows 2i and 2i + 1 of `pairs` pairs, each times its power of the twiddle.
template <typename A>
void twiddle_rows(int64_t pairs, const A* twiddle, int64_t n, A sign, Block<A>* rows) {
  Block<A> power, base;
  base.load(twiddle, n);
  for (int i = 0; i < kBlock; ++i) base.im[i] *= sign;
  power = base;
  for (int64_t b = 1; b < 2 * pairs; ++b) {
    for (int i = 0; i < kBlock; ++i) rows[b].set(i, rows[b][i] * power[i]);
    if (b + 1 < 2 * pairs) {
      for (int i = 0; i < kBlock; ++i) power.set(i, power[i] * base[i]);
    }
  }
}

template <typename A>
void add_product(const Block<A>& x, Complex<A> factor, bool first, Block<A>* sum) {
  if (first) {
    for (int i = 0; i < kBlock; ++i) sum->set(i, x[i] * factor);
  } else {
    for (int i = 0; i < kBlock; ++i) sum->set(i, (*sum)[i] + x[i] * factor);
  }
}

template <typename A>
void join_rows(int64_t begin, int64_t end, int64_t n, int64_t pairs, const A* rows, const A* twiddle,
               A* half_spectrum) {
  Block<A> spectra[2 * kMaxPairs], ahead, behind;
  for (int64_t k = begin; k < end; k += kBlock) {
    const int64_t count = smaller(kBlock, end - k);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const A* row = rows + 2 * pair * n;
      ahead.load(row + 2 * k, count);
      if (k == 0) {  // whose place n - k is place 0
        for (int64_t i = 0; i < count; ++i) behind.set(i, {row[2 * ((n - i) % n)], row[2 * ((n - i) % n) + 1]});
      } else {
        behind.load_reversed(row + 2 * (n - k), count);
      }
      for (int i = 0; i < kBlock; ++i) {
        const Complex<A> mirrored = conjugate(behind[i]);
        const Complex<A> sum = ahead[i] + mirrored, difference = ahead[i] - mirrored;
        spectra[2 * pair].set(i, {A(0.5) * sum.re, A(0.5) * sum.im});
        spectra[2 * pair + 1].set(i, {A(0.5) * difference.im, A(-0.5) * difference.re});
      }
    }
    twiddle_rows<A>(pairs, twiddle + 2 * k, count, A(1), spectra);
    for (int64_t m = 0; m < pairs; ++m) {
      Block<A> even, odd;
      for (int64_t i = 0; i < pairs; ++i) {
        add_product(spectra[2 * i], root<A>(-i * m, pairs), i == 0, &even);
        add_product(spectra[2 * i + 1], root<A>(-(2 * i + 1) * m, 2 * pairs), i == 0, &odd);
      }
      for (int i = 0; i < kBlock; ++i) {
        const Complex<A> sum = even[i] + odd[i], difference = even[i] - odd[i];
        even.set(i, sum);
        odd.set(i, conjugate(difference));
      }
      if (k == 0 && m == 0) even.im[0] = odd.im[0] = A(0);  // the first and the last bin are real
      odd.store_reversed(half_spectrum + 2 * (n * (pairs - m) - k), count);
      even.store(half_spectrum + 2 * (n * m + k), count);
    }
  }
}

template <typename A>
void split_rows(int64_t begin, int64_t end, int64_t n, int64_t pairs, const A* half_spectrum, const A* twiddle,
                A* rows) {
  Block<A> sums[kMaxPairs], differences[kMaxPairs], spectra[2 * kMaxPairs], near, far;
  for (int64_t k = begin; k < end; k += kBlock) {
    const int64_t count = smaller(kBlock, end - k);
    for (int64_t m = 0; m < pairs; ++m) {
      near.load(half_spectrum + 2 * (n * m + k), count);
      far.load_reversed(half_spectrum + 2 * (n * (pairs - m) - k), count);
      if (k == 0 && m == 0) near.im[0] = far.im[0] = A(0);
      for (int i = 0; i < kBlock; ++i) {
        sums[m].set(i, near[i] + conjugate(far[i]));
        differences[m].set(i, near[i] - conjugate(far[i]));
      }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      for (int64_t m = 0; m < pairs; ++m) {
        add_product(sums[m], root<A>(pair * m, pairs), m == 0, &spectra[2 * pair]);
        add_product(differences[m], root<A>((2 * pair + 1) * m, 2 * pairs), m == 0, &spectra[2 * pair + 1]);
      }
    }
    twiddle_rows<A>(pairs, twiddle + 2 * k, count, A(-1), spectra);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      A* row = rows + 2 * pair * n;
      const Block<A>& even = spectra[2 * pair];
      const Block<A>& odd = spectra[2 * pair + 1];
      for (int i = 0; i < kBlock; ++i) {
        near.set(i, {even.re[i] - odd.im[i], even.im[i] + odd.re[i]});
        far.set(i, {even.re[i] + odd.im[i], odd.re[i] - even.im[i]});
      }
      if (k == 0) {
        // Place n - 0 is place 0, which `near` holds.
        for (int64_t i = 1; i < count; ++i) {
          row[2 * (n - i)] = far.re[i];
          row[2 * (n - i) + 1] = far.im[i];
        }
      } else {
        far.store_reversed(row + 2 * (n - k), count);
      }
      near.store(row + 2 * k, count);
    }
  }
}

// ---- by type
// ---------------------------------------------------------------------------------------------------------

template <typename F>
void visit(DType dtype, F f) {
  if (dtype == DType::kFloat64) {
    f(TypeTag<double>{});
  } else {
    f(TypeTag<float>{});
  }
}

void sums(DType dtype, SpectrumRange range, int64_t begin, int64_t end, const void* spectrum, const void* log_q,
          double* result) {
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    sums<A>(range, begin, end, static_cast<const A*>(spectrum), static_cast<const A*>(log_q), result);
  });
}

void seed(DType dtype, SpectrumRange range, int64_t begin, int64_t end, void* spectrum, const void* log_q, double scale,
          double offset) {
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    seed<A>(range, begin, end, static_cast<A*>(spectrum), static_cast<const A*>(log_q), static_cast<A>(scale),
            static_cast<A>(offset));
  });
}

void teacher(DType dtype, SpectrumRange range, int64_t begin, int64_t end, const void* spectrum, void* log_q,
             double* sum) {
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    teacher<A>(range, begin, end, static_cast<const A*>(spectrum), static_cast<A*>(log_q), sum);
  });
}

void join_rows(DType dtype, int64_t begin, int64_t end, int64_t n, int64_t pairs, const void* rows, const void* twiddle,
               void* half_spectrum) {
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    join_rows<A>(begin, end, n, pairs, static_cast<const A*>(rows), static_cast<const A*>(twiddle),
                 static_cast<A*>(half_spectrum));
  });
}

void split_rows(DType dtype, int64_t begin, int64_t end, int64_t n, int64_t pairs, const void* half_spectrum,
                const void* twiddle, void* rows) {
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    split_rows<A>(begin, end, n, pairs, static_cast<const A*>(half_spectrum), static_cast<const A*>(twiddle),
                  static_cast<A*>(rows));
  });
}

}  // namespace

extern const SpectralKernels spectral;
const SpectralKernels spectral = {sums, seed, teacher, join_rows, split_rows};

}  // namespace pfl::cpu::PFL_ISA
