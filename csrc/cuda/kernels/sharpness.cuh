// Perturbation, restoration and scores on the GPU: the kernels, and the torch-free planning of their launches. The glue
// (cuda/sharpness.cu) and the emulator (emulator/sharpness.cpp) differ only in the `launch` they pass in.
#pragma once

#include "cuda/kernels/chunk_sums.cuh"

namespace pfl::cuda {

// What the perturbation needs of a norm, left in device memory by the second launch.
struct NormResult {
  double maximum;
  double factor;
};

struct FinishNorm {
  Perturbation how;
  NormResult* norms;

  __device__ void operator()(int64_t group, PowerSum total, int64_t) const {
    norms[group] = {total.maximum, norm_factor(how, total)};
  }
};

struct FinishRawScore {
  double* raw;

  __device__ void operator()(int64_t group, PowerSum total, int64_t elements) const {
    raw[group] = raw_score(total.sum, elements);
  }
};

constexpr int kWeight = 0, kGrad = 1, kBackup = 2, kScoreOf = 3, kNormOf = 4;  // words of a slot
constexpr int kPerturbWords = 5;
constexpr int kPerturbPrefix = 3;  // words before the slots: the norms, the scores (null: all 1), the exponent q - 1

// scalar: rho.
template <typename T, PerturbForm kForm>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    perturb_kernel(const __grid_constant__ ListArguments args) {
  using A = accumulate_t<T>;
  const Chunk chunk = find_chunk(args, blockIdx.x);
  const auto* norms = reinterpret_cast<const NormResult*>(static_cast<uintptr_t>(args.words[0]));
  const auto* scores = reinterpret_cast<const double*>(static_cast<uintptr_t>(args.words[1]));
  const NormResult norm = kForm == PerturbForm::kSign ? NormResult{0.0, 1.0} : norms[chunk.words[kNormOf]];
  const double score = scores == nullptr ? 1.0 : scores[chunk.words[kScoreOf]];
  const A scale = to_scale<A>(args.scalar * score * norm.factor);
  const A maximum = static_cast<A>(norm.maximum);
  const A exponent = static_cast<A>(bit_copy<double>(args.words[2]));
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    auto* weight = reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kWeight) + i);
    Pack<T, N> w = *weight;
    *reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(kBackup) + i) = w;
    if (scale == A(0)) return;
    if constexpr (kForm == PerturbForm::kPower) {
      T* values = chunk.pointer<T>(kWeight) + i;
      const T* g = chunk.pointer<const T>(kGrad) + i;
#pragma unroll 1  // a call of pow() is long: unrolled, it would spill
      for (int k = 0; k < N; ++k) {
        const A moved = perturbed<kForm>(to_accumulate(values[k]), to_accumulate(g[k]), scale, maximum, exponent);
        from_accumulate(moved, values + k);
      }
    } else {
      const Pack<T, N> g = *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(kGrad) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A moved =
            perturbed<kForm>(to_accumulate(w.values[k]), to_accumulate(g.values[k]), scale, maximum, exponent);
        from_accumulate(moved, &w.values[k]);
      }
      *weight = w;
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    restore_kernel(const __grid_constant__ ListArguments args) {
  const Chunk chunk = find_chunk(args, blockIdx.x);
  for_each_in_chunk<T>(chunk, [&](auto width, int64_t i) {
    constexpr int N = decltype(width)::value;
    *reinterpret_cast<Pack<T, N>*>(chunk.pointer<T>(0) + i) =
        *reinterpret_cast<const Pack<T, N>*>(chunk.pointer<const T>(1) + i);
  });
}

struct NormalizeArguments {
  double* scores;  // in: raw, out: xi
  int64_t layers;
};

// One block: layers are few.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    normalize_scores_kernel(const __grid_constant__ NormalizeArguments args) {
  __shared__ PowerSum shared_total;
  PowerSum total{0.0, 0.0};
  PowerSum scored{0.0, 0.0};
  for (int64_t l = threadIdx.x; l < args.layers; l += kThreads) {
    const double raw = args.scores[l];
    if (raw == kNoScore) continue;
    total.sum += raw;
    scored.sum += 1.0;
  }
  total = combine_block(total, AddSquares{});
  __syncthreads();
  scored = combine_block(scored, AddSquares{});
  if (threadIdx.x == 0) shared_total = {scored.sum, total.sum};
  __syncthreads();
  for (int64_t l = threadIdx.x; l < args.layers; l += kThreads) {
    args.scores[l] = score(args.scores[l], shared_total.sum, static_cast<int64_t>(shared_total.maximum));
  }
}

