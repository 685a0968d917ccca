// Glue of the spectral family for the CPU key. Schemas: pfl_ext/ops/spectral.py.
#include "cpu/kernels/spectral.h"

#include <cstring>
#include <tuple>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <torch/csrc/stable/library.h>

#include "cpu/real_dft.h"
#include "glue/spectral.h"

namespace pfl::cpu {
namespace {

using glue::DivergenceProblem;
using glue::fail;
using glue::HalfSpectra;
using glue::ScalarType;
using glue::Tensor;

template <typename F>
void visit(DType dtype, const F& f) {
  if (dtype == DType::kFloat64) {
    f(TypeTag<double>{});
  } else {
    f(TypeTag<float>{});
  }
}

// A tensor of a type that nobody has written to yet. Large ones ask for large pages: with small ones, the system took
// as long to hand out the memory of a ResNet-18's transform as the transform itself took.
Tensor new_buffer(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  Tensor buffer = torch::stable::new_empty(like, sizes, type);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t data = reinterpret_cast<uintptr_t>(buffer.mutable_data_ptr());
  const uintptr_t begin = (data + kPage - 1) / kPage * kPage;
  const uintptr_t end =
      (data + buffer.numel() * item_size(type == ScalarType::Double ? DType::kFloat64 : DType::kFloat32)) / kPage *
      kPage;
  // A wish: where it is not granted, everything works as before.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return buffer;
}

// ---- transforms

// Rows up to this length are given to the threads whole, longer ones one after the other in parts.
constexpr int64_t kShortRow = 1 << 15;

// f(row, workspace) for all rows, with a workspace of `size` numbers for each that is in work at a time.
template <typename A, typename F>
void for_each_row(const Tensor& like, int64_t rows, int64_t length, int64_t size, const F& f) {
  const ScalarType type = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
  const auto some = [&](int64_t begin, int64_t end) {
    Tensor work = new_buffer(like, {size}, type);
    for (int64_t row = begin; row < end; ++row) f(row, static_cast<A*>(work.mutable_data_ptr()));
  };
  if (rows > 1 && length <= kShortRow) {
    torch::stable::parallel_for(0, rows, 1, some);
  } else {
    some(0, rows);
  }
}

// Weights are computed in this type.
ScalarType computed_in(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return ScalarType::Float;
    case ScalarType::Double:
      return ScalarType::Double;
    default:
      fail(op, ": the weights are ", glue::describe(x), "; float32, float64, float16 and bfloat16 are accepted");
  }
}

// The tensors, each read as [rows, ...], side by side in contiguous rows of `length`, followed by zeros.
Tensor dense_rows(const char* op, const std::vector<Tensor>& tensors, int64_t rows, int64_t length) {
  if (tensors.empty() || rows < 1) fail(op, ": ", tensors.size(), " tensors and ", rows, " clients; one is needed");
  const ScalarType type = computed_in(op, tensors[0]);
  int64_t size = 0;
  for (const Tensor& x : tensors) {
    if (x.scalar_type() != tensors[0].scalar_type() || !x.is_cpu() || x.numel() % rows != 0) {
      fail(op, ": the weights are ", glue::describe(x), " beside ", glue::describe(tensors[0]), ", for ", rows,
           " clients");
    }
    size += x.numel() / rows;
  }
  if (size < 1 || size > length) fail(op, ": ", size, " weights for a transform of length ", length);
  const auto in_type = [&](const Tensor& x) {
    if (x.scalar_type() == type && x.is_contiguous()) return x;
    return torch::stable::contiguous(torch::stable::to(x, type));
  };
  if (tensors.size() == 1 && size == length) {
    const int64_t shape[2] = {rows, length};
    return torch::stable::view(in_type(tensors[0]), torch::headeronly::IntHeaderOnlyArrayRef(shape, 2));
  }
  Tensor dense = new_buffer(tensors[0], {rows, length}, type);
  const int64_t item = type == ScalarType::Double ? sizeof(double) : sizeof(float);
  char* data = static_cast<char*>(dense.mutable_data_ptr());
  const int64_t pitch = length * item;
  int64_t filled = 0;
  for (const Tensor& x : tensors) {
    const Tensor part = in_type(x);
    const char* from = static_cast<const char*>(part.const_data_ptr());
    const int64_t bytes = part.numel() / rows * item;
    constexpr int64_t kPiece = 1 << 17;
    const int64_t pieces = (bytes + kPiece - 1) / kPiece;
    torch::stable::parallel_for(0, rows * pieces, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces, at = i % pieces * kPiece;
        std::memcpy(data + row * pitch + filled + at, from + row * bytes + at, std::min(kPiece, bytes - at));
      }
    });
    filled += bytes;
  }
  for (int64_t row = 0; row < rows; ++row) std::memset(data + row * pitch + filled, 0, pitch - filled);
  return dense;
}

