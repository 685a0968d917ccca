// Built once per instruction set with -DPFL_ISA=<namespace>; see averaging.cpp for what that forbids.
#include "cpu/kernels/distillation.h"

#include "cpu/kernels/convert.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pfl::cpu::PFL_ISA {
namespace {

// All arithmetic is on blocks of [vectors][kLanes] numbers in first-level cache, in one of two layouts:
//  * a tile, for few classes: lane l holds row l, vector k class k. A row of 10 would not fill vectors.
//  * a row, for many: element k * kLanes + l is that class, padded with -infinity, the logit of probability 0.
// Sums go lane by lane in the order of the vectors and, in a row, over the lanes by halving. Both orders are the same
// for every vector width: the same bits on every instruction set.
constexpr int kLanes = 16;
// Up to here a tile is faster in float32 and as fast in float64, on an EPYC: a row spends its time on sums over lanes.
constexpr int64_t kMostTileClasses = 128;

inline bool in_tiles(int64_t classes) { return classes <= kMostTileClasses; }

template <typename A>
struct Lanes {
  A v[kLanes];
};

template <typename A>
Lanes<A> filled(A value) {
  Lanes<A> lanes;
  for (int l = 0; l < kLanes; ++l) lanes.v[l] = value;
  return lanes;
}

template <typename A>
A larger(A a, A b) {
  return a > b ? a : b;
}

// In a row all lanes get the sum over the lanes; in a tile every lane is a row of its own. By value: a sum whose
// address is taken might be the memory that the loop around it writes, for all the compiler knows.
template <bool kTile, typename A>
[[gnu::always_inline]] inline Lanes<A> finished_sum(Lanes<A> x) {
  if constexpr (!kTile) {
    for (int l = 0; l < 8; ++l) x.v[l] += x.v[l + 8];
    for (int l = 0; l < 4; ++l) x.v[l] += x.v[l + 4];
    x = filled((x.v[0] + x.v[2]) + (x.v[1] + x.v[3]));
  }
  return x;
}

template <bool kTile, typename A>
[[gnu::always_inline]] inline Lanes<A> finished_max(Lanes<A> x) {
  if constexpr (!kTile) {
    for (int l = 0; l < 8; ++l) x.v[l] = larger(x.v[l], x.v[l + 8]);
    for (int l = 0; l < 4; ++l) x.v[l] = larger(x.v[l], x.v[l + 4]);
    x = filled(larger(larger(x.v[0], x.v[2]), larger(x.v[1], x.v[3])));
  }
  return x;
}

// to[c][r] = from[r][c]
template <typename A>
void transpose(const A* __restrict from, int rows, int columns, A* __restrict to) {
  int done_rows = 0;
  int done_columns = 0;
#if defined(__SSE2__)
  if constexpr (sizeof(A) == 4) {
    // Four by four: one by one, moving the numbers takes as long as computing with them.
    done_rows = rows / 4 * 4;
    done_columns = columns / 4 * 4;
    for (int c = 0; c < done_columns; c += 4) {
      for (int r = 0; r < done_rows; r += 4) {
        __m128 x[4];
        for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(from + (r + i) * columns + c);
        _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
        for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (c + i) * rows + r, x[i]);
      }
    }
  }
#endif
  for (int r = 0; r < rows; ++r) {
    for (int c = r < done_rows ? done_columns : 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
}

template <typename A>
constexpr A negative_infinity() {
  return -static_cast<A>(__builtin_inf());
}

template <typename T, bool kTile>
struct Block {
  using A = accumulate_t<T>;

  const DistillationRows& r;
  const int64_t classes;
  const int64_t vectors;
  const A inverse_temperature;
  int64_t row = 0;    // the first row
  int64_t count = 0;  // rows: up to kLanes in a tile, else 1
  // Scratch memory, [vectors * kLanes] each; `flat` has the order of memory.
  A* student;
  A* soft_target;
  A* soft_student;
  A* other;
  A* entropy;
  A* flat;
  // The means of the teachers' logits of rows [means_begin, means_end), in the order of memory.
  A* means;
  int64_t means_begin = 0;
  int64_t means_end = 0;
  int64_t last = 0;  // the end of the rows of this call

  static constexpr int kBuffers = 6;
  // Teachers are averaged over so many elements at a time. A row of 1000 is one page for each teacher, too short for
  // the hardware to fetch ahead; and by fetch instructions one core asks for no more than 16 GB/s.
  static constexpr int64_t kMeanElements = 4096;

  Block(const DistillationRows& rows, void* workspace)
      : r(rows),
        classes(rows.classes),
        vectors(kTile ? rows.classes : (rows.classes + kLanes - 1) / kLanes),
        inverse_temperature(static_cast<A>(1.0 / rows.options.temperature)) {
    A* memory = static_cast<A*>(workspace);
    student = memory;
    soft_target = memory + vectors * kLanes;
    soft_student = memory + 2 * vectors * kLanes;
    other = memory + 3 * vectors * kLanes;
    entropy = memory + 4 * vectors * kLanes;
    flat = memory + 5 * vectors * kLanes;
    means = memory + kBuffers * vectors * kLanes;
  }

  // ---- memory ----

  // From the order of memory into the layout. In a tile, lanes without a row are zeros: any finite number will do.
  void arrange(const A* x, A* out, A padding) {
    if constexpr (kTile) {
      if (count == kLanes) {
        transpose(x, kLanes, static_cast<int>(classes), out);
      } else {
        for (int64_t k = 0; k < classes; ++k) {
          for (int l = 0; l < kLanes; ++l) out[k * kLanes + l] = l < count ? x[l * classes + k] : A(0);
        }
      }
    } else {
      if (x != out) memcpy(out, x, sizeof(A) * classes);
      for (int64_t i = classes; i < vectors * kLanes; ++i) out[i] = padding;
    }
  }

  template <typename Storage>
  void load(const Storage* x, A* out, A padding = negative_infinity<A>()) {
    const int64_t n = count * classes;
    arrange(as_accumulate(x + row * classes, n, kTile ? flat : out), out, padding);
  }

  const T* teacher(int64_t m) const { return static_cast<const T*>(r.teacher[m]); }

  // While exponentials are computed memory rests: of 20 teachers of 1000 classes 1.9 ms of reading and 1.8 of
  // arithmetic take 3.6 (EPYC, two threads). What the first teachers and the student hold next is fetched meanwhile,
  // and the gradient's place. Fetching all teachers' numbers then, or averaging them bit by bit between the
  // exponentials, takes longer: short reads are not fetched ahead by the processor.
  struct Ahead {
    const T* of[6];
    int reads;
    bool writes;
  };

  Ahead ahead() const {
    Ahead result{{}, 0, false};
    if (kTile) return result;
    if (row + 1 < last) result.of[result.reads++] = static_cast<const T*>(r.student) + (row + 1) * classes;
    const int64_t next = row + (means_end - means_begin);  // of the next means
    if (r.teachers >= kGroup && next < last) {
      for (int m = 0; m < kGroup; ++m) result.of[result.reads++] = teacher(m) + next * classes;
    }
    result.writes = r.gradient != nullptr;
    if (result.writes) result.of[5] = static_cast<const T*>(r.gradient) + row * classes;
    return result;
  }

  void fetch(const Ahead& rows, int64_t k) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t i = k * kLanes; i < (k + 1) * kLanes && i < classes; i += kLine) {
      for (int m = 0; m < rows.reads; ++m) __builtin_prefetch(rows.of[m] + i);
      if (rows.writes) __builtin_prefetch(rows.of[5] + i, 1);
    }
  }

