// Distillation losses on the GPU: the kernels, and the torch-free planning of their launches. The glue
// (cuda/distillation.cu) and the emulator (emulator/distillation.cpp) differ only in the `launch` they pass in.
//
// A warp works on a row of up to kMostWarpClasses classes, a block on a longer one. Each thread keeps to its own
// classes, so the unnormalised target probabilities that it leaves in shared memory need no barrier. Teachers are read
// once, with average = logits; the student is read again from a near cache. Where shared memory does not hold a row,
// its target probabilities are computed again from teachers that are read again, from L2: memory of its own for them
// would be written and read beside all that must be.
#pragma once

#include "common/distillation.h"
#include "cuda/kernels/list_arguments.cuh"

namespace pfl::cuda {

constexpr int64_t kMostWarpClasses = 1024;
constexpr int kWarp = 32;
constexpr int kRowsPerBlock = 4;      // of a warp each
constexpr int kLongRowThreads = 256;  // of a block on one row
constexpr int kReduceThreads = 256;
constexpr int64_t kMaxTeachers = 1024;
constexpr int64_t kMaxSharedCache = 48 * 1024 - 256;  // what needs no opt-in, without the kernels' own
constexpr int64_t kMostUncached = 256;                // rows in work at once where each is read again from L2
constexpr int64_t kMostBlocks = 1024;  // about two for each place a large GPU has; each leaves a piece of the loss
constexpr int64_t kSumPiece = 4096;    // values that a block adds up, at least
constexpr int64_t kMostPieces = 1024;

struct DistillationArguments {
  DistillationOptions options;
  int64_t rows;
  int64_t classes;
  int64_t teachers;
  int64_t count_divisor;  // whether `normalizer` is counted on the device; else it is `divisor`
  double divisor;
  const void* student;
  const void* target;       // int64 [rows], or A [rows, classes] for the multi-label form; or null
  const void* row_weights;  // A [rows] or null
  void* losses;             // A [rows], or null with a reduction
  void* gradient;           // [rows, classes] or null
  void* normalizer;         // A
  void* loss;               // A, or null without a reduction
  double* pieces;           // [workspace_doubles(...)]: pieces of the sum of weights, then of that of losses
  struct {
    const void* logits;
    double weight;
  } teacher[kMaxTeachers];
};
static_assert(sizeof(DistillationArguments) <= 32764, "CUDA's limit on kernel arguments from 12.1 on");

struct Sum {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};
struct Largest {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return a > b ? a : b;
  }
};

// One value for all threads of a row, combined in a fixed order. `scratch` is shared, one entry a warp.
template <int kThreads, typename A, typename Combine>
__device__ inline A combined(A value, A* scratch, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, value, distance);
    // The lower lane's value first, on both sides: addition commutes, but a maximum beside a NaN does not.
    value = (threadIdx.x & distance) == 0 ? combine(value, other) : combine(other, value);
  }
  if constexpr (kThreads > kWarp) {
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = scratch[0];
    for (int w = 1; w < kThreads / kWarp; ++w) value = combine(value, scratch[w]);
    __syncthreads();
  }
  return value;
}

template <typename A>
struct RowState {
  bool kept;
  bool valid;  // the label is a class
  int64_t label;
  A weight;
};

template <typename A>
__device__ inline RowState<A> row_state(const DistillationArguments& args, int64_t row) {
  RowState<A> state{true, true, -1, A(1)};
  if (args.row_weights != nullptr) {
    state.weight = static_cast<const A*>(args.row_weights)[row];
    state.kept = state.weight != A(0);
  }
  if (args.target != nullptr && !args.options.multilabel) {
    state.label = static_cast<const int64_t*>(args.target)[row];
    state.kept = state.kept && state.label != args.options.ignore_index;
    state.valid = state.label >= 0 && state.label < args.classes;
  }
  return state;
}

template <typename A>
__device__ inline A not_a_number() {
  return static_cast<A>(bit_copy<float>(0x7fc00000u));
}

// What the gradient is multiplied with beside the scale of its term. Half types keep it undivided: see the glue.
template <typename T>
__device__ inline accumulate_t<T> gradient_scale(const DistillationArguments& args) {
  using A = accumulate_t<T>;
  if constexpr (sizeof(T) < 4) return A(1);
  const A divisor = args.count_divisor ? *static_cast<const A*>(args.normalizer) : static_cast<A>(args.divisor);
  return A(1) / divisor;
}