// Half spectra of the rows of x, one after the other in `half_spectra`.
template <typename A>
void transform_rows(const Tensor& x, A* half_spectra) {
  const int64_t length = x.size(1);
  const auto dft = RealDft<A>::of(length);
  const A* data = static_cast<const A*>(x.const_data_ptr());
  for_each_row<A>(x, x.size(0), length, dft->workspace(), [&](int64_t row, A* work) {
    dft->forward(data + row * length, work, half_spectra + row * 2 * (length / 2 + 1));
  });
}

// The inverse of `rows` half spectra in a flat buffer, which then holds the results in its first rows * length numbers.
template <typename A>
void transform_back(const Tensor& buffer, int64_t rows, int64_t length) {
  const auto dft = RealDft<A>::of(length);
  A* data = static_cast<A*>(buffer.mutable_data_ptr());
  const int64_t pitch = 2 * (length / 2 + 1);
  for_each_row<A>(buffer, rows, length, dft->workspace(),
                  [&](int64_t row, A* work) { dft->inverse(data + row * pitch, work, data + row * pitch); });
  for (int64_t row = 1; row < rows; ++row) {
    std::memmove(data + row * length, data + row * pitch, length * sizeof(A));
  }
}

// The first `size` numbers of each row of what transform_back left, in a type.
Tensor rows_of(const Tensor& buffer, int64_t rows, int64_t length, int64_t size, ScalarType type) {
  Tensor flat = buffer;
  const int64_t shape[2] = {rows, length};
  Tensor matrix = torch::stable::view(torch::stable::narrow(flat, 0, 0, rows * length),
                                      torch::headeronly::IntHeaderOnlyArrayRef(shape, 2));
  if (size != length) matrix = torch::stable::contiguous(torch::stable::narrow(matrix, 1, 0, size));
  return torch::stable::to(matrix, type);
}

