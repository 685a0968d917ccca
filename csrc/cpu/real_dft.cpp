#include "cpu/real_dft.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <list>
#include <mutex>
#include <type_traits>

#include <torch/csrc/stable/ops.h>

#include "cpu/kernels/spectral.h"

namespace pfl::cpu {
namespace {

template <typename A>
const FftKernels<A>& kernels() {
  if constexpr (std::is_same_v<A, double>) {
    return fft_double();
  } else {
    return fft_float();
  }
}

template <typename A>
constexpr DType dtype_of() {
  return std::is_same_v<A, double> ? DType::kFloat64 : DType::kFloat32;
}

// Numbers below which a task is not worth waking a thread for: some ten microseconds of work.
constexpr int64_t kNumbersPerTask = 1 << 12;

// f(begin, end) over [0, count), where one of them is work on `size` numbers.
template <typename F>
void in_parallel(int64_t count, int64_t size, const F& f) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, kNumbersPerTask / std::max<int64_t>(1, size)), f);
}

// f(tile, scratch) over tiles of `places` places.
template <typename A, typename F>
void for_each_tile(const TwoStepFft<A>& fft, int64_t tiles, int64_t places, const F& f) {
  in_parallel(tiles, places * kLanes, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<A[]> scratch(new A[fft.scratch()]);
    for (int64_t tile = begin; tile < end; ++tile) f(tile, scratch.get());
  });
}

// f(begin, end) over chunks of [0, count).
template <typename F>
void for_each_chunk(int64_t count, const F& f) {
  in_parallel((count + kBinsPerChunk - 1) / kBinsPerChunk, kBinsPerChunk, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) f(c * kBinsPerChunk, std::min(count, (c + 1) * kBinsPerChunk));
  });
}

// ---- lengths

int64_t largest_prime_factor(int64_t n) {
  int64_t largest = 1;
  for (int64_t p = 2; p * p <= n; ++p) {
    for (; n % p == 0; n /= p) largest = p;
  }
  return std::max(largest, n);
}

// The smallest multiple of 64, so that two steps can both fill their tiles, from `least` on whose other factors are 2,
// 3 and 5.
int64_t smooth_length(int64_t least) {
  int64_t best = 64;
  while (best < least) best *= 2;
  for (int64_t fives = 64; fives < best; fives *= 5) {
    for (int64_t odd = fives; odd < best; odd *= 3) {
      int64_t length = odd;
      while (length < least) length *= 2;
      best = std::min(best, length);
    }
  }
  return best;
}

int64_t to_tiles(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The divisor a of n for which the steps a and n / a leave the fewest lanes empty, and among those are shortest.
int64_t first_step(int64_t n) {
  int64_t best = 1;
  for (int64_t a = 1; a * a <= n; ++a) {
    if (n % a == 0 && to_tiles(a) * to_tiles(n / a) <= to_tiles(best) * to_tiles(n / best)) best = a;
  }
  return best;
}

// ---- tables

// exp(-i pi numerator / denominator), to out[0] and out[1]. The angle is brought to at most pi / 4 in integers, where
// its own rounding is small.
template <typename A>
void unit(int64_t numerator, int64_t denominator, A* out) {
  int64_t turn = numerator % (2 * denominator);  // of 2 * denominator
  const bool lower = turn > denominator;
  if (lower) turn = 2 * denominator - turn;
  const bool left = 2 * turn > denominator;
  if (left) turn = denominator - turn;
  const bool steep = 4 * turn > denominator;
  // pi / 2 - angle = pi (denominator - 2 turn) / (2 denominator)
  const double angle = steep ? M_PI * (static_cast<double>(denominator - 2 * turn) / (2.0 * denominator))
                             : M_PI * (static_cast<double>(turn) / static_cast<double>(denominator));
  const double cosine = steep ? std::sin(angle) : std::cos(angle), sine = steep ? std::cos(angle) : std::sin(angle);
  out[0] = static_cast<A>(left ? -cosine : cosine);
  out[1] = static_cast<A>(lower ? sine : -sine);
}

template <typename A>
const A* keep(std::vector<std::vector<A>>& memory, std::vector<A> values) {
  memory.push_back(std::move(values));
  return memory.back().data();
}

template <typename A>
int64_t bytes_of(const std::vector<std::vector<A>>& memory) {
  int64_t bytes = 0;
  for (const std::vector<A>& values : memory) bytes += values.size() * sizeof(A);
  return bytes;
}

template <typename A>
ShortFft<A> make_short(int64_t length, std::vector<std::vector<A>>& memory) {
  ShortFft<A> fft;
  fft.length = length;
  for (int64_t left = length; left > 1;) {
    int64_t radix = 0;
    for (int64_t candidate : {8, 4, 2, 5, 3}) {
      if (radix == 0 && left % candidate == 0) radix = candidate;
    }
    for (int64_t candidate = 7; radix == 0; candidate += 2) {
      if (left % candidate == 0) radix = candidate;
    }
    auto& pass = fft.pass[fft.passes++];
    pass.radix = radix;
    std::vector<A> twiddles(2 * (left / radix) * (radix - 1)), roots;
    for (int64_t p = 0; p < left / radix; ++p) {
      for (int64_t j = 1; j < radix; ++j) unit(2 * p * j, left, &twiddles[2 * (p * (radix - 1) + j - 1)]);
    }
    if (radix > 5 && radix != 8) {
      const int64_t half = radix / 2;
      roots.resize(2 * half * half);
      for (int64_t j = 1; j <= half; ++j) {
        for (int64_t k = 1; k <= half; ++k) {
          A* root = &roots[2 * ((j - 1) * half + k - 1)];
          unit(2 * (j * k % radix), radix, root);
          root[1] = -root[1];
        }
      }
    }
    pass.twiddles = keep(memory, std::move(twiddles));
    pass.roots = keep(memory, std::move(roots));
    left /= radix;
  }
  return fft;
}

}  // namespace

