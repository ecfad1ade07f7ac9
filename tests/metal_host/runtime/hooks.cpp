// The functions that compiled kernels call: ThreadSanitizer's and UBSan's entry points, and those
// of the MSL library in msl/.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "runtime.h"

using metal_host::abort_dispatch;
using metal_host::check_access;
using metal_host::Fiber;
using metal_host::machine;
using metal_host::report;
using metal_host::State;

// The address of the access in the kernel's code (one byte before the return address is inside the
// call, which is what a symbolizer wants).
#define CALL_SITE (reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1)

extern "C" {

// ---- function constants: number i is the symbol mtlh_fc_<i>, which the transform gives to the MSL
// variable by an asm label ----
uint64_t mtlh_fc_table[256];
asm(R"(
.altmacro
.macro mtlh_fc n
.globl mtlh_fc_\n
.set mtlh_fc_\n, mtlh_fc_table + 8 * \n
.type mtlh_fc_\n, @object
.size mtlh_fc_\n, 8
.endm
.set i, 0
.rept 256
mtlh_fc %i
.set i, i + 1
.endr
.noaltmacro
)");

// ---- called from msl/ ----
const metal_host::ThreadInputs* mtlh_inputs() {
  return &machine.current->inputs;
}
uint64_t mtlh_lane() {
  return machine.current->lane;
}
float mtlh_fuzz(float x) {
  if (machine.job.fuzz == 0 || !std::isfinite(x)) return x;
  const int step = static_cast<int>(machine.random() % 2001) - 1000;
  return x * (1.0f + machine.job.fuzz * static_cast<float>(step) / 1000.0f);
}
/// Publishes this lane's value, waits for the simdgroup, returns all values and who took part.
uint64_t mtlh_exchange(const void* value, void* all, uint32_t bytes, uint64_t site) {
  Fiber* f = machine.current;
  f->published = value;
  f->collected = all;
  f->value_bytes = bytes;
  f->site = site;
  f->state = State::kInSimdFunction;
  metal_host::yield_fiber();
  return f->participants;
}
static void wait_at_barrier(State kind, uint32_t flags, uint64_t site) {
  Fiber* f = machine.current;
  f->barrier_flags = flags;
  f->site = site;
  f->state = kind;
  metal_host::yield_fiber();
}
void mtlh_threadgroup_barrier(uint32_t flags, uint64_t site) {
  wait_at_barrier(State::kInThreadgroupBarrier, flags, site);
}
void mtlh_simdgroup_barrier(uint32_t flags, uint64_t site) {
  wait_at_barrier(State::kInSimdBarrier, flags, site);
}
void mtlh_bad_lane(uint32_t lane, uint64_t site) {
  report("inactive-lane", site,
         "simdgroup function at line %lu reads lane %u, which does not take part",
         static_cast<unsigned long>(site >> 12), lane);
}
uint64_t mtlh_threadgroup_alloc(uint32_t id, uint64_t bytes, uint32_t) {
  return metal_host::allocate_threadgroup_memory(id, bytes);
}
void mtlh_atomic(const volatile void* p, uint32_t bytes, int write) {
  const uint32_t options = machine.job.options;
  machine.job.options &= ~metal_host::kCheckRaces;
  check_access(reinterpret_cast<uintptr_t>(p), bytes, write != 0, CALL_SITE, true);
  machine.job.options = options;
}

// ---- -fsanitize=thread ----
void __tsan_init() {}
#define ACCESS(n)                                                            \
  void __tsan_read##n(void* p) {                                             \
    check_access(reinterpret_cast<uintptr_t>(p), n, false, CALL_SITE, true); \
  }                                                                          \
  void __tsan_write##n(void* p) {                                            \
    check_access(reinterpret_cast<uintptr_t>(p), n, true, CALL_SITE, true);  \
  }                                                                          \
  void __tsan_unaligned_read##n(void* p) {                                   \
    check_access(reinterpret_cast<uintptr_t>(p), n, false, CALL_SITE);       \
  }                                                                          \
  void __tsan_unaligned_write##n(void* p) {                                  \
    check_access(reinterpret_cast<uintptr_t>(p), n, true, CALL_SITE);        \
  }                                                                          \
  void __tsan_read_write##n(void* p) {                                       \
    check_access(reinterpret_cast<uintptr_t>(p), n, false, CALL_SITE, true); \
    check_access(reinterpret_cast<uintptr_t>(p), n, true, CALL_SITE, true);  \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

