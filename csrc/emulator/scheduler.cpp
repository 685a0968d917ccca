#include "emulator/scheduler.h"

#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/launch.h"

namespace pfl::emulator {
namespace {

// All bits set is NaN in every floating-point type and -1 or the maximum in the integers: hard to mistake for a result.
constexpr int kPoison = 0xFF;

// A thread that polls memory forever is reported after so many switches in which no thread got past a barrier or ended.
constexpr std::uint64_t kMaxFruitlessSwitches = std::uint64_t{1} << 23;

// SplitMix64 (Steele, Lea, Flood 2014): one addition and a mix a number, and any seed is a good one.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // Uniform in [0, bound) up to a bias of bound / 2^32.
  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>((next() >> 32) * bound >> 32); }

 private:
  std::uint64_t state_;
};

// Thrown in a waiting thread to unwind its stack when another thread of the block has failed.
struct Cancelled {};

enum class Activity { kRunnable, kAtBlockBarrier, kAtWarpCollective, kExited };

class Grid;

struct CudaThread {
  Grid* grid;
  Fiber* fiber;
  uint3 index;
  bool started = false;
  Activity activity = Activity::kRunnable;
  CallSite site{};  // the latest intrinsic that could wait
  unsigned mask = 0;
  LaneOperand operand;
  std::uint64_t result = 0;
};

std::string to_string(uint3 v) {
  std::ostringstream text;
  text << "(" << v.x << "," << v.y << "," << v.z << ")";
  return text.str();
}

std::string to_string(const CallSite& site) {
  std::ostringstream text;
  text << site.intrinsic << " at " << site.where.file_name() << ":" << site.where.line();
  return text.str();
}

std::string to_hex(unsigned mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

std::uint64_t volume(dim3 extent) { return std::uint64_t{extent.x} * extent.y * extent.z; }

uint3 unflatten(std::uint64_t index, dim3 extent) {
  return {static_cast<unsigned>(index % extent.x), static_cast<unsigned>(index / extent.x % extent.y),
          static_cast<unsigned>(index / extent.x / extent.y)};
}

// `__shared__` variables are thread_local, hence all in the thread-local block of this shared object, and each
// operating system thread has a block of its own. A launch runs on a new one: kernels are the only code that uses this
// block there (pybind11 keeps thread_local state as well, but in the block of the Python thread), so all of it may be
// poisoned.
class StaticSharedMemory {
 public:
  StaticSharedMemory() {
    static thread_local volatile char anchor;  // the block is allocated when a variable in it is first touched
    anchor = 0;
    anchor_ = const_cast<const char*>(&anchor);
    dl_iterate_phdr(&StaticSharedMemory::visit, this);
    if (begin_ == nullptr) throw Error("cannot find the thread-local block that holds __shared__ variables");
  }

  void poison() { std::memset(begin_, kPoison, size_); }

  // A lower bound of the bytes that the last block declared.
  std::size_t written_bytes() const {
    return static_cast<std::size_t>(
        std::count_if(begin_, begin_ + size_, [](unsigned char byte) { return byte != kPoison; }));
  }

 private:
  static int visit(dl_phdr_info* object, std::size_t, void* self_pointer) {
    auto* self = static_cast<StaticSharedMemory*>(self_pointer);
    if (object->dlpi_tls_data == nullptr) return 0;
    auto* begin = static_cast<unsigned char*>(object->dlpi_tls_data);
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& segment = object->dlpi_phdr[i];
      if (segment.p_type != PT_TLS) continue;
      const auto* anchor = reinterpret_cast<const unsigned char*>(self->anchor_);
      if (anchor < begin || anchor >= begin + segment.p_memsz) continue;
      self->begin_ = begin;
      self->size_ = segment.p_memsz;
      return 1;
    }
    return 0;
  }

  const char* anchor_ = nullptr;
  unsigned char* begin_ = nullptr;
  std::size_t size_ = 0;
};

// Runs the blocks of one launch one after another.
class Grid {
 public:
  Grid(const LaunchConfiguration& configuration, const std::function<void()>& thread_body, std::uint64_t seed,
       std::uint64_t launches_since_seed);

  void run();