template <typename A>
ComplexFft<A>::ComplexFft(int64_t length) {
  const int64_t a = first_step(length), b = length / a;
  tables_.a = a;
  tables_.b = b;
  tables_.columns = make_short<A>(a, memory_);
  tables_.rows = make_short<A>(b, memory_);
  std::vector<A> lanes(a * kPlace);
  for (int64_t k = 0; k < a; ++k) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      A w[2];
      unit(2 * k * lane, length, w);
      lanes[k * kPlace + lane] = w[0];
      lanes[k * kPlace + kLanes + lane] = w[1];
    }
  }
  std::vector<A> tiles(2 * tables_.column_tiles() * a);
  in_parallel(tables_.column_tiles(), a * 16, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t k = 0; k < a; ++k) unit(2 * (k * tile * kLanes % length), length, &tiles[2 * (tile * a + k)]);
    }
  });
  tables_.lane_phase = keep(memory_, std::move(lanes));
  tables_.tile_phase = keep(memory_, std::move(tiles));
}

template <typename A>
void ComplexFft<A>::transform(const A* x, bool inverse, A* between, A* out) const {
  const FftKernels<A>& run = kernels<A>();
  for_each_tile(tables_, tables_.column_tiles(), tables_.a,
                [&](int64_t tile, A* scratch) { run.columns(tables_, tile, inverse, x, between, scratch); });
  for_each_tile(tables_, tables_.row_tiles(), tables_.b,
                [&](int64_t tile, A* scratch) { run.rows(tables_, tile, inverse, between, out, scratch); });
}

template <typename A>
int64_t ComplexFft<A>::bytes() const {
  return bytes_of(memory_);
}

