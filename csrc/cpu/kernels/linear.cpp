// Built once per instruction set with -DPFL_ISA=<namespace>; see averaging.cpp for what that forbids.
//
// With a batch of ten a general product of matrices is at half its speed: it packs the weights, of which every number
// is used ten times only. Here they are read where they lie. Every element is summed in one order, whatever the vectors
// hold.
#include "cpu/kernels/linear.h"

#include "cpu/kernels/vectors.h"

namespace pfl::cpu::PFL_ISA {
namespace {

// Sums along the inputs are of 64 bytes of lanes, then over the lanes by halving: the same on every instruction set.
constexpr int kParts = 64 / kVectorBytes;
template <typename T>
constexpr int kSumLanes = 64 / static_cast<int>(sizeof(T));

// Rows and outputs, or rows and vectors, that are summed at once: what registers hold.
constexpr int kRows = 5;
#if defined(__AVX512F__)
constexpr int kOutputs = 5;
constexpr int kVectors = 4;
#else
constexpr int kOutputs = 2;
constexpr int kVectors = 2;
#endif

// Written out by vectors: gcc 12 makes a loop over numbers of it, which took longer than the products.
template <typename T, int kLanesHere>
inline T sum_of_lanes(const vector_t<T, kLanesHere>& lanes) {
  if constexpr (kLanesHere == 1) {
    return lanes;
  } else {
    using Half = vector_t<T, kLanesHere / 2>;
    Half halves[2];
    memcpy(halves, &lanes, sizeof(lanes));
    return sum_of_lanes<T, kLanesHere / 2>(halves[0] + halves[1]);
  }
}
template <typename T>
inline T sum_of_lanes(const T* lanes) {
  wide_t<T> parts[kParts];
  memcpy(parts, lanes, sizeof(parts));
  for (int width = kParts / 2; width > 0; width /= 2) {
    for (int p = 0; p < width; ++p) parts[p] += parts[p + width];
  }
  return sum_of_lanes<T, kLanes<T>>(parts[0]);
}

// kRowsHere x kOutputsHere dot products. A vector is part of the lanes of a sum: part after part, so that registers
// hold as many sums as they can.
template <typename T, int kRowsHere, int kOutputsHere>
void dots(const LinearShape& s, const T* x, const T* weight, const T* bias, T* y) {
  using V = wide_t<T>;
  constexpr int64_t kStep = kSumLanes<T>;
  const int64_t whole = s.inputs / kStep * kStep;
  // What is left of the rows, with zeros behind.
  T last_x[kRowsHere * kStep] = {};
  T last_weight[kOutputsHere * kStep] = {};
  const size_t left = (s.inputs - whole) * sizeof(T);
  if (left != 0) {
    for (int r = 0; r < kRowsHere; ++r) memcpy(last_x + r * kStep, x + r * s.inputs + whole, left);
    for (int o = 0; o < kOutputsHere; ++o) memcpy(last_weight + o * kStep, weight + o * s.inputs + whole, left);
  }
  T lanes[kRowsHere][kOutputsHere][kSumLanes<T>];
  for (int part = 0; part < kParts; ++part) {
    V sums[kRowsHere][kOutputsHere] = {};
    const auto add = [&](const T* from_x, int64_t x_row, const T* from_weight, int64_t weight_row) {
      V weights[kOutputsHere];
      for (int o = 0; o < kOutputsHere; ++o) weights[o] = load<V>(from_weight + o * weight_row);
      for (int r = 0; r < kRowsHere; ++r) {
        const V inputs = load<V>(from_x + r * x_row);
        for (int o = 0; o < kOutputsHere; ++o) sums[r][o] = multiply_add<T>(inputs, weights[o], sums[r][o]);
      }
    };
    const int64_t first = part * kLanes<T>;
    for (int64_t i = first; i < whole; i += kStep) add(x + i, s.inputs, weight + i, s.inputs);
    if (left != 0) add(last_x + first, kStep, last_weight + first, kStep);
    for (int r = 0; r < kRowsHere; ++r) {
      for (int o = 0; o < kOutputsHere; ++o) memcpy(lanes[r][o] + first, &sums[r][o], sizeof(V));
    }
  }
  for (int r = 0; r < kRowsHere; ++r) {
    for (int o = 0; o < kOutputsHere; ++o) y[r * s.outputs + o] = sum_of_lanes<T>(lanes[r][o]) + bias[o];
  }
}

template <typename T, int kOutputsHere>
void dots_of_rows(const LinearShape& s, const T* x, const T* weight, const T* bias, T* y) {
  for (int64_t row = 0; row < s.rows; row += kRows) {
    const T* from = x + row * s.inputs;
    T* to = y + row * s.outputs;
    switch (s.rows - row) {
      case 1:
        dots<T, 1, kOutputsHere>(s, from, weight, bias, to);
        break;
      case 2:
        dots<T, 2, kOutputsHere>(s, from, weight, bias, to);
        break;
      case 3:
        dots<T, 3, kOutputsHere>(s, from, weight, bias, to);
        break;
      case 4:
        dots<T, 4, kOutputsHere>(s, from, weight, bias, to);
        break;
      default:
        dots<T, kRows, kOutputsHere>(s, from, weight, bias, to);
    }
  }
}

template <typename T>
void forward(const LinearShape& s, bool relu, int64_t begin, int64_t end, const T* x, const T* weight, const T* bias,
             T* y) {
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) {
    dots_of_rows<T, kOutputs>(s, x, weight + o * s.inputs, bias + o, y + o);
  }
  for (; o < end; ++o) dots_of_rows<T, 1>(s, x, weight + o * s.inputs, bias + o, y + o);
  if (!relu) return;
  // Behind all sums: signs cannot be foretold, and a branch for each sum took as long as a quarter of its products.
  for (int64_t row = 0; row < s.rows; ++row) {
    T* to = y + row * s.outputs;
    for (o = begin; o < end; ++o) to[o] = to[o] <= 0 ? T(0) : to[o];  // NaN stays, as in torch
  }
}

template <typename T>
void mask(int64_t count, const T* __restrict grad, const T* __restrict y, T* __restrict masked) {
  for (int64_t i = 0; i < count; ++i) masked[i] = y[i] <= 0 ? T(0) : grad[i];
}

// What becomes of sums of products at a place: they are put there, or it is stepped along them.
template <typename T>
struct Put {
  template <typename V>
  void operator()(const V& sums, T* to) const {
    memcpy(to, &sums, sizeof(V));
  }
};
template <typename T>
struct Step {
  template <typename V>
  void operator()(const V& sums, T* to) const {
    V none = {};
    const V moved = proximal_step<Momentum::kNone, false, false>(numbers, load<V>(to), sums, none, &none);
    memcpy(to, &moved, sizeof(V));
  }
  ProximalNumbers<T> numbers;
};

// The sums over `count` of factors[row][i] * from[i][vectors] to to[row][vectors], for kRowsHere rows and kVectorsHere
// vectors; with kLanesHere of 1 the vectors are numbers, for what is left at the end of a row.
template <typename T, int kLanesHere, int kRowsHere, int kVectorsHere, typename F>
void sum_products(const T* factors, int64_t factor_row, int64_t factor_step, int64_t count, const T* from,
                  int64_t from_row, T* to, int64_t to_row, const F& give) {
  using V = vector_t<T, kLanesHere>;
  V sums[kRowsHere][kVectorsHere] = {};
  for (int64_t i = 0; i < count; ++i) {
    V vectors[kVectorsHere];
    for (int v = 0; v < kVectorsHere; ++v) vectors[v] = load<V>(from + i * from_row + v * kLanesHere);
    for (int r = 0; r < kRowsHere; ++r) {
      const T factor = factors[r * factor_row + i * factor_step];
      for (int v = 0; v < kVectorsHere; ++v) {
        if constexpr (kLanesHere == 1) {
          sums[r][v] = multiply_add<T>(filled<T>(factor), filled<T>(vectors[v]), filled<T>(sums[r][v]))[0];
        } else {
          sums[r][v] = multiply_add<T>(filled<T>(factor), vectors[v], sums[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRowsHere; ++r) {
    for (int v = 0; v < kVectorsHere; ++v) give(sums[r][v], to + r * to_row + v * kLanesHere);
  }
}

// The same for the columns [begin, end) of kRowsHere rows.
template <typename T, int kRowsHere, typename F>
void sum_products_of_rows(const T* factors, int64_t factor_row, int64_t factor_step, int64_t count, const T* from,
                          int64_t from_row, int64_t begin, int64_t end, T* to, int64_t to_row, const F& give) {
  constexpr int64_t kStep = kVectors * kLanes<T>;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    sum_products<T, kLanes<T>, kRowsHere, kVectors>(factors, factor_row, factor_step, count, from + i, from_row, to + i,
                                                    to_row, give);
  }
  for (; i + kLanes<T> <= end; i += kLanes<T>) {
    sum_products<T, kLanes<T>, kRowsHere, 1>(factors, factor_row, factor_step, count, from + i, from_row, to + i,
                                             to_row, give);
  }
  for (; i < end; ++i) {
    sum_products<T, 1, kRowsHere, 1>(factors, factor_row, factor_step, count, from + i, from_row, to + i, to_row, give);
  }
}

// What a gradient of the weights is given to, and the gradient of the bias.
template <typename T, typename F>
void for_weight_gradient(const LinearShape& s, int64_t begin, int64_t end, const T* masked, const T* x, T* to_weight,
                         T* to_bias, const F& give) {
  int64_t o = begin;
  for (; o + 4 <= end; o += 4) {
    sum_products_of_rows<T, 4>(masked + o, 1, s.outputs, s.rows, x, s.inputs, 0, s.inputs, to_weight + o * s.inputs,
                               s.inputs, give);
  }
  for (; o < end; ++o) {
    sum_products_of_rows<T, 1>(masked + o, 1, s.outputs, s.rows, x, s.inputs, 0, s.inputs, to_weight + o * s.inputs,
                               s.inputs, give);
  }
  for (int64_t i = begin; i < end; ++i) to_bias[i] = 0;
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t i = begin; i < end; ++i) to_bias[i] += masked[row * s.outputs + i];
  }
}

template <typename T>
void input_gradient(const LinearShape& s, int64_t begin, int64_t end, const T* masked, const T* weight, T* to_x) {
  int64_t row = 0;
  for (; row + kRows <= s.rows; row += kRows) {
    sum_products_of_rows<T, kRows>(masked + row * s.outputs, s.outputs, 1, s.outputs, weight, s.inputs, begin, end,
                                   to_x + row * s.inputs, s.inputs, Put<T>{});
  }
  for (; row < s.rows; ++row) {
    sum_products_of_rows<T, 1>(masked + row * s.outputs, s.outputs, 1, s.outputs, weight, s.inputs, begin, end,
                               to_x + row * s.inputs, s.inputs, Put<T>{});
  }
}

template <typename T>
const T* of(const void* p) {
  return static_cast<const T*>(p);
}
template <typename T>
T* of(void* p) {
  return static_cast<T*>(p);
}

template <typename T>
struct Typed {
  static void forward(const LinearShape& s, bool relu, int64_t begin, int64_t end, const void* x, const void* weight,
                      const void* bias, void* y) {
    PFL_ISA::forward(s, relu, begin, end, of<T>(x), of<T>(weight), of<T>(bias), of<T>(y));
  }
  static void mask(int64_t count, const void* grad, const void* y, void* masked) {
    PFL_ISA::mask(count, of<T>(grad), of<T>(y), of<T>(masked));
  }
  static void weight_gradient(const LinearShape& s, int64_t begin, int64_t end, const void* masked, const void* x,
                              void* to_weight, void* to_bias) {
    for_weight_gradient(s, begin, end, of<T>(masked), of<T>(x), of<T>(to_weight), of<T>(to_bias), Put<T>{});
  }
  static void weight_step(const ProximalStep& how, const LinearShape& s, int64_t begin, int64_t end, const void* masked,
                          const void* x, void* weight, void* to_bias) {
    for_weight_gradient(s, begin, end, of<T>(masked), of<T>(x), of<T>(weight), of<T>(to_bias),
                        Step<T>{numbers_of<T>(how)});
  }
  static void input_gradient(const LinearShape& s, int64_t begin, int64_t end, const void* masked, const void* weight,
                             void* to_x) {
    PFL_ISA::input_gradient(s, begin, end, of<T>(masked), of<T>(weight), of<T>(to_x));
  }
};

// The function of the type, called with what the table is called with.
template <auto kFloat, auto kDouble, typename... Arguments>
void by_type(DType dtype, Arguments... arguments) {
  (dtype == DType::kFloat64 ? kDouble : kFloat)(arguments...);
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {
    by_type<Typed<float>::forward, Typed<double>::forward>,
    by_type<Typed<float>::mask, Typed<double>::mask>,
    by_type<Typed<float>::weight_gradient, Typed<double>::weight_gradient>,
    by_type<Typed<float>::weight_step, Typed<double>::weight_step>,
    by_type<Typed<float>::input_gradient, Typed<double>::input_gradient>,
};

}  // namespace pfl::cpu::PFL_ISA
