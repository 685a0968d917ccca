// Lists of numpy arrays as the kernels take them, for the bindings of the families.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernels/chunk_sums.cuh"

namespace pfl::emulator {

using Arrays = std::vector<pybind11::array>;

// numpy has no bfloat16: such arrays come as uint16, and the type is given by name.
inline DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "float64") return DType::kFloat64;
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  throw std::invalid_argument("unknown dtype " + name);
}

const auto emulate = [](auto kernel, int64_t grid, const auto& args) {
  launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(cuda::kThreads), 0, args);
};

inline std::vector<int64_t> sizes_of(const Arrays& arrays) {
  std::vector<int64_t> sizes;
  for (const auto& array : arrays) sizes.push_back(array.size());
  return sizes;
}

inline std::vector<const void*> inputs(const Arrays& arrays) {
  std::vector<const void*> pointers;
  for (const auto& array : arrays) pointers.push_back(array.data());
  return pointers;
}

inline std::vector<void*> outputs(Arrays& arrays) {
  std::vector<void*> pointers;
  for (auto& array : arrays) pointers.push_back(array.mutable_data());
  return pointers;
}

// The records of chunk_sums.cuh and where each tensor's begin.
struct Records {
  explicit Records(const std::vector<int64_t>& sizes) {
    int64_t count = 0;
    for (int64_t size : sizes) {
      first.push_back(count);
      count += cuda::chunks_of(size);
    }
    memory.resize(count);
  }

  std::vector<int64_t> first;
  std::vector<cuda::ChunkRecord> memory;
};

}  // namespace pfl::emulator