  // The intrinsics, on behalf of the running thread.
  unsigned block_barrier(const CallSite& site, bool predicate);
  std::uint64_t warp_collective(const CallSite& site, unsigned mask, LaneOperand operand, Resolve resolve);
  int running_lane() const { return lane(*running_); }
  void interleave(const CallSite& site);
  void* dynamic_shared_memory() { return dynamic_shared_.get(); }
  [[noreturn]] void fail(const CudaThread& thread, const CallSite& site, const std::string& message) const;
  [[noreturn]] void fail(const CallSite& site, const std::string& message) const { fail(*running_, site, message); }

 private:
  void run_block();
  void run_thread(CudaThread& thread);    // until it waits or ends
  void live_through(CudaThread& thread);  // on the thread's own fiber: all of its life
  void wait();
  void make_runnable(CudaThread& thread);
  void cancel();

  int lane(const CudaThread& thread) const { return static_cast<int>((&thread - threads_.data()) % kWarpSize); }
  // The thread in that lane of the same warp, or null when the block has no such thread.
  CudaThread* neighbour(const CudaThread& thread, int lane);
  bool has_met(const CudaThread& thread);

  [[noreturn]] void report_stall();
  std::string whereabouts() const;

  const LaunchConfiguration configuration_;
  const std::function<void()>& thread_body_;
  const std::uint64_t seed_;
  const std::uint64_t launches_since_seed_;
  Random random_;
  StaticSharedMemory static_shared_;
  std::unique_ptr<unsigned char[]> dynamic_shared_;

  std::vector<CudaThread> threads_;  // in CUDA's order: x runs fastest, 32 in a row are a warp
  std::vector<CudaThread*> runnable_;
  CudaThread* running_ = nullptr;
  std::size_t exited_ = 0;
  std::size_t at_barrier_ = 0;
  unsigned predicates_arriving_ = 0;
  unsigned predicates_at_last_barrier_ = 0;
  std::uint64_t fruitless_switches_ = 0;
  std::exception_ptr failure_;
  bool cancelled_ = false;
};

// Launches are serialised, so that this state and the builtin variables need no further protection.
std::mutex launch_mutex;
std::uint64_t current_seed = 0;
std::uint64_t launches_since_seed = 0;
std::uint64_t launches = 0;
Grid* active_grid = nullptr;
std::atomic<std::thread::id> active_host_thread;  // the default id is no running thread's

// Stacks are kept between launches: mapping them takes longer than a small kernel.
Fiber& pooled_fiber(std::size_t index) {
  static std::vector<std::unique_ptr<Fiber>> pool;
  while (pool.size() <= index) pool.push_back(std::make_unique<Fiber>());
  return *pool[index];
}

bool inside_kernel() { return active_host_thread.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

Grid& grid_of_caller(const char* intrinsic) {
  if (!inside_kernel()) {
    throw Error(std::string(intrinsic) + " was called outside a kernel");
  }
  return *active_grid;
}

Grid::Grid(const LaunchConfiguration& configuration, const std::function<void()>& thread_body, std::uint64_t seed,
           std::uint64_t launches_since_seed)
    : configuration_(configuration),
      thread_body_(thread_body),
      seed_(seed),
      launches_since_seed_(launches_since_seed),
      random_(Random(seed).next() + launches_since_seed),
      // Exactly what was asked for, on the heap: AddressSanitizer then sees an access past its end.
      dynamic_shared_(new unsigned char[configuration.dynamic_shared_bytes]),
      threads_(volume(configuration.block)) {
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    threads_[i].grid = this;
    threads_[i].fiber = &pooled_fiber(i);
    threads_[i].index = unflatten(i, configuration_.block);
  }
  runnable_.reserve(threads_.size());
}

void Grid::run() {
  builtin::grid_dim = configuration_.grid;
  builtin::block_dim = configuration_.block;

  std::vector<std::uint64_t> order(volume(configuration_.grid));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::swap(order[i], order[i + random_.next() % (order.size() - i)]);
    builtin::block_index = unflatten(order[i], configuration_.grid);
    run_block();
    if (i > 0) continue;
    const std::size_t static_bytes = static_shared_.written_bytes();
    if (static_bytes > kMaxStaticSharedBytes || static_bytes + configuration_.dynamic_shared_bytes > kMaxSharedBytes) {
      throw Error("too much shared memory: the kernel wrote " + std::to_string(static_bytes) +
                  " bytes of static shared memory and the launch asked for " +
                  std::to_string(configuration_.dynamic_shared_bytes) + " dynamic bytes; the limits are " +
                  std::to_string(kMaxStaticSharedBytes) + " static and " + std::to_string(kMaxSharedBytes) +
                  " in total");
    }
  }
}

