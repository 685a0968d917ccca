// The host side of the emulator: launching a kernel, and what can go wrong with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulator/vector_types.h"

namespace pfl::emulator {

// A launch that CUDA would refuse, or a kernel whose behaviour CUDA leaves undefined.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Limits of CUDA 13 for sm_90. Every kernel must launch within them.
inline constexpr std::size_t kMaxArgumentBytes = 32'764;
inline constexpr std::size_t kMaxThreadsPerBlock = 1024;
inline constexpr std::size_t kMaxStaticSharedBytes = 48 * 1024;
inline constexpr std::size_t kMaxSharedBytes = 227 * 1024;

// Chooses the order in which blocks and threads run. The n-th launch after it is the same for the same seed.
void set_seed(std::uint64_t seed);

std::uint64_t launch_count();
void reset_launch_count();

struct LaunchConfiguration {
  dim3 grid;
  dim3 block;
  std::size_t dynamic_shared_bytes;
  std::size_t argument_bytes;
};

// Calls thread_body once for each thread of the grid. Returns when all have ended, or throws what the first failing
// thread threw.
void run_grid(const LaunchConfiguration& configuration, const std::function<void()>& thread_body);

namespace detail {

// The parameters lie one after another, each at its own alignment, as in a struct.
template <typename... Parameters>
constexpr std::size_t argument_bytes() {
  std::size_t bytes = 0;
  ((bytes = (bytes + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) + sizeof(Parameters)), ...);
  return bytes;
}

}  // namespace detail

// Stands for kernel<<<grid, block, dynamic_shared_bytes>>>(arguments...) followed by a synchronisation.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((!std::is_reference_v<Parameters> && ...), "a kernel cannot take a reference to host memory");
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "CUDA copies kernel arguments as bytes");
  const std::tuple<std::remove_cv_t<Parameters>...> copies(std::forward<Arguments>(arguments)...);
  run_grid({grid, block, dynamic_shared_bytes, detail::argument_bytes<Parameters...>()},
           [&] { std::apply(kernel, copies); });
}

}  // namespace pfl::emulator
