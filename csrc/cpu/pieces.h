// Work over a list of tensors, cut into pieces and spread over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/planner.h"

namespace pfl::cpu {

// What a thread takes at once. Large enough that starting a piece does not show, small enough that LeNet's 62,006
// weights still feed four threads.
constexpr int64_t kPieceElements = 16384;
// Fewer bundles than this stay on the calling thread. LeNet's four are shared: with threads that are awake, as they are
// after a backward pass, a step takes 2/3 of the time, with sleeping ones as long (Xeon, two cores). Where other
// programs hold the cores, waiting for a thread takes milliseconds, as it does in torch's ops, which share work from
// 32,768 elements on: give such a run one thread.
constexpr int64_t kFewestParallelBundles = 4;

// f(index of the piece, piece) over all pieces. `backwards` walks each thread's share from its end: what an earlier
// pass over the same plan read last is then read first, while it is still in the cache.
template <typename F>
void for_each_piece(const BundlePlan& plan, bool backwards, const F& f,
                    int64_t fewest_parallel = kFewestParallelBundles) {
  const auto share = [&](int64_t begin, int64_t end) {
    const int64_t first = plan.bundle_begin[begin];
    const int64_t last = plan.bundle_begin[end];
    for (int64_t i = first; i < last; ++i) {
      const int64_t p = backwards ? last - 1 - (i - first) : i;
      f(p, plan.pieces[p]);
    }
  };
  if (plan.bundles() < fewest_parallel) {
    share(0, plan.bundles());
  } else {
    torch::stable::parallel_for(0, plan.bundles(), 1, share);
  }
}

}  // namespace pfl::cpu