  static constexpr int kGroup = 4;

  // sum (+)= w . x for four teachers.
  template <bool kFirst>
  static void add_four(const A* const* x, const A* w, int64_t n, A* __restrict sum) {
    const A* __restrict x0 = x[0];
    const A* __restrict x1 = x[1];
    const A* __restrict x2 = x[2];
    const A* __restrict x3 = x[3];
    const A w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
    for (int64_t i = 0; i < n; ++i) {
      const A first = kFirst ? w0 * x0[i] : sum[i] + w0 * x0[i];
      sum[i] = ((first + w1 * x1[i]) + w2 * x2[i]) + w3 * x3[i];
    }
  }

  // The mean of the teachers' logits: one teacher after another, products rounded before they are added.
  void load_mean(A* out) {
    if (r.teachers == 1) {
      load(teacher(0), out);
      return;
    }
    if constexpr (kTile) {
      average(row, count, flat);
      arrange(flat, out, negative_infinity<A>());
    } else {
      if (row < means_begin || row >= means_end) {
        const int64_t rows = classes < kMeanElements ? kMeanElements / classes : 1;
        means_begin = row;
        means_end = last - row < rows ? last : row + rows;
        average(means_begin, means_end - means_begin, means);
      }
      arrange(means + (row - means_begin) * classes, out, negative_infinity<A>());
    }
  }

