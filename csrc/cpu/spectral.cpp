// Glue of the spectral family for the CPU key. Schemas: pfl_ext/ops/spectral.py.
#include "cpu/kernels/spectral.h"

#include <cstring>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "glue/fft.h"
#include "glue/spectral.h"

namespace pfl::cpu {
namespace {

using glue::DivergenceProblem;
using glue::fail;
using glue::HalfSpectra;
using glue::Tensor;

// Fewer are not worth waking a thread for: a chunk takes some ten microseconds.
constexpr int64_t kChunksPerTask = 4;

int64_t chunks_of(int64_t elements) { return (elements + kBinsPerChunk - 1) / kBinsPerChunk; }

// f(begin, end) over chunks of [0, elements).
template <typename F>
void for_each_chunk(int64_t elements, const F& f) {
  torch::stable::parallel_for(0, chunks_of(elements), kChunksPerTask, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) f(c * kBinsPerChunk, std::min(elements, (c + 1) * kBinsPerChunk));
  });
}

// f(row, chunk, begin, end) over the chunks of [0, elements) of each row.
template <typename F>
void for_each_chunk_of_rows(int64_t rows, int64_t elements, const F& f) {
  const int64_t chunks = chunks_of(elements);
  torch::stable::parallel_for(0, rows * chunks, kChunksPerTask, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / chunks, c = i % chunks;
      f(row, c, c * kBinsPerChunk, std::min(elements, (c + 1) * kBinsPerChunk));
    }
  });
}

// A pointer to element `index` of a tensor of this type, where an element has `parts` numbers.
template <typename Pointer>
Pointer* at(Pointer* data, DType dtype, int64_t index, int64_t parts = 1) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Byte*>(data) + index * parts * item_size(dtype);
}

void check_like(const char* op, const char* role, const Tensor& t, const Tensor& like) {
  if (t.scalar_type() != like.scalar_type() || !t.is_cpu() || !t.is_contiguous()) {
    fail(op, ": ", role, " is ", glue::describe(t), "; a contiguous tensor like ", glue::describe(like),
         " is expected");
  }
}

std::tuple<Tensor, Tensor> spectral_teacher(const Tensor& spectrum, int64_t length, int64_t count) {
  const HalfSpectra given("pfl_ext::spectral_teacher", spectrum, length, count);
  const int64_t bins = given.range.bins(), chunks = chunks_of(bins);
  Tensor log_q = torch::stable::new_empty(spectrum, {given.rows, bins}, glue::real_type(given.dtype));
  Tensor total = torch::stable::new_empty(spectrum, {given.rows}, glue::ScalarType::Double);
  const void* in = spectrum.const_data_ptr();
  void* logs = log_q.mutable_data_ptr();
  std::vector<double> sums(given.rows * chunks);
  const SpectralKernels& kernels = spectral();
  for_each_chunk_of_rows(given.rows, bins, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
    kernels.teacher(given.dtype, given.range, begin, end, at(in, given.dtype, row * given.range.half(), 2),
                    at(logs, given.dtype, row * bins), &sums[row * chunks + chunk]);
  });
  double* totals = static_cast<double*>(total.mutable_data_ptr());
  for (int64_t row = 0; row < given.rows; ++row) {
    totals[row] = 0;
    for (int64_t c = 0; c < chunks; ++c) totals[row] += sums[row * chunks + c];
  }
  return {log_q, total};
}

Tensor half_spectrum_divergence_(const Tensor& spectrum, const Tensor& log_q, const Tensor& total, int64_t length,
                                 int64_t count, int64_t form, bool need_grad) {
  const DivergenceProblem given("pfl_ext::half_spectrum_divergence_", spectrum, log_q, total, length, count, form);
  const int64_t bins = given.range.bins(), half = given.range.half(), chunks = chunks_of(bins);
  Tensor loss = torch::stable::new_empty(spectrum, {given.rows}, glue::real_type(given.dtype));
  void* data = spectrum.mutable_data_ptr();
  const void* logs = log_q.const_data_ptr();
  const double* totals = static_cast<const double*>(total.const_data_ptr());
  const auto teacher_of = [&](int64_t row) { return given.teachers == 1 ? 0 : row; };
  std::vector<double> sums(2 * given.rows * chunks);
  const SpectralKernels& kernels = spectral();
  for_each_chunk_of_rows(given.rows, bins, [&](int64_t row, int64_t chunk, int64_t begin, int64_t end) {
    kernels.sums(given.dtype, given.range, begin, end, at(data, given.dtype, row * half, 2),
                 at(logs, given.dtype, teacher_of(row) * bins), &sums[2 * (row * chunks + chunk)]);
  });
  std::vector<Divergence> divergences(given.rows);
  for (int64_t row = 0; row < given.rows; ++row) {
    double z = 0, a = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      z += sums[2 * (row * chunks + c)];
      a += sums[2 * (row * chunks + c) + 1];
    }
    divergences[row] = finish_divergence(given.form, z, a, totals[teacher_of(row)]);
    if (given.dtype == DType::kFloat64) {
      static_cast<double*>(loss.mutable_data_ptr())[row] = divergences[row].loss;
    } else {
      static_cast<float*>(loss.mutable_data_ptr())[row] = static_cast<float>(divergences[row].loss);
    }
  }
  if (need_grad) {
    for_each_chunk_of_rows(given.rows, half, [&](int64_t row, int64_t, int64_t begin, int64_t end) {
      kernels.seed(given.dtype, given.range, begin, end, at(data, given.dtype, row * half, 2),
                   at(logs, given.dtype, teacher_of(row) * bins), divergences[row].scale, divergences[row].offset);
    });
  }
  return loss;
}

