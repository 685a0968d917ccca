// The arguments of the spectral ops, checked in full before anything is written. Shared by the CPU and CUDA glue.
#pragma once

#include "common/spectral.h"
#include "glue/tensor_list.h"

namespace pfl::glue {

inline bool same_place(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

inline ScalarType real_type(DType dtype) { return dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float; }

// The type of the parts of a complex tensor.
inline DType parts_of(const char* op, const char* role, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::ComplexFloat:
      return DType::kFloat32;
    case ScalarType::ComplexDouble:
      return DType::kFloat64;
    default:
      fail(op, ": ", role, " is ", describe(t), "; complex64 and complex128 are accepted");
  }
}

// Rows of half spectra of which the first `count` of `length` entries are used.
struct HalfSpectra {
  HalfSpectra(const char* op, DType dtype, int64_t rows, int64_t length, int64_t count)
      : range{length, count}, dtype(dtype), rows(rows) {
    if (length < 1 || count < 1 || count > length) {
      fail(op, ": count=", count, " entries of a spectrum of length ", length, "; 1 to ", length, " are accepted");
    }
  }

  static HalfSpectra of(const char* op, const Tensor& spectrum, int64_t length, int64_t count) {
    const DType dtype = parts_of(op, "the half spectrum", spectrum);
    if (length < 1 || spectrum.dim() != 2 || spectrum.size(1) != length / 2 + 1 || !spectrum.is_contiguous()) {
      fail(op, ": the half spectrum is ", describe(spectrum), "; a contiguous matrix with rows of ", length / 2 + 1,
           " bins is expected for length ", length);
    }
    return {op, dtype, spectrum.size(0), length, count};
  }

  SpectrumRange range;
  DType dtype;
  int64_t rows;
};

// They and what they are compared with; `p` is where they come from, or they themselves.
struct DivergenceProblem : HalfSpectra {
  DivergenceProblem(const char* op, const HalfSpectra& spectra, const Tensor& p, const Tensor& log_q,
                    const Tensor& total, int64_t form_index)
      : HalfSpectra(spectra) {
    if (log_q.dim() != 2 || log_q.size(1) != range.bins() || (log_q.size(0) != 1 && log_q.size(0) != rows) ||
        log_q.scalar_type() != real_type(dtype) || !log_q.is_contiguous() || !same_place(log_q, p)) {
      fail(op, ": log_q is ", describe(log_q), " for ", describe(p), "; contiguous ", name_of(real_type(dtype)),
           " [1 or ", rows, ", ", range.bins(), "] on the same device is expected");
    }
    if (total.dim() != 1 || total.size(0) != log_q.size(0) || total.scalar_type() != ScalarType::Double ||
        !total.is_contiguous() || !same_place(total, p)) {
      fail(op, ": total is ", describe(total), "; contiguous float64 [", log_q.size(0),
           "] on the same device is expected");
    }
    if (form_index < 0 || form_index >= kDivergenceForms) {
      fail(op, ": form=", form_index, "; 0 to ", kDivergenceForms - 1, " are accepted");
    }
    form = static_cast<DivergenceForm>(form_index);
    teachers = log_q.size(0);
  }

  DivergenceForm form;
  int64_t teachers;  // 1, or one for each row
};

}  // namespace pfl::glue
