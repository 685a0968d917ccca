// Built once per instruction set with -DPFL_ISA=<namespace>; see averaging.cpp for what that forbids.
//
// A patch is KH stretches of KW * inputs numbers that lie next to each other, in x as in the weights: the taps. The
// convolution multiplies each with vectors of outputs and pools what it has in registers.
//
// Behind a 2x2 pooling at most a quarter of a convolution's gradient is not zero, and ReLU cuts off some of that. The
// gradients here are sums over what is left, each term a number times a patch. Every element is summed in one order,
// whatever the vectors hold.
#include "cpu/kernels/convolution.h"

#include <type_traits>

#include "cpu/kernels/vectors.h"

namespace pfl::cpu::PFL_ISA {
namespace {

// Sums held in registers: with a factor and a product they leave room in 16.
constexpr int kSums = 10;
// Outputs whose terms are collected in one walk over the cells, which lie output next to output.
constexpr int64_t kOutputs = 16;

// ---- the convolution with its pooling -------------------------------------------------------------------------------

template <typename T>
using index_t = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
template <typename T>
using places_t = vector_t<index_t<T>, kLanes<T>>;

// Vectors of outputs, and cells of a row, that are summed at once: what registers hold.
constexpr int kVectors = 2;
#if defined(__AVX512F__)
constexpr int kCells = 2;
#else
constexpr int kCells = 1;
#endif
template <typename T>
constexpr int64_t kBlock = kVectors * kLanes<T>;

// Outputs are taken in blocks; the last may be of fewer vectors.
template <typename T>
int64_t block_vectors(int64_t outputs, int64_t first) {
  return outputs - first > kLanes<T> ? kVectors : 1;
}

template <typename T>
int64_t packed_block(const ConvolutionShape& s) {
  return (1 + s.taps()) * kBlock<T>;
}

// Of each block bias and weights, tap by tap, the outputs next to each other; zeros behind the last.
template <typename T>
void pack(const ConvolutionShape& s, const T* weight, const T* bias, T* packed) {
  for (int64_t first = 0; first < s.outputs; first += kBlock<T>, packed += packed_block<T>(s)) {
    const int64_t width = block_vectors<T>(s.outputs, first) * kLanes<T>;
    const int64_t outputs = s.outputs - first < width ? s.outputs - first : width;
    if (outputs < width) memset(packed, 0, (1 + s.taps()) * width * sizeof(T));
    for (int64_t o = 0; o < outputs; ++o) {
      packed[o] = bias[first + o];
      const T* taps = weight + (first + o) * s.taps();
      for (int64_t t = 0; t < s.taps(); ++t) packed[(1 + t) * width + o] = taps[t];
    }
  }
}

// The larger of two numbers, and which it is. NaN is the largest, as in torch.
template <typename T>
void take_larger(wide_t<T> challenger, int number, wide_t<T>* best, places_t<T>* place) {
  const places_t<T> wins = (challenger > *best) | (challenger != challenger);
  *best = wins ? challenger : *best;
  *place = wins ? places_t<T>{} + number : *place;
}

// ReLU; NaN is no less than zero, as in torch.
template <typename T>
void cut_off(wide_t<T>* best, places_t<T>* place) {
  const places_t<T> cut = *best <= wide_t<T>{};
  *best = cut ? wide_t<T>{} : *best;
  *place = cut ? places_t<T>{} + 4 : *place;
}

// One block of outputs of kCellsHere cells that lie next to each other. The largest of four, or zero, is written to y,
// and to `which` the one it is.
template <typename T, int kCellsHere, int kVectorsHere>
void convolve_cells(const ConvolutionShape& s, const T* x, const T* packed, int64_t outputs, T* y, uint8_t* which) {
  using V = wide_t<T>;
  using Places = places_t<T>;
  constexpr int kWidth = kVectorsHere * kLanes<T>;
  const int64_t row = s.width * s.inputs;
  const int64_t length = s.kernel_width * s.inputs;
  V sums[2][2 * kCellsHere][kVectorsHere];
  for (int down = 0; down < 2; ++down) {
    for (int right = 0; right < 2 * kCellsHere; ++right) {
      for (int v = 0; v < kVectorsHere; ++v) sums[down][right][v] = load<V>(packed + v * kLanes<T>);
    }
  }
  packed += kWidth;
  for (int64_t i = 0; i < s.kernel_height; ++i) {
    const T* at = x + i * row;
    for (int64_t t = 0; t < length; ++t, ++at, packed += kWidth) {
      V weights[kVectorsHere];
      for (int v = 0; v < kVectorsHere; ++v) weights[v] = load<V>(packed + v * kLanes<T>);
      for (int down = 0; down < 2; ++down) {
        for (int right = 0; right < 2 * kCellsHere; ++right) {
          const T factor = at[down * row + right * s.inputs];
          for (int v = 0; v < kVectorsHere; ++v) {
            sums[down][right][v] = multiply_add<T>(filled<T>(factor), weights[v], sums[down][right][v]);
          }
        }
      }
    }
  }
  for (int cell = 0; cell < kCellsHere; ++cell) {
    T values[kWidth];
    uint8_t indices[kWidth];
    for (int v = 0; v < kVectorsHere; ++v) {
      V best = sums[0][2 * cell][v];
      Places place = {};
      for (int other = 1; other < 4; ++other) {
        take_larger<T>(sums[other / 2][2 * cell + other % 2][v], other, &best, &place);
      }
      cut_off<T>(&best, &place);
      memcpy(values + v * kLanes<T>, &best, sizeof(V));
      const auto bytes = __builtin_convertvector(place, vector_t<uint8_t, kLanes<T>>);
      memcpy(indices + v * kLanes<T>, &bytes, sizeof(bytes));
    }
    if (outputs == kWidth) {  // a length that the compiler knows
      memcpy(y + cell * s.outputs, values, sizeof(values));
      memcpy(which + cell * s.outputs, indices, sizeof(indices));
    } else {
      memcpy(y + cell * s.outputs, values, outputs * sizeof(T));
      memcpy(which + cell * s.outputs, indices, outputs);
    }
  }
}

template <typename T, int kVectorsHere>
void convolve_block(const ConvolutionShape& s, int64_t begin, int64_t end, const T* x, const T* packed, int64_t first,
                    T* y, uint8_t* which) {
  const int64_t width = kVectorsHere * kLanes<T>;
  const int64_t outputs = s.outputs - first < width ? s.outputs - first : width;
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + (row / s.cell_rows() * s.height + row % s.cell_rows() * 2) * s.width * s.inputs;
    int64_t to = row * s.cell_columns() * s.outputs + first;
    int64_t column = 0;
    for (; column + kCells <= s.cell_columns(); column += kCells, to += kCells * s.outputs) {
      convolve_cells<T, kCells, kVectorsHere>(s, from + 2 * column * s.inputs, packed, outputs, y + to, which + to);
    }
    for (; column < s.cell_columns(); ++column, to += s.outputs) {
      convolve_cells<T, 1, kVectorsHere>(s, from + 2 * column * s.inputs, packed, outputs, y + to, which + to);
    }
  }
}

#if defined(__AVX512F__)
// Few outputs leave most of a vector empty: six of sixteen lanes. Here numbers that lie next to each other in a row of
// an input's plane are in a vector, and each weight multiplies two vectors of two rows. LeNet's first layer takes half
// of the time. The same products are added in the same order, so the bits are those of the other way.
constexpr int64_t kPlaneBytes = 65536;
constexpr int kMostOutputs = 6;  // at once: what registers hold

// Of a plane: reading goes beyond the last column.
template <typename T>
int64_t plane_row(const ConvolutionShape& s) {
  return s.width + kVectors * kLanes<T>;
}

template <typename T>
bool is_narrow(const ConvolutionShape& s) {
  return 2 * s.outputs <= kLanes<T> &&
         s.inputs * s.height * plane_row<T>(s) <= kPlaneBytes / static_cast<int64_t>(sizeof(T));
}

// A sample as a plane for each input, with zeros behind each row.
template <typename T>
void take_apart(const ConvolutionShape& s, const T* x, T* planes) {
  for (int64_t c = 0; c < s.inputs; ++c) {
    for (int64_t h = 0; h < s.height; ++h, planes += plane_row<T>(s)) {
      const T* row = x + h * s.width * s.inputs + c;
      for (int64_t w = 0; w < s.width; ++w) planes[w] = row[w * s.inputs];
      memset(planes + s.width, 0, kVectors * kLanes<T> * sizeof(T));
    }
  }
}

// The numbers at even or at odd places of two vectors, or of one and, behind them, the same again.
template <typename T, int kVectorsHere>
wide_t<T> every_other(const wide_t<T>* x, int first) {
  places_t<T> places;
  for (int l = 0; l < kLanes<T>; ++l) places[l] = static_cast<index_t<T>>((2 * l + first) % (kVectorsHere * kLanes<T>));
  return __builtin_shuffle(x[0], x[kVectorsHere - 1], places);
}

// Some outputs of `cells` cells that lie next to each other, from the two rows of planes that begin at `planes`.
template <typename T, int kOutputsHere, int kVectorsHere>
void convolve_planes(const ConvolutionShape& s, const T* planes, const T* packed, int64_t cells, T* y, uint8_t* which) {
  using V = wide_t<T>;
  using Places = places_t<T>;
  const int64_t row = plane_row<T>(s);
  const T* weights = packed;
  V sums[kOutputsHere][2][kVectorsHere];
  for (int o = 0; o < kOutputsHere; ++o) {
    for (int down = 0; down < 2; ++down) {
      for (int v = 0; v < kVectorsHere; ++v) sums[o][down][v] = filled<T>(weights[o]);
    }
  }
  for (int64_t i = 0; i < s.kernel_height; ++i) {
    for (int64_t j = 0; j < s.kernel_width; ++j) {
      const T* at = planes + i * row + j;
      for (int64_t c = 0; c < s.inputs; ++c, at += s.height * row) {
        weights += kLanes<T>;
        V x[2][kVectorsHere];
        for (int down = 0; down < 2; ++down) {
          for (int v = 0; v < kVectorsHere; ++v) x[down][v] = load<V>(at + down * row + v * kLanes<T>);
        }
        for (int o = 0; o < kOutputsHere; ++o) {
          const V weight = filled<T>(weights[o]);
          for (int down = 0; down < 2; ++down) {
            for (int v = 0; v < kVectorsHere; ++v) {
              sums[o][down][v] = multiply_add<T>(x[down][v], weight, sums[o][down][v]);
            }
          }
        }
      }
    }
  }
  for (int o = 0; o < kOutputsHere; ++o) {
    V best;
    Places place = {};
    for (int other = 0; other < 4; ++other) {
      const V challenger = every_other<T, kVectorsHere>(sums[o][other / 2], other % 2);
      if (other == 0) {
        best = challenger;
      } else {
        take_larger<T>(challenger, other, &best, &place);
      }
    }
    cut_off<T>(&best, &place);
    T values[kLanes<T>];
    index_t<T> indices[kLanes<T>];
    memcpy(values, &best, sizeof(values));
    memcpy(indices, &place, sizeof(indices));
    for (int64_t cell = 0; cell < cells; ++cell) {
      y[cell * s.outputs + o] = values[cell];
      which[cell * s.outputs + o] = static_cast<uint8_t>(indices[cell]);
    }
  }
}

template <typename T, int kVectorsHere>
void convolve_planes(const ConvolutionShape& s, int64_t outputs, const T* planes, const T* packed, int64_t cells, T* y,
                     uint8_t* which) {
  switch (outputs) {
    case 1:
      return convolve_planes<T, 1, kVectorsHere>(s, planes, packed, cells, y, which);
    case 2:
      return convolve_planes<T, 2, kVectorsHere>(s, planes, packed, cells, y, which);
    case 3:
      return convolve_planes<T, 3, kVectorsHere>(s, planes, packed, cells, y, which);
    case 4:
      return convolve_planes<T, 4, kVectorsHere>(s, planes, packed, cells, y, which);
    case 5:
      return convolve_planes<T, 5, kVectorsHere>(s, planes, packed, cells, y, which);
    default:
      return convolve_planes<T, kMostOutputs, kVectorsHere>(s, planes, packed, cells, y, which);
  }
}

template <typename T>
void convolve_narrow(const ConvolutionShape& s, int64_t begin, int64_t end, const T* x, const T* packed, T* y,
                     uint8_t* which) {
  alignas(64) T planes[kPlaneBytes / sizeof(T)];
  int64_t taken = -1;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sample = row / s.cell_rows();
    if (sample != taken) take_apart(s, x + sample * s.height * s.width * s.inputs, planes);
    taken = sample;
    const T* top = planes + row % s.cell_rows() * 2 * plane_row<T>(s);
    for (int64_t cell = 0; cell < s.cell_columns();) {
      const int64_t left = s.cell_columns() - cell;
      const bool several = 2 * left > kLanes<T>;
      const int64_t fit = (several ? kVectors : 1) * kLanes<T> / 2;
      const int64_t cells = left < fit ? left : fit;
      const auto run = several ? convolve_planes<T, kVectors> : convolve_planes<T, 1>;
      const int64_t to = (row * s.cell_columns() + cell) * s.outputs;
      for (int64_t first = 0; first < s.outputs; first += kMostOutputs) {
        const int64_t outputs = s.outputs - first < kMostOutputs ? s.outputs - first : kMostOutputs;
        run(s, outputs, top + 2 * cell, packed + first, cells, y + to + first, which + to + first);
      }
      cell += cells;
    }
  }
}
#endif