// The weighted mean of the teachers' logits of a class, over the temperature.
template <typename T>
__device__ inline accumulate_t<T> mean_logit(const DistillationArguments& args, int64_t i, accumulate_t<T> scale) {
  using A = accumulate_t<T>;
  if (args.teachers == 1) return to_accumulate(static_cast<const T*>(args.teacher[0].logits)[i]) * scale;
  A mean = A(0);
#pragma unroll 4
  for (int64_t m = 0; m < args.teachers; ++m) {
    const T* teacher = static_cast<const T*>(args.teacher[m].logits);
    mean = mean + static_cast<A>(args.teacher[m].weight) * to_accumulate(teacher[i]);
  }
  return mean * scale;
}

// What the softmax of a teacher takes: its largest logit over the temperature, and its weight over the sum.
template <typename A>
struct TeacherSoftmax {
  A most;
  A factor;
};

// The weighted mean of the teachers' probabilities of a class.
template <typename T>
__device__ inline accumulate_t<T> mean_probability(const DistillationArguments& args, int64_t i, accumulate_t<T> scale,
                                                   const TeacherSoftmax<accumulate_t<T>>* softmax) {
  using A = accumulate_t<T>;
  A mean = A(0);
  for (int64_t m = 0; m < args.teachers; ++m) {
    const T* teacher = static_cast<const T*>(args.teacher[m].logits);
    mean = mean + softmax[m].factor * exp_nonpositive(to_accumulate(teacher[i]) * scale - softmax[m].most);
  }
  return mean;
}

