// The arguments of the averaging ops, checked in full before anything is written. Shared by the CPU and CUDA glue.
#pragma once

#include "glue/prepared.h"

namespace pfl::glue {

inline void check_weights(const char* op, const Tensor& weights) {
  if (!weights.is_cpu() || weights.scalar_type() != ScalarType::Double || weights.dim() != 1 ||
      !weights.is_contiguous()) {
    fail(op, ": weights are ", describe(weights), "; a contiguous float64 vector on the CPU is accepted");
  }
}

// out[t] (= server[t] + lr *) sum_c weights[c] * (clients[c * T + t] (- server[t])) over T tensors and C clients.
struct AverageProblem {
  AverageProblem(const char* op, const std::vector<Tensor>& out, const std::vector<Tensor>& server,
                 const std::vector<Tensor>& client_tensors, const Tensor& weight_tensor, bool on_cpu)
      : has_server(!server.empty()) {
    check_weights(op, weight_tensor);
    clients = weight_tensor.numel();
    weights = static_cast<const double*>(weight_tensor.const_data_ptr());
    const size_t tensors = out.size();
    if (clients == 0 || client_tensors.size() != clients * tensors) {
      fail(op, ": ", client_tensors.size(), " client tensors for ", clients, " weights and ", tensors,
           " outputs; clients * outputs are expected");
    }
    if (has_server && server.size() != tensors) {
      fail(op, ": ", server.size(), " server tensors for ", tensors, " outputs");
    }
    dtypes.reserve(tensors);
    for (size_t t = 0; t < tensors; ++t) {
      dtypes.push_back(dtype_of(out[t], op, "out", t));
      check_device(op, "out", out, t, on_cpu);
      const Kind kind(out[t]);
      if (has_server && Kind(server[t]) != kind) {
        fail(op, ": server tensor ", t, " is ", describe(server[t]), ", out is ", describe(out[t]));
      }
      for (int64_t c = 0; c < clients; ++c) {
        const Tensor& x = client_tensors[c * tensors + t];
        if (Kind(x) != kind) {
          fail(op, ": tensor ", t, " of client ", c, " is ", describe(x), ", out is ", describe(out[t]));
        }
      }
    }
    // Only now: the copies made for odd layouts must not happen for a call that is refused.
    Overlaps overlaps(op, out);
    for (size_t t = 0; t < server.size(); ++t) overlaps.add_input(server[t], t);
    for (size_t i = 0; i < client_tensors.size(); ++i) overlaps.add_input(client_tensors[i], i % tensors);
    rows.reserve(tensors);
    sizes.reserve(tensors);
    std::vector<const Tensor*> row;
    for (size_t t = 0; t < tensors; ++t) {
      row.assign(1, &out[t]);
      if (has_server) row.push_back(&server[t]);
      for (int64_t c = 0; c < clients; ++c) row.push_back(&client_tensors[c * tensors + t]);
      rows.emplace_back(row, overlaps[t]);
      sizes.push_back(rows.back().numel);
    }
  }

  void* out(int64_t t) const { return rows[t].pointers[0]; }
  const void* server(int64_t t) const { return has_server ? rows[t].pointers[1] : nullptr; }
  const void* const* x(int64_t t) const { return rows[t].pointers.data() + (has_server ? 2 : 1); }

  void finish() {
    for (Aligned& row : rows) row.finish();
  }

  bool has_server;
  int64_t clients;
  const double* weights;
  std::vector<DType> dtypes;
  std::vector<int64_t> sizes;
  std::vector<Aligned> rows;
};

// out = sum_c weights[c] * matrix[c]. A row as a tensor of its own takes 1.6 us (Xeon, 2.5 GHz): to make, to hand over
// and to check.
struct RowsProblem {
  RowsProblem(const char* op, const Tensor& out, const Tensor& given, const Tensor& weight_tensor, bool on_cpu)
      : dtype(dtype_of(out, op, "out", 0)), matrix(given) {
    check_weights(op, weight_tensor);
    const int64_t clients = weight_tensor.numel();
    weights = static_cast<const double*>(weight_tensor.const_data_ptr());
    if (clients == 0 || matrix.dim() != 2 || matrix.size(0) != clients) {
      fail(op, ": the clients are ", describe(matrix), " for ", clients,
           " weights; a matrix with a row each is accepted");
    }
    check_device(op, "out", {out}, 0, on_cpu);
    if (out.dim() != 1 || !out.is_contiguous() || out.size(0) != matrix.size(1) ||
        out.scalar_type() != matrix.scalar_type() || out.is_cpu() != matrix.is_cpu() ||
        out.get_device_index() != matrix.get_device_index()) {
      fail(op, ": out is ", describe(out), ", the clients are ", describe(matrix),
           "; a contiguous vector like a row is accepted");
    }
    if (Span(out).overlaps(Span(matrix))) fail(op, ": out and the clients overlap in memory");
    size = out.numel();
    // Only now: no copy is made for a call that is refused.
    if (matrix.stride(1) != 1 && size > 1) matrix = torch::stable::contiguous(matrix);
    const char* first = static_cast<const char*>(matrix.const_data_ptr());
    const int64_t step = matrix.stride(0) * matrix.element_size();
    for (int64_t c = 0; c < clients; ++c) rows.push_back(first + c * step);
  }