// Tensors of one storage type.
struct PerturbRows {
  std::vector<int64_t> sizes;
  std::vector<void*> weight;
  std::vector<const void*> grad;
  std::vector<void*> backup;
  std::vector<int64_t> layer;
  std::vector<int64_t> norm;
  std::vector<int64_t> record;
};

template <typename T, typename Launch>
void launch_gradient_sums(const PerturbRows& rows, const Perturbation& how, ChunkRecord* records, Launch launch) {
  const SumRows sums{rows.sizes, rows.grad, {}, rows.record, rows.norm};
  if (how.form == PerturbForm::kEuclidean) {
    launch_chunk_sums<T, ChunkSum::kSquares>(sums, records, how.q, launch);
  } else {
    launch_chunk_sums<T, ChunkSum::kPowers>(sums, records, how.q, launch);
  }
}

template <typename T, PerturbForm kForm, typename Launch>
void launch_perturb(const PerturbRows& rows, const Perturbation& how, double rho, const NormResult* norms,
                    const double* scores, Launch launch) {
  for (const LaunchPlan& plan :
       plan_launches(rows.sizes, kChunkElements, slots_per_launch(kPerturbWords, kPerturbPrefix), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = kPerturbPrefix;
    args.flags = 0;
    args.scalar = rho;
    args.words[0] = word_of(norms);
    args.words[1] = word_of(scores);
    args.words[2] = word_of(how.exponent);
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[kWeight] = word_of(rows.weight[t]);
      words[kGrad] = word_of(rows.grad[t]);
      words[kBackup] = word_of(rows.backup[t]);
      words[kScoreOf] = static_cast<uint64_t>(rows.layer[t]);
      words[kNormOf] = static_cast<uint64_t>(rows.norm[t]);
    };
    const auto aligned = [&](int64_t t) {
      return is_vector_aligned(rows.weight[t]) && is_vector_aligned(rows.grad[t]) && is_vector_aligned(rows.backup[t]);
    };
    const int64_t grid = fill_slots(plan, rows.sizes, kPerturbWords, pointers_of, aligned, &args);
    launch(perturb_kernel<T, kForm>, grid, args);
  }
}

template <typename T, typename Launch>
void launch_perturb(const PerturbRows& rows, const Perturbation& how, double rho, const NormResult* norms,
                    const double* scores, Launch launch) {
  switch (how.form) {
    case PerturbForm::kSign:
      return launch_perturb<T, PerturbForm::kSign>(rows, how, rho, norms, scores, launch);
    case PerturbForm::kEuclidean:
      return launch_perturb<T, PerturbForm::kEuclidean>(rows, how, rho, norms, scores, launch);
    default:
      return launch_perturb<T, PerturbForm::kPower>(rows, how, rho, norms, scores, launch);
  }
}

template <typename T, typename Launch>
void launch_restore(const std::vector<int64_t>& sizes, const std::vector<void*>& weight,
                    const std::vector<const void*>& backup, Launch launch) {
  for (const LaunchPlan& plan : plan_launches(sizes, kChunkElements, slots_per_launch(2, 0), kMaxGrid)) {
    ListArguments args;
    args.prefix_words = 0;
    args.flags = 0;
    args.scalar = 0;
    const auto pointers_of = [&](int64_t t, uint64_t* words) {
      words[0] = word_of(weight[t]);
      words[1] = word_of(backup[t]);
    };
    const auto aligned = [&](int64_t t) { return is_vector_aligned(weight[t]) && is_vector_aligned(backup[t]); };
    const int64_t grid = fill_slots(plan, sizes, 2, pointers_of, aligned, &args);
    launch(restore_kernel<T>, grid, args);
  }
}

template <typename Launch>
void launch_scores(const ChunkRecord* records, int64_t count, Grouping layers, double* scores, Launch launch) {
  launch_group_sums(records, count, layers, 0.0, /*powers=*/false, FinishRawScore{scores}, launch);
  launch(normalize_scores_kernel, int64_t{1}, NormalizeArguments{scores, layers.count});
}

}  // namespace pfl::cuda