// ---- FFTs whose bits do not depend on the number of threads

// Up to this length the library gives a row to one thread by itself (measured: other bits from 16384 on).
constexpr int64_t kShort = 4096;

// out(row) = transform(row) for the rows of a matrix, each on one thread: the library cuts a transform that it has
// several threads for in another way, with other bits. The second task of a single row is empty; it is there because
// only a parallel region keeps the library to one thread.
template <typename F>
Tensor transform_rows(const Tensor& x, int64_t columns, glue::ScalarType type, const F& transform) {
  const int64_t rows = x.size(0);
  if (x.size(1) <= kShort) return transform(x);
  Tensor out = torch::stable::new_empty(x, {rows == 1 ? 0 : rows, columns}, type);
  torch::stable::parallel_for(0, std::max<int64_t>(rows, 2), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < std::min(end, rows); ++row) {
      Tensor all = x;
      Tensor result = transform(torch::stable::narrow(all, 0, row, 1));
      if (rows == 1) {
        out = result;
      } else {
        Tensor place = torch::stable::narrow(out, 0, row, 1);
        torch::stable::copy_(place, result);
      }
    }
  });
  return out;
}

Tensor rfft_rows(const Tensor& x) {
  const char* op = "pfl_ext::rfft_rows";
  const bool wide = x.scalar_type() == glue::ScalarType::Double;
  if ((!wide && x.scalar_type() != glue::ScalarType::Float) || x.dim() != 2 || x.size(1) < 1) {
    fail(op, ": x is ", glue::describe(x), "; a float32 or float64 matrix is accepted");
  }
  return transform_rows(x, x.size(1) / 2 + 1, wide ? glue::ScalarType::ComplexDouble : glue::ScalarType::ComplexFloat,
                        [](const Tensor& row) { return glue::real_fft(row); });
}

Tensor irfft_rows(const Tensor& half_spectrum, int64_t length) {
  const char* op = "pfl_ext::irfft_rows";
  const DType dtype = glue::parts_of(op, "the half spectrum", half_spectrum);
  if (half_spectrum.dim() != 2 || length < 1 || half_spectrum.size(1) != length / 2 + 1) {
    fail(op, ": the half spectrum is ", glue::describe(half_spectrum), " for length ", length);
  }
  return transform_rows(half_spectrum, length, glue::real_type(dtype),
                        [&](const Tensor& row) { return glue::inverse_real_fft(row, length); });
}

// Rows transformed at once. They and their result fit into the second-level cache for rows of 2048 complex numbers.
constexpr int64_t kTile = 16;