  void average(int64_t first_row, int64_t rows, A* sum) {
    constexpr int64_t kBlock = kTile ? 1024 : kMeanElements;
    alignas(64) A buffer[kIsAccumulateType<T> ? 1 : kGroup][kIsAccumulateType<T> ? 1 : kBlock];
    const int64_t n = rows * classes;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t length = n - begin < kBlock ? n - begin : kBlock;
      A* __restrict s = sum + begin;
      for (int64_t first = 0; first < r.teachers; first += kGroup) {
        const A* x[kGroup] = {};
        A w[kGroup] = {};
        const int64_t group = r.teachers - first < kGroup ? r.teachers - first : kGroup;
        for (int64_t g = 0; g < group; ++g) {
          const T* given = teacher(first + g) + first_row * classes + begin;
          x[g] = as_accumulate(given, length, buffer[kIsAccumulateType<T> ? 0 : g]);
          w[g] = static_cast<A>(r.teacher_weights[first + g]);
        }
        if (group == kGroup) {
          if (first == 0) {
            add_four<true>(x, w, length, s);
          } else {
            add_four<false>(x, w, length, s);
          }
        } else {
          for (int64_t g = 0; g < group; ++g) {
            const A* __restrict xg = x[g];
            const A wg = w[g];
            if (first == 0 && g == 0) {
              for (int64_t i = 0; i < length; ++i) s[i] = wg * xg[i];
            } else {
              for (int64_t i = 0; i < length; ++i) s[i] += wg * xg[i];
            }
          }
        }
      }
    }
  }

  bool is_kept(int64_t i) const {
    if (r.row_weights != nullptr && static_cast<const A*>(r.row_weights)[row + i] == A(0)) return false;
    return r.target == nullptr || r.options.multilabel ||
           static_cast<const int64_t*>(r.target)[row + i] != r.options.ignore_index;
  }

  A row_weight(int64_t i) const {
    return r.row_weights == nullptr ? A(1) : static_cast<const A*>(r.row_weights)[row + i];
  }

  void store_gradient(const A* gradient) {
    T* out = static_cast<T*>(r.gradient) + row * classes;
    if constexpr (kTile) {
      A* ordered = kIsAccumulateType<T> ? reinterpret_cast<A*>(out) : flat;
      if (count == kLanes) {
        transpose(gradient, static_cast<int>(classes), kLanes, ordered);
      } else {
        for (int l = 0; l < count; ++l) {
          for (int64_t k = 0; k < classes; ++k) ordered[l * classes + k] = gradient[k * kLanes + l];
        }
      }
      if constexpr (!kIsAccumulateType<T>) store_accumulated(flat, count * classes, out);
    } else {
      store_accumulated(gradient, classes, out);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!is_kept(i)) memset(out + i * classes, 0, sizeof(T) * classes);
    }
  }

  // In a row the numbers of the only row stand in every lane.
  void store_loss(const Lanes<A>& loss) {
    A* out = static_cast<A*>(r.losses) + row;
    for (int64_t i = 0; i < count; ++i) out[i] = is_kept(i) ? loss.v[i] : A(0);
  }

  Lanes<A> scales(double scale) const {
    Lanes<A> result = filled(static_cast<A>(scale));
    if (r.row_weights != nullptr) {
      for (int l = 0; l < kLanes; ++l) result.v[l] *= kTile ? (l < count ? row_weight(l) : A(0)) : row_weight(0);
    }
    return result;
  }

  // ---- softmax ----

  Lanes<A> largest(const A* x, A scale) const {
    Lanes<A> most = filled(negative_infinity<A>());
    for (int64_t k = 0; k < vectors; ++k) {
#pragma GCC unroll 1  // unrolled before it is vectorised, it stays scalar
      for (int l = 0; l < kLanes; ++l) {
        const A value = x[k * kLanes + l] * scale;
        const A so_far = most.v[l];
        most.v[l] = larger(value, so_far);
      }
    }
    return finished_max<kTile>(most);
  }

  // out = e^(scale x - most); returns the sums.
  Lanes<A> exponentials(const A* __restrict x, A scale, const Lanes<A>& most_of, A* __restrict out) const {
    const Lanes<A> most = most_of;
    Lanes<A> sum = filled(A(0));
    for (int64_t k = 0; k < vectors; ++k) {
      for (int l = 0; l < kLanes; ++l) {
        const A e = exp_nonpositive(x[k * kLanes + l] * scale - most.v[l]);
        out[k * kLanes + l] = e;
        sum.v[l] += e;
      }
    }
    return finished_sum<kTile>(sum);
  }

  // The soft term, before its scale. Leaves e^(student/T - most) in soft_student and unnormalised probabilities in
  // soft_target; `student_sum` and `target_sum` are what they add up to. For averaged probabilities those are
  // normalised already, so target_sum is 1 in all but rounding.
  Lanes<A> soft_loss(Lanes<A>* student_sum, Lanes<A>* target_sum) {
    const A scale = inverse_temperature;
    const Lanes<A> student_most = largest(student, scale);
    if (r.options.average == Average::kLogits) {
      load_mean(soft_target);
      return r.options.cross_entropy ? soft_loss_of_mean<false>(student_most, student_sum, target_sum)
                                     : soft_loss_of_mean<true>(student_most, student_sum, target_sum);
    }
    Lanes<A> entropy = average_probabilities();
    *student_sum = exponentials(student, scale, student_most, soft_student);
    Lanes<A> cross = filled(A(0));
    Lanes<A> mixed = filled(A(0));
    Lanes<A> total = filled(A(0));
    for (int64_t k = 0; k < vectors; ++k) {
      for (int l = 0; l < kLanes; ++l) {
        const A q = soft_target[k * kLanes + l];
        const A d = student[k * kLanes + l] * scale - student_most.v[l];
        const A term = q * d;
        cross.v[l] -= q > A(0) ? term : A(0);
        total.v[l] += q;
      }
    }
    cross = finished_sum<kTile>(cross);
    total = finished_sum<kTile>(total);
    if (r.options.average == Average::kProbs && !r.options.cross_entropy) {
      for (int64_t k = 0; k < vectors; ++k) {
        for (int l = 0; l < kLanes; ++l) mixed.v[l] += entropy_term(soft_target[k * kLanes + l]);
      }
      mixed = finished_sum<kTile>(mixed);
      entropy = mixed;
    }
    Lanes<A> loss;
    for (int l = 0; l < kLanes; ++l) {
      loss.v[l] =
          (r.options.cross_entropy ? A(0) : entropy.v[l]) + cross.v[l] + total.v[l] * log_positive(student_sum->v[l]);
    }
    *target_sum = filled(A(1));
    return loss;
  }

  // sum_k q_k (log q_k - log p_k), or without log q_k, from the differences to the largest logits: where teacher and
  // student agree, the terms are small and so is their error.
  template <bool kDivergence>
  Lanes<A> soft_loss_of_mean(const Lanes<A>& most_of_student, Lanes<A>* student_sum, Lanes<A>* target_sum) {
    const A scale = inverse_temperature;
    const Lanes<A> student_most = most_of_student;
    const Lanes<A> target_most = largest(soft_target, scale);
    const A* __restrict a = student;
    A* __restrict target_out = soft_target;
    A* __restrict student_out = soft_student;
    Lanes<A> of_student = filled(A(0));
    Lanes<A> of_target = filled(A(0));
    Lanes<A> inner = filled(A(0));
    const Ahead rows = ahead();
    for (int64_t k = 0; k < vectors; ++k) {
      if constexpr (!kTile) fetch(rows, k);
      for (int l = 0; l < kLanes; ++l) {
        const int64_t i = k * kLanes + l;
        const A dz = target_out[i] * scale - target_most.v[l];
        const A da = a[i] * scale - student_most.v[l];
        const A ez = exp_nonpositive(dz);
        const A ea = exp_nonpositive(da);
        const A term = ez * (kDivergence ? dz - da : -da);
        of_target.v[l] += ez;
        of_student.v[l] += ea;
        inner.v[l] += ez > A(0) ? term : A(0);  // a masked class is 0 * (-infinity - -infinity)
        target_out[i] = ez;
        student_out[i] = ea;
      }
    }
    of_target = finished_sum<kTile>(of_target);
    of_student = finished_sum<kTile>(of_student);
    inner = finished_sum<kTile>(inner);
    Lanes<A> loss;
    for (int l = 0; l < kLanes; ++l) {
      loss.v[l] = inner.v[l] / of_target.v[l] + log_positive(of_student.v[l]);
      if constexpr (kDivergence) loss.v[l] -= log_positive(of_target.v[l]);
    }
    *student_sum = of_student;
    *target_sum = of_target;
    return loss;
  }

  // soft_target = sum_m w_m softmax(teacher_m / T); returns sum_m w_m sum_k q log q.
  Lanes<A> average_probabilities() {
    Lanes<A> entropy = filled(A(0));
    const A scale = inverse_temperature;
    A* __restrict x = other;
    A* __restrict q = soft_target;
    for (int64_t m = 0; m < r.teachers; ++m) {
      load(teacher(m), other);
      const Lanes<A> most = largest(other, inverse_temperature);
      Lanes<A> sum = filled(A(0));
      Lanes<A> inner = filled(A(0));
      for (int64_t k = 0; k < vectors; ++k) {
        for (int l = 0; l < kLanes; ++l) {
          const A d = x[k * kLanes + l] * scale - most.v[l];
          const A e = exp_nonpositive(d);
          const A term = e * d;
          sum.v[l] += e;
          inner.v[l] += e > A(0) ? term : A(0);
          x[k * kLanes + l] = e;
        }
      }
      sum = finished_sum<kTile>(sum);
      inner = finished_sum<kTile>(inner);
      const A w = static_cast<A>(r.teacher_weights[m]);
      Lanes<A> factor;
      for (int l = 0; l < kLanes; ++l) {
        factor.v[l] = w / sum.v[l];
        entropy.v[l] += w * (inner.v[l] / sum.v[l] - log_positive(sum.v[l]));
      }
      if (m == 0) {
        for (int64_t i = 0; i < vectors * kLanes; ++i) q[i] = A(0);
      }
      for (int64_t k = 0; k < vectors; ++k) {
        for (int l = 0; l < kLanes; ++l) q[k * kLanes + l] += factor.v[l] * x[k * kLanes + l];
      }
    }
    return entropy;
  }

  int64_t position(int64_t i, int64_t label) const { return kTile ? label * kLanes + i : label; }

  void run_softmax() {
    const DistillationOptions& o = r.options;
    load(static_cast<const T*>(r.student), student);
    Lanes<A> loss = filled(A(0));
    Lanes<A> student_sum = filled(A(1));
    Lanes<A> target_sum = filled(A(1));
    const bool soft = o.soft_scale != 0;
    const bool hard = r.target != nullptr && o.hard_scale != 0;
    if (soft) {
      loss = soft_loss(&student_sum, &target_sum);
      const Lanes<A> scale = scales(o.soft_scale);
      for (int l = 0; l < kLanes; ++l) loss.v[l] *= scale.v[l];
    }
    // At temperature 1 both terms need the same softmax of the student.
    const bool shared = soft && o.temperature == 1;
    const A* hard_student = shared ? soft_student : other;
    const int64_t* labels = static_cast<const int64_t*>(r.target);
    const A smoothing = static_cast<A>(o.label_smoothing);
    const A certainty = static_cast<A>(1.0 - o.label_smoothing);
    const Lanes<A> hard_scale = scales(o.hard_scale);
    Lanes<A> hard_sum = filled(A(1));
    if (hard) {
      const Lanes<A> most = largest(student, A(1));
      hard_sum = shared ? student_sum : exponentials(student, A(1), most, other);
      Lanes<A> all = filled(A(0));
      if (smoothing != A(0)) {
        for (int64_t i = 0; i < (kTile ? vectors * kLanes : classes); ++i) {
          all.v[i % kLanes] += student[i] - most.v[i % kLanes];
        }
        all = finished_sum<kTile>(all);
      }
      for (int64_t i = 0; i < count; ++i) {
        if (!is_kept(i)) continue;
        const A log_sum = log_positive(hard_sum.v[i]);
        // A label that counts nothing may have any logit: 0 times infinity is NaN.
        A value = A(0);
        if (certainty != A(0)) value = certainty * (log_sum - (student[position(i, labels[row + i])] - most.v[i]));
        if (smoothing != A(0)) value += smoothing * (log_sum - all.v[i] / static_cast<A>(classes));
        loss.v[i] += hard_scale.v[i] * value;
      }
    }
    store_loss(loss);
    if (r.gradient == nullptr) return;

    Lanes<A> student_factor, target_factor, hard_factor, even;
    const Lanes<A> soft_gradient = scales(o.soft_scale * r.gradient_scale / o.temperature);
    const Lanes<A> hard_gradient = scales(o.hard_scale * r.gradient_scale);
    for (int l = 0; l < kLanes; ++l) {
      student_factor.v[l] = soft_gradient.v[l] / student_sum.v[l];
      target_factor.v[l] = soft_gradient.v[l] / target_sum.v[l];
      hard_factor.v[l] = hard_gradient.v[l] / hard_sum.v[l];
      even.v[l] = hard_gradient.v[l] * smoothing / static_cast<A>(classes);
    }
    // Written over what it is computed from: the target's probabilities, at the same place.
    A* __restrict gradient = soft_target;
    const A* __restrict p = soft_student;
    for (int64_t k = 0; k < vectors; ++k) {
      for (int l = 0; l < kLanes; ++l) {
        const int64_t i = k * kLanes + l;
        const A g = student_factor.v[l] * p[i] - target_factor.v[l] * gradient[i];
        gradient[i] = soft ? g : A(0);
      }
    }
    if (hard) {
      for (int64_t k = 0; k < vectors; ++k) {
        for (int l = 0; l < kLanes; ++l) {
          const int64_t i = k * kLanes + l;
          gradient[i] += hard_factor.v[l] * hard_student[i] - even.v[l];
        }
      }
    }
    for (int64_t i = 0; hard && i < count; ++i) {
      if (is_kept(i)) gradient[position(i, labels[row + i])] -= hard_gradient.v[i] * certainty;
    }
    store_gradient(gradient);
  }

  // ---- one sigmoid a label ----

  // soft_target = sum_m w_m sigmoid(teacher_m / T), soft_complement = 1 - soft_target without cancellation, and in
  // `entropy` what the divergence adds to the cross-entropy.
  void average_sigmoids(A* __restrict soft_complement) {
    const int64_t n = vectors * kLanes;
    const A scale = inverse_temperature;
    const A* __restrict x = other;
    A* __restrict q = soft_target;
    A* __restrict h = entropy;
    const bool of_mean = r.options.average == Average::kLogits;
    for (int64_t m = 0; m < (of_mean ? 1 : r.teachers); ++m) {
      if (of_mean) {
        load_mean(other);
      } else {
        load(teacher(m), other);
      }
      const A w = of_mean ? A(1) : static_cast<A>(r.teacher_weights[m]);
      if (m == 0) {
        for (int64_t i = 0; i < n; ++i) q[i] = soft_complement[i] = h[i] = A(0);
      }
      for (int64_t i = 0; i < n; ++i) {
        const Sigmoid<A> s = sigmoid_of(x[i] * scale);
        q[i] += w * s.p;
        soft_complement[i] += w * s.complement;
        h[i] -= w * binary_cross_entropy(s.p, s.complement, s);
      }
    }
    if (r.options.cross_entropy) {
      for (int64_t i = 0; i < n; ++i) h[i] = A(0);
    } else if (r.options.average == Average::kProbs) {
      for (int64_t i = 0; i < n; ++i) h[i] = entropy_term(q[i]) + entropy_term(soft_complement[i]);
    }
  }

  void run_multilabel() {
    const DistillationOptions& o = r.options;
    const bool soft = o.soft_scale != 0;
    const bool hard = r.target != nullptr && o.hard_scale != 0;
    load(static_cast<const T*>(r.student), student);
    if (soft) average_sigmoids(soft_student);
    // `entropy` becomes a label's loss and `soft_target` its gradient.
    const Lanes<A> soft_scale = scales(o.soft_scale);
    const Lanes<A> soft_gradient = scales(o.soft_scale * r.gradient_scale / o.temperature);
    const A scale = inverse_temperature;
    const A* __restrict a = student;
    const A* __restrict y_given = other;
    const A* __restrict complement = soft_student;
    A* __restrict value = entropy;
    A* __restrict slope = soft_target;
    for (int64_t k = 0; k < vectors; ++k) {
      for (int l = 0; l < kLanes; ++l) {
        const int64_t i = k * kLanes + l;
        const Sigmoid<A> s = sigmoid_of(a[i] * scale);
        const A v = soft_scale.v[l] * (binary_cross_entropy(slope[i], complement[i], s) + value[i]);
        const A g = soft_gradient.v[l] * (s.p - slope[i]);
        value[i] = soft ? v : A(0);
        slope[i] = soft ? g : A(0);
      }
    }
    if (r.target != nullptr) load(static_cast<const A*>(r.target), other, A(0));
    if (hard) {
      const Lanes<A> hard_scale = scales(o.hard_scale);
      const Lanes<A> hard_gradient = scales(o.hard_scale * r.gradient_scale);
      const A certainty = static_cast<A>(1.0 - o.label_smoothing);
      const A even = static_cast<A>(o.label_smoothing / 2);
      for (int64_t k = 0; k < vectors; ++k) {
        for (int l = 0; l < kLanes; ++l) {
          const int64_t i = k * kLanes + l;
          const Sigmoid<A> s = sigmoid_of(a[i]);
          const A y = y_given[i] * certainty + even;
          value[i] += hard_scale.v[l] * binary_cross_entropy(y, A(1) - y, s);
          slope[i] += hard_gradient.v[l] * (s.p - y);
        }
      }
    }
    if (r.target != nullptr) {
      const A ignored = static_cast<A>(o.ignore_index);
      for (int64_t i = 0; i < vectors * kLanes; ++i) {
        value[i] = y_given[i] == ignored ? A(0) : value[i];
        slope[i] = y_given[i] == ignored ? A(0) : slope[i];
      }
    }
    Lanes<A> loss = filled(A(0));
    // Smoothing gives the padding of a row a loss.
    const int64_t n = kTile ? vectors * kLanes : classes;
    for (int64_t i = n; i < vectors * kLanes; ++i) value[i] = A(0);
    for (int64_t k = 0; k < vectors; ++k) {
      for (int l = 0; l < kLanes; ++l) loss.v[l] += value[k * kLanes + l];
    }
    loss = finished_sum<kTile>(loss);
    store_loss(loss);
    if (r.gradient != nullptr) store_gradient(slope);
  }

  void run(int64_t first, int64_t number) {
    row = first;
    count = number;
    if (r.options.multilabel) {
      run_multilabel();
    } else {
      run_softmax();
    }
  }
};

