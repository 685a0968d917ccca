// Device memory for the records of chunk_sums.cuh.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "cuda/kernels/chunk_sums.cuh"

namespace pfl::cuda {

struct RecordBuffer {
  RecordBuffer(const torch::stable::Tensor& like, const std::vector<int64_t>& sizes) : memory(allocate(like, sizes)) {
    for (int64_t size : sizes) {
      first.push_back(count);
      count += chunks_of(size);
    }
  }

  ChunkRecord* data() const { return static_cast<ChunkRecord*>(memory.mutable_data_ptr()); }

  static torch::stable::Tensor allocate(const torch::stable::Tensor& like, const std::vector<int64_t>& sizes) {
    int64_t chunks = 0;
    for (int64_t size : sizes) chunks += chunks_of(size);
    const int64_t words = chunks * static_cast<int64_t>(sizeof(ChunkRecord) / sizeof(double));
    return torch::stable::new_empty(like, {words}, torch::headeronly::ScalarType::Double);
  }

  torch::stable::Tensor memory;
  std::vector<int64_t> first;  // the index of each tensor's first record
  int64_t count = 0;
};

}  // namespace pfl::cuda
