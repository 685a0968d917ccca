// Built once per instruction set with -DPFL_ISA=<namespace>; see averaging.cpp for what that forbids.
//
// Behind a 2x2 pooling at most a quarter of a convolution's gradient is not zero, and ReLU cuts off some of that. The
// gradients here are sums over what is left, each term a number times a patch: KH stretches of KW * inputs numbers that
// lie next to each other, in x as in the weights. Every element is summed in one order, whatever the vectors hold.
#include "cpu/kernels/convolution.h"

#include <cstring>

namespace pfl::cpu::PFL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
// Sums held in registers: with a factor and a product they leave room in 16.
constexpr int kSums = 10;
// Outputs whose terms are collected in one walk over the cells, which lie output next to output.
constexpr int64_t kOutputs = 16;

template <typename T, int kLanes>
struct Vector {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <typename T>
struct Vector<T, 1> {
  typedef T type;
};
template <typename T, int kLanes>
using vector_t = typename Vector<T, kLanes>::type;

template <typename V, typename T>
inline V load(const T* p) {
  V result;
  memcpy(&result, p, sizeof(V));
  return result;
}

// A number, and where in `from` the patch begins that it multiplies.
template <typename T>
struct Term {
  T factor;
  int64_t offset;
};

// to = (kAdd ? to : 0) + sum over the terms of factor * patch, for kRows stretches of kVectors vectors. The last of a
// stretch begins at `last` and may overlap the one before it: both then hold the same sums there.
template <typename T, int kLanes, int kRows, int kVectors, bool kAdd>
void sum_terms(const Term<T>* terms, int64_t count, const T* from, int64_t from_row, T* to, int64_t to_row,
               int64_t last) {
  using V = vector_t<T, kLanes>;
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = kAdd ? load<V>(to + r * to_row + (v + 1 == kVectors ? last : v * kLanes)) : V{};
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const T factor = terms[i].factor;
    const T* patch = from + terms[i].offset;
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] += factor * load<V>(patch + r * from_row + (v + 1 == kVectors ? last : v * kLanes));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      memcpy(to + r * to_row + (v + 1 == kVectors ? last : v * kLanes), &sums[r][v], sizeof(V));
    }
  }
}

template <typename T>
using SumTerms = void (*)(const Term<T>*, int64_t, const T*, int64_t, T*, int64_t, int64_t);

template <typename T, int kLanes, bool kAdd>
SumTerms<T> sum_of_vectors(int64_t vectors) {
  switch (vectors) {
    case 1:
      return sum_terms<T, kLanes, 1, 1, kAdd>;
    case 2:
      return sum_terms<T, kLanes, 1, 2, kAdd>;
    case 3:
      return sum_terms<T, kLanes, 1, 3, kAdd>;
    case 4:
      return sum_terms<T, kLanes, 1, 4, kAdd>;
    case 5:
      return sum_terms<T, kLanes, 1, 5, kAdd>;
    case 6:
      return sum_terms<T, kLanes, 1, 6, kAdd>;
    case 7:
      return sum_terms<T, kLanes, 1, 7, kAdd>;
    case 8:
      return sum_terms<T, kLanes, 1, 8, kAdd>;
    case 9:
      return sum_terms<T, kLanes, 1, 9, kAdd>;
    default:
      return sum_terms<T, kLanes, 1, kSums, kAdd>;
  }
}

// How patches of `rows` stretches of `length` numbers are cut for sum_terms: bands of rows, in each pieces of vectors.
template <typename T, bool kAdd>
class Cut {
 public:
  Cut(int64_t rows, int64_t length) {
    // The widest vectors that a stretch fills: others would go beyond its end.
    lanes_ = 1;
    while (2 * lanes_ * static_cast<int64_t>(sizeof(T)) <= kVectorBytes && 2 * lanes_ <= length) lanes_ *= 2;
    const int64_t vectors = (length + lanes_ - 1) / lanes_;
    // Short stretches leave too few sums in flight: all rows at once, for the usual kernels.
    band_ = vectors <= 2 && (rows == 3 || rows == 5) ? rows : 1;
    // The last two vectors, which may overlap, are of one piece: what both add must be added once.
    vectors_ = kSums;
    while (vectors > kSums && vectors % vectors_ == 1) --vectors_;
    pieces_ = (vectors + vectors_ - 1) / vectors_;
    full_ = sum_of(vectors_);
    end_ = sum_of(vectors - (pieces_ - 1) * vectors_);
    last_ = length - lanes_ - (pieces_ - 1) * vectors_ * lanes_;
  }

