// Averaging on the GPU: the kernels, and the torch-free planning of their launches. The glue (cuda/averaging.cu) and
// the emulator (emulator/averaging.cpp) differ only in the `launch` they pass in.
#pragma once

#include "cuda/kernels/list_arguments.cuh"

namespace pfl::cuda {

// More clients than fit into one launch's arguments are added group by group, through a running sum in memory.
constexpr int kContinues = 1;   // flag: start from the running sum, not from zero
constexpr int kUnfinished = 2;  // flag: leave the running sum in memory, more clients follow

constexpr int kOut = 0, kServer = 1, kCarry = 2, kClients = 3;  // words of a slot

// out = sum_c w_c x_c, or server + lr * sum_c w_c (x_c - server); see the CPU kernel for the order of operations.
template <typename T, bool kHasServer>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    average_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const int clients = args.prefix_words;  // the weights are the prefix
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    Pack<T, N> server;
    A sum[N];
    if constexpr (kHasServer) server = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kServer) + i);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = (args.flags & kContinues) ? chunk.pointer<const A>(kCarry)[i + k] : A(0);
#pragma unroll 4
    for (int c = 0; c < clients; ++c) {
      const A weight = static_cast<A>(bit_copy<double>(args.words[c]));
      const Pack<T, N> x = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kClients + c) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        A value = to_accumulate(x.values[k]);
        if constexpr (kHasServer) value = value - to_accumulate(server.values[k]);
        sum[k] = sum[k] + weight * value;
      }
    }
    if (args.flags & kUnfinished) {
#pragma unroll
      for (int k = 0; k < N; ++k) chunk.pointer<A>(kCarry)[i + k] = sum[k];
      return;
    }
    Pack<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A value = sum[k];
      if constexpr (kHasServer) value = to_accumulate(server.values[k]) + static_cast<A>(args.scalar) * value;
      from_accumulate(value, &out.values[k]);
    }
    *reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kOut) + i) = out;
  });
}

// sum += weight * x, with sum in the accumulate type. By the width of a vector of sums: by that of half types, a warp
// would touch every sector of the sums several times.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    accumulate_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const A weight = static_cast<A>(args.scalar);
  for_each_in_chunk<A>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    const Pack<T, N> x = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(1) + i);
    Pack<A, N>* place = reinterpret_cast<Pack<A, N>*>(chunk.pointer<A>(0) + i);
    Pack<A, N> sum = *place;
#pragma unroll
    for (int k = 0; k < N; ++k) sum.values[k] = sum.values[k] + weight * to_accumulate(x.values[k]);
    *place = sum;
  });
}

// Sets a tensor's flag where it holds infinity or NaN. Threads may write the same value to the same byte: no atomics.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    nonfinite_kernel(const __grid_constant__ ListArguments args) {
  const Chunk chunk = find_chunk(args, blockIdx.x);
  bool found = false;
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    const Pack<T, N> x = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(0) + i);
#pragma unroll
    for (int k = 0; k < N; ++k) found |= is_nonfinite(x.values[k]);
  });
  if (found) *chunk.pointer<bool>(1) = true;
}

// Tensors of one storage type, as the planning below sees them.
struct AverageRows {
  std::vector<int64_t> sizes;
  std::vector<void*> out;
  std::vector<const void*> server;  // empty: no server
  std::vector<const void* const*> clients;
  std::vector<void*> carry;  // one accumulate-type buffer a tensor; only read where carry_needed
};

constexpr int64_t kMaxClientsPerLaunch = 1024;

inline bool carry_needed(int64_t clients) { return clients > kMaxClientsPerLaunch; }

// launch(kernel, grid, args) is called for each launch in order; all on one stream.
template <typename T, bool kHasServer, typename Launch>
void launch_average(const AverageRows& rows, int64_t clients, const double* weights, double lr, Launch launch) {
  const int64_t group = clients < kMaxClientsPerLaunch ? clients : kMaxClientsPerLaunch;
  const int64_t capacity = slots_per_launch(kClients + group, group);
  for (const LaunchPlan& plan : plan_launches(rows.sizes, kChunkElements, capacity, kMaxGrid)) {
    for (int64_t first = 0; first < clients; first += group) {
      const int64_t count = clients - first < group ? clients - first : group;
      const bool last = first + count == clients;
      ListArguments args;
      args.prefix_words = static_cast<int32_t>(count);
      args.flags = (first > 0 ? kContinues : 0) | (last ? 0 : kUnfinished);
      args.scalar = lr;
      for (int64_t c = 0; c < count; ++c) args.words[c] = word_of(weights[first + c]);
      const auto pointers_of = [&](int64_t t, uint64_t* words) {
        words[kOut] = word_of(rows.out[t]);
        words[kServer] = word_of(kHasServer ? rows.server[t] : nullptr);
        words[kCarry] = word_of(carry_needed(clients) ? rows.carry[t] : nullptr);
        for (int64_t c = 0; c < count; ++c) words[kClients + c] = word_of(rows.clients[t][first + c]);
      };
      const auto aligned = [&](int64_t t) {
        bool all = is_vector_aligned(rows.out[t]) && (!kHasServer || is_vector_aligned(rows.server[t]));
        for (int64_t c = 0; all && c < count; ++c) all = is_vector_aligned(rows.clients[t][first + c]);
        return all;
      };
      const int64_t grid = fill_slots(plan, rows.sizes, kClients + count, pointers_of, aligned, &args);
      launch(average_kernel<T, kHasServer>, grid, args);
    }
  }
}

template <typename T, typename Launch>
void launch_accumulate(const std::vector<int64_t>& sizes, const std::vector<void*>& sums,
                       const std::vector<const void*>& x, double weight, Launch launch) {
  for (const LaunchPlan& plan : plan_launches(sizes, kChunkElements, slots_per_launch(2, 0), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = 0;
    args.flags = 0;
    args.scalar = weight;
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[0] = word_of(sums[t]);
      words[1] = word_of(x[t]);
    };
    const auto aligned = [&](int64_t t) { return is_vector_aligned(x[t]) && is_vector_aligned(sums[t]); };
    const int64_t grid = fill_slots(plan, sizes, 2, pointers_of, aligned, &args);
    launch(accumulate_kernel<T>, grid, args);
  }
}

template <typename T, typename Launch>
void launch_nonfinite(const std::vector<int64_t>& sizes, const std::vector<const void*>& x,
                      const std::vector<bool*>& flags, Launch launch) {
  for (const LaunchPlan& plan : plan_launches(sizes, kChunkElements, slots_per_launch(2, 0), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = 0;
    args.flags = 0;
    args.scalar = 0;
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[0] = word_of(x[t]);
      words[1] = word_of(flags[t]);
    };
    const auto aligned = [&](int64_t t) { return is_vector_aligned(x[t]); };
    const int64_t grid = fill_slots(plan, sizes, 2, pointers_of, aligned, &args);
    launch(nonfinite_kernel<T>, grid, args);
  }
}

}  // namespace pfl::cuda