// The loss of a row, which the first thread of the row has, and its gradient. `shared` has a number for each class
// where kCached; else, with averages of probabilities, a TeacherSoftmax for each teacher.
template <typename T, int kThreads, bool kCached>
__device__ inline accumulate_t<T> softmax_row(const DistillationArguments& args, int64_t row, accumulate_t<T>* shared,
                                              accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  A* const cache = shared;
  TeacherSoftmax<A>* const softmax = reinterpret_cast<TeacherSoftmax<A>*>(shared);
  const DistillationOptions& o = args.options;
  const int64_t classes = args.classes;
  const int thread = threadIdx.x % kThreads;
  const RowState<A> state = row_state<A>(args, row);
  T* gradient = args.gradient == nullptr ? nullptr : static_cast<T*>(args.gradient) + row * classes;
  if (!state.kept) {
    for (int64_t k = thread; gradient != nullptr && k < classes; k += kThreads) from_accumulate(A(0), gradient + k);
    return A(0);
  }
  const T* student = static_cast<const T*>(args.student) + row * classes;
  const A scale = static_cast<A>(1.0 / o.temperature);
  const bool soft = o.soft_scale != 0;
  const bool hard = args.target != nullptr && o.hard_scale != 0;
  const A negative_infinity = -static_cast<A>(bit_copy<float>(0x7f800000u));

  A most = negative_infinity;
  for (int64_t k = thread; k < classes; k += kThreads) {
    const A a = to_accumulate(student[k]);
    most = a > most ? a : most;
  }
  most = combined<kThreads>(most, scratch, Largest());
  const A soft_most = most * scale;  // rounding keeps the order

  A loss = A(0);
  A student_sum = A(1);
  A target_sum = A(1);
  A target_most = negative_infinity;  // of the mean logits
  if (soft) {
    A inner = A(0);
    A constant = A(0);
    student_sum = A(0);
    if (o.average == Average::kLogits) {
      for (int64_t k = thread; k < classes; k += kThreads) {
        const A mean = mean_logit<T>(args, row * classes + k, scale);
        if constexpr (kCached) cache[k] = mean;
        target_most = mean > target_most ? mean : target_most;
      }
      target_most = combined<kThreads>(target_most, scratch, Largest());
      target_sum = A(0);
      for (int64_t k = thread; k < classes; k += kThreads) {
        const A dz = (kCached ? cache[k] : mean_logit<T>(args, row * classes + k, scale)) - target_most;
        const A da = to_accumulate(student[k]) * scale - soft_most;
        const A ez = exp_nonpositive(dz);
        if constexpr (kCached) cache[k] = ez;
        target_sum += ez;
        student_sum += exp_nonpositive(da);
        if (ez > A(0)) inner += ez * (o.cross_entropy ? -da : dz - da);  // a masked class is 0 * (infinity - infinity)
      }
      target_sum = combined<kThreads>(target_sum, scratch, Sum());
      student_sum = combined<kThreads>(student_sum, scratch, Sum());
      inner = combined<kThreads>(inner, scratch, Sum());
      loss = inner / target_sum + log_positive(student_sum);
      if (!o.cross_entropy) loss -= log_positive(target_sum);
    } else {
      for (int64_t m = 0; m < args.teachers; ++m) {
        const T* teacher = static_cast<const T*>(args.teacher[m].logits) + row * classes;
        A teacher_most = negative_infinity;
        for (int64_t k = thread; k < classes; k += kThreads) {
          const A z = to_accumulate(teacher[k]) * scale;
          teacher_most = z > teacher_most ? z : teacher_most;
        }
        teacher_most = combined<kThreads>(teacher_most, scratch, Largest());
        A sum = A(0);
        A entropy = A(0);
        for (int64_t k = thread; k < classes; k += kThreads) {
          const A d = to_accumulate(teacher[k]) * scale - teacher_most;
          const A e = exp_nonpositive(d);
          sum += e;
          if (e > A(0)) entropy += e * d;
        }
        sum = combined<kThreads>(sum, scratch, Sum());
        entropy = combined<kThreads>(entropy, scratch, Sum());
        const A weight = static_cast<A>(args.teacher[m].weight);
        const A factor = weight / sum;
        constant += weight * (entropy / sum - log_positive(sum));
        if constexpr (kCached) {
          for (int64_t k = thread; k < classes; k += kThreads) {
            const A e = exp_nonpositive(to_accumulate(teacher[k]) * scale - teacher_most);
            cache[k] = (m == 0 ? A(0) : cache[k]) + factor * e;
          }
        } else if (thread == 0) {
          softmax[m] = {teacher_most, factor};  // the last row's are not read any more: `combined` is a barrier
        }
      }
      if constexpr (!kCached) __syncthreads();
      A total = A(0);
      A mixed = A(0);
      for (int64_t k = thread; k < classes; k += kThreads) {
        const A q = kCached ? cache[k] : mean_probability<T>(args, row * classes + k, scale, softmax);
        const A da = to_accumulate(student[k]) * scale - soft_most;
        total += q;
        student_sum += exp_nonpositive(da);
        mixed += entropy_term(q);
        if (q > A(0)) inner -= q * da;
      }
      total = combined<kThreads>(total, scratch, Sum());
      student_sum = combined<kThreads>(student_sum, scratch, Sum());
      inner = combined<kThreads>(inner, scratch, Sum());
      mixed = combined<kThreads>(mixed, scratch, Sum());
      if (o.average == Average::kProbs) constant = mixed;
      loss = (o.cross_entropy ? A(0) : constant) + inner + total * log_positive(student_sum);
    }
    loss *= static_cast<A>(o.soft_scale);
  }

  const A smoothing = static_cast<A>(o.label_smoothing);
  const A certainty = static_cast<A>(1.0 - o.label_smoothing);
  A hard_sum = A(1);
  if (hard) {
    hard_sum = A(0);
    A all = A(0);
    for (int64_t k = thread; k < classes; k += kThreads) {
      const A d = to_accumulate(student[k]) - most;
      hard_sum += exp_nonpositive(d);
      all += d;
    }
    hard_sum = combined<kThreads>(hard_sum, scratch, Sum());
    all = combined<kThreads>(all, scratch, Sum());
    const A log_sum = log_positive(hard_sum);
    A value = not_a_number<A>();
    // A label that counts nothing may have any logit: 0 times infinity is NaN.
    if (state.valid) value = A(0);
    if (state.valid && certainty != A(0)) value = certainty * (log_sum - (to_accumulate(student[state.label]) - most));
    if (smoothing != A(0)) value += smoothing * (log_sum - all / static_cast<A>(classes));
    loss += static_cast<A>(o.hard_scale) * value;
  }
  loss *= state.weight;
  if (gradient == nullptr) return loss;

  const A common = state.weight * gradient_scale<T>(args);
  const A soft_gradient = static_cast<A>(o.soft_scale / o.temperature) * common;
  const A hard_gradient = static_cast<A>(o.hard_scale) * common;
  const A student_factor = soft_gradient / student_sum;
  const A target_factor = soft_gradient / target_sum;
  const A hard_factor = hard_gradient / hard_sum;
  const A even = hard_gradient * smoothing / static_cast<A>(classes);
  for (int64_t k = thread; k < classes; k += kThreads) {
    const A a = to_accumulate(student[k]);
    A g = A(0);
    if (soft) {
      A target = A(0);
      if constexpr (kCached) {
        target = cache[k];
      } else if (o.average == Average::kLogits) {
        target = exp_nonpositive(mean_logit<T>(args, row * classes + k, scale) - target_most);
      } else {
        target = mean_probability<T>(args, row * classes + k, scale, softmax);
      }
      g = student_factor * exp_nonpositive(a * scale - soft_most) - target_factor * target;
    }
    if (hard) {
      g += hard_factor * exp_nonpositive(a - most) - even;
      if (k == state.label) g -= hard_gradient * certainty;
      if (!state.valid) g = not_a_number<A>();
    }
    from_accumulate(g, gradient + k);
  }
  return loss;
}

