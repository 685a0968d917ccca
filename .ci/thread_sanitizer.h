// For `make thread-sanitized`, included before every source: torch's loop over threads, on std::thread.
//
// ThreadSanitizer does not see the barriers of an OpenMP that was built without it and takes every loop for a race. It
// sees how a std::thread begins and ends. The kernels are torch-free: those sources have no loop, and no torch to find.
#pragma once

#if __has_include(<torch/csrc/stable/ops.h>)
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

// As torch's: shares of at least `grain`, the first on the calling thread, and none of its own inside of another loop.
template <typename F>
void parallel_for_on_threads(int64_t begin, int64_t end, int64_t grain, const F& f) {
  constexpr int64_t kThreads = 4;
  static thread_local bool inside = false;
  const int64_t count = end - begin;
  if (count <= 0) return;
  const int64_t share = std::max((count + kThreads - 1) / kThreads, std::max<int64_t>(grain, 1));
  if (inside || share >= count) return f(begin, end);
  std::vector<std::thread> threads;
  for (int64_t first = begin + share; first < end; first += share) {
    threads.emplace_back([&f, first, last = std::min(first + share, end)] {
      inside = true;
      f(first, last);
    });
  }
  inside = true;
  f(begin, begin + share);
  inside = false;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch::stable

#define parallel_for parallel_for_on_threads
#endif