// DFTs of the rows of x [R, a * b], in two steps of short FFTs: of the b columns of the matrix [a, b] that a row is,
// then, times the twiddles [b, a], of its a rows. One long FFT walks through memory many times, and the library
// computes its own twiddles anew in each call.
// Without twiddles, in one step.
Tensor fft_rows(const Tensor& x, const Tensor& twiddle, bool inverse) {
  const char* op = "pfl_ext::fft_rows";
  const DType dtype = glue::parts_of(op, "x", x);
  check_like(op, "x", x, x);
  if (twiddle.numel() == 0 && x.dim() == 2) {
    return transform_rows(x, x.size(1), x.scalar_type(),
                          [&](const Tensor& row) { return glue::complex_fft(row, inverse); });
  }
  check_like(op, "twiddle", twiddle, x);
  if (x.dim() != 2 || twiddle.dim() != 2 || x.size(1) != twiddle.numel()) {
    fail(op, ": x is ", glue::describe(x), " for twiddles ", glue::describe(twiddle));
  }
  const int64_t rows = x.size(0), b = twiddle.size(0), a = twiddle.size(1);
  Tensor between = torch::stable::new_empty(x, x.sizes());
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const void *in = x.const_data_ptr(), *factors = twiddle.const_data_ptr();
  void *middle = between.mutable_data_ptr(), *result = out.mutable_data_ptr();
  const SpectralKernels& kernels = spectral();
  const int64_t column_tiles = (b + kTile - 1) / kTile, row_tiles = (a + kTile - 1) / kTile;
  torch::stable::parallel_for(0, rows * column_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t % column_tiles * kTile, count = std::min(kTile, b - first),
                    row = t / column_tiles * a * b;
      Tensor columns = torch::stable::new_empty(x, {count, a});
      kernels.gather_columns(dtype, a, b, first, count, at(in, dtype, row, 2), columns.mutable_data_ptr());
      Tensor transformed = glue::complex_fft(columns, inverse);
      kernels.scatter_columns(dtype, a, b, first, count, transformed.mutable_data_ptr(),
                              at(factors, dtype, first * a, 2), inverse, at(middle, dtype, row, 2));
    }
  });
  torch::stable::parallel_for(0, rows * row_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t % row_tiles * kTile, count = std::min(kTile, a - first), row = t / row_tiles * a * b;
      Tensor part = torch::stable::new_empty(x, {count, b});
      std::memcpy(part.mutable_data_ptr(), at(middle, dtype, row + first * b, 2), count * b * 2 * item_size(dtype));
      Tensor transformed = glue::complex_fft(part, inverse);
      kernels.scatter_columns(dtype, b, a, first, count, transformed.mutable_data_ptr(), nullptr, false,
                              at(result, dtype, row, 2));
    }
  });
  return out;
}

// ---- chirps
// ----------------------------------------------------------------------------------------------------------

// Column `row` of a complex matrix [n, R].
struct Column {
  Column(const char* op, const Tensor& rows, int64_t row, const Tensor& chirp, const Tensor& shift)
      : dtype(glue::parts_of(op, "rows", rows)), n(chirp.numel()) {
    check_like(op, "chirp", chirp, rows);
    check_like(op, "shift", shift, rows);
    if (rows.dim() != 2 || rows.size(0) != n || shift.numel() != n || row < 0 || row >= rows.size(1)) {
      fail(op, ": column ", row, " of rows ", glue::describe(rows), " for ", n, " chirps and ", shift.numel(),
           " shifts");
    }
    stride = rows.stride(0);
    offset = row * rows.stride(1);
  }

  DType dtype;
  int64_t n, stride, offset;
};

Tensor chirp_load(const Tensor& rows, int64_t row, const Tensor& chirp, const Tensor& shift, int64_t padded,
                  bool conjugate) {
  const Column column("pfl_ext::chirp_load", rows, row, chirp, shift);
  if (padded < column.n) fail("pfl_ext::chirp_load: padded=", padded, " for ", column.n, " values");
  Tensor out = torch::stable::new_empty(chirp, {2, padded});
  const void* x = at(rows.const_data_ptr(), column.dtype, column.offset, 2);
  const void *chirps = chirp.const_data_ptr(), *shifts = shift.const_data_ptr();
  void* result = out.mutable_data_ptr();
  const SpectralKernels& kernels = spectral();
  for_each_chunk(padded, [&](int64_t begin, int64_t end) {
    kernels.chirp_load(column.dtype, begin, end, column.n, padded, x, column.stride, chirps, shifts, conjugate, result);
  });
  return out;
}

void chirp_store_(const Tensor& out, int64_t row, const Tensor& convolved, const Tensor& chirp, const Tensor& shift,
                  bool conjugate) {
  const Column column("pfl_ext::chirp_store_", out, row, chirp, shift);
  check_like("pfl_ext::chirp_store_", "convolved", convolved, out);
  if (convolved.dim() != 2 || convolved.size(0) != 2 || convolved.size(1) < column.n) {
    fail("pfl_ext::chirp_store_: convolved is ", glue::describe(convolved), "; [2, at least ", column.n,
         "] is expected");
  }
  const int64_t padded = convolved.size(1);
  const void *in = convolved.const_data_ptr(), *chirps = chirp.const_data_ptr(), *shifts = shift.const_data_ptr();
  void* result = at(out.mutable_data_ptr(), column.dtype, column.offset, 2);
  const SpectralKernels& kernels = spectral();
  for_each_chunk(column.n, [&](int64_t begin, int64_t end) {
    kernels.chirp_store(column.dtype, begin, end, padded, in, chirps, shifts, conjugate, result, column.stride);
  });
}