  // sum_terms for the rows [first, end).
  void operator()(const Term<T>* terms, int64_t count, const T* from, int64_t from_row, T* to, int64_t to_row,
                  int64_t first, int64_t end) const {
    for (int64_t row = first; row < end; row += band_) {
      const T* source = from + row * from_row;
      T* target = to + row * to_row;
      for (int64_t piece = 1; piece < pieces_; ++piece) {
        full_(terms, count, source, from_row, target, to_row, (vectors_ - 1) * lanes_);
        source += vectors_ * lanes_;
        target += vectors_ * lanes_;
      }
      end_(terms, count, source, from_row, target, to_row, last_);
    }
  }

 private:
  SumTerms<T> sum_of(int64_t vectors) const {
    switch (lanes_ * static_cast<int64_t>(sizeof(T))) {
      case 64:
        return sum_of_bytes<64>(vectors);
      case 32:
        return sum_of_bytes<32>(vectors);
      case 16:
        return sum_of_bytes<16>(vectors);
      case 8:
        return sum_of_bytes<8>(vectors);
      default:
        return sum_of_bytes<static_cast<int>(sizeof(T))>(vectors);
    }
  }

  template <int kBytes>
  SumTerms<T> sum_of_bytes(int64_t vectors) const {
    // Never asked for more than kVectorBytes; then it need not be compiled either.
    constexpr int kLanes = (kBytes < kVectorBytes ? kBytes : kVectorBytes) / static_cast<int>(sizeof(T));
    if (band_ == 3) return vectors == 1 ? sum_terms<T, kLanes, 3, 1, kAdd> : sum_terms<T, kLanes, 3, 2, kAdd>;
    if (band_ == 5) return vectors == 1 ? sum_terms<T, kLanes, 5, 1, kAdd> : sum_terms<T, kLanes, 5, 2, kAdd>;
    return sum_of_vectors<T, kLanes, kAdd>(vectors);
  }

  int64_t lanes_, vectors_, band_, pieces_, last_;
  SumTerms<T> full_, end_;
};

template <typename T>
void weight_gradient(const ConvolutionShape& s, int64_t begin, int64_t end, const T* grad, const uint8_t* which,
                     const T* x, Term<T>* terms, T* to_weight, T* to_bias) {
  const int64_t length = s.kernel_width * s.inputs;
  const int64_t patch = s.kernel_height * length;
  const int64_t most = s.cells() + 1;
  const Cut<T, true> cut(s.kernel_height, length);
  memset(to_weight + begin * patch, 0, (end - begin) * patch * sizeof(T));
  memset(to_bias + begin, 0, (end - begin) * sizeof(T));
  // Sample by sample: one stays in the first-level cache, a batch would not.
  for (int64_t n = 0; n < s.samples; ++n) {
    const T* sample = x + n * s.height * s.width * s.inputs;
    for (int64_t first = begin; first < end; first += kOutputs) {
      const int64_t outputs = end - first < kOutputs ? end - first : kOutputs;
      int64_t count[kOutputs] = {};
      for (int64_t cell = 0; cell < s.cells(); ++cell) {
        const int64_t offsets[5] = {s.patch(cell, 0), s.patch(cell, 1), s.patch(cell, 2), s.patch(cell, 3), 0};
        const int64_t at = (n * s.cells() + cell) * s.outputs + first;
        for (int64_t o = 0; o < outputs; ++o) {
          // Written in any case and counted only if it is one, which takes no branch.
          terms[o * most + count[o]] = {grad[at + o], offsets[which[at + o]]};
          count[o] += which[at + o] < 4;
        }
      }
      for (int64_t o = 0; o < outputs; ++o) {
        const Term<T>* own = terms + o * most;
        if (count[o] == 0) continue;
        cut(own, count[o], sample, s.width * s.inputs, to_weight + (first + o) * patch, length, 0, s.kernel_height);
        T total = to_bias[first + o];
        for (int64_t i = 0; i < count[o]; ++i) total += own[i].factor;
        to_bias[first + o] = total;
      }
    }
  }
}