template <typename T>
void convolve(const ConvolutionShape& s, int64_t begin, int64_t end, const T* x, const T* packed, T* y,
              uint8_t* which) {
#if defined(__AVX512F__)
  if (is_narrow<T>(s)) return convolve_narrow(s, begin, end, x, packed, y, which);
#endif
  for (int64_t first = 0; first < s.outputs; first += kBlock<T>, packed += packed_block<T>(s)) {
    const auto run = block_vectors<T>(s.outputs, first) == 1 ? convolve_block<T, 1> : convolve_block<T, kVectors>;
    run(s, begin, end, x, packed, first, y, which);
  }
}

int64_t packed_bytes(DType dtype, const ConvolutionShape& s) {
  if (dtype == DType::kFloat64) {
    return (s.outputs + kBlock<double> - 1) / kBlock<double> * packed_block<double>(s) * sizeof(double);
  }
  return (s.outputs + kBlock<float> - 1) / kBlock<float> * packed_block<float>(s) * sizeof(float);
}

void pack(DType dtype, const ConvolutionShape& shape, const void* weight, const void* bias, void* packed) {
  if (dtype == DType::kFloat64) {
    pack(shape, static_cast<const double*>(weight), static_cast<const double*>(bias), static_cast<double*>(packed));
  } else {
    pack(shape, static_cast<const float*>(weight), static_cast<const float*>(bias), static_cast<float*>(packed));
  }
}