void chirp_multiply_(const Tensor& x, const Tensor& kernel) {
  const char* op = "pfl_ext::chirp_multiply_";
  const DType dtype = glue::parts_of(op, "x", x);
  check_like(op, "x", x, x);
  check_like(op, "kernel", kernel, x);
  if (x.numel() != kernel.numel()) fail(op, ": x is ", glue::describe(x), ", kernel is ", glue::describe(kernel));
  void* values = x.mutable_data_ptr();
  const void* factors = kernel.const_data_ptr();
  const SpectralKernels& kernels = spectral();
  for_each_chunk(x.numel(), [&](int64_t begin, int64_t end) { kernels.multiply(dtype, begin, end, values, factors); });
}

void check_rows(const char* op, int64_t n, int64_t pairs, const Tensor& twiddle) {
  if (n < 1 || pairs < 1 || pairs > kMaxPairs || twiddle.numel() != n / 2 + 1) {
    fail(op, ": ", pairs, " pairs of rows of length ", n, " and ", twiddle.numel(), " twiddles; 1 to ", kMaxPairs,
         " pairs and n / 2 + 1 twiddles are expected");
  }
}

Tensor join_rows(const Tensor& rows, const Tensor& twiddle) {
  const char* op = "pfl_ext::join_rows";
  const DType dtype = glue::parts_of(op, "rows", rows);
  if (rows.dim() != 2) fail(op, ": rows are ", glue::describe(rows), "; a matrix [n, pairs] is expected");
  const Tensor dense = torch::stable::contiguous(torch::stable::transpose(rows, 0, 1));  // as they are, mostly
  const int64_t n = rows.size(0), pairs = rows.size(1);
  check_like(op, "twiddle", twiddle, dense);
  check_rows(op, n, pairs, twiddle);
  Tensor out = torch::stable::new_empty(rows, {n * pairs + 1});
  const void *in = dense.const_data_ptr(), *twiddles = twiddle.const_data_ptr();
  void* result = out.mutable_data_ptr();
  const SpectralKernels& kernels = spectral();
  for_each_chunk(n / 2 + 1, [&](int64_t begin, int64_t end) {
    kernels.join_rows(dtype, begin, end, n, pairs, in, twiddles, result);
  });
  return out;
}

Tensor split_rows(const Tensor& half_spectrum, const Tensor& twiddle, int64_t n) {
  const char* op = "pfl_ext::split_rows";
  const DType dtype = glue::parts_of(op, "half_spectrum", half_spectrum);
  check_like(op, "half_spectrum", half_spectrum, half_spectrum);
  check_like(op, "twiddle", twiddle, half_spectrum);
  const int64_t pairs = n < 1 ? 0 : (half_spectrum.numel() - 1) / n;
  check_rows(op, n, pairs, twiddle);
  if (half_spectrum.dim() != 1 || half_spectrum.numel() != n * pairs + 1) {
    fail(op, ": half_spectrum is ", glue::describe(half_spectrum), "; a multiple of n=", n,
         " and one more is expected");
  }
  Tensor out = torch::stable::new_empty(half_spectrum, {pairs, n});
  const void *in = half_spectrum.const_data_ptr(), *twiddles = twiddle.const_data_ptr();
  void* result = out.mutable_data_ptr();
  const SpectralKernels& kernels = spectral();
  for_each_chunk(n / 2 + 1, [&](int64_t begin, int64_t end) {
    kernels.split_rows(dtype, begin, end, n, pairs, in, twiddles, result);
  });
  return torch::stable::transpose(out, 0, 1);
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("spectral_teacher", TORCH_BOX(&pfl::cpu::spectral_teacher));
  m.impl("half_spectrum_divergence_", TORCH_BOX(&pfl::cpu::half_spectrum_divergence_));
  m.impl("rfft_rows", TORCH_BOX(&pfl::cpu::rfft_rows));
  m.impl("irfft_rows", TORCH_BOX(&pfl::cpu::irfft_rows));
  m.impl("fft_rows", TORCH_BOX(&pfl::cpu::fft_rows));
  m.impl("chirp_load", TORCH_BOX(&pfl::cpu::chirp_load));
  m.impl("chirp_multiply_", TORCH_BOX(&pfl::cpu::chirp_multiply_));
  m.impl("chirp_store_", TORCH_BOX(&pfl::cpu::chirp_store_));
  m.impl("join_rows", TORCH_BOX(&pfl::cpu::join_rows));
  m.impl("split_rows", TORCH_BOX(&pfl::cpu::split_rows));
}