  DType dtype;
  Tensor matrix;
  const double* weights;
  int64_t size;
  std::vector<const void*> rows;
};

// One output for each tensor of the first client. Arguments that do not fit each other are left to AverageProblem.
inline std::vector<Tensor> empty_outputs(const std::vector<Tensor>& client_tensors, const Tensor& weights) {
  std::vector<Tensor> out;
  const size_t clients = weights.dim() == 1 ? static_cast<size_t>(weights.numel()) : 0;
  const size_t tensors = clients == 0 ? 0 : client_tensors.size() / clients;
  for (size_t t = 0; t < tensors; ++t) out.push_back(torch::stable::empty_like(client_tensors[t]));
  return out;
}

inline void check_server(const char* op, const std::vector<Tensor>& out, const std::vector<Tensor>& server) {
  if (server.size() != out.size()) fail(op, ": ", server.size(), " server tensors for ", out.size(), " outputs");
}

// sum[t] += weight * client[t], with sum[t] contiguous and of client[t]'s accumulate type. The client's tensors
// are all of the type of this number, if it is one.
struct AccumulateProblem {
  AccumulateProblem(const char* op, const std::vector<Tensor>& sum_list, const std::vector<Tensor>& client_list,
                    int64_t type, bool on_cpu)
      : sums_given(sum_list), client_given(client_list), sums(sums_given.tensors()) {
    const std::vector<Tensor>& client = client_given.tensors();
    if (sums.size() != client.size()) fail(op, ": ", client.size(), " client tensors for ", sums.size(), " sums");
    dtypes.reserve(sums.size());
    sizes.reserve(sums.size());
    sum_pointers.reserve(sums.size());
    values.reserve(sums.size());
    for (size_t t = 0; t < sums.size(); ++t) {
      const Tensor& x = client[t];
      const Kind of_client(x);
      const Kind of_sum(sums[t]);
      DType dtype;
      if (!find_dtype(of_client.dtype, &dtype)) dtype_of(x, op, "client", t);
      if (t == 0) {
        first_device_type = of_sum.device_type;
        first_device_index = of_sum.device_index;
      }
      if (t == 0 || of_sum.device_type != first_device_type || of_sum.device_index != first_device_index) {
        check_device(op, "sums", sums, t, on_cpu);
      }
      if (type >= 0 && static_cast<int64_t>(dtype) != type) {
        fail(op, ": tensor ", t, " of the client is ", describe(x), "; type ", type, " is expected");
      }
      const DType expected = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
      if (of_sum.dtype != number_of(expected) || !equal(of_sum.sizes, of_client.sizes) || !sums[t].is_contiguous() ||
          of_sum.device_type != of_client.device_type || of_sum.device_index != of_client.device_index) {
        fail(op, ": sum ", t, " is ", describe(sums[t]), ", the client's tensor is ", describe(x), "; a contiguous ",
             expected == DType::kFloat64 ? "float64" : "float32", " sum of the same shape and device is expected");
      }
      dtypes.push_back(dtype);
      sizes.push_back(x.numel());
      sum_pointers.push_back(sums[t].mutable_data_ptr());
      values.push_back(x.is_contiguous() ? x.const_data_ptr() : nullptr);
    }
    // Only now: the copies made for odd layouts must not happen for a call that is refused.
    for (size_t t = 0; t < sums.size(); ++t) {
      if (values[t] != nullptr || sizes[t] == 0) continue;
      copies.push_back(torch::stable::contiguous(client[t]));
      values[t] = copies.back().const_data_ptr();
    }
  }

  void* sum(int64_t t) const { return sum_pointers[t]; }

  GivenList sums_given;
  GivenList client_given;
  const std::vector<Tensor>& sums;
  std::vector<DType> dtypes;  // the client's
  std::vector<int64_t> sizes;
  std::vector<void*> sum_pointers;
  std::vector<const void*> values;
  std::vector<Tensor> copies;
  int32_t first_device_type = 0;
  int32_t first_device_index = 0;
};

// Which of the tensors hold infinity or NaN. The order of elements does not matter, so any dense layout is read in
// place.
struct NonfiniteProblem {
  NonfiniteProblem(const std::vector<Tensor>& tensors, bool on_cpu) : found(no_flags(tensors)) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      dtypes.push_back(dtype_of(tensors[t], "pfl_ext::nonfinite", "input", t));
      check_device("pfl_ext::nonfinite", "the list", tensors, t, on_cpu);
      dense.push_back(is_dense(tensors[t]) ? tensors[t] : torch::stable::contiguous(tensors[t]));
      sizes.push_back(tensors[t].numel());
    }
  }

  static Tensor no_flags(const std::vector<Tensor>& tensors) {
    if (tensors.empty()) fail("pfl_ext::nonfinite: no tensors given");
    Tensor flags = torch::stable::new_empty(tensors[0], {static_cast<int64_t>(tensors.size())}, ScalarType::Bool);
    return torch::stable::zero_(flags);
  }

  std::vector<DType> dtypes;
  std::vector<int64_t> sizes;
  std::vector<Tensor> dense;
  Tensor found;  // bool, one entry a tensor
};

}  // namespace pfl::glue
