// The real DFT of any length and its inverse, on raw pointers, cut over torch's threads. The same bits for any number
// of threads, any instruction set and any neighbours in a batch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels/fft.h"

namespace pfl::cpu {

// Tables of a TwoStepFft and the memory they lie in. The length has no prime factor above kLargestRadix.
template <typename A>
class ComplexFft {
 public:
  explicit ComplexFft(int64_t length);
  // x [length] complex to out, which may be x. `between` has space for tables().between() numbers.
  void transform(const A* x, bool inverse, A* between, A* out) const;
  const TwoStepFft<A>& tables() const { return tables_; }
  int64_t bytes() const;

 private:
  TwoStepFft<A> tables_;
  std::vector<std::vector<A>> memory_;
};

// With j k = (j^2 + k^2 - (k - j)^2) / 2 a DFT is a convolution with a chirp, exp(i pi m^2 / n), between two
// multiplications by its conjugate. A linear convolution of n inputs and outputs is the mean of a cyclic and a
// negacyclic one of any length m from n on, so nothing is padded to 2n; the second is a cyclic one of what is modulated
// by half a frequency. Phases are reduced as integers and thus exact before they are rounded once.
template <typename A>
class ChirpDft {
 public:
  explicit ChirpDft(int64_t n);
  // The DFT of n complex numbers, `stride` apart in x, to `out_stride` apart in out; or the inverse without 1/n.
  void transform(const A* x, int64_t stride, bool inverse, A* between, A* out, int64_t out_stride) const;
  int64_t between() const { return 2 * fft_.tables().between(); }
  int64_t bytes() const;

 private:
  ComplexFft<A> fft_;
  ChirpTables<A> tables_;
  std::vector<std::vector<A>> memory_;
};

// The DFT of `length` real numbers, as length / 2 + 1 complex ones, and its inverse without 1/length.
//
// An even length is cut into interleaved rows; pairs of rows are the real and imaginary parts of complex sequences
// (rows 0 and 1 are simply memory read as complex numbers). One pair is enough where FFTs like half the length. From
// an awkward length as many as possible up to four are cut, to shorten the chirps. An odd length is transformed as
// complex numbers without imaginary part.
template <typename A>
class RealDft {
 public:
  explicit RealDft(int64_t length);
  // From a small cache of such tables; bounded in bytes, least recently used out first.
  static std::shared_ptr<const RealDft> of(int64_t length);

  int64_t workspace() const;  // numbers of type A
  void forward(const A* x, A* work, A* half_spectrum) const;
  // Destroys the half spectrum; x may lie in its memory. Imaginary parts of the bins that are real are not looked at.
  void inverse(A* half_spectrum, A* work, A* x) const;
  int64_t bytes() const;

 private:
  void transform_odd(A* z, bool inverse, A* between) const;
  int64_t between() const;

  int64_t length_, pairs_, n_;  // length = 2 * pairs * n, or pairs = 0 and n = length
  std::unique_ptr<ComplexFft<A>> fft_;
  std::unique_ptr<ChirpDft<A>> chirp_;
  std::vector<A> row_twiddles_;  // [n / 2 + 1] complex, exp(-2 pi i k / length)
};

}  // namespace pfl::cpu
