// Context switches. Kernels have no destructors, so an abandoned fibre needs no unwinding.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

extern "C" void mtlh_switch(void** save, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl mtlh_switch
.type mtlh_switch,@function
mtlh_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size mtlh_switch,.-mtlh_switch
)");
#else
#error "the fibre runtime is written for x86-64"
#endif

namespace metal_host {

void yield_fiber() {
  Fiber* fiber = machine.current;
  ++machine.statistics.switches;
  mtlh_switch(&fiber->stack_pointer, machine.scheduler_stack_pointer);
}

void abort_dispatch() {
  machine.aborted = true;
  machine.current->state = State::kDone;
  yield_fiber();
  abort();
}

static void fiber_entry() {
  machine.job.function(&machine.arguments);
  machine.current->state = State::kDone;
  yield_fiber();
  abort();
}

void start_fiber(Fiber& fiber) {
  constexpr int kSavedRegisters = 6;
  void** top = reinterpret_cast<void**>((fiber.stack_begin + kStackBytes) & ~uintptr_t{15});
  *--top = nullptr;  // keeps the stack 16-byte aligned at fiber_entry
  *--top = reinterpret_cast<void*>(&fiber_entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.state = State::kReady;
  fiber.threadgroup_memory = fiber.device_memory =
      Stamp{machine.group_index} << kGroupAt | (fiber.thread + 1);
}

void run_fiber(Fiber& fiber) {
  machine.current = &fiber;
  mtlh_switch(&machine.scheduler_stack_pointer, fiber.stack_pointer);
  machine.current = nullptr;
}

}  // namespace metal_host