void Grid::run_block() {
  static_shared_.poison();
  std::memset(dynamic_shared_.get(), kPoison, configuration_.dynamic_shared_bytes);
  exited_ = at_barrier_ = 0;
  predicates_arriving_ = 0;
  fruitless_switches_ = 0;
  runnable_.clear();
  for (auto& thread : threads_) {
    thread.started = false;
    make_runnable(thread);
  }

  try {
    while (!runnable_.empty()) {
      const auto chosen = random_.below(static_cast<std::uint32_t>(runnable_.size()));
      CudaThread& thread = *runnable_[chosen];
      runnable_[chosen] = runnable_.back();
      runnable_.pop_back();
      run_thread(thread);
      if (failure_) std::rethrow_exception(failure_);
    }
    if (exited_ < threads_.size()) report_stall();
  } catch (...) {
    // Not cancelled in this handler: the exceptions that unwind the fibers must not nest in the one being handled.
    failure_ = std::current_exception();
  }
  if (failure_) {
    cancel();
    std::rethrow_exception(failure_);
  }
}

void Grid::run_thread(CudaThread& thread) {
  running_ = &thread;
  builtin::thread_index = thread.index;
  if (!thread.started) {
    thread.started = true;
    thread.fiber->start(
        [](void* thread) {
          auto& self = *static_cast<CudaThread*>(thread);
          self.grid->live_through(self);
        },
        &thread);
  }
  thread.fiber->resume();
}

void Grid::live_through(CudaThread& thread) {
  try {
    thread_body_();
  } catch (const Cancelled&) {
  } catch (...) {
    if (!cancelled_) failure_ = std::current_exception();
  }
  thread.activity = Activity::kExited;
  ++exited_;
  fruitless_switches_ = 0;
}

void Grid::cancel() {
  cancelled_ = true;
  for (auto& thread : threads_) {
    if (thread.started && thread.activity != Activity::kExited) run_thread(thread);
  }
}

void Grid::make_runnable(CudaThread& thread) {
  thread.activity = Activity::kRunnable;
  runnable_.push_back(&thread);
}

void Grid::wait() {
  if (!cancelled_) running_->fiber->suspend();
  if (cancelled_) throw Cancelled{};  // also where a kernel caught the first one and goes on
}

unsigned Grid::block_barrier(const CallSite& site, bool predicate) {
  running_->activity = Activity::kAtBlockBarrier;
  running_->site = site;
  predicates_arriving_ += predicate;
  if (++at_barrier_ == threads_.size()) {
    for (const auto& thread : threads_) {
      if (thread.site != site) {
        fail(site, "divergent barrier: another thread of the block, " + to_string(thread.index) + ", is at " +
                       to_string(thread.site) + "\n" + whereabouts());
      }
    }
    predicates_at_last_barrier_ = predicates_arriving_;
    predicates_arriving_ = 0;
    at_barrier_ = 0;
    fruitless_switches_ = 0;
    for (auto& thread : threads_) make_runnable(thread);
  }
  wait();
  return predicates_at_last_barrier_;  // still ours: the next barrier cannot complete before this thread reaches it
}

CudaThread* Grid::neighbour(const CudaThread& thread, int lane) {
  const std::size_t index = (&thread - threads_.data()) / kWarpSize * kWarpSize + lane;
  return index < threads_.size() ? &threads_[index] : nullptr;
}

// Whether all lanes named by the thread's mask wait at the same operation with the same mask.
bool Grid::has_met(const CudaThread& thread) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!(thread.mask >> lane & 1)) continue;
    const CudaThread* other = neighbour(thread, lane);
    if (other == nullptr || other->activity != Activity::kAtWarpCollective || other->mask != thread.mask ||
        other->site != thread.site) {
      return false;
    }
  }
  return true;
}

