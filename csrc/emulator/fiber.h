// A fiber: a call stack of its own which runs until it suspends, and continues there when resumed.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(PFL_EMULATOR_UCONTEXT)
#define PFL_FIBER_UCONTEXT 1
#include <ucontext.h>
#endif

namespace pfl::emulator {

class Fiber {
 public:
  using Body = void (*)(void* argument);  // must not let an exception escape

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Prepares body to run from its beginning at the next resume(). The fiber must not be suspended in another body.
  void start(Body body, void* argument);

  // Runs the fiber until it suspends or ends.
  void resume();

  // Called on the fiber itself: returns control to whoever resumed it.
  void suspend();

 private:
  static void entry();
  void leave(void** fake_stack);

  std::byte* stack_;  // lowest usable address, above the guard page
  Body body_ = nullptr;
  void* argument_ = nullptr;

#if PFL_FIBER_UCONTEXT
  ucontext_t own_context_, resumer_context_;
#else
  void* own_stack_pointer_ = nullptr;
  void* resumer_stack_pointer_ = nullptr;
#endif

  // What AddressSanitizer has to be told at each switch; unused in other builds.
  void* own_fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  std::size_t resumer_stack_size_ = 0;
};

}  // namespace pfl::emulator
