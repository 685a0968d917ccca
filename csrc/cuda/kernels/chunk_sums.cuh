// Sums over lists of tensors in two launches: one record a chunk, then one block a group adds the records up. All in a
// fixed order, without atomics, and the results stay on the device.
#pragma once

#include <algorithm>
#include <vector>

#include "common/sharpness.h"
#include "cuda/kernels/list_arguments.cuh"

namespace pfl::cuda {

struct ChunkRecord {
  PowerSum value;
  int64_t group;
  int64_t elements;
};

enum class ChunkSum : int { kSquares = 0, kSquaredDifferences = 1, kPowers = 2 };

constexpr int kSumX = 0, kSumY = 1, kSumRecord = 2, kSumGroup = 3;  // words of a slot
constexpr int kSumWords = 4;
constexpr int kSumPrefix = 2;  // words before the slots: the records, the exponent q

struct AddSquares {
  __device__ PowerSum operator()(PowerSum a, PowerSum b) const { return add_squares(a, b); }
};

constexpr unsigned kWarps = kThreads / 32;

// add(a, b) over the values of all threads, in a fixed order. The result is thread 0's.
template <typename Add>
__device__ inline PowerSum combine_block(PowerSum value, Add add) {
  __shared__ PowerSum of_warp[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    PowerSum other;
    other.maximum = __shfl_down_sync(0xffffffffu, value.maximum, distance);
    other.sum = __shfl_down_sync(0xffffffffu, value.sum, distance);
    value = add(value, other);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned w = 1; w < kWarps; ++w) value = add(value, of_warp[w]);
  }
  return value;
}

template <typename T, ChunkSum kSum>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    chunk_sums_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const T* x = chunk.pointer<const T>(kSumX);
  PowerSum value{0.0, 0.0};
  if constexpr (kSum == ChunkSum::kPowers) {
    const double q = bit_copy<double>(args.words[1]);
    __shared__ A chunk_maximum;
    A maximum = A(0);
    for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
      constexpr int N = decltype(width)::value;
      const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(x + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A element = to_accumulate(pack.values[k]);
        maximum = larger(maximum, element < A(0) ? -element : element);
      }
    });
    const PowerSum found = combine_block(PowerSum{static_cast<double>(maximum), 0.0}, [](PowerSum a, PowerSum b) {
      return PowerSum{larger(a.maximum, b.maximum), 0.0};
    });
    if (threadIdx.x == 0) chunk_maximum = static_cast<A>(found.maximum);
    __syncthreads();
    value.maximum = static_cast<double>(chunk_maximum);
    if (value.maximum != 0.0) {
      for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
        constexpr int N = decltype(width)::value;
        // A call of pow() is long: unrolled, it would spill.
#pragma unroll 1
        for (int k = 0; k < N; ++k) {
          const double element = static_cast<double>(to_accumulate(x[i + k]));
          value.sum += pow((element < 0.0 ? -element : element) / value.maximum, q);
        }
      });
    }
    // One maximum for the whole chunk: the sums add up as they are.
    const double shared_maximum = value.maximum;
    value = combine_block(value, AddSquares{});
    value.maximum = shared_maximum;
  } else {
    const T* y = chunk.pointer<const T>(kSumY);
    for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
      constexpr int N = decltype(width)::value;
      const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(x + i);
      Pack<T, N> other;
      if constexpr (kSum == ChunkSum::kSquaredDifferences) other = *reinterpret_cast<const Pack<T, N>*>(y + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        double element = static_cast<double>(to_accumulate(pack.values[k]));
        if constexpr (kSum == ChunkSum::kSquaredDifferences) {
          element = element - static_cast<double>(to_accumulate(other.values[k]));
        }
        value.sum = value.sum + element * element;
      }
    });
    value = combine_block(value, AddSquares{});
  }
  if (threadIdx.x == 0) {
    ChunkRecord* records = reinterpret_cast<ChunkRecord*>(static_cast<uintptr_t>(args.words[0]));
    const int64_t index = static_cast<int64_t>(chunk.words[kSumRecord]) + chunk.begin / kChunkElements;
    records[index] = {value, static_cast<int64_t>(chunk.words[kSumGroup]), chunk.end - chunk.begin};
  }
}