template <typename T>
void input_gradient(const ConvolutionShape& s, int64_t begin, int64_t end, const T* grad, const uint8_t* which,
                    const T* weight, Term<T>* terms, T* to_x) {
  const int64_t length = s.kernel_width * s.inputs;
  const int64_t patch = s.kernel_height * length;
  const int64_t sample = s.height * s.width * s.inputs;
  const Cut<T, true> cut(s.kernel_height, length);
  // Row by row of the kernel, so that of all weights one row stays in the first-level cache over the positions; unless
  // the rows are short. This is the order of the sums: it depends on sizes alone.
  const int64_t rows = length * static_cast<int64_t>(sizeof(T)) <= 2 * 64 ? s.kernel_height : 1;
  // Behind the terms: how many each position of each cell has.
  int64_t* counts = reinterpret_cast<int64_t*>(terms + s.cells() * s.outputs + 1);
  for (int64_t n = begin; n < end; ++n) {
    T* x = to_x + n * sample;
    memset(x, 0, sample * sizeof(T));
    int64_t used = 0;
    for (int64_t cell = 0; cell < s.cells(); ++cell) {
      const int64_t at = (n * s.cells() + cell) * s.outputs;
      for (int position = 0; position < 4; ++position) {
        const int64_t before = used;
        for (int64_t o = 0; o < s.outputs; ++o) {
          terms[used] = {grad[at + o], o * patch};
          used += which[at + o] == position;
        }
        counts[4 * cell + position] = used - before;
      }
    }
    for (int64_t row = 0; row < s.kernel_height; row += rows) {
      const Term<T>* own = terms;
      for (int64_t cell = 0; cell < s.cells(); ++cell) {
        for (int position = 0; position < 4; ++position) {
          const int64_t count = counts[4 * cell + position];
          if (count != 0) {
            cut(own, count, weight, length, x + s.patch(cell, position), s.width * s.inputs, row, row + rows);
          }
          own += count;
        }
      }
    }
  }
}

// The largest of four, or zero, and which it is. NaN is the largest, and no less than zero, as in torch.
template <typename T, typename Index>
inline Index pooled(T first, T second, T third, T fourth, T* y) {
  T best = first;
  Index which = 0;
  const bool to_second = (second > best) | (second != second);
  best = to_second ? second : best;
  which = to_second ? 1 : which;
  const bool to_third = (third > best) | (third != third);
  best = to_third ? third : best;
  which = to_third ? 2 : which;
  const bool to_fourth = (fourth > best) | (fourth != fourth);
  best = to_fourth ? fourth : best;
  which = to_fourth ? 3 : which;
  const bool cut = best <= 0;
  *y = cut ? T(0) : best;
  return cut ? 4 : which;
}