template <typename T, bool kTile>
void run_blocks(const DistillationRows& rows, int64_t begin, int64_t end, void* workspace) {
  constexpr int64_t kStep = kTile ? kLanes : 1;
  Block<T, kTile> block(rows, workspace);
  block.last = end;
  for (int64_t row = begin; row < end; row += kStep) block.run(row, end - row < kStep ? end - row : kStep);
}

void run(const DistillationRows& rows, int64_t begin, int64_t end, void* workspace) {
  visit_dtype(rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (in_tiles(rows.classes)) {
      run_blocks<T, true>(rows, begin, end, workspace);
    } else {
      run_blocks<T, false>(rows, begin, end, workspace);
    }
  });
}

int64_t rows_at_once(int64_t classes) { return in_tiles(classes) ? kLanes : 1; }

int64_t workspace(DType dtype, int64_t classes) {
  const int64_t vectors = in_tiles(classes) ? classes : (classes + kLanes - 1) / kLanes;
  const int64_t means = in_tiles(classes)                              ? 0
                        : classes < Block<float, false>::kMeanElements ? Block<float, false>::kMeanElements
                                                                       : classes;
  return (Block<float, true>::kBuffers * vectors * kLanes + means) * (dtype == DType::kFloat64 ? 8 : 4);
}