void convolve(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* x, const void* packed,
              void* y, uint8_t* which) {
  if (dtype == DType::kFloat64) {
    convolve(shape, begin, end, static_cast<const double*>(x), static_cast<const double*>(packed),
             static_cast<double*>(y), which);
  } else {
    convolve(shape, begin, end, static_cast<const float*>(x), static_cast<const float*>(packed), static_cast<float*>(y),
             which);
  }
}

// ---- its gradients
// ----------------------------------------------------------------------------------------------------

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

#if defined(__AVX2__)
// With one input or two a stretch fills no vector. Then outputs lie in vectors, and of the four numbers that a tap may
// have met in a cell each output takes its own. The order of the sums is that of sum_terms, with zeros for what was
// cut.
constexpr int kTaps = 5;

bool is_short(const ConvolutionShape& s) { return s.kernel_width * s.inputs < 8 && s.outputs >= 16; }

// The staged cells of a sample, one block of outputs each: factors, and which of four numbers they multiply.
struct Staged {
  float factors[kBlock<float>];
  int32_t places[kBlock<float>];
};

// Four numbers, then zeros: what place 4 takes. By intrinsics: GCC goes through memory otherwise.
inline wide_t<float> with_zeros(const float* four) {
#if defined(__AVX512F__)
  return (wide_t<float>)_mm512_zextps128_ps512(_mm_loadu_ps(four));
#else
  return (wide_t<float>)_mm256_zextps128_ps256(_mm_loadu_ps(four));
#endif
}