std::uint64_t Grid::warp_collective(const CallSite& site, unsigned mask, LaneOperand operand, Resolve resolve) {
  CudaThread& self = *running_;
  self.activity = Activity::kAtWarpCollective;
  self.site = site;
  self.mask = mask;
  self.operand = operand;
  if (!(mask >> lane(self) & 1)) {
    fail(site, "the calling lane " + std::to_string(lane(self)) + " is not in its own mask " + to_hex(mask));
  }

  if (has_met(self)) {
    // The last lane resolves the operation for all of them. A lane that continues may overwrite its operand at once.
    Rendezvous rendezvous{site, mask, {}};
    for (int l = 0; l < kWarpSize; ++l) {
      if (rendezvous.contains(l)) rendezvous.operands[l] = &neighbour(self, l)->operand;
    }
    for (int l = 0; l < kWarpSize; ++l) {
      if (!rendezvous.contains(l)) continue;
      CudaThread& thread = *neighbour(self, l);
      running_ = &thread;  // so that a complaint names the lane it is about
      thread.result = resolve(rendezvous, l);
    }
    running_ = &self;
    fruitless_switches_ = 0;
    for (int l = 0; l < kWarpSize; ++l) {
      if (rendezvous.contains(l)) make_runnable(*neighbour(self, l));
    }
  }
  wait();
  return self.result;
}

void Grid::interleave(const CallSite& site) {
  if (random_.below(4) != 0) return;
  if (++fruitless_switches_ > kMaxFruitlessSwitches) {
    fail(site,
         "livelock: threads keep polling and none gets past a barrier or ends. A block cannot wait for another "
         "block here, and on the device only when both are resident\n" +
             whereabouts());
  }
  running_->site = site;
  make_runnable(*running_);
  wait();
}

void Grid::fail(const CudaThread& thread, const CallSite& site, const std::string& message) const {
  std::ostringstream text;
  text << to_string(site) << ": " << message << (message.ends_with('\n') ? "" : "\n") << "  in "
       << site.where.function_name() << "\n"
       << "  thread " << to_string(thread.index) << " of block " << to_string(builtin::block_index)
       << ", launched as grid " << to_string(configuration_.grid) << " x block " << to_string(configuration_.block)
       << " with " << configuration_.dynamic_shared_bytes << " bytes of dynamic shared memory\n"
       << "  launch " << launches_since_seed_ << " after set_seed(" << seed_ << ")";
  throw Error(text.str());
}

// No thread can run and some have not ended. Names the most specific reason it can find.
void Grid::report_stall() {
  const auto all = whereabouts();
  for (const auto& thread : threads_) {
    if (thread.activity != Activity::kAtWarpCollective) continue;
    for (int l = 0; l < kWarpSize; ++l) {
      if (!(thread.mask >> l & 1)) continue;
      const std::string subject =
          "divergent warp: the mask " + to_hex(thread.mask) + " names lane " + std::to_string(l);
      const CudaThread* other = neighbour(thread, l);
      if (other == nullptr) {
        fail(thread, thread.site,
             subject + ", which does not exist: the last warp of this block has " +
                 std::to_string(threads_.size() % kWarpSize) + " threads\n" + all);
      }
      if (other->activity == Activity::kExited) {
        fail(thread, thread.site, subject + ", which has exited\n" + all);
      }
      if (other->activity == Activity::kAtBlockBarrier) {
        fail(thread, thread.site, subject + ", which waits at " + to_string(other->site) + "\n" + all);
      }
      if (other->site != thread.site) {
        fail(thread, thread.site, subject + ", which is at " + to_string(other->site) + "\n" + all);
      }
      if (other->mask != thread.mask) {
        fail(thread, thread.site, subject + ", which is there with another mask, " + to_hex(other->mask) + "\n" + all);
      }
    }
  }
  const auto waiting = std::find_if(threads_.begin(), threads_.end(), [](const CudaThread& thread) {
    return thread.activity == Activity::kAtBlockBarrier;
  });
  if (exited_ > 0) {
    const auto gone = std::find_if(threads_.begin(), threads_.end(),
                                   [](const CudaThread& thread) { return thread.activity == Activity::kExited; });
    fail(*waiting, waiting->site,
         "divergent barrier: thread " + to_string(gone->index) + " exited without reaching it\n" + all);
  }
  fail(*waiting, waiting->site, "deadlock: no thread of the block can continue\n" + all);
}