template <typename T, int kThreads>
__device__ inline accumulate_t<T> multilabel_row(const DistillationArguments& args, int64_t row,
                                                 accumulate_t<T>* scratch) {
  using A = accumulate_t<T>;
  const DistillationOptions& o = args.options;
  const int64_t classes = args.classes;
  const int thread = threadIdx.x % kThreads;
  const RowState<A> state = row_state<A>(args, row);
  const bool soft = o.soft_scale != 0;
  const bool hard = args.target != nullptr && o.hard_scale != 0;
  const bool of_mean = o.average == Average::kLogits;
  const A scale = static_cast<A>(1.0 / o.temperature);
  const A common = state.weight * gradient_scale<T>(args);
  const A soft_gradient = static_cast<A>(o.soft_scale / o.temperature) * common;
  const A hard_gradient = static_cast<A>(o.hard_scale) * common;
  A loss = A(0);
  for (int64_t k = thread; k < classes; k += kThreads) {
    const int64_t i = row * classes + k;
    A value = A(0);
    A g = A(0);
    const A y = args.target == nullptr ? A(0) : static_cast<const A*>(args.target)[i];
    const bool counts = state.kept && (args.target == nullptr || y != static_cast<A>(o.ignore_index));
    if (counts) {
      const A a = to_accumulate(static_cast<const T*>(args.student)[i]);
      if (soft) {
        A q = A(0), complement = A(0), entropy = A(0), mean = A(0);
        for (int64_t m = 0; m < args.teachers; ++m) {
          A z = to_accumulate(static_cast<const T*>(args.teacher[m].logits)[i]);
          A weight = static_cast<A>(args.teacher[m].weight);
          if (of_mean) {
            mean = args.teachers == 1 ? z : mean + weight * z;
            if (m + 1 < args.teachers) continue;
            z = mean;
            weight = A(1);
          }
          const Sigmoid<A> s = sigmoid_of(z * scale);
          q += weight * s.p;
          complement += weight * s.complement;
          entropy -= weight * binary_cross_entropy(s.p, s.complement, s);
        }
        if (o.average == Average::kProbs) entropy = entropy_term(q) + entropy_term(complement);
        const Sigmoid<A> s = sigmoid_of(a * scale);
        value = binary_cross_entropy(q, complement, s) + (o.cross_entropy ? A(0) : entropy);
        value *= static_cast<A>(o.soft_scale);
        g = soft_gradient * (s.p - q);
      }
      if (hard) {
        const Sigmoid<A> s = sigmoid_of(a);
        const A smooth = y * static_cast<A>(1.0 - o.label_smoothing) + static_cast<A>(o.label_smoothing / 2);
        value += static_cast<A>(o.hard_scale) * binary_cross_entropy(smooth, A(1) - smooth, s);
        g += hard_gradient * (s.p - smooth);
        if (!(y >= A(0) && y <= A(1))) value = g = not_a_number<A>();
      }
    }
    loss += value;
    if (args.gradient != nullptr) from_accumulate(g, static_cast<T*>(args.gradient) + i);
  }
  loss = combined<kThreads>(loss, scratch, Sum());
  return state.kept ? loss * state.weight : A(0);
}

// How a row's target probabilities are come by; the multi-label form needs none of it.
enum class Form { kMultilabel, kCached, kUncached };

