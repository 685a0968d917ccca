// What the device intrinsics need from the scheduler. Every function here acts for the CUDA thread that calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

#include "emulator/vector_types.h"

// The hidden last parameter of an intrinsic: the line that calls it.
#define PFL_HERE std::source_location where = std::source_location::current()

namespace pfl::emulator {

inline constexpr int kWarpSize = 32;

// Behind threadIdx and its siblings. The scheduler sets them before it resumes a thread; plain globals suffice because
// one thread runs at a time.
namespace builtin {
inline uint3 thread_index{};
inline uint3 block_index{};
inline dim3 block_dim;
inline dim3 grid_dim;
inline int warp_size = kWarpSize;
}  // namespace builtin

// An intrinsic and the line of the kernel that calls it.
struct CallSite {
  const char* intrinsic;
  std::source_location where;

  bool operator==(const CallSite& other) const;
};

// Waits for all threads of the block, and returns for how many of them the predicate holds.
unsigned block_barrier(const CallSite& site, bool predicate);

// What one lane brings to a warp-wide operation.
struct LaneOperand {
  std::uint64_t value = 0;
  int argument = 0;  // the source lane of a shuffle
};

// A warp-wide operation when all lanes of its mask have arrived. operands is indexed by lane.
struct Rendezvous {
  const CallSite& site;
  unsigned mask;
  const LaneOperand* operands[kWarpSize];

  bool contains(int lane) const { return mask >> lane & 1; }
};

// The result of the operation for one lane.
using Resolve = std::uint64_t (*)(const Rendezvous& rendezvous, int lane);

// Waits for all lanes that the mask names and returns resolve() for the calling lane. Lanes must agree on site and
// mask.
std::uint64_t warp_collective(const CallSite& site, unsigned mask, LaneOperand operand, Resolve resolve);

// Lane of the calling thread in its warp.
int lane_index(const CallSite& site);

// Now and then lets other threads run: atomics and polling loops interleave with them on the device.
void interleave(const CallSite& site);

// The dynamic shared memory of the running block.
void* dynamic_shared_memory();

// Throws Error with the position of the calling thread in the launch, the site, and the message.
[[noreturn]] void fail(const CallSite& site, const std::string& message);

}  // namespace pfl::emulator