// Groups of tensors. Where their numbers only grow from tensor to tensor, as those of layers do, the records of one
// stand together: its block finds and reads these alone.
struct Grouping {
  Grouping(int64_t groups) : count(groups), ordered(groups == 1) {}
  Grouping(int64_t groups, const std::vector<int64_t>& of_tensors)
      : count(groups), ordered(std::is_sorted(of_tensors.begin(), of_tensors.end())) {}

  int64_t count;
  bool ordered;
};

// What is done with the total of each group: finish(group, total, elements), by one thread.
template <typename Finish>
struct GroupArguments {
  const ChunkRecord* records;
  int64_t count;
  bool ordered;
  double q;
  bool powers;
  Finish finish;
};

// Where the records of `group` or a later one begin.
__device__ inline int64_t first_record(const ChunkRecord* records, int64_t count, int64_t group) {
  int64_t begin = 0;
  int64_t end = count;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (records[middle].group < group) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

template <typename Finish>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    group_sums_kernel(const __grid_constant__ GroupArguments<Finish> args) {
  const int64_t group = blockIdx.x;
  PowerSum total{0.0, 0.0};
  PowerSum elements{0.0, 0.0};  // counted in double: exact up to 2^53
  const auto add = [&](PowerSum a, PowerSum b) { return args.powers ? add_powers(a, b, args.q) : add_squares(a, b); };
  __shared__ int64_t range[2];
  if (threadIdx.x < 2) {
    range[threadIdx.x] = args.ordered && gridDim.x > 1 ? first_record(args.records, args.count, group + threadIdx.x)
                                                       : static_cast<int64_t>(threadIdx.x) * args.count;
  }
  __syncthreads();
  // A record has the same thread wherever its group begins: the order of the sums depends on the tensors' sizes alone.
  for (int64_t i = range[0] / kThreads * kThreads + threadIdx.x; i < range[1]; i += kThreads) {
    if (i < range[0]) continue;
    const ChunkRecord record = args.records[i];
    if (record.group != group) continue;
    total = add(total, record.value);
    elements.sum += static_cast<double>(record.elements);
  }
  total = combine_block(total, add);
  __syncthreads();  // the shared memory of combine_block is used again
  elements = combine_block(elements, AddSquares{});
  if (threadIdx.x == 0) args.finish(group, total, static_cast<int64_t>(elements.sum));
}

// Tensors of one storage type; `record` is the index of the first record of each.
struct SumRows {
  std::vector<int64_t> sizes;
  std::vector<const void*> x;
  std::vector<const void*> y;  // only for kSquaredDifferences
  std::vector<int64_t> record;
  std::vector<int64_t> group;
};

inline int64_t chunks_of(int64_t size) { return (size + kChunkElements - 1) / kChunkElements; }

template <typename T, ChunkSum kSum, typename Launch>
void launch_chunk_sums(const SumRows& rows, ChunkRecord* records, double q, Launch launch) {
  constexpr bool kHasY = kSum == ChunkSum::kSquaredDifferences;
  for (const LaunchPlan& plan :
       plan_launches(rows.sizes, kChunkElements, slots_per_launch(kSumWords, kSumPrefix), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = kSumPrefix;
    args.flags = 0;
    args.scalar = 0;
    args.words[0] = word_of(records);
    args.words[1] = word_of(q);
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[kSumX] = word_of(rows.x[t]);
      words[kSumY] = word_of(kHasY ? rows.y[t] : nullptr);
      words[kSumRecord] = static_cast<uint64_t>(rows.record[t]);
      words[kSumGroup] = static_cast<uint64_t>(rows.group[t]);
    };
    const auto aligned = [&](int64_t t) {
      return is_vector_aligned(rows.x[t]) && (!kHasY || is_vector_aligned(rows.y[t]));
    };
    const int64_t grid = fill_slots(plan, rows.sizes, kSumWords, pointers_of, aligned, &args);
    launch(chunk_sums_kernel<T, kSum>, grid, args);
  }
}

template <typename Finish, typename Launch>
void launch_group_sums(const ChunkRecord* records, int64_t count, Grouping groups, double q, bool powers, Finish finish,
                       Launch launch) {
  const GroupArguments<Finish> args{records, count, groups.ordered, q, powers, finish};
  launch(group_sums_kernel<Finish>, groups.count, args);
}

}  // namespace pfl::cuda
