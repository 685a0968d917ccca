// Work over a list of tensors, cut into pieces and spread over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/planner.h"

namespace pfl::cpu {

// What a thread takes at once. Large enough that starting a piece does not show, small enough that LeNet's 62,006
// weights still feed four threads.
constexpr int64_t kPieceElements = 16384;

// f(index of the piece, piece) over all pieces. `backwards` walks each thread's share from its end: what an earlier
// pass over the same plan read last is then read first, while it is still in the cache.
template <typename F>
void for_each_piece(const BundlePlan& plan, bool backwards, const F& f) {
  torch::stable::parallel_for(0, plan.bundles(), 1, [&](int64_t begin, int64_t end) {
    const int64_t first = plan.bundle_begin[begin];
    const int64_t last = plan.bundle_begin[end];
    for (int64_t i = first; i < last; ++i) {
      const int64_t p = backwards ? last - 1 - (i - first) : i;
      f(p, plan.pieces[p]);
    }
  });
}

}  // namespace pfl::cpu
