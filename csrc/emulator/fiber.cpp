#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define PFL_FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PFL_FIBER_ASAN 1
#endif
#endif

#if PFL_FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace pfl::emulator {
namespace {

// Pages are committed when touched, so the size costs address space only. A kernel's frame holds its arguments (up to
// 32 KB) and sanitized frames are several times larger than optimised ones.
constexpr std::size_t kStackBytes = 256 * 1024;

std::size_t page_bytes() {
  static const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The fiber whose first resume() is under way: entry() can take no argument.
Fiber* starting = nullptr;

void announce_switch([[maybe_unused]] void** own_fake_stack, [[maybe_unused]] const void* stack,
                     [[maybe_unused]] std::size_t size) {
#if PFL_FIBER_ASAN
  __sanitizer_start_switch_fiber(own_fake_stack, stack, size);
#endif
}

void confirm_switch([[maybe_unused]] void* own_fake_stack, [[maybe_unused]] const void** previous_stack,
                    [[maybe_unused]] std::size_t* previous_size) {
#if PFL_FIBER_ASAN
  __sanitizer_finish_switch_fiber(own_fake_stack, previous_stack, previous_size);
#endif
}

}  // namespace

#if !PFL_FIBER_UCONTEXT
// swapcontext makes a system call to save the signal mask; this saves what the System V ABI calls callee-saved and
// nothing else. The floating-point control words are the same in all fibers.
extern "C" void pfl_emulator_switch_stack(void** save_stack_pointer, void* next_stack_pointer);
asm(R"(
  .text
  .p2align 4
  .hidden pfl_emulator_switch_stack
  .globl pfl_emulator_switch_stack
  .type pfl_emulator_switch_stack, @function
pfl_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pfl_emulator_switch_stack, .-pfl_emulator_switch_stack
)");
#endif

Fiber::Fiber() {
  // A guard page below the stack turns an overflow into a crash instead of a corrupted neighbour.
  void* mapping = mmap(nullptr, page_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mprotect(mapping, page_bytes(), PROT_NONE);
  stack_ = static_cast<std::byte*>(mapping) + page_bytes();
}

Fiber::~Fiber() { munmap(stack_ - page_bytes(), page_bytes() + kStackBytes); }

void Fiber::start(Body body, void* argument) {
  body_ = body;
  argument_ = argument;
#if PFL_FIBER_UCONTEXT
  getcontext(&own_context_);
  own_context_.uc_stack.ss_sp = stack_;
  own_context_.uc_stack.ss_size = kStackBytes;
  own_context_.uc_link = nullptr;
  makecontext(&own_context_, &Fiber::entry, 0);
#else
  // As if entry() had been called: six saved registers, its address for `ret`, and a null return address which keeps
  // the stack aligned as the ABI wants it at a function's first instruction.
  auto* top = reinterpret_cast<std::uintptr_t*>(stack_ + kStackBytes);
  top[-1] = 0;
  top[-2] = reinterpret_cast<std::uintptr_t>(&Fiber::entry);
  for (int saved_register = 3; saved_register <= 8; ++saved_register) top[-saved_register] = 0;
  own_stack_pointer_ = top - 8;
#endif
}

void Fiber::resume() {
  starting = this;
  announce_switch(&resumer_fake_stack_, stack_, kStackBytes);
#if PFL_FIBER_UCONTEXT
  swapcontext(&resumer_context_, &own_context_);
#else
  pfl_emulator_switch_stack(&resumer_stack_pointer_, own_stack_pointer_);
#endif
  confirm_switch(resumer_fake_stack_, nullptr, nullptr);
}

void Fiber::suspend() {
  leave(&own_fake_stack_);
  confirm_switch(own_fake_stack_, &resumer_stack_, &resumer_stack_size_);
}

void Fiber::leave(void** fake_stack) {
  announce_switch(fake_stack, resumer_stack_, resumer_stack_size_);
#if PFL_FIBER_UCONTEXT
  swapcontext(&own_context_, &resumer_context_);
#else
  pfl_emulator_switch_stack(&own_stack_pointer_, resumer_stack_pointer_);
#endif
}

void Fiber::entry() {
  Fiber* self = starting;
  confirm_switch(nullptr, &self->resumer_stack_, &self->resumer_stack_size_);
  self->body_(self->argument_);
  self->leave(nullptr);  // a null fake stack tells AddressSanitizer that this fiber ends
}

}  // namespace pfl::emulator