template <typename A>
ChirpDft<A>::ChirpDft(int64_t n) : fft_(smooth_length(n)) {
  const int64_t m = smooth_length(n);
  std::vector<A> chirp(2 * n), ahead(2 * n), behind(2 * n);
  for_each_chunk(n, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double c[2], s[2];
      unit(k * k % (2 * n), n, c);
      unit(k, m, s);
      chirp[2 * k] = static_cast<A>(c[0]);
      chirp[2 * k + 1] = static_cast<A>(c[1]);
      ahead[2 * k] = static_cast<A>(c[0] * s[0] - c[1] * s[1]);
      ahead[2 * k + 1] = static_cast<A>(c[0] * s[1] + c[1] * s[0]);
      behind[2 * k] = static_cast<A>(c[0] * s[0] + c[1] * s[1]);
      behind[2 * k + 1] = static_cast<A>(c[1] * s[0] - c[0] * s[1]);
    }
  });
  // The conjugate chirp at the places 0 ... n - 1 and, wrapped around, -n + 1 ... -1: cyclic, and negacyclic with a
  // change of sign and the modulation.
  std::vector<double> sequence[2] = {std::vector<double>(2 * m), std::vector<double>(2 * m)};
  for_each_chunk(m, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double here[2] = {0, 0}, wrapped[2] = {0, 0}, s[2];
      if (k < n) unit(k * k % (2 * n), n, here);
      if (k > m - n) unit((m - k) * (m - k) % (2 * n), n, wrapped);
      unit(k, m, s);
      const double re = here[0] - wrapped[0], im = wrapped[1] - here[1];
      sequence[0][2 * k] = here[0] + wrapped[0];
      sequence[0][2 * k + 1] = -here[1] - wrapped[1];
      sequence[1][2 * k] = re * s[0] - im * s[1];
      sequence[1][2 * k + 1] = re * s[1] + im * s[0];
    }
  });
  tables_.n = n;
  tables_.fft = fft_.tables();
  tables_.chirp = keep(memory_, std::move(chirp));
  tables_.chirp_ahead = keep(memory_, std::move(ahead));
  tables_.chirp_behind = keep(memory_, std::move(behind));
  const ComplexFft<double> exact(m);
  const TwoStepFft<double>& fft = exact.tables();
  std::vector<double> between(fft.between());
  for (int which : {0, 1}) {
    for_each_tile(fft, fft.column_tiles(), fft.a, [&](int64_t tile, double* scratch) {
      kernels<double>().columns(fft, tile, false, sequence[which].data(), between.data(), scratch);
    });
    for_each_tile(fft, fft.row_tiles(), fft.b,
                  [&](int64_t tile, double* scratch) { kernels<double>().spread(fft, tile, between.data(), scratch); });
    std::vector<A> rounded(between.size());
    for (size_t i = 0; i < between.size(); ++i) rounded[i] = static_cast<A>(between[i] / (2.0 * m));
    tables_.kernel[which] = keep(memory_, std::move(rounded));
  }
}

template <typename A>
void ChirpDft<A>::transform(const A* x, int64_t stride, bool inverse, A* between, A* out, int64_t out_stride) const {
  const FftKernels<A>& run = kernels<A>();
  const TwoStepFft<A>& fft = tables_.fft;
  A* const parts[2] = {between, between + fft.between()};
  for_each_tile(fft, fft.column_tiles(), 2 * fft.a,
                [&](int64_t tile, A* scratch) { run.chirp_load(tables_, tile, inverse, x, stride, parts, scratch); });
  for_each_tile(fft, 2 * fft.row_tiles(), 2 * fft.b, [&](int64_t tile, A* scratch) {
    const int64_t which = tile / fft.row_tiles();
    run.convolve(fft, tile % fft.row_tiles(), tables_.kernel[which], parts[which], scratch);
  });
  for_each_tile(fft, fft.column_tiles(), 2 * fft.a, [&](int64_t tile, A* scratch) {
    run.chirp_store(tables_, tile, inverse, parts, out, out_stride, scratch);
  });
}

template <typename A>
int64_t ChirpDft<A>::bytes() const {
  return fft_.bytes() + bytes_of(memory_);
}

// ---- real numbers

template <typename A>
RealDft<A>::RealDft(int64_t length) : length_(length) {
  const bool awkward = largest_prime_factor(length) > kLargestRadix;
  pairs_ = length % 2 == 0 ? 1 : 0;
  for (int64_t pairs = 2; awkward && pairs <= kMaxPairs; ++pairs) {
    if (length % (2 * pairs) == 0) pairs_ = pairs;
  }
  n_ = pairs_ == 0 ? length : length / (2 * pairs_);
  if (awkward) {
    chirp_ = std::make_unique<ChirpDft<A>>(n_);
  } else {
    fft_ = std::make_unique<ComplexFft<A>>(n_);
  }
  if (pairs_ != 0) {
    row_twiddles_.resize(2 * (n_ / 2 + 1));
    for_each_chunk(n_ / 2 + 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) unit(2 * k, length, &row_twiddles_[2 * k]);
    });
  }
}