template <typename T, typename Index>
void pool(int64_t begin, int64_t end, int64_t height, int64_t width, int64_t channels, const T* __restrict x,
          T* __restrict y, uint8_t* __restrict which) {
  // Few channels fill no vectors: then the cells of a row are taken one after the other, through a table of where their
  // numbers are.
  constexpr int64_t kBlock = 64;
  constexpr int64_t kFewChannels = 16;
  const int64_t rows = height / 2;
  const int64_t columns = width / 2;
  const int64_t right = channels;
  const int64_t down = width * channels;
  const int64_t stretch = channels < kFewChannels ? columns * channels : channels;
  Index offset[kBlock];
  Index index[kBlock];
  T value[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + (row / rows * height + row % rows * 2) * down;
    int64_t at = row * columns * channels;
    for (const T* end_of_row = from + 2 * columns * channels; from < end_of_row;
         from += channels < kFewChannels ? 2 * columns * channels : 2 * channels) {
      int64_t column = 0;
      int64_t channel = 0;
      for (int64_t first = 0; first < stretch; first += kBlock) {
        const int64_t block = stretch - first < kBlock ? stretch - first : kBlock;
        if (channels < kFewChannels) {
          for (int64_t i = 0; i < block; ++i) {
            offset[i] = static_cast<Index>(2 * column * channels + channel);
            const bool wraps = ++channel == channels;
            column += wraps;
            channel = wraps ? 0 : channel;
          }
          for (int64_t i = 0; i < block; ++i) {
            const Index o = offset[i];
            index[i] = pooled<T, Index>(from[o], from[o + right], from[o + down], from[o + down + right], value + i);
          }
        } else {
          const T* cell = from + first;
          for (int64_t i = 0; i < block; ++i) {
            index[i] = pooled<T, Index>(cell[i], cell[i + right], cell[i + down], cell[i + down + right], value + i);
          }
        }
        memcpy(y + at, value, block * sizeof(T));
        for (int64_t i = 0; i < block; ++i) which[at + i] = static_cast<uint8_t>(index[i]);
        at += block;
      }
    }
  }
}

void pool(DType dtype, int64_t begin, int64_t end, int64_t height, int64_t width, int64_t channels, const void* x,
          void* y, uint8_t* which) {
  if (dtype == DType::kFloat64) {
    pool<double, int64_t>(begin, end, height, width, channels, static_cast<const double*>(x), static_cast<double*>(y),
                          which);
  } else {
    pool<float, int32_t>(begin, end, height, width, channels, static_cast<const float*>(x), static_cast<float*>(y),
                         which);
  }
}

int64_t workspace(DType dtype, const ConvolutionShape& s) {
  const int64_t term = dtype == DType::kFloat64 ? sizeof(Term<double>) : sizeof(Term<float>);
  const int64_t for_weight = kOutputs * (s.cells() + 1) * term;
  const int64_t for_input = (s.cells() * s.outputs + 1) * term + 4 * s.cells() * static_cast<int64_t>(sizeof(int64_t));
  return for_weight > for_input ? for_weight : for_input;
}

template <typename T>
void weight_gradient_of(const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                        const uint8_t* which, const void* x, void* workspace, void* to_weight, void* to_bias) {
  weight_gradient(shape, begin, end, static_cast<const T*>(grad), which, static_cast<const T*>(x),
                  static_cast<Term<T>*>(workspace), static_cast<T*>(to_weight), static_cast<T*>(to_bias));
}

void weight_gradient(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                     const uint8_t* which, const void* x, void* workspace, void* to_weight, void* to_bias) {
  const auto run = dtype == DType::kFloat64 ? weight_gradient_of<double> : weight_gradient_of<float>;
  run(shape, begin, end, grad, which, x, workspace, to_weight, to_bias);
}

template <typename T>
void input_gradient_of(const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                       const uint8_t* which, const void* weight, void* workspace, void* to_x) {
  input_gradient(shape, begin, end, static_cast<const T*>(grad), which, static_cast<const T*>(weight),
                 static_cast<Term<T>*>(workspace), static_cast<T*>(to_x));
}

void input_gradient(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                    const uint8_t* which, const void* weight, void* workspace, void* to_x) {
  const auto run = dtype == DType::kFloat64 ? input_gradient_of<double> : input_gradient_of<float>;
  run(shape, begin, end, grad, which, weight, workspace, to_x);
}

}  // namespace

extern const ConvolutionKernels convolution;
const ConvolutionKernels convolution = {pool, workspace, weight_gradient, input_gradient};

}  // namespace pfl::cpu::PFL_ISA