// sums[tap] += sum over the cells of factor * the number chosen of quads[cell's origin + tap's offset].
template <int kTapsHere>
void sum_chosen(const Staged* cells, const int64_t* origins, int64_t count, const float* quads, const int64_t* offsets,
                float* to) {
  using V = wide_t<float>;
  using Places = places_t<float>;
  V sums[kTapsHere][kVectors];
  for (int t = 0; t < kTapsHere; ++t) {
    for (int v = 0; v < kVectors; ++v) sums[t][v] = load<V>(to + t * kBlock<float> + v * kLanes<float>);
  }
  for (int64_t cell = 0; cell < count; ++cell) {
    V factors[kVectors];
    Places places[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      factors[v] = load<V>(cells[cell].factors + v * kLanes<float>);
      places[v] = load<Places>(cells[cell].places + v * kLanes<float>);
    }
    for (int t = 0; t < kTapsHere; ++t) {
      const V choice = with_zeros(quads + 4 * (origins[cell] + offsets[t]));
      for (int v = 0; v < kVectors; ++v) sums[t][v] += factors[v] * __builtin_shuffle(choice, places[v]);
    }
  }
  for (int t = 0; t < kTapsHere; ++t) {
    for (int v = 0; v < kVectors; ++v) memcpy(to + t * kBlock<float> + v * kLanes<float>, &sums[t][v], sizeof(V));
  }
}