Tensor real_dft(const Tensor& x, int64_t length) {
  const char* op = "pfl_ext::real_dft";
  if (x.dim() != 2) fail(op, ": x is ", glue::describe(x), "; a matrix is accepted");
  const Tensor dense = dense_rows(op, {x}, x.size(0), length);
  const bool wide = dense.scalar_type() == ScalarType::Double;
  Tensor out = torch::stable::new_empty(dense, {x.size(0), length / 2 + 1},
                                        wide ? ScalarType::ComplexDouble : ScalarType::ComplexFloat);
  visit(wide ? DType::kFloat64 : DType::kFloat32, [&](auto tag) {
    using A = typename decltype(tag)::type;
    transform_rows<A>(dense, static_cast<A*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor real_idft(const Tensor& half_spectrum, int64_t length, int64_t size) {
  const char* op = "pfl_ext::real_idft";
  const DType dtype = glue::parts_of(op, "the half spectrum", half_spectrum);
  if (half_spectrum.dim() != 2 || length < 1 || half_spectrum.size(1) != length / 2 + 1 || size < 1 || size > length) {
    fail(op, ": the half spectrum is ", glue::describe(half_spectrum), " for ", size, " values of length ", length);
  }
  const int64_t rows = half_spectrum.size(0);
  const ScalarType type = glue::real_type(dtype);
  const Tensor dense = torch::stable::contiguous(half_spectrum);
  Tensor buffer = new_buffer(dense, {2 * dense.numel()}, type);
  std::memcpy(buffer.mutable_data_ptr(), dense.const_data_ptr(), 2 * dense.numel() * item_size(dtype));
  visit(dtype, [&](auto tag) { transform_back<typename decltype(tag)::type>(buffer, rows, length); });
  return rows_of(buffer, rows, length, size, type);
}

// ---- passes over half spectra

int64_t chunks_of(int64_t elements) { return (elements + kBinsPerChunk - 1) / kBinsPerChunk; }

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
  const auto given = HalfSpectra::of("pfl_ext::spectral_teacher", spectrum, length, count);
  const int64_t bins = given.range.bins(), chunks = chunks_of(bins);
  Tensor log_q = torch::stable::new_empty(spectrum, {given.rows, bins}, glue::real_type(given.dtype));
  Tensor total = torch::stable::new_empty(spectrum, {given.rows}, ScalarType::Double);
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

// The divergence of each row of `data`, which is replaced by the gradient's half spectrum if that is needed.
Tensor diverge(const DivergenceProblem& given, const Tensor& log_q, const Tensor& total, bool need_grad, void* data) {
  const int64_t bins = given.range.bins(), half = given.range.half(), chunks = chunks_of(bins);
  Tensor loss = torch::stable::new_empty(log_q, {given.rows}, glue::real_type(given.dtype));
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
    divergences[row] = finish_divergence(given.form, z, a, totals[teacher_of(row)], given.range.count);
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

Tensor half_spectrum_divergence_(const Tensor& spectrum, const Tensor& log_q, const Tensor& total, int64_t length,
                                 int64_t count, int64_t form, bool need_grad) {
  const char* op = "pfl_ext::half_spectrum_divergence_";
  const DivergenceProblem given(op, HalfSpectra::of(op, spectrum, length, count), spectrum, log_q, total, form);
  return diverge(given, log_q, total, need_grad, spectrum.mutable_data_ptr());
}

// All of it in one buffer: half spectra, the gradient's half spectra, the gradients.
std::tuple<Tensor, Tensor> spectral_divergence(const std::vector<Tensor>& p, int64_t clients, const Tensor& log_q,
                                               const Tensor& total, int64_t length, int64_t count, int64_t form,
                                               bool need_grad) {
  const char* op = "pfl_ext::spectral_divergence";
  const Tensor dense = dense_rows(op, p, clients, length);
  const DType dtype = dense.scalar_type() == ScalarType::Double ? DType::kFloat64 : DType::kFloat32;
  const DivergenceProblem given(op, {op, dtype, clients, length, count}, p[0], log_q, total, form);
  Tensor buffer = new_buffer(dense, {clients * 2 * given.range.half()}, glue::real_type(dtype));
  Tensor loss = log_q;
  visit(dtype, [&](auto tag) {
    using A = typename decltype(tag)::type;
    transform_rows<A>(dense, static_cast<A*>(buffer.mutable_data_ptr()));
    loss = diverge(given, log_q, total, need_grad, buffer.mutable_data_ptr());
    if (need_grad) transform_back<A>(buffer, clients, length);
  });
  if (!need_grad) return {loss, torch::stable::new_empty(p[0], {0})};
  int64_t size = 0;
  for (const Tensor& x : p) size += x.numel() / clients;
  return {loss, rows_of(buffer, clients, length, size, p[0].scalar_type())};
}

// grad [rows, size] times scale [rows].
Tensor spectral_scale_gradient(const Tensor& grad, const Tensor& scale) {
  const char* op = "pfl_ext::spectral_scale_gradient";
  const ScalarType type = computed_in(op, grad);
  if (grad.dim() != 2 || scale.dim() != 1 || scale.size(0) != grad.size(0) || !scale.is_cpu()) {
    fail(op, ": grad is ", glue::describe(grad), ", scale is ", glue::describe(scale), "; a scale a row is expected");
  }
  const Tensor given = torch::stable::contiguous(torch::stable::to(grad, type));
  const Tensor factors = torch::stable::contiguous(torch::stable::to(scale, type));
  Tensor out = new_buffer(grad, {grad.size(0), grad.size(1)}, type);
  const int64_t size = grad.size(1);
  visit(type == ScalarType::Double ? DType::kFloat64 : DType::kFloat32, [&](auto tag) {
    using A = typename decltype(tag)::type;
    const A *x = static_cast<const A*>(given.const_data_ptr()), *by = static_cast<const A*>(factors.const_data_ptr());
    A* result = static_cast<A*>(out.mutable_data_ptr());
    for_each_chunk_of_rows(grad.size(0), size, [&](int64_t row, int64_t, int64_t begin, int64_t end) {
      const A factor = by[row];
      for (int64_t i = row * size + begin; i < row * size + end; ++i) result[i] = x[i] * factor;
    });
  });
  return torch::stable::to(out, grad.scalar_type());
}

}  // namespace
}  // namespace pfl::cpu

STABLE_TORCH_LIBRARY_IMPL(pfl_ext, CPU, m) {
  m.impl("real_dft", TORCH_BOX(&pfl::cpu::real_dft));
  m.impl("real_idft", TORCH_BOX(&pfl::cpu::real_idft));
  m.impl("spectral_teacher", TORCH_BOX(&pfl::cpu::spectral_teacher));
  m.impl("half_spectrum_divergence_", TORCH_BOX(&pfl::cpu::half_spectrum_divergence_));
  m.impl("spectral_divergence", TORCH_BOX(&pfl::cpu::spectral_divergence));
  m.impl("spectral_scale_gradient", TORCH_BOX(&pfl::cpu::spectral_scale_gradient));
}