// Where all threads of the block are, those at the same place in one line.
std::string Grid::whereabouts() const {
  std::map<std::string, std::vector<const CudaThread*>> places;
  for (const auto& thread : threads_) {
    std::string place;
    switch (thread.activity) {
      case Activity::kRunnable:
        place = thread.started ? "able to run, last at " + to_string(thread.site) : "not started";
        break;
      case Activity::kAtBlockBarrier:
        place = "waiting at " + to_string(thread.site);
        break;
      case Activity::kAtWarpCollective:
        place = "waiting at " + to_string(thread.site) + " with mask " + to_hex(thread.mask);
        break;
      case Activity::kExited:
        place = "exited";
        break;
    }
    places[place].push_back(&thread);
  }
  constexpr std::size_t kNamed = 4;
  std::ostringstream text;
  for (const auto& [place, threads] : places) {
    text << "    " << threads.size() << (threads.size() == 1 ? " thread " : " threads ") << place << ":";
    for (std::size_t i = 0; i < std::min(kNamed, threads.size()); ++i) text << " " << to_string(threads[i]->index);
    text << (threads.size() > kNamed ? " ...\n" : "\n");
  }
  return text.str();
}

void check_limits(const LaunchConfiguration& configuration) {
  const auto& [grid, block, dynamic_shared_bytes, argument_bytes] = configuration;
  const auto refuse = [&](const std::string& reason) {
    throw Error("invalid launch of grid " + to_string(grid) + " x block " + to_string(block) + ": " + reason);
  };
  if (volume(grid) == 0 || volume(block) == 0) refuse("no dimension may be 0");
  if (grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) refuse("a grid is at most (2147483647,65535,65535)");
  if (block.x > 1024 || block.y > 1024 || block.z > 64) refuse("a block is at most (1024,1024,64)");
  if (volume(block) > kMaxThreadsPerBlock) {
    refuse("a block has at most " + std::to_string(kMaxThreadsPerBlock) + " threads, not " +
           std::to_string(volume(block)));
  }
  if (dynamic_shared_bytes > kMaxSharedBytes) {
    refuse(std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory exceed the limit of " +
           std::to_string(kMaxSharedBytes));
  }
  if (argument_bytes > kMaxArgumentBytes) {
    refuse(std::to_string(argument_bytes) + " bytes of kernel arguments exceed the limit of " +
           std::to_string(kMaxArgumentBytes));
  }
}

}  // namespace

void set_seed(std::uint64_t seed) {
  const std::lock_guard lock(launch_mutex);
  current_seed = seed;
  launches_since_seed = 0;
}

std::uint64_t launch_count() {
  const std::lock_guard lock(launch_mutex);
  return launches;
}

void reset_launch_count() {
  const std::lock_guard lock(launch_mutex);
  launches = 0;
}

void run_grid(const LaunchConfiguration& configuration, const std::function<void()>& thread_body) {
  if (inside_kernel()) throw Error("a kernel cannot launch a kernel");
  const std::lock_guard lock(launch_mutex);
  check_limits(configuration);
  ++launches;
  ++launches_since_seed;

  std::exception_ptr failure;
  std::thread host_thread([&] {
    try {
      Grid grid(configuration, thread_body, current_seed, launches_since_seed);
      active_grid = &grid;
      active_host_thread = std::this_thread::get_id();
      grid.run();
    } catch (...) {
      failure = std::current_exception();
    }
    active_host_thread = std::thread::id();
  });
  host_thread.join();
  if (failure) std::rethrow_exception(failure);
}

bool CallSite::operator==(const CallSite& other) const {
  // Equal strings are mostly one string.
  const auto same = [](const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; };
  return where.line() == other.where.line() && where.column() == other.where.column() &&
         same(intrinsic, other.intrinsic) && same(where.file_name(), other.where.file_name());
}

unsigned block_barrier(const CallSite& site, bool predicate) {
  return grid_of_caller(site.intrinsic).block_barrier(site, predicate);
}

std::uint64_t warp_collective(const CallSite& site, unsigned mask, LaneOperand operand, Resolve resolve) {
  return grid_of_caller(site.intrinsic).warp_collective(site, mask, operand, resolve);
}

int lane_index(const CallSite& site) { return grid_of_caller(site.intrinsic).running_lane(); }

void interleave(const CallSite& site) { grid_of_caller(site.intrinsic).interleave(site); }

void* dynamic_shared_memory() { return grid_of_caller("dynamic shared memory").dynamic_shared_memory(); }

void fail(const CallSite& site, const std::string& message) { grid_of_caller(site.intrinsic).fail(site, message); }

}  // namespace pfl::emulator