// The second bound lets ptxas use 128 registers a thread: left to itself it keeps to fewer on sm_75, and spills.
template <typename T, int kThreads, Form kForm>
__global__ void __launch_bounds__(kThreads == kWarp ? kWarp * kRowsPerBlock : kThreads, kThreads == kWarp ? 4 : 2)
    distillation_kernel(const __grid_constant__ DistillationArguments args) {
  using A = accumulate_t<T>;
  PFL_DYNAMIC_SHARED(A, shared);
  __shared__ A scratch[kThreads / kWarp];
  const int64_t at_once = kThreads == kWarp ? kRowsPerBlock : 1;
  const int64_t slot = threadIdx.x / kThreads;
  double sum = 0;
  for (int64_t row = blockIdx.x * at_once + slot; row < args.rows; row += gridDim.x * at_once) {
    A loss;
    if constexpr (kForm == Form::kMultilabel) {
      loss = multilabel_row<T, kThreads>(args, row, scratch);
    } else {
      loss = softmax_row<T, kThreads, kForm == Form::kCached>(args, row, shared + slot * args.classes, scratch);
    }
    sum += static_cast<double>(loss);
    if (args.losses != nullptr && threadIdx.x % kThreads == 0) static_cast<A*>(args.losses)[row] = loss;
  }
  __shared__ double sums[kThreads == kWarp ? kRowsPerBlock : 1];
  if (threadIdx.x % kThreads == 0) sums[slot] = sum;
  __syncthreads();
  if (threadIdx.x != 0 || args.loss == nullptr) return;
  for (int64_t i = 1; i < at_once; ++i) sum += sums[i];
  args.pieces[blockIdx.x] = sum;
}

// The sum of a block's values, in double and in a fixed order; thread 0 has it.
__device__ inline double block_sum(double value) {
  __shared__ double scratch[kReduceThreads / kWarp];
  return combined<kReduceThreads>(value, scratch, Sum());
}

// The sum over this block's share of `count` values, cut into gridDim.x shares.
template <typename Value>
__device__ inline double share_sum(int64_t count, Value value) {
  const int64_t share = (count + gridDim.x - 1) / gridDim.x;
  const int64_t begin = blockIdx.x * share;
  const int64_t end = begin + share < count ? begin + share : count;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kReduceThreads) sum += value(i);
  return block_sum(sum);
}

// What a row counts (a label, for the multi-label form) in the normalizer.
template <typename A, bool kMultilabel>
__device__ inline double counted(const DistillationArguments& args, int64_t i) {
  if constexpr (!kMultilabel) {
    const RowState<A> state = row_state<A>(args, i);
    return state.kept ? static_cast<double>(state.weight) : 0.0;
  } else {
    const bool counts =
        args.target == nullptr || static_cast<const A*>(args.target)[i] != static_cast<A>(args.options.ignore_index);
    return counts ? static_cast<double>(row_state<A>(args, i / args.classes).weight) : 0.0;
  }
}

// normalizer = the weights of all rows (labels, for the multi-label form) that count; or, of many, pieces of the sum.
template <typename A, bool kMultilabel>
__global__ void __launch_bounds__(kReduceThreads) count_kernel(const __grid_constant__ DistillationArguments args) {
  const int64_t count = args.rows * (kMultilabel ? args.classes : 1);
  const double sum = share_sum(count, [&](int64_t i) { return counted<A, kMultilabel>(args, i); });
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    args.pieces[blockIdx.x] = sum;
  } else {
    *static_cast<A*>(args.normalizer) = static_cast<A>(sum);
  }
}

// What the pieces that were left come to: the normalizer where kCounts, else the loss, divided by the normalizer.
template <typename A, bool kCounts>
__global__ void __launch_bounds__(kReduceThreads)
    pieces_kernel(const __grid_constant__ DistillationArguments args, int64_t count) {
  const double sum = share_sum(count, [&](int64_t i) { return args.pieces[i]; });
  if (threadIdx.x != 0) return;
  A* normalizer = static_cast<A*>(args.normalizer);
  if constexpr (kCounts) {
    *normalizer = static_cast<A>(sum);
  } else {
    if (!args.count_divisor) *normalizer = static_cast<A>(args.divisor);
    const double divisor = args.count_divisor ? static_cast<double>(*normalizer) : args.divisor;
    if (args.loss != nullptr) *static_cast<A*>(args.loss) = static_cast<A>(sum / divisor);
  }
}

struct ScaleArguments {
  void* gradient;
  int64_t count;
  const void* incoming;    // A
  const void* normalizer;  // A; read for half types alone
};

