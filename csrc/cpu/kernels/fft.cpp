// Built once per instruction set with -DPFL_ISA=<namespace>. No standard-library templates here (see averaging.cpp).
#include "cpu/kernels/fft.h"

namespace pfl::cpu::PFL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kRegister = 64;
#elif defined(__AVX2__)
constexpr int64_t kRegister = 32;
#else
constexpr int64_t kRegister = 16;
#endif

// kLanes numbers in as many registers as they take. Left to itself, the compiler takes vectors that are wider than a
// register apart into single numbers, which made float64 forty times slower than float32.
template <typename A>
struct Vector {
  static constexpr int64_t kBytes = kLanes * sizeof(A) < kRegister ? kLanes * sizeof(A) : kRegister;
  static constexpr int kParts = kLanes * sizeof(A) / kBytes;
  typedef A Part __attribute__((vector_size(kBytes)));
  Part part[kParts];

  static Vector load(const A* x) {
    Vector v;
    __builtin_memcpy(v.part, x, sizeof(v.part));
    return v;
  }
  void store(A* x) const { __builtin_memcpy(x, part, sizeof(part)); }

  Vector operator+(const Vector& o) const {
    Vector v;
    for (int i = 0; i < kParts; ++i) v.part[i] = part[i] + o.part[i];
    return v;
  }
  Vector operator-(const Vector& o) const {
    Vector v;
    for (int i = 0; i < kParts; ++i) v.part[i] = part[i] - o.part[i];
    return v;
  }
  Vector operator*(const Vector& o) const {
    Vector v;
    for (int i = 0; i < kParts; ++i) v.part[i] = part[i] * o.part[i];
    return v;
  }
  Vector operator*(A factor) const {
    Vector v;
    for (int i = 0; i < kParts; ++i) v.part[i] = part[i] * factor;
    return v;
  }
};

// kLanes complex numbers.
template <typename A>
struct Complexes {
  Vector<A> re, im;

  static Complexes load(const A* place) { return {Vector<A>::load(place), Vector<A>::load(place + kLanes)}; }
  void store(A* place) const {
    re.store(place);
    im.store(place + kLanes);
  }
  Complexes operator+(const Complexes& o) const { return {re + o.re, im + o.im}; }
  Complexes operator-(const Complexes& o) const { return {re - o.re, im - o.im}; }
  Complexes operator*(const Complexes& o) const { return {re * o.re - im * o.im, re * o.im + im * o.re}; }
  Complexes times(const A* w) const { return {re * w[0] - im * w[1], re * w[1] + im * w[0]}; }
  Complexes scaled(A factor) const { return {re * factor, im * factor}; }
  Complexes turned() const { return {im, re * A(-1)}; }  // times -i
  Complexes exchanged() const { return {im, re}; }
};

// `count` pairs (re, im) of the caller's memory, `stride` pairs apart; the other lanes are zero.
template <typename A>
inline Complexes<A> load_some_pairs(const A* x, int64_t stride, int64_t count) {
  alignas(64) A place[kPlace] = {};
  for (int64_t i = 0; i < count; ++i) {
    place[i] = x[2 * stride * i];
    place[kLanes + i] = x[2 * stride * i + 1];
  }
  return Complexes<A>::load(place);
}

template <typename A>
inline void store_some_pairs(const Complexes<A>& z, A* x, int64_t stride, int64_t count) {
  alignas(64) A place[kPlace];
  z.store(place);
  for (int64_t i = 0; i < count; ++i) {
    x[2 * stride * i] = place[i];
    x[2 * stride * i + 1] = place[kLanes + i];
  }
}

// kLanes pairs, one after the other.
template <typename A>
inline Complexes<A> load_pairs(const A* x) {
  if constexpr (Vector<A>::kParts == 1) {
    const auto low = Vector<A>::load(x).part[0], high = Vector<A>::load(x + kLanes).part[0];
    return {{{__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14)}},
            {{__builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15)}}};
  } else {
    return load_some_pairs(x, 1, kLanes);
  }
}

template <typename A>
inline void store_pairs(const Complexes<A>& z, A* x) {
  if constexpr (Vector<A>::kParts == 1) {
    const auto re = z.re.part[0], im = z.im.part[0];
    Vector<A>{{__builtin_shufflevector(re, im, 0, 8, 1, 9, 2, 10, 3, 11)}}.store(x);
    Vector<A>{{__builtin_shufflevector(re, im, 4, 12, 5, 13, 6, 14, 7, 15)}}.store(x + kLanes);
  } else {
    store_some_pairs(z, x, 1, kLanes);
  }
}