template <typename A>
int64_t RealDft<A>::between() const {
  return fft_ ? fft_->tables().between() : chirp_->between();
}

template <typename A>
int64_t RealDft<A>::workspace() const {
  // Beside it, the rows; an FFT of one pair has them in the half spectrum.
  return between() + (pairs_ == 0 ? 2 * length_ : chirp_ ? 2 * pairs_ * n_ : 0);
}

template <typename A>
int64_t RealDft<A>::bytes() const {
  return (fft_ ? fft_->bytes() : chirp_->bytes()) + row_twiddles_.size() * sizeof(A);
}

template <typename A>
void RealDft<A>::transform_odd(A* z, bool inverse, A* between) const {
  if (fft_) {
    fft_->transform(z, inverse, between, z);
  } else {
    chirp_->transform(z, 1, inverse, between, z, 1);
  }
}

template <typename A>
void RealDft<A>::forward(const A* x, A* work, A* half_spectrum) const {
  A* rows = work + between();
  if (pairs_ == 0) {
    for (int64_t j = 0; j < length_; ++j) {
      rows[2 * j] = x[j];
      rows[2 * j + 1] = A(0);
    }
    transform_odd(rows, false, work);
    std::memcpy(half_spectrum, rows, 2 * (length_ / 2 + 1) * sizeof(A));
    half_spectrum[1] = A(0);
    return;
  }
  if (fft_) {
    rows = half_spectrum;
    fft_->transform(x, false, work, rows);
  } else {
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      chirp_->transform(x + 2 * pair, pairs_, false, work, rows + 2 * n_ * pair, 1);
    }
  }
  for_each_chunk(n_ / 2 + 1, [&](int64_t begin, int64_t end) {
    spectral().join_rows(cpu::dtype_of<A>(), begin, end, n_, pairs_, rows, row_twiddles_.data(), half_spectrum);
  });
}

template <typename A>
void RealDft<A>::inverse(A* half_spectrum, A* work, A* x) const {
  A* rows = fft_ && pairs_ != 0 ? half_spectrum : work + between();
  if (pairs_ == 0) {
    rows[0] = half_spectrum[0];
    rows[1] = A(0);
    for (int64_t k = 1; k <= length_ / 2; ++k) {
      rows[2 * k] = rows[2 * (length_ - k)] = half_spectrum[2 * k];
      rows[2 * k + 1] = half_spectrum[2 * k + 1];
      rows[2 * (length_ - k) + 1] = -half_spectrum[2 * k + 1];
    }
    transform_odd(rows, true, work);
    for (int64_t j = 0; j < length_; ++j) x[j] = rows[2 * j];
    return;
  }
  for_each_chunk(n_ / 2 + 1, [&](int64_t begin, int64_t end) {
    spectral().split_rows(cpu::dtype_of<A>(), begin, end, n_, pairs_, half_spectrum, row_twiddles_.data(), rows);
  });
  if (fft_) {
    fft_->transform(rows, true, work, x);
  } else {
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      chirp_->transform(rows + 2 * n_ * pair, 1, true, work, x + 2 * pair, pairs_);
    }
  }
}

template <typename A>
std::shared_ptr<const RealDft<A>> RealDft<A>::of(int64_t length) {
  // Two plans of ResNet-18's length, or hundreds of small ones.
  constexpr int64_t kMostBytes = int64_t{256} << 20;
  static std::mutex mutex;
  static std::list<std::shared_ptr<const RealDft>> cache;  // last used first
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto it = cache.begin(); it != cache.end(); ++it) {
      if ((*it)->length_ == length) {
        cache.splice(cache.begin(), cache, it);
        return cache.front();
      }
    }
  }
  // Made without the lock: it uses all threads. Two callers may make the same one.
  std::shared_ptr<const RealDft> made = std::make_shared<const RealDft>(length);
  const std::lock_guard<std::mutex> lock(mutex);
  cache.push_front(made);
  int64_t bytes = 0;
  for (auto it = cache.begin(); it != cache.end(); ++it) {
    bytes += (*it)->bytes();
    if (bytes > kMostBytes && it != cache.begin()) {
      cache.erase(it, cache.end());
      break;
    }
  }
  return made;
}

template class RealDft<float>;
template class RealDft<double>;

}  // namespace pfl::cpu
