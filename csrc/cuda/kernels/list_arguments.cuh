// Kernel arguments of the ops over lists of tensors: one launch takes as many tensors as fit into 32 KB.
#pragma once

#include <cstring>
#include <vector>

#include "common/numeric.h"
#include "common/planner.h"

namespace pfl::cuda {

constexpr int kThreads = 256;
// Stated so that ptxas may use 80 registers a thread: without it, and with 4, the averaging kernels spilled.
constexpr int kBlocksPerMultiprocessor = 3;
// Elements a block works on. A multiple of kThreads * 8, the widest vector, so that only the last chunk of a tensor
// has a remainder.
constexpr int64_t kChunkElements = 8192;
constexpr int64_t kMaxGrid = 0x7fffffff;
// Bytes of one vector access.
constexpr int kVectorBytes = 16;

// Passed by value as `const __grid_constant__`: without that the compiler copies all of it to every thread's stack
// as soon as it is indexed by a variable.
struct ListArguments {
  static constexpr int kWords = 4091;

  int32_t slots;
  int32_t slot_words;    // words of one slot: two of bookkeeping, then what the kernel needs, mostly pointers
  int32_t prefix_words;  // words before the first slot, for what all slots share
  int32_t flags;
  double scalar;
  uint64_t words[kWords];
};
static_assert(sizeof(ListArguments) <= 32764, "CUDA's limit on kernel arguments from 12.1 on");

constexpr int kSlotHeader = 2;  // chunk_end; 2 * numel + (every pointer allows vector access)

inline int64_t slots_per_launch(int64_t pointers, int64_t prefix_words) {
  return (ListArguments::kWords - prefix_words) / (kSlotHeader + pointers);
}

// Fills the slots of one launch. `pointers_of(tensor, words)` writes the slot's words behind its header;
// `aligned(tensor)` says whether vector access is possible. Returns the grid.
template <typename PointersOf, typename Aligned>
inline int64_t fill_slots(const LaunchPlan& plan, const std::vector<int64_t>& sizes, int64_t pointers,
                          PointersOf pointers_of, Aligned aligned, ListArguments* args) {
  args->slots = static_cast<int32_t>(plan.size());
  args->slot_words = static_cast<int32_t>(kSlotHeader + pointers);
  uint64_t* slot = args->words + args->prefix_words;
  for (const Slot& entry : plan) {
    slot[0] = static_cast<uint64_t>(entry.chunk_end);
    slot[1] = static_cast<uint64_t>(sizes[entry.tensor]) * 2 + (aligned(entry.tensor) ? 1 : 0);
    pointers_of(entry.tensor, slot + kSlotHeader);
    slot += args->slot_words;
  }
  return plan.back().chunk_end;
}

inline uint64_t word_of(const void* pointer) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)); }
inline uint64_t word_of(double value) { return bit_copy<uint64_t>(value); }
inline bool is_vector_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; }

// What the block works on.
struct Chunk {
  const uint64_t* words;  // the slot's words behind its header
  int64_t begin;
  int64_t end;
  bool aligned;

  template <typename T>
  __device__ T* pointer(int index) const {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(words[index]));
  }
};

__device__ inline Chunk find_chunk(const ListArguments& args, int64_t block) {
  const uint64_t* table = args.words + args.prefix_words;
  int low = 0;
  int high = args.slots - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (block < static_cast<int64_t>(table[middle * args.slot_words])) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint64_t* slot = table + low * args.slot_words;
  const int64_t before = low == 0 ? 0 : static_cast<int64_t>(slot[-args.slot_words]);
  const int64_t numel = static_cast<int64_t>(slot[1] >> 1);
  Chunk chunk;
  chunk.words = slot + kSlotHeader;
  chunk.begin = (block - before) * kChunkElements;
  chunk.end = chunk.begin + kChunkElements < numel ? chunk.begin + kChunkElements : numel;
  chunk.aligned = (slot[1] & 1) != 0;
  return chunk;
}

// N elements moved as one access: N * sizeof(T) is a power of two of at most 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T values[N];
};

template <typename T>
constexpr int kVectorElements = kVectorBytes / sizeof(T);

// Calls body(Width<N>, i) over a chunk: N elements from i on, N a vector's width where alignment allows, else 1.
template <int N>
struct Width {
  static constexpr int value = N;
};

template <typename T, typename Body>
__device__ inline void for_each_in_chunk(const Chunk& chunk, Body body) {
  int64_t begin = chunk.begin;
  if (chunk.aligned) {
    constexpr int kWidth = kVectorElements<T>;
    const int64_t whole = chunk.begin + (chunk.end - chunk.begin) / kWidth * kWidth;
    for (int64_t i = chunk.begin + static_cast<int64_t>(threadIdx.x) * kWidth; i < whole; i += kThreads * kWidth) {
      body(Width<kWidth>{}, i);
    }
    begin = whole;
  }
  for (int64_t i = begin + threadIdx.x; i < chunk.end; i += kThreads) body(Width<1>{}, i);
}

}  // namespace pfl::cuda