template <typename A>
int64_t count_rows(const DistillationRows& rows, double* total) {
  const A* weights = static_cast<const A*>(rows.row_weights);
  const int64_t* labels = static_cast<const int64_t*>(rows.target);
  const A* label_values = static_cast<const A*>(rows.target);
  const A ignored = static_cast<A>(rows.options.ignore_index);
  double sum = 0;
  for (int64_t i = 0; i < rows.rows; ++i) {
    const A weight = weights == nullptr ? A(1) : weights[i];
    if (weight == A(0)) continue;
    if (rows.target == nullptr || !rows.options.multilabel) {
      const int64_t label = labels == nullptr ? 0 : labels[i];
      if (labels != nullptr && label == rows.options.ignore_index) continue;
      if (label < 0 || label >= rows.classes) return i;
      sum += rows.options.multilabel ? static_cast<double>(weight) * static_cast<double>(rows.classes) : weight;
      continue;
    }
    int64_t kept = 0;
    for (int64_t k = 0; k < rows.classes; ++k) {
      const A y = label_values[i * rows.classes + k];
      if (y == ignored) continue;
      if (!(y >= A(0) && y <= A(1))) return i;
      ++kept;
    }
    sum += static_cast<double>(weight) * static_cast<double>(kept);
  }
  *total += sum;
  return -1;
}

int64_t count(const DistillationRows& rows, double* total) {
  return rows.dtype == DType::kFloat64 ? count_rows<double>(rows, total) : count_rows<float>(rows, total);
}

}  // namespace

extern const DistillationKernels distillation;
const DistillationKernels distillation = {rows_at_once, workspace, run, count};

}  // namespace pfl::cpu::PFL_ISA