static void check_range(const void* p, size_t bytes, bool write, uint64_t address) {
  for (size_t i = 0; i < bytes; i += 16) {
    check_access(reinterpret_cast<uintptr_t>(p) + i, std::min<size_t>(16, bytes - i), write,
                 address);
  }
}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  check_range(from, bytes, false, CALL_SITE);
  check_range(to, bytes, true, CALL_SITE);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  check_range(from, bytes, false, CALL_SITE);
  check_range(to, bytes, true, CALL_SITE);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  check_range(to, bytes, true, CALL_SITE);
  return memset(to, value, bytes);
}

// ---- -fsanitize=bounds,alignment,shift,...: the handlers get the source position ----
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
static void undefined(const SourceLocation* at, uint64_t address, const char* what) {
  report("undefined", address, "%s at %s:%u:%u", what, at->file ? at->file : "?", at->line,
         at->column);
}
void __ubsan_handle_out_of_bounds(SourceLocation* at, uint64_t index) {
  char text[80];
  snprintf(text, sizeof text, "index %ld is outside the array", static_cast<long>(index));
  undefined(at, CALL_SITE, text);
  abort_dispatch();
}
struct TypeMismatch {
  SourceLocation at;
  const void* type;
  uint8_t log_alignment;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uint64_t p) {
  if (metal_host::is_aligned(p, size_t{1} << data->log_alignment)) return;
  char text[80];
  snprintf(text, sizeof text, "address %lx is misaligned for its type",
           static_cast<unsigned long>(p));
  undefined(&data->at, CALL_SITE, text);
  abort_dispatch();
}
void __ubsan_handle_shift_out_of_bounds(SourceLocation* at, uint64_t, uint64_t) {
  undefined(at, CALL_SITE, "shift count is too large");
}
void __ubsan_handle_divrem_overflow(SourceLocation* at, uint64_t, uint64_t) {
  undefined(at, CALL_SITE, "division by zero");
  abort_dispatch();
}
void __ubsan_handle_add_overflow(SourceLocation* at, uint64_t, uint64_t) {
  undefined(at, CALL_SITE, "signed overflow in +");
}
void __ubsan_handle_sub_overflow(SourceLocation* at, uint64_t, uint64_t) {
  undefined(at, CALL_SITE, "signed overflow in -");
}
void __ubsan_handle_mul_overflow(SourceLocation* at, uint64_t, uint64_t) {
  undefined(at, CALL_SITE, "signed overflow in *");
}
void __ubsan_handle_negate_overflow(SourceLocation* at, uint64_t) {
  undefined(at, CALL_SITE, "signed overflow in negation");
}
void __ubsan_handle_float_cast_overflow(SourceLocation* at, uint64_t) {
  undefined(at, CALL_SITE, "float value does not fit the integer");
}
void __ubsan_handle_missing_return(SourceLocation* at) {
  undefined(at, CALL_SITE, "no value returned");
  abort_dispatch();
}
void __ubsan_handle_builtin_unreachable(SourceLocation* at) {
  undefined(at, CALL_SITE, "unreachable code reached");
  abort_dispatch();
}

// ---- libgcc 12 has no float -> bfloat16 conversion; clang expects it in xmm0 ----
double mtlh_float_to_bfloat(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  const bool nan = (u & 0x7fffffff) > 0x7f800000;
  const uint64_t bits = nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  double d;
  memcpy(&d, &bits, 8);
  return d;
}
asm(".globl __truncsfbf2\n.set __truncsfbf2, mtlh_float_to_bfloat\n");

}  // extern "C"
