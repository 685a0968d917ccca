// Barriers, shuffles and votes. Each takes its call site as a hidden last argument, so that the scheduler can tell
// threads that meet from threads that diverged, and name the line in a complaint.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <string>
#include <type_traits>

#include "emulator/scheduler.h"

inline void __syncthreads(PFL_HERE) { pfl::emulator::block_barrier({"__syncthreads", where}, false); }

inline int __syncthreads_count(int predicate, PFL_HERE) {
  return static_cast<int>(pfl::emulator::block_barrier({"__syncthreads_count", where}, predicate != 0));
}

inline int __syncthreads_or(int predicate, PFL_HERE) {
  return pfl::emulator::block_barrier({"__syncthreads_or", where}, predicate != 0) != 0;
}

inline int __syncthreads_and(int predicate, PFL_HERE) {
  return pfl::emulator::block_barrier({"__syncthreads_and", where}, predicate == 0) == 0;
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, PFL_HERE) {
  pfl::emulator::warp_collective({"__syncwarp", where}, mask, {},
                                 [](const pfl::emulator::Rendezvous&, int) -> std::uint64_t { return 0; });
}

namespace pfl::emulator {

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>,
                "warp operations take values of at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// Reads the value of the lane `source`, which must take part. Where the source lies outside the caller's segment, the
// caller reads itself: this is how the shfl instruction defines it (PTX ISA, shfl.sync).
template <typename T>
T shuffle(const CallSite& site, unsigned mask, T value, int source, int first_legal, int last_legal) {
  if (source < first_legal || source > last_legal) source = lane_index(site);
  const auto resolve = [](const Rendezvous& rendezvous, int lane) {
    const int from = rendezvous.operands[lane]->argument;
    if (!rendezvous.contains(from)) {
      fail(rendezvous.site,
           "lane " + std::to_string(lane) + " reads from lane " + std::to_string(from) + ", which is not in the mask");
    }
    return rendezvous.operands[from]->value;
  };
  return from_bits<T>(warp_collective(site, mask, {to_bits(value), source}, resolve));
}

// The lanes among which a shuffle of that width stays.
struct Segment {
  int lane, first, last;

  Segment(const CallSite& site, int width) : lane(lane_index(site)) {
    if (width < 1 || width > kWarpSize || !std::has_single_bit(static_cast<unsigned>(width))) {
      fail(site, "width " + std::to_string(width) + " is not 1, 2, 4, 8, 16 or 32");
    }
    first = lane & ~(width - 1);
    last = first + width - 1;
  }
};

// A warp-wide operation whose result is the same for all lanes: combine() folds the operands in the order of the lanes.
template <typename T, typename Combine>
T warp_reduction(const CallSite& site, unsigned mask, T value, Combine) {
  static_assert(std::is_empty_v<Combine>);
  const auto resolve = [](const Rendezvous& rendezvous, int) {
    int lane = std::countr_zero(rendezvous.mask);
    T result = from_bits<T>(rendezvous.operands[lane]->value);
    for (++lane; lane < kWarpSize; ++lane) {
      if (rendezvous.contains(lane)) result = Combine{}(result, from_bits<T>(rendezvous.operands[lane]->value));
    }
    return to_bits(result);
  };
  return from_bits<T>(warp_collective(site, mask, {to_bits(value), 0}, resolve));
}

// The lanes whose operand equals that of the calling lane.
inline unsigned matching_lanes(const CallSite& site, unsigned mask, std::uint64_t bits) {
  const auto resolve = [](const Rendezvous& rendezvous, int lane) {
    std::uint64_t lanes = 0;
    for (int other = 0; other < kWarpSize; ++other) {
      if (!rendezvous.contains(other)) continue;
      if (rendezvous.operands[other]->value == rendezvous.operands[lane]->value) lanes |= std::uint64_t{1} << other;
    }
    return lanes;
  };
  return static_cast<unsigned>(warp_collective(site, mask, {bits, 0}, resolve));
}

// The lanes whose predicate holds.
inline unsigned voting_lanes(const CallSite& site, unsigned mask, bool predicate) {
  const unsigned own = predicate ? 1u << lane_index(site) : 0u;
  return warp_reduction(site, mask, own, std::bit_or<unsigned>{});
}

struct Minimum {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

struct Maximum {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

}  // namespace pfl::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source_lane, int width = pfl::emulator::kWarpSize, PFL_HERE) {
  const pfl::emulator::CallSite site{"__shfl_sync", where};
  const pfl::emulator::Segment segment(site, width);
  const int source = segment.first + (source_lane & (width - 1));
  return pfl::emulator::shuffle(site, mask, value, source, segment.first, segment.last);
}

// The instruction takes five bits of the distance, hence the `& 31` here and below.
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = pfl::emulator::kWarpSize, PFL_HERE) {
  const pfl::emulator::CallSite site{"__shfl_up_sync", where};
  const pfl::emulator::Segment segment(site, width);
  const int source = segment.lane - static_cast<int>(delta & 31);
  return pfl::emulator::shuffle(site, mask, value, source, segment.first, segment.last);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = pfl::emulator::kWarpSize, PFL_HERE) {
  const pfl::emulator::CallSite site{"__shfl_down_sync", where};
  const pfl::emulator::Segment segment(site, width);
  const int source = segment.lane + static_cast<int>(delta & 31);
  return pfl::emulator::shuffle(site, mask, value, source, segment.first, segment.last);
}

