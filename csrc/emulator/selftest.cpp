// Small kernels with which the tests check how the emulator executes and what it detects. Many take a flag that turns a
// correct kernel into its faulty twin.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "emulator/cuda_emulator.h"

namespace py = pybind11;

namespace {

using pfl::emulator::launch;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;
using Extent = std::array<unsigned, 3>;

dim3 to_dim3(const Extent& extent) { return {extent[0], extent[1], extent[2]}; }

constexpr unsigned kFullMask = 0xFFFFFFFFu;

// --- builtin variables, arguments and order of execution
// ----------------------------------------------------------------

constexpr int kIndexColumns = 13;

__global__ void record_indices(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned row[kIndexColumns] = {threadIdx.x,
                                       threadIdx.y,
                                       threadIdx.z,
                                       blockIdx.x,
                                       blockIdx.y,
                                       blockIdx.z,
                                       blockDim.x,
                                       blockDim.y,
                                       blockDim.z,
                                       gridDim.x,
                                       gridDim.y,
                                       gridDim.z,
                                       static_cast<unsigned>(warpSize)};
  out += (block * blockDim.x * blockDim.y * blockDim.z + thread) * kIndexColumns;
  for (int i = 0; i < kIndexColumns; ++i) out[i] = row[i];
}

struct Counter {
  int value;
};

__global__ void count_in_argument(Counter counter, int* out) {
  ++counter.value;
  out[blockIdx.x * blockDim.x + threadIdx.x] = counter.value;
}

template <int bytes>
struct Payload {
  char content[bytes];
};

template <int bytes>
__global__ void take_payload(Payload<bytes>) {}

__global__ void do_nothing() {}

__global__ void record_order(unsigned* next, unsigned* out) {
  out[atomicAdd(next, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

__global__ void wait_at_barriers(int barriers) {
  for (int i = 0; i < barriers; ++i) __syncthreads();
}

// --- shared memory
// --------------------------------------------------------------------------------------------------------

template <typename T, int kThreads, bool kBarriers>
__global__ void __launch_bounds__(kThreads) sum_blocks(const T* __restrict__ x, T* __restrict__ sums) {
  __shared__ T partial[kThreads];
  partial[threadIdx.x] = x[blockIdx.x * kThreads + threadIdx.x];
  __syncthreads();
  for (unsigned stride = kThreads / 2; stride > 0; stride /= 2) {
    if (threadIdx.x < stride) partial[threadIdx.x] += partial[threadIdx.x + stride];
    if (kBarriers) __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}

// Without __syncwarp the lanes would read what their neighbour has not yet written.
template <bool kBarriers>
__global__ void reverse_warp(const int* x, int* out) {
  __shared__ int values[32];
  values[threadIdx.x] = x[threadIdx.x];
  if (kBarriers) __syncwarp();
  out[threadIdx.x] = values[31 - threadIdx.x];
}

template <typename T>
__global__ void reverse_blocks(const T* x, T* out) {
  PFL_DYNAMIC_SHARED(T, tile);
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  __syncthreads();
  out[i] = tile[blockDim.x - 1 - threadIdx.x];
}

template <typename T>
__device__ T take_shared_of_function(T value) {
  __shared__ T kept;
  const T before = kept;
  kept = value;
  return before;
}

template <typename T>
__global__ void read_shared_before_writing(T* out) {
  __shared__ T scalar;
  __shared__ __align__(16) T array[5];
  PFL_DYNAMIC_SHARED(T, dynamic);
  out += blockIdx.x * 4;
  out[0] = scalar;
  out[1] = array[4];
  out[2] = dynamic[2];
  out[3] = take_shared_of_function(T(7));
  scalar = array[4] = dynamic[2] = T(7);
}

__global__ void write_static_shared(int bytes, char* last) {
  __shared__ char storage[50 * 1024];
  for (int i = static_cast<int>(threadIdx.x); i < bytes; i += static_cast<int>(blockDim.x)) storage[i] = 1;
  __syncthreads();
  if (threadIdx.x == 0) *last = storage[bytes - 1];
}

// --- block barriers
// -------------------------------------------------------------------------------------------------------

__global__ void vote_in_block(const int* predicates, int* out) {
  const int predicate = predicates[blockIdx.x * blockDim.x + threadIdx.x];
  out += (blockIdx.x * blockDim.x + threadIdx.x) * 3;
  out[0] = __syncthreads_count(predicate);
  out[1] = __syncthreads_and(predicate);
  out[2] = __syncthreads_or(predicate);
}

__global__ void exit_before_barrier(unsigned exiting_threads) {
  if (threadIdx.x < exiting_threads) return;
  __syncthreads();
}

__global__ void barrier_in_two_branches(bool diverge) {
  if (diverge && threadIdx.x % 2 == 1) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// --- warps
// ----------------------------------------------------------------------------------------------------------------

enum class Shuffle { kIndex, kUp, kDown, kXor };

// Lanes outside the mask take no part.
template <typename T>
__global__ void shuffle(Shuffle kind, unsigned mask, const T* x, const int* arguments, int width, T* out) {
  const unsigned i = threadIdx.x;
  if (!(mask >> (i % warpSize) & 1)) return;
  switch (kind) {
    case Shuffle::kIndex:
      out[i] = __shfl_sync(mask, x[i], arguments[i], width);
      break;
    case Shuffle::kUp:
      out[i] = __shfl_up_sync(mask, x[i], arguments[i], width);
      break;
    case Shuffle::kDown:
      out[i] = __shfl_down_sync(mask, x[i], arguments[i], width);
      break;
    case Shuffle::kXor:
      out[i] = __shfl_xor_sync(mask, x[i], arguments[i], width);
      break;
  }
}

__global__ void vote_in_warp(const int* x, unsigned* out) {
  const int value = x[threadIdx.x];
  int all_equal;
  out += threadIdx.x * 12;
  out[0] = __ballot_sync(kFullMask, value);
  out[1] = __any_sync(kFullMask, value);
  out[2] = __all_sync(kFullMask, value);
  out[3] = __match_any_sync(kFullMask, value);
  out[4] = __match_all_sync(kFullMask, value, &all_equal);
  out[5] = all_equal;
  out[6] = static_cast<unsigned>(__reduce_add_sync(kFullMask, value));
  out[7] = static_cast<unsigned>(__reduce_min_sync(kFullMask, value));
  out[8] = static_cast<unsigned>(__reduce_max_sync(kFullMask, value));
  out[9] = __reduce_and_sync(kFullMask, static_cast<unsigned>(value));
  out[10] = __reduce_or_sync(kFullMask, static_cast<unsigned>(value));
  out[11] = __reduce_xor_sync(kFullMask, static_cast<unsigned>(value));
}

__global__ void activemask(unsigned* out) { out[threadIdx.x] = __activemask(); }

__global__ void ballot_with_masks(const unsigned* masks, unsigned* out) {
  out[threadIdx.x] = __ballot_sync(masks[threadIdx.x], 1);
}

__global__ void exit_before_shuffle(unsigned exiting_lanes, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (threadIdx.x < exiting_lanes) return;
  out[lane] = __shfl_xor_sync(kFullMask, lane, 1);
}

__global__ void shuffle_in_two_branches(bool diverge, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (diverge && lane % 2 == 1) {
    out[lane] = __shfl_sync(kFullMask, lane, 0);
  } else {
    out[lane] = __shfl_sync(kFullMask, lane, 0);
  }
}

__global__ void warp_and_block_barrier(bool diverge) {
  if (!diverge || threadIdx.x % 2 == 0) __syncwarp();
  __syncthreads();
}

__global__ void syncwarp_with_masks(const unsigned* masks) { __syncwarp(masks[threadIdx.x]); }

// --- atomics
// --------------------------------------------------------------------------------------------------------------

enum class Atomic { kAdd, kSub, kMin, kMax, kExch, kCas, kAnd, kOr, kXor, kInc, kDec };

template <typename T>
__global__ void apply_atomics(Atomic operation, T* target, const T* operands, T* before) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const T x = operands[i];
  constexpr bool kInteger = std::is_integral_v<T>;
  switch (operation) {
    case Atomic::kAdd:
      before[i] = atomicAdd(target, x);
      break;
    case Atomic::kSub:
      if constexpr (kInteger && sizeof(T) == 4) before[i] = atomicSub(target, x);
      break;
    case Atomic::kMin:
      if constexpr (kInteger) before[i] = atomicMin(target, x);
      break;
    case Atomic::kMax:
      if constexpr (kInteger) before[i] = atomicMax(target, x);
      break;
    case Atomic::kExch:
      if constexpr (!std::is_same_v<T, double>) before[i] = atomicExch(target, x);
      break;
    case Atomic::kCas:
      if constexpr (kInteger) before[i] = atomicCAS(target, T(0), x);
      break;
    case Atomic::kAnd:
      if constexpr (kInteger) before[i] = atomicAnd(target, x);
      break;
    case Atomic::kOr:
      if constexpr (kInteger) before[i] = atomicOr(target, x);
      break;
    case Atomic::kXor:
      if constexpr (kInteger) before[i] = atomicXor(target, x);
      break;
    case Atomic::kInc:
      if constexpr (std::is_same_v<T, unsigned>) before[i] = atomicInc(target, x);
      break;
    case Atomic::kDec:
      if constexpr (std::is_same_v<T, unsigned>) before[i] = atomicDec(target, x);
      break;
  }
}

constexpr int kBins = 8;

__global__ void histogram(const int* values, int n, int* bins) {
  __shared__ int counts[kBins];
  if (threadIdx.x < kBins) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
    atomicAdd(&counts[values[i]], 1);
  __syncthreads();
  if (threadIdx.x < kBins) bins[threadIdx.x] = counts[threadIdx.x];
}

// A counter that is read and written apart loses what other threads add in between.
__global__ void count_with_two_atomics(int* counter) {
  const int before = atomicAdd(counter, 0);
  atomicExch(counter, before + 1);
}

__global__ void poll_flag(bool set) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 1) {
    if (set) atomicExch(&flag, 1);
  } else {
    while (atomicAdd(&flag, 0) == 0) __nanosleep(100);
  }
}

// --- memory faults
// --------------------------------------------------------------------------------------------------------

__global__ void read_at(const float* x, long long index, float* out) { *out = x[index]; }

__global__ void write_at(float* x, long long index) { x[index] = 1.0f; }

__global__ void write_static_shared_at(int index, float* out) {
  __shared__ float values[8];
  values[index] = 1.0f;
  *out = values[index];
}

__global__ void copy_vector(const float* x, float* out) {
  *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(x);
}

__global__ void copy_vector_with_hints(const float* x, float* out) {
  __stcs(reinterpret_cast<float4*>(out), __ldg(reinterpret_cast<const float4*>(x)));
}

__global__ void multiply_integers(int a, int b, int* out) { *out = a * b; }

__global__ void read_local_array_at(int index, int* out) {
  int values[4] = {1, 2, 3, 4};
  int* volatile pointer = values;  // hides the array's size from the compiler, and so from UBSan
  *out = pointer[index];
}

// --- failing cleanly
// ------------------------------------------------------------------------------------------------------

int live_objects = 0;

struct CountedObject {
  std::vector<int> memory{1, 2, 3};  // what a leak checker would miss if the destructor did not run
  CountedObject() { ++live_objects; }
  ~CountedObject() { --live_objects; }
};

__global__ void fail_with_live_objects(bool fail) {
  CountedObject object;
  __syncthreads();
  if (fail && blockIdx.x == 1 && threadIdx.x == 5) __trap();
  __syncthreads();
}

__global__ void launch_within_kernel() { launch(do_nothing, 1, 1, 0); }

template <typename T>
void bind_for_type(py::module_& m) {
  m.def(
      "shuffle",
      [](const std::string& kind, unsigned mask, Array<T> x, Array<int> arguments, int width) {
        const Shuffle operation = kind == "index"  ? Shuffle::kIndex
                                  : kind == "up"   ? Shuffle::kUp
                                  : kind == "down" ? Shuffle::kDown
                                                   : Shuffle::kXor;
        Array<T> out(x.size());
        std::fill_n(out.mutable_data(), out.size(), T(0));
        launch(shuffle<T>, 1, static_cast<unsigned>(x.size()), 0, operation, mask, x.data(), arguments.data(), width,
               out.mutable_data());
        return out;
      },
      py::arg("kind"), py::arg("mask"), py::arg("x").noconvert(), py::arg("arguments"), py::arg("width") = 32);
}

template <typename T>
void bind_atomics_for_type(py::module_& m) {
  m.def(
      "atomics",
      [](const std::string& name, T initial, Array<T> operands, unsigned block) {
        const std::vector<std::string> names = {"add", "sub", "min", "max", "exch", "cas",
                                                "and", "or",  "xor", "inc", "dec"};
        const auto operation = static_cast<Atomic>(std::find(names.begin(), names.end(), name) - names.begin());
        T target = initial;
        Array<T> before(operands.size());
        launch(apply_atomics<T>, static_cast<unsigned>(operands.size()) / block, block, 0, operation, &target,
               operands.data(), before.mutable_data());
        return py::make_tuple(target, before);
      },
      py::arg("name"), py::arg("initial"), py::arg("operands").noconvert(), py::arg("block") = 32);
}

template <typename T>
void bind_sums_for_type(py::module_& m) {
  m.def(
      "sum_blocks",
      [](Array<T> x, bool barriers) {
        constexpr int kThreads = 64;
        const auto blocks = static_cast<unsigned>(x.size()) / kThreads;
        Array<T> sums(blocks);
        launch(barriers ? sum_blocks<T, kThreads, true> : sum_blocks<T, kThreads, false>, blocks, kThreads, 0, x.data(),
               sums.mutable_data());
        return sums;
      },
      py::arg("x").noconvert(), py::arg("barriers") = true);
}

}  // namespace

void bind_selftest(py::module_& parent) {
  auto m = parent.def_submodule("selftest", "Kernels that test the emulator itself.");

  m.def("record_indices", [](Extent grid, Extent block) {
    const auto threads = std::int64_t{grid[0]} * grid[1] * grid[2] * block[0] * block[1] * block[2];
    Array<unsigned> out({threads, std::int64_t{kIndexColumns}});
    launch(record_indices, to_dim3(grid), to_dim3(block), 0, out.mutable_data());
    return out;
  });
  m.def("count_in_argument", [](int start, unsigned blocks, unsigned threads) {
    Array<int> out(blocks * threads);
    launch(count_in_argument, blocks, threads, 0, Counter{start}, out.mutable_data());
    return out;
  });
  m.def("launch_with_largest_arguments", [] { launch(take_payload<32'764>, 1, 1, 0, Payload<32'764>{}); });
  m.def("launch_with_too_large_arguments", [] { launch(take_payload<32'765>, 1, 1, 0, Payload<32'765>{}); });
  m.def(
      "launch_nothing",
      [](Extent grid, Extent block, std::size_t dynamic_shared_bytes) {
        launch(do_nothing, to_dim3(grid), to_dim3(block), dynamic_shared_bytes);
      },
      py::arg("grid"), py::arg("block"), py::arg("dynamic_shared_bytes") = 0);
  m.def("record_order", [](unsigned blocks, unsigned threads) {
    unsigned next = 0;
    Array<unsigned> out(blocks * threads);
    launch(record_order, blocks, threads, 0, &next, out.mutable_data());
    return out;
  });
  m.def("wait_at_barriers", [](unsigned blocks, unsigned threads, int barriers) {
    launch(wait_at_barriers, blocks, threads, 0, barriers);
  });

  bind_sums_for_type<float>(m);
  bind_sums_for_type<double>(m);
  bind_sums_for_type<int>(m);
  m.def("reverse_warp", [](Array<int> x, bool barriers) {
    Array<int> out(32);
    launch(barriers ? reverse_warp<true> : reverse_warp<false>, 1, 32, 0, x.data(), out.mutable_data());
    return out;
  });
  m.def("reverse_blocks", [](Array<double> x, unsigned block, std::size_t dynamic_shared_bytes) {
    Array<double> out(x.size());
    launch(reverse_blocks<double>, static_cast<unsigned>(x.size()) / block, block, dynamic_shared_bytes, x.data(),
           out.mutable_data());
    return out;
  });
  m.def("read_shared_before_writing", [](unsigned blocks) {
    Array<float> floats({blocks, 4u});
    Array<double> doubles({blocks, 4u});
    Array<int> integers({blocks, 4u});
    launch(read_shared_before_writing<float>, blocks, 1, 3 * sizeof(float), floats.mutable_data());
    launch(read_shared_before_writing<double>, blocks, 1, 3 * sizeof(double), doubles.mutable_data());
    launch(read_shared_before_writing<int>, blocks, 1, 3 * sizeof(int), integers.mutable_data());
    return py::make_tuple(floats, doubles, integers);
  });
  m.def("write_static_shared", [](int bytes, std::size_t dynamic_shared_bytes) {
    char last;
    launch(write_static_shared, 1, 64, dynamic_shared_bytes, bytes, &last);
    return static_cast<int>(last);
  });

  m.def("vote_in_block", [](Array<int> predicates, unsigned block) {
    Array<int> out({predicates.size(), py::ssize_t{3}});
    launch(vote_in_block, static_cast<unsigned>(predicates.size()) / block, block, 0, predicates.data(),
           out.mutable_data());
    return out;
  });
  m.def("exit_before_barrier",
        [](unsigned exiting, unsigned threads) { launch(exit_before_barrier, 2, threads, 0, exiting); });
  m.def("barrier_in_two_branches", [](bool diverge) { launch(barrier_in_two_branches, 2, 64, 0, diverge); });

  bind_for_type<int>(m);
  bind_for_type<unsigned>(m);
  bind_for_type<long long>(m);
  bind_for_type<unsigned long long>(m);
  bind_for_type<float>(m);
  bind_for_type<double>(m);
  m.def("vote_in_warp", [](Array<int> x) {
    Array<unsigned> out({32, 12});
    launch(vote_in_warp, 1, 32, 0, x.data(), out.mutable_data());
    return out;
  });
  m.def("activemask", [] {
    Array<unsigned> out(32);
    launch(activemask, 1, 32, 0, out.mutable_data());
    return out;
  });
  m.def("ballot_with_masks", [](Array<unsigned> masks) {
    Array<unsigned> out(masks.size());
    launch(ballot_with_masks, 1, static_cast<unsigned>(masks.size()), 0, masks.data(), out.mutable_data());
    return out;
  });
  m.def("exit_before_shuffle", [](unsigned exiting_lanes, unsigned threads) {
    Array<int> out(threads);
    launch(exit_before_shuffle, 1, threads, 0, exiting_lanes, out.mutable_data());
    return out;
  });
  m.def("shuffle_in_two_branches", [](bool diverge) {
    Array<int> out(32);
    launch(shuffle_in_two_branches, 1, 32, 0, diverge, out.mutable_data());
    return out;
  });
  m.def("warp_and_block_barrier", [](bool diverge) { launch(warp_and_block_barrier, 1, 64, 0, diverge); });
  m.def("syncwarp_with_masks", [](Array<unsigned> masks) {
    launch(syncwarp_with_masks, 1, static_cast<unsigned>(masks.size()), 0, masks.data());
  });

  bind_atomics_for_type<int>(m);
  bind_atomics_for_type<unsigned>(m);
  bind_atomics_for_type<unsigned long long>(m);
  bind_atomics_for_type<float>(m);
  bind_atomics_for_type<double>(m);
  m.def("histogram", [](Array<int> values) {
    Array<int> bins(kBins);
    launch(histogram, 1, 64, 0, values.data(), static_cast<int>(values.size()), bins.mutable_data());
    return bins;
  });
  m.def("count_with_two_atomics", [](unsigned threads) {
    int counter = 0;
    launch(count_with_two_atomics, 1, threads, 0, &counter);
    return counter;
  });
  m.def("poll_flag", [](bool set) { launch(poll_flag, 1, 64, 0, set); });

  m.def("read_at", [](Array<float> x, long long index) {
    float out;
    launch(read_at, 1, 1, 0, x.data(), index, &out);
    return out;
  });
  m.def("write_at", [](py::array_t<float, py::array::c_style> x, long long index) {
    launch(write_at, 1, 1, 0, x.mutable_data(), index);
  });
  m.def("write_static_shared_at", [](int index) {
    float out;
    launch(write_static_shared_at, 1, 1, 0, index, &out);
    return out;
  });
  m.def("copy_vector", [](Array<float> x, int offset, bool with_hints) {
    alignas(16) float out[4];
    launch(with_hints ? copy_vector_with_hints : copy_vector, 1, 1, 0, x.data() + offset, out);
    return std::vector<float>(out, out + 4);
  });
  m.def("multiply_integers", [](int a, int b) {
    int out;
    launch(multiply_integers, 1, 1, 0, a, b, &out);
    return out;
  });
  m.def("read_local_array_at", [](int index) {
    int out;
    launch(read_local_array_at, 1, 1, 0, index, &out);
    return out;
  });

  m.def("fail_with_live_objects", [](bool fail) { launch(fail_with_live_objects, 3, 64, 0, fail); });
  m.def("live_objects", [] { return live_objects; });
  m.def("synchronize_outside_a_kernel", [] { __syncthreads(); });
  m.def("launch_within_kernel", [] { launch(launch_within_kernel, 1, 1, 0); });
}