void sum_chosen(int64_t taps, const Staged* cells, const int64_t* origins, int64_t count, const float* quads,
                const int64_t* offsets, float* to) {
  switch (taps) {
    case 1:
      return sum_chosen<1>(cells, origins, count, quads, offsets, to);
    case 2:
      return sum_chosen<2>(cells, origins, count, quads, offsets, to);
    case 3:
      return sum_chosen<3>(cells, origins, count, quads, offsets, to);
    case 4:
      return sum_chosen<4>(cells, origins, count, quads, offsets, to);
    default:
      return sum_chosen<kTaps>(cells, origins, count, quads, offsets, to);
  }
}

// What weight_gradient_of_short_stretches keeps for itself, one behind the other.
struct ShortWorkspace {
  ShortWorkspace(const ConvolutionShape& s, char* memory)
      : cells(reinterpret_cast<Staged*>(memory)),
        origins(reinterpret_cast<int64_t*>(cells + s.cells())),
        offsets(origins + s.cells()),
        quads(reinterpret_cast<float*>(offsets + s.taps())),
        sums(quads + 4 * s.height * s.width * s.inputs) {}

  static int64_t bytes(const ConvolutionShape& s) {
    const int64_t of_sums = (1 + s.taps()) * ((s.outputs + kBlock<float> - 1) / kBlock<float>)*kBlock<float>;
    return s.cells() * (sizeof(Staged) + sizeof(int64_t)) + s.taps() * sizeof(int64_t) +
           (4 * s.height * s.width * s.inputs + of_sums) * sizeof(float);
  }

  Staged* cells;
  int64_t* origins;
  int64_t* offsets;
  float* quads;
  float* sums;
};

