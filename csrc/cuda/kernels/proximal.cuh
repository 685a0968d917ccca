// The proximal step and the squared distance on the GPU: the kernels, and the torch-free planning of their launches.
#pragma once

#include "common/proximal.h"
#include "cuda/kernels/chunk_sums.cuh"

namespace pfl::cuda {

constexpr int kStepWeight = 0, kStepGrad = 1, kStepAnchor = 2, kStepBuffer = 3;  // words of a slot
constexpr int kStepWords = 4;
constexpr int kStepPrefix = 4;               // lam, momentum, dampening, weight decay; the scalar is lr
constexpr int kNesterov = 1, kMaximize = 2;  // flags

template <typename T, Momentum kMode, bool kAnchor, bool kDecay>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    proximal_step_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const ProximalNumbers<A> s = numbers_of<A>(
      {args.scalar, bit_copy<double>(args.words[0]), bit_copy<double>(args.words[1]), bit_copy<double>(args.words[2]),
       bit_copy<double>(args.words[3]), (args.flags & kNesterov) != 0, (args.flags & kMaximize) != 0, kMode});
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    auto* weight = reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kStepWeight) + i);
    auto* buffer = reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kStepBuffer) + i);
    Pack<T, N> w = *weight;
    const Pack<T, N> g = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kStepGrad) + i);
    Pack<T, N> c{};
    Pack<T, N> b{};
    if constexpr (kAnchor) c = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kStepAnchor) + i);
    if constexpr (kMode == Momentum::kRunning) b = *buffer;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A running = kMode == Momentum::kRunning ? to_accumulate(b.values[k]) : A(0);
      const A moved = proximal_step<kMode, kAnchor, kDecay>(s, to_accumulate(w.values[k]), to_accumulate(g.values[k]),
                                                            kAnchor ? to_accumulate(c.values[k]) : A(0), &running);
      from_accumulate(moved, &w.values[k]);
      if constexpr (kMode != Momentum::kNone) from_accumulate(running, &b.values[k]);
    }
    *weight = w;
    if constexpr (kMode != Momentum::kNone) *buffer = b;
  });
}

template <typename Out>
struct FinishDistance {
  Out* out;

  __device__ void operator()(int64_t, PowerSum total, int64_t) const { *out = static_cast<Out>(total.sum); }
};

constexpr int kGradientA = 0, kGradientB = 1, kGradientToA = 2,
              kGradientToB = 3;  // words of a slot; either "to" may be null
constexpr int kGradientWords = 4;
constexpr int kWideUpstream = 1;  // flag: the upstream gradient, pointed to by the prefix, is a double

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    distance_gradient_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const auto* upstream = reinterpret_cast<const void*>(static_cast<uintptr_t>(args.words[0]));
  const double given = (args.flags & kWideUpstream) != 0 ? *static_cast<const double*>(upstream)
                                                         : static_cast<double>(*static_cast<const float*>(upstream));
  const A scale = static_cast<A>(2.0 * given);
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    const Pack<T, N> a = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kGradientA) + i);
    const Pack<T, N> b = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kGradientB) + i);
    Pack<T, N> to_a;
    Pack<T, N> to_b;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A difference = to_accumulate(a.values[k]) - to_accumulate(b.values[k]);
      from_accumulate(scale * difference, &to_a.values[k]);
      from_accumulate(-scale * difference, &to_b.values[k]);
    }
    if (chunk.words[kGradientToA] != 0) *reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kGradientToA) + i) = to_a;
    if (chunk.words[kGradientToB] != 0) *reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kGradientToB) + i) = to_b;
  });
}

// Tensors of one storage type.
struct StepRows {
  std::vector<int64_t> sizes;
  std::vector<void*> weight;
  std::vector<const void*> grad;
  std::vector<const void*> anchor;  // null without
  std::vector<void*> buffer;        // null without
};

template <typename T, typename Launch>
void launch_proximal_step(const StepRows& rows, const ProximalStep& step, Launch launch) {
  for (const LaunchPlan& plan :
       plan_launches(rows.sizes, kChunkElements, slots_per_launch(kStepWords, kStepPrefix), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = kStepPrefix;
    args.flags = (step.nesterov ? kNesterov : 0) | (step.maximize ? kMaximize : 0);
    args.scalar = step.lr;
    args.words[0] = word_of(step.lam);
    args.words[1] = word_of(step.momentum);
    args.words[2] = word_of(step.dampening);
    args.words[3] = word_of(step.weight_decay);
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[kStepWeight] = word_of(rows.weight[t]);
      words[kStepGrad] = word_of(rows.grad[t]);
      words[kStepAnchor] = word_of(rows.anchor[t]);
      words[kStepBuffer] = word_of(rows.buffer[t]);
    };
    const auto aligned = [&](int64_t t) {
      return is_vector_aligned(rows.weight[t]) && is_vector_aligned(rows.grad[t]) &&
             is_vector_aligned(rows.anchor[t]) && is_vector_aligned(rows.buffer[t]);
    };
    const int64_t grid = fill_slots(plan, rows.sizes, kStepWords, pointers_of, aligned, &args);
    visit_step(step, [&](auto mode, auto anchored, auto decayed) {
      launch(proximal_step_kernel<T, decltype(mode)::value, decltype(anchored)::value, decltype(decayed)::value>, grid,
             args);
    });
  }
}

// Tensors of one storage type.
struct GradientRows {
  std::vector<int64_t> sizes;
  std::vector<const void*> a;
  std::vector<const void*> b;
  std::vector<void*> to_a;  // null where not wanted
  std::vector<void*> to_b;
};

template <typename T, typename Launch>
void launch_distance_gradient(const GradientRows& rows, const void* upstream, bool wide, Launch launch) {
  for (const LaunchPlan& plan :
       plan_launches(rows.sizes, kChunkElements, slots_per_launch(kGradientWords, 1), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = 1;
    args.flags = wide ? kWideUpstream : 0;
    args.scalar = 0;
    args.words[0] = word_of(upstream);
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[kGradientA] = word_of(rows.a[t]);
      words[kGradientB] = word_of(rows.b[t]);
      words[kGradientToA] = word_of(rows.to_a[t]);
      words[kGradientToB] = word_of(rows.to_b[t]);
    };
    const auto aligned = [&](int64_t t) {
      return is_vector_aligned(rows.a[t]) && is_vector_aligned(rows.b[t]) && is_vector_aligned(rows.to_a[t]) &&
             is_vector_aligned(rows.to_b[t]);
    };
    const int64_t grid = fill_slots(plan, rows.sizes, kGradientWords, pointers_of, aligned, &args);
    launch(distance_gradient_kernel<T>, grid, args);
  }
}

}  // namespace pfl::cuda