// gradient *= incoming, and /= normalizer for half types. A factor of 1, which is what comes in where backward begins
// at the loss, moves nothing: only the GPU knows it without a wait.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ ScaleArguments args) {
  using A = accumulate_t<T>;
  A factor = *static_cast<const A*>(args.incoming);
  if constexpr (sizeof(T) < 4) factor = factor / *static_cast<const A*>(args.normalizer);
  if (factor == A(1)) return;
  T* gradient = static_cast<T*>(args.gradient);
  Chunk chunk;
  chunk.words = nullptr;
  chunk.begin = static_cast<int64_t>(blockIdx.x) * kChunkElements;
  chunk.end = chunk.begin + kChunkElements < args.count ? chunk.begin + kChunkElements : args.count;
  chunk.aligned = reinterpret_cast<uintptr_t>(gradient) % kVectorBytes == 0;
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    Pack<T, N>* place = reinterpret_cast<Pack<T, N>*>(gradient + i);
    Pack<T, N> values = *place;
#pragma unroll
    for (int k = 0; k < N; ++k) from_accumulate(to_accumulate(values.values[k]) * factor, &values.values[k]);
    *place = values;
  });
}

template <typename T, typename Launch>
void launch_scale(const ScaleArguments& args, Launch launch) {
  if (args.count == 0) return;
  launch(scale_kernel<T>, (args.count + kChunkElements - 1) / kChunkElements, args);
}

inline bool in_warps(int64_t classes) { return classes <= kMostWarpClasses; }

inline int64_t cache_bytes(DType dtype, int64_t classes) {
  return classes * (dtype == DType::kFloat64 ? 8 : 4) * (in_warps(classes) ? kRowsPerBlock : 1);
}

inline bool cached(DType dtype, int64_t classes) { return cache_bytes(dtype, classes) <= kMaxSharedCache; }

inline int64_t shared_bytes(DType dtype, const DistillationArguments& args) {
  if (args.options.multilabel || args.options.soft_scale == 0) return 0;
  if (cached(dtype, args.classes)) return cache_bytes(dtype, args.classes);
  return args.teachers * 2 * (dtype == DType::kFloat64 ? 8 : 4);
}

inline int64_t row_blocks(DType dtype, int64_t rows, int64_t classes) {
  const int64_t blocks = in_warps(classes) ? (rows + kRowsPerBlock - 1) / kRowsPerBlock : rows;
  const int64_t most = cached(dtype, classes) ? kMostBlocks : kMostUncached;
  return blocks < most ? blocks : most;
}

// Blocks that add up so many values; it depends on nothing else.
inline int64_t sum_pieces(int64_t values) {
  const int64_t pieces = (values + kSumPiece - 1) / kSumPiece;
  return pieces < 1 ? 1 : pieces < kMostPieces ? pieces : kMostPieces;
}

// Doubles that `pieces` must have.
inline int64_t workspace_doubles(DType dtype, int64_t rows, int64_t classes, bool multilabel) {
  const int64_t counted = sum_pieces(multilabel ? rows * classes : rows), losses = row_blocks(dtype, rows, classes);
  return counted > losses ? counted : losses;
}

// At most three launches, and one more for a count of many: launch(kernel, grid, block, dynamic shared bytes, args...).
template <typename T, typename Launch>
void launch_distillation(DType dtype, const DistillationArguments& args, Launch launch) {
  using A = accumulate_t<T>;
  const int64_t none = 0;
  if (args.count_divisor) {
    const int64_t pieces = sum_pieces(args.rows * (args.options.multilabel ? args.classes : 1));
    launch(args.options.multilabel ? count_kernel<A, true> : count_kernel<A, false>, pieces, kReduceThreads, none,
           args);
    if (pieces > 1) launch(pieces_kernel<A, true>, int64_t{1}, kReduceThreads, none, args, pieces);
  }
  if (args.rows > 0) {
    const bool warps = in_warps(args.classes);
    auto kernel = warps                         ? distillation_kernel<T, kWarp, Form::kCached>
                  : cached(dtype, args.classes) ? distillation_kernel<T, kLongRowThreads, Form::kCached>
                                                : distillation_kernel<T, kLongRowThreads, Form::kUncached>;
    if (args.options.multilabel) {
      kernel = warps ? distillation_kernel<T, kWarp, Form::kMultilabel>
                     : distillation_kernel<T, kLongRowThreads, Form::kMultilabel>;
    }
    launch(kernel, row_blocks(dtype, args.rows, args.classes), warps ? kWarp * kRowsPerBlock : kLongRowThreads,
           shared_bytes(dtype, args), args);
  }
  const int64_t pieces = args.loss == nullptr ? 0 : row_blocks(dtype, args.rows, args.classes);
  launch(pieces_kernel<A, false>, int64_t{1}, kReduceThreads, none, args, pieces);
}

}  // namespace pfl::cuda