void weight_gradient_of_short_stretches(const ConvolutionShape& s, int64_t begin, int64_t end, const float* grad,
                                        const uint8_t* which, const float* x, char* memory, float* to_weight,
                                        float* to_bias) {
  const ShortWorkspace work(s, memory);
  const int64_t row = s.width * s.inputs;
  const int64_t sample = s.height * row;
  const int64_t block_sums = (1 + s.taps()) * kBlock<float>;
  for (int64_t cell = 0; cell < s.cells(); ++cell) work.origins[cell] = s.patch(cell, 0);
  for (int64_t t = 0; t < s.taps(); ++t) {
    const int64_t length = s.kernel_width * s.inputs;
    work.offsets[t] = t / length * row + t % length;
  }
  memset(work.sums, 0, (end - begin + kBlock<float> - 1) / kBlock<float> * block_sums * sizeof(float));
  for (int64_t n = 0; n < s.samples; ++n) {
    // Each number with those to the right, below, and both. The last row and column begin no cell.
    const float* own = x + n * sample;
    for (int64_t i = 0; i < sample - row - s.inputs; ++i) {
      const float quad[4] = {own[i], own[i + s.inputs], own[i + row], own[i + row + s.inputs]};
      memcpy(work.quads + 4 * i, quad, sizeof(quad));
    }
    float* sums = work.sums;
    for (int64_t first = begin; first < end; first += kBlock<float>, sums += block_sums) {
      const int64_t outputs = end - first < kBlock<float> ? end - first : kBlock<float>;
      for (int64_t cell = 0; cell < s.cells(); ++cell) {
        const int64_t at = (n * s.cells() + cell) * s.outputs + first;
        Staged& staged = work.cells[cell];
        if (outputs < kBlock<float>) memset(&staged, 0, sizeof(staged));
        for (int64_t o = 0; o < outputs; ++o) staged.places[o] = which[at + o];
        for (int64_t o = 0; o < outputs; ++o) staged.factors[o] = staged.places[o] < 4 ? grad[at + o] : 0.0f;
        for (int64_t o = 0; o < kBlock<float>; ++o) sums[o] += staged.factors[o];
      }
      for (int64_t t = 0; t < s.taps(); t += kTaps) {
        const int64_t taps = s.taps() - t < kTaps ? s.taps() - t : kTaps;
        sum_chosen(taps, work.cells, work.origins, s.cells(), work.quads, work.offsets + t,
                   sums + (1 + t) * kBlock<float>);
      }
    }
  }
  for (int64_t o = begin; o < end; ++o) {
    const float* sums = work.sums + (o - begin) / kBlock<float> * block_sums + (o - begin) % kBlock<float>;
    to_bias[o] = sums[0];
    for (int64_t t = 0; t < s.taps(); ++t) to_weight[o * s.taps() + t] = sums[(1 + t) * kBlock<float>];
  }
}
#endif

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
          const bool counts = which[at + o] < 4;
          terms[o * most + count[o]] = {grad[at + o], offsets[counts ? which[at + o] : 4]};
          count[o] += counts;
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

int64_t workspace(DType dtype, const ConvolutionShape& s) {
  const int64_t term = dtype == DType::kFloat64 ? sizeof(Term<double>) : sizeof(Term<float>);
  const int64_t for_weight = kOutputs * (s.cells() + 1) * term;
  const int64_t for_input = (s.cells() * s.outputs + 1) * term + 4 * s.cells() * static_cast<int64_t>(sizeof(int64_t));
  const int64_t for_terms = for_weight > for_input ? for_weight : for_input;
#if defined(__AVX2__)
  const int64_t for_short = dtype == DType::kFloat32 && is_short(s) ? ShortWorkspace::bytes(s) : 0;
  return for_terms > for_short ? for_terms : for_short;
#else
  return for_terms;
#endif
}

template <typename T>
void weight_gradient_of(const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                        const uint8_t* which, const void* x, void* workspace, void* to_weight, void* to_bias) {
  weight_gradient(shape, begin, end, static_cast<const T*>(grad), which, static_cast<const T*>(x),
                  static_cast<Term<T>*>(workspace), static_cast<T*>(to_weight), static_cast<T*>(to_bias));
}

void weight_gradient(DType dtype, const ConvolutionShape& shape, int64_t begin, int64_t end, const void* grad,
                     const uint8_t* which, const void* x, void* workspace, void* to_weight, void* to_bias) {
#if defined(__AVX2__)
  if (dtype == DType::kFloat32 && is_short(shape)) {
    return weight_gradient_of_short_stretches(shape, begin, end, static_cast<const float*>(grad), which,
                                              static_cast<const float*>(x), static_cast<char*>(workspace),
                                              static_cast<float*>(to_weight), static_cast<float*>(to_bias));
  }
#endif
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
const ConvolutionKernels convolution = {packed_bytes, pack, convolve, workspace, weight_gradient, input_gradient};

}  // namespace pfl::cpu::PFL_ISA
