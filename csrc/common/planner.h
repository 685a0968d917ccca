// How work over a list of tensors is cut into equal pieces. Knows sizes, nothing else.
//
// Two rules hold for both cuts below. An empty tensor never takes a slot or a piece (skipping it late is what broke
// list kernels elsewhere), and the cut depends on the sizes alone, never on the number of threads, so that a
// reduction over the pieces has one fixed order.
#pragma once

#include <cstdint>
#include <vector>

namespace pfl {

// Elements [offset, offset + length) of one tensor.
struct Piece {
  int64_t tensor;
  int64_t offset;
  int64_t length;
};

// CPU: bundles of pieces. A bundle is the unit a thread takes; all but the last hold exactly `bundle_elements`, so a
// hundred tiny tensors cost one bundle and a large tensor is spread over many.
struct BundlePlan {
  std::vector<Piece> pieces;
  std::vector<int64_t> bundle_begin;  // pieces of bundle b: [bundle_begin[b], bundle_begin[b + 1])

  int64_t bundles() const { return static_cast<int64_t>(bundle_begin.size()) - 1; }
};

inline BundlePlan plan_bundles(const std::vector<int64_t>& sizes, int64_t bundle_elements) {
  BundlePlan plan;
  plan.bundle_begin.push_back(0);
  int64_t room = bundle_elements;
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    for (int64_t offset = 0; offset < sizes[tensor];) {
      const int64_t left = sizes[tensor] - offset;
      const int64_t length = left < room ? left : room;
      plan.pieces.push_back({tensor, offset, length});
      offset += length;
      room -= length;
      if (room == 0) {
        plan.bundle_begin.push_back(static_cast<int64_t>(plan.pieces.size()));
        room = bundle_elements;
      }
    }
  }
  if (plan.bundle_begin.back() != static_cast<int64_t>(plan.pieces.size())) {
    plan.bundle_begin.push_back(static_cast<int64_t>(plan.pieces.size()));
  }
  return plan;
}

// CUDA: launches of slots. A slot is a non-empty tensor in the kernel's arguments; a block works on one chunk of one
// slot and finds it by searching `chunk_end`, so the arguments hold one entry a tensor, not one a block.
struct Slot {
  int64_t tensor;
  int64_t chunk_end;  // chunks of this and all earlier slots of the launch
};

using LaunchPlan = std::vector<Slot>;

// `max_chunks` is the limit of a grid's x dimension; a tensor that alone exceeds it is the caller's to refuse.
inline std::vector<LaunchPlan> plan_launches(const std::vector<int64_t>& sizes, int64_t chunk_elements,
                                             int64_t slots_per_launch, int64_t max_chunks = 0x7fffffff) {
  std::vector<LaunchPlan> launches;
  LaunchPlan current;
  int64_t chunks = 0;
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    if (sizes[tensor] == 0) continue;
    const int64_t more = (sizes[tensor] + chunk_elements - 1) / chunk_elements;
    const bool full = static_cast<int64_t>(current.size()) == slots_per_launch;
    if (!current.empty() && (full || chunks + more > max_chunks)) {
      launches.push_back(std::move(current));
      current = {};
      chunks = 0;
    }
    chunks += more;
    current.push_back({tensor, chunks});
  }
  if (!current.empty()) launches.push_back(std::move(current));
  return launches;
}

}  // namespace pfl