// Unlike the others it may read from a segment before its own.
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = pfl::emulator::kWarpSize, PFL_HERE) {
  const pfl::emulator::CallSite site{"__shfl_xor_sync", where};
  const pfl::emulator::Segment segment(site, width);
  return pfl::emulator::shuffle(site, mask, value, segment.lane ^ (lane_mask & 31), 0, segment.last);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, PFL_HERE) {
  return pfl::emulator::voting_lanes({"__ballot_sync", where}, mask, predicate != 0);
}

inline int __any_sync(unsigned mask, int predicate, PFL_HERE) {
  return pfl::emulator::voting_lanes({"__any_sync", where}, mask, predicate != 0) != 0;
}

inline int __all_sync(unsigned mask, int predicate, PFL_HERE) {
  return pfl::emulator::voting_lanes({"__all_sync", where}, mask, predicate != 0) == mask;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, PFL_HERE) {
  return pfl::emulator::matching_lanes({"__match_any_sync", where}, mask, pfl::emulator::to_bits(value));
}

template <typename T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, PFL_HERE) {
  *predicate = pfl::emulator::matching_lanes({"__match_all_sync", where}, mask, pfl::emulator::to_bits(value)) == mask;
  return *predicate ? mask : 0;
}

// CUDA promises no more than that the caller is active: lanes may run apart from one another at any point. A kernel
// that takes this for the lanes of its branch gets wrong results here.
inline unsigned __activemask(PFL_HERE) { return 1u << pfl::emulator::lane_index({"__activemask", where}); }

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, PFL_HERE) {
  return pfl::emulator::warp_reduction({"__reduce_add_sync", where}, mask, value, std::plus<unsigned>{});
}
inline int __reduce_add_sync(unsigned mask, int value, PFL_HERE) {
  return static_cast<int>(
      __reduce_add_sync(mask, static_cast<unsigned>(value), where));  // wraps around, as on the device
}

#define PFL_WARP_REDUCTION(name, T, Combine)                                      \
  inline T name(unsigned mask, T value, PFL_HERE) {                               \
    return pfl::emulator::warp_reduction({#name, where}, mask, value, Combine{}); \
  }
PFL_WARP_REDUCTION(__reduce_min_sync, int, pfl::emulator::Minimum)
PFL_WARP_REDUCTION(__reduce_min_sync, unsigned, pfl::emulator::Minimum)
PFL_WARP_REDUCTION(__reduce_max_sync, int, pfl::emulator::Maximum)
PFL_WARP_REDUCTION(__reduce_max_sync, unsigned, pfl::emulator::Maximum)
PFL_WARP_REDUCTION(__reduce_and_sync, unsigned, std::bit_and<unsigned>)
PFL_WARP_REDUCTION(__reduce_or_sync, unsigned, std::bit_or<unsigned>)
PFL_WARP_REDUCTION(__reduce_xor_sync, unsigned, std::bit_xor<unsigned>)
#undef PFL_WARP_REDUCTION