template <typename A>
inline Complexes<A> load_lanes(const A* x, int64_t stride, int64_t count) {
  return stride == 1 && count == kLanes ? load_pairs(x) : load_some_pairs(x, stride, count);
}

template <typename A>
inline void store_lanes(const Complexes<A>& z, A* x, int64_t stride, int64_t count) {
  if (stride == 1 && count == kLanes) {
    store_pairs(z, x);
  } else {
    store_some_pairs(z, x, stride, count);
  }
}

template <typename A>
inline void transpose(Vector<A>* v) {
  if constexpr (Vector<A>::kParts == 1) {
    typename Vector<A>::Part w[8], u[8];
    for (int i = 0; i < 8; i += 2) {
      w[i] = __builtin_shufflevector(v[i].part[0], v[i + 1].part[0], 0, 8, 2, 10, 4, 12, 6, 14);
      w[i + 1] = __builtin_shufflevector(v[i].part[0], v[i + 1].part[0], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int j = i; j < i + 2; ++j) {
        u[j] = __builtin_shufflevector(w[j], w[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        u[j + 2] = __builtin_shufflevector(w[j], w[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
      }
    }
    for (int i = 0; i < 4; ++i) {
      v[i].part[0] = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      v[i + 4].part[0] = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
  } else {
    alignas(64) A x[kLanes][kLanes], y[kLanes][kLanes];
    for (int i = 0; i < kLanes; ++i) v[i].store(x[i]);
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < kLanes; ++j) y[i][j] = x[j][i];
    }
    for (int i = 0; i < kLanes; ++i) v[i] = Vector<A>::load(y[i]);
  }
}

// ---- the short DFT: passes -----------------------------------------------------------------------------------------

template <typename A, int radix>
inline void butterfly(Complexes<A>* x) {
  using C = Complexes<A>;
  if constexpr (radix == 2) {
    const C sum = x[0] + x[1];
    x[1] = x[0] - x[1];
    x[0] = sum;
  } else if constexpr (radix == 3) {
    const C sum = x[1] + x[2], middle = x[0] - sum.scaled(A(0.5));
    const C side = (x[1] - x[2]).scaled(A(0.86602540378443864676)).turned();
    x[0] = x[0] + sum;
    x[1] = middle + side;
    x[2] = middle - side;
  } else if constexpr (radix == 4) {
    const C even = x[0] + x[2], odd = x[1] + x[3];
    const C middle = x[0] - x[2], side = (x[1] - x[3]).turned();
    x[0] = even + odd;
    x[1] = middle + side;
    x[2] = even - odd;
    x[3] = middle - side;
  } else if constexpr (radix == 5) {
    constexpr double kCos1 = 0.30901699437494742410, kCos2 = -0.80901699437494742410;
    constexpr double kSin1 = 0.95105651629515357212, kSin2 = 0.58778525229247312917;
    const C sum1 = x[1] + x[4], sum2 = x[2] + x[3], difference1 = x[1] - x[4], difference2 = x[2] - x[3];
    const C middle1 = x[0] + (sum1.scaled(A(kCos1)) + sum2.scaled(A(kCos2)));
    const C middle2 = x[0] + (sum1.scaled(A(kCos2)) + sum2.scaled(A(kCos1)));
    const C side1 = (difference1.scaled(A(kSin1)) + difference2.scaled(A(kSin2))).turned();
    const C side2 = (difference1.scaled(A(kSin2)) - difference2.scaled(A(kSin1))).turned();
    x[0] = x[0] + (sum1 + sum2);
    x[1] = middle1 + side1;
    x[2] = middle2 + side2;
    x[3] = middle2 - side2;
    x[4] = middle1 - side1;
  } else {
    static_assert(radix == 8);
    C even[4] = {x[0], x[2], x[4], x[6]}, odd[4] = {x[1], x[3], x[5], x[7]};
    butterfly<A, 4>(even);
    butterfly<A, 4>(odd);
    constexpr double kSqrt2 = 0.70710678118654752440;
    const C o1 = odd[1], o2 = odd[2].turned(), o3 = odd[3].turned();
    const C side1 = (o1 + o1.turned()).scaled(A(kSqrt2)), side3 = (o3 + o3.turned()).scaled(A(kSqrt2));
    const C sides[4] = {odd[0], side1, o2, side3};
    for (int j = 0; j < 4; ++j) {
      x[j] = even[j] + sides[j];
      x[j + 4] = even[j] - sides[j];
    }
  }
}

// One pass over `left * step` places: the places step * (p + left / radix * k) + q, k = 0 ..., to
// step * (radix * p + j) + q, j = 0 ...
template <typename A, int radix>
void run_pass(int64_t left, int64_t step, const A* twiddles, const A* x, A* y) {
  const int64_t groups = left / radix;
  for (int64_t p = 0; p < groups; ++p) {
    const A* w = twiddles + 2 * (radix - 1) * p;
    for (int64_t q = 0; q < step; ++q) {
      const A* from = x + kPlace * (step * p + q);
      A* to = y + kPlace * (step * radix * p + q);
      Complexes<A> z[radix];
      for (int k = 0; k < radix; ++k) z[k] = Complexes<A>::load(from + kPlace * step * groups * k);
      butterfly<A, radix>(z);
      z[0].store(to);
      if (p == 0) {
        for (int j = 1; j < radix; ++j) z[j].store(to + kPlace * step * j);
      } else {
        for (int j = 1; j < radix; ++j) z[j].times(w + 2 * (j - 1)).store(to + kPlace * step * j);
      }
    }
  }
}

// Any odd radix, by its definition; places k and radix - k share their products.
template <typename A>
void run_odd_pass(int64_t radix, int64_t left, int64_t step, const A* twiddles, const A* roots, const A* x, A* y) {
  using C = Complexes<A>;
  const int64_t groups = left / radix, half = radix / 2;
  C sums[kLargestRadix / 2], differences[kLargestRadix / 2];
  const auto finish = [&](const C& middle, const C& unturned, int64_t j, const A* w, A* to) {
    const C side = unturned.turned();
    (middle + side).times(w + 2 * (j - 1)).store(to + kPlace * step * j);
    (middle - side).times(w + 2 * (radix - j - 1)).store(to + kPlace * step * (radix - j));
  };
  for (int64_t p = 0; p < groups; ++p) {
    const A* w = twiddles + 2 * (radix - 1) * p;
    for (int64_t q = 0; q < step; ++q) {
      const A* from = x + kPlace * (step * p + q);
      A* to = y + kPlace * (step * radix * p + q);
      const C first = C::load(from);
      C total = first;
      for (int64_t k = 1; k <= half; ++k) {
        const C ahead = C::load(from + kPlace * step * groups * k);
        const C behind = C::load(from + kPlace * step * groups * (radix - k));
        sums[k - 1] = ahead + behind;
        differences[k - 1] = ahead - behind;
        total = total + sums[k - 1];
      }
      total.store(to);
      int64_t j = 1;
      for (; j < half; j += 2) {  // two at once: their additions do not wait for each other
        const A *root = roots + 2 * half * (j - 1), *next = root + 2 * half;
        C middle = first, side = {}, next_middle = first, next_side = {};
        for (int64_t k = 0; k < half; ++k) {
          middle = middle + sums[k].scaled(root[2 * k]);
          side = side + differences[k].scaled(root[2 * k + 1]);
          next_middle = next_middle + sums[k].scaled(next[2 * k]);
          next_side = next_side + differences[k].scaled(next[2 * k + 1]);
        }
        finish(middle, side, j, w, to);
        finish(next_middle, next_side, j + 1, w, to);
      }
      if (j == half) {
        const A* root = roots + 2 * half * (j - 1);
        C middle = first, side = {};
        for (int64_t k = 0; k < half; ++k) {
          middle = middle + sums[k].scaled(root[2 * k]);
          side = side + differences[k].scaled(root[2 * k + 1]);
        }
        finish(middle, side, j, w, to);
      }
    }
  }
}

// Of the tile x, with another one to work in. Returns the one that holds the result.
template <typename A>
A* run_fft(const ShortFft<A>& fft, A* x, A* other) {
  int64_t left = fft.length, step = 1;
  for (int64_t i = 0; i < fft.passes; ++i) {
    const auto& pass = fft.pass[i];
    switch (pass.radix) {
      case 2:
        run_pass<A, 2>(left, step, pass.twiddles, x, other);
        break;
      case 3:
        run_pass<A, 3>(left, step, pass.twiddles, x, other);
        break;
      case 4:
        run_pass<A, 4>(left, step, pass.twiddles, x, other);
        break;
      case 5:
        run_pass<A, 5>(left, step, pass.twiddles, x, other);
        break;
      case 8:
        run_pass<A, 8>(left, step, pass.twiddles, x, other);
        break;
      default:
        run_odd_pass<A>(pass.radix, left, step, pass.twiddles, pass.roots, x, other);
    }
    left /= pass.radix;
    step *= pass.radix;
    A* const result = other;
    other = x;
    x = result;
  }
  return x;
}

// ---- between the two steps
// -------------------------------------------------------------------------------------------

// exp(-2 pi i k c / (a b)) for the columns c of a tile.
template <typename A>
inline Complexes<A> phase(const TwoStepFft<A>& fft, int64_t tile, int64_t k) {
  return Complexes<A>::load(fft.lane_phase + kPlace * k).times(fft.tile_phase + 2 * (tile * fft.a + k));
}

// A tile of columns, times the phases, to where its rows lie; and back, times the same phases.
template <typename A>
void turn_to_rows(const TwoStepFft<A>& fft, int64_t tile, const A* columns, A* between) {
  const int64_t first = tile * kLanes, count = fft.b - first < kLanes ? fft.b - first : kLanes;
  for (int64_t k = 0; k < fft.a; k += kLanes) {
    Vector<A> re[kLanes] = {}, im[kLanes] = {};
    for (int64_t i = 0; i < kLanes && k + i < fft.a; ++i) {
      const Complexes<A> z = Complexes<A>::load(columns + kPlace * (k + i)) * phase(fft, tile, k + i);
      re[i] = z.re;
      im[i] = z.im;
    }
    transpose<A>(re);
    transpose<A>(im);
    A* to = between + kPlace * (k / kLanes * fft.b + first);
    for (int64_t c = 0; c < count; ++c) Complexes<A>{re[c], im[c]}.store(to + kPlace * c);
  }
}

template <typename A>
void turn_to_columns(const TwoStepFft<A>& fft, int64_t tile, const A* between, A* columns) {
  const int64_t first = tile * kLanes, count = fft.b - first < kLanes ? fft.b - first : kLanes;
  for (int64_t k = 0; k < fft.a; k += kLanes) {
    Vector<A> re[kLanes] = {}, im[kLanes] = {};
    const A* from = between + kPlace * (k / kLanes * fft.b + first);
    for (int64_t c = 0; c < count; ++c) {
      const Complexes<A> z = Complexes<A>::load(from + kPlace * c);
      re[c] = z.re;
      im[c] = z.im;
    }
    transpose<A>(re);
    transpose<A>(im);
    for (int64_t i = 0; i < kLanes && k + i < fft.a; ++i) {
      (Complexes<A>{re[i], im[i]} * phase(fft, tile, k + i)).store(columns + kPlace * (k + i));
    }
  }
}

// Scratch memory is given without alignment.
template <typename A>
inline A* tile_of(A* scratch, int64_t index, const TwoStepFft<A>& fft) {
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64;
  return reinterpret_cast<A*>(aligned) + index * (fft.a > fft.b ? fft.a : fft.b) * kPlace;
}

// ---- what the table holds
// --------------------------------------------------------------------------------------------

template <typename A>
void columns(const TwoStepFft<A>& fft, int64_t tile, bool inverse, const A* x, A* between, A* scratch) {
  A *loaded = tile_of(scratch, 0, fft), *other = tile_of(scratch, 1, fft);
  const int64_t first = tile * kLanes, count = fft.b - first < kLanes ? fft.b - first : kLanes;
  for (int64_t j = 0; j < fft.a; ++j) {
    const Complexes<A> z = load_lanes(x + 2 * (j * fft.b + first), 1, count);
    (inverse ? z.exchanged() : z).store(loaded + kPlace * j);
  }
  turn_to_rows(fft, tile, run_fft(fft.columns, loaded, other), between);
}

template <typename A>
void rows(const TwoStepFft<A>& fft, int64_t tile, bool inverse, A* between, A* out, A* scratch) {
  A* part = between + kPlace * tile * fft.b;
  const A* result = run_fft(fft.rows, part, tile_of(scratch, 0, fft));
  const int64_t first = tile * kLanes, count = fft.a - first < kLanes ? fft.a - first : kLanes;
  for (int64_t l = 0; l < fft.b; ++l) {
    const Complexes<A> z = Complexes<A>::load(result + kPlace * l);
    store_lanes(inverse ? z.exchanged() : z, out + 2 * (l * fft.a + first), 1, count);
  }
}

template <typename A>
void spread(const TwoStepFft<A>& fft, int64_t tile, A* between, A* scratch) {
  A* part = between + kPlace * tile * fft.b;
  const A* result = run_fft(fft.rows, part, tile_of(scratch, 0, fft));
  if (result != part) __builtin_memcpy(part, result, kPlace * fft.b * sizeof(A));
}

template <typename A>
void convolve(const TwoStepFft<A>& fft, int64_t tile, const A* kernel, A* between, A* scratch) {
  A *part = between + kPlace * tile * fft.b, *other = tile_of(scratch, 0, fft);
  A* result = run_fft(fft.rows, part, other);
  const A* factor = kernel + kPlace * tile * fft.b;
  for (int64_t l = 0; l < fft.b; ++l) {
    const Complexes<A> z = Complexes<A>::load(result + kPlace * l) * Complexes<A>::load(factor + kPlace * l);
    z.exchanged().store(result + kPlace * l);
  }
  result = run_fft(fft.rows, result, result == part ? other : part);
  if (result != part) __builtin_memcpy(part, result, kPlace * fft.b * sizeof(A));
}

// Lanes of place j of a tile of columns that are below n.
template <typename A>
inline int64_t lanes_below(int64_t n, const TwoStepFft<A>& fft, int64_t tile, int64_t j) {
  const int64_t in_row = fft.b - tile * kLanes, in_all = n - (j * fft.b + tile * kLanes);
  const int64_t count = in_row < in_all ? in_row : in_all;
  return count < 0 ? 0 : count < kLanes ? count : kLanes;
}

template <typename A>
void chirp_load(const ChirpTables<A>& chirps, int64_t tile, bool conjugate, const A* x, int64_t stride,
                A* const* between, A* scratch) {
  const TwoStepFft<A>& fft = chirps.fft;
  A *cyclic = tile_of(scratch, 0, fft), *negacyclic = tile_of(scratch, 1, fft), *other = tile_of(scratch, 2, fft);
  const A sign = conjugate ? A(-1) : A(1);
  for (int64_t j = 0; j < fft.a; ++j) {
    const int64_t count = lanes_below(chirps.n, fft, tile, j), at = j * fft.b + tile * kLanes;
    Complexes<A> z = load_lanes(x + 2 * stride * at, stride, count);
    z.im = z.im * sign;
    (z * load_lanes(chirps.chirp + 2 * at, 1, count)).store(cyclic + kPlace * j);
    (z * load_lanes(chirps.chirp_ahead + 2 * at, 1, count)).store(negacyclic + kPlace * j);
  }
  A* result = run_fft(fft.columns, cyclic, other);
  turn_to_rows(fft, tile, result, between[0]);
  turn_to_rows(fft, tile, run_fft(fft.columns, negacyclic, result), between[1]);
}

template <typename A>
void chirp_store(const ChirpTables<A>& chirps, int64_t tile, bool conjugate, const A* const* between, A* out,
                 int64_t stride, A* scratch) {
  const TwoStepFft<A>& fft = chirps.fft;
  A *cyclic = tile_of(scratch, 0, fft), *negacyclic = tile_of(scratch, 1, fft), *other = tile_of(scratch, 2, fft);
  turn_to_columns(fft, tile, between[0], cyclic);
  turn_to_columns(fft, tile, between[1], negacyclic);
  const A* first = run_fft(fft.columns, cyclic, other);
  const A* second = run_fft(fft.columns, negacyclic, first == cyclic ? other : cyclic);
  const A sign = conjugate ? A(-1) : A(1);
  for (int64_t j = 0; j < fft.a; ++j) {
    const int64_t count = lanes_below(chirps.n, fft, tile, j), at = j * fft.b + tile * kLanes;
    Complexes<A> z =
        Complexes<A>::load(first + kPlace * j).exchanged() * load_lanes(chirps.chirp + 2 * at, 1, count) +
        Complexes<A>::load(second + kPlace * j).exchanged() * load_lanes(chirps.chirp_behind + 2 * at, 1, count);
    z.im = z.im * sign;
    store_lanes(z, out + 2 * stride * at, stride, count);
  }
}

}  // namespace

extern const FftKernels<float> fft_float;
const FftKernels<float> fft_float = {columns<float>,  rows<float>,       spread<float>,
                                     convolve<float>, chirp_load<float>, chirp_store<float>};
extern const FftKernels<double> fft_double;
const FftKernels<double> fft_double = {columns<double>,  rows<double>,       spread<double>,
                                       convolve<double>, chirp_load<double>, chirp_store<double>};

}  // namespace pfl::cpu::PFL_ISA
