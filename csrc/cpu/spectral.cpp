// Glue of the spectral family for the CPU key. Schemas: pfl_ext/ops/spectral.py.
#include "cpu/kernels/spectral.h"

#include <tuple>

#include <torch/csrc/stable/library.h>

#include "glue/spectral.h"

namespace pfl::cpu {
namespace {

using glue::DivergenceProblem;
using glue::fail;
using glue::HalfSpectra;
using glue::Tensor;

int64_t chunks_of(int64_t elements) { return (elements + kBinsPerChunk - 1) / kBinsPerChunk; }

// f(begin, end) over chunks of [0, elements).
template <typename F>
void for_each_chunk(int64_t elements, const F& f) {
  torch::stable::parallel_for(0, chunks_of(elements), 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) f(c * kBinsPerChunk, std::min(elements, (c + 1) * kBinsPerChunk));
  });
}

// f(row, chunk, begin, end) over the chunks of [0, elements) of each row.
template <typename F>
void for_each_chunk_of_rows(int64_t rows, int64_t elements, const F& f) {
  const int64_t chunks = chunks_of(elements);
  torch::stable::parallel_for(0, rows * chunks, 1, [&](int64_t first, int64_t last) {
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

// ---- chirps
// ----------------------------------------------------------------------------------------------------------

void check_like(const char* op, const char* role, const Tensor& t, const Tensor& like) {
  if (t.scalar_type() != like.scalar_type() || !t.is_cpu() || !t.is_contiguous()) {
    fail(op, ": ", role, " is ", glue::describe(t), "; a contiguous tensor like ", glue::describe(like),
         " is expected");
  }
}

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
  m.impl("chirp_load", TORCH_BOX(&pfl::cpu::chirp_load));
  m.impl("chirp_store_", TORCH_BOX(&pfl::cpu::chirp_store_));
  m.impl("join_rows", TORCH_BOX(&pfl::cpu::join_rows));
  m.impl("split_rows", TORCH_BOX(&pfl::cpu::split_rows));
}
