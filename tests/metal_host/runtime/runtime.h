#pragma once

// Runs one dispatch of a kernel on the host: a fibre per GPU thread, threadgroup after threadgroup.
// The kernel is compiled by clang with -fsanitize=thread,bounds,...; this library is the runtime
// that those instrumentation calls expect, so every load, store and barrier passes through it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace metal_host {

constexpr uint32_t kSimdWidth = 32;
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kArenaBytes = 256 << 10;  // threadgroup memory and the gaps between allocations

// ---- what a kernel's launcher sees (mirrored in msl/launch.clh) ----
struct KernelArguments {
  uint64_t buffer[32];
  uint64_t threadgroup[32];
};
/// Built-in inputs by number (BUILTIN_INPUTS in transform.py), up to three components each.
struct ThreadInputs {
  uint32_t value[16][3];
};
using KernelFunction = void (*)(const KernelArguments*);

// ---- what the dispatcher passes (mirrored in dispatch.py) ----
enum class Access : int32_t { kOutput = 0, kInput = 1, kInOut = 2 };
struct BoundBuffer {
  uint64_t address;
  uint64_t bytes;
  int32_t index;
  Access access;
  uint64_t allocation;  // where its buffer begins: Metal's are page-aligned, so alignment counts
                        // from here
};
enum Option : uint32_t {
  kCheckRaces = 1,
  kStrict = 2,  // uninitialised reads, simdgroup functions that not all lanes reach
};
struct Dispatch {
  KernelFunction function;
  uint32_t threads[3];      // of the grid, as dispatchThreads counts
  uint32_t threadgroup[3];  // threads of a threadgroup
  const BoundBuffer* buffers;
  uint32_t num_buffers;
  uint32_t options;
  uint64_t threadgroup_memory[32];  // bytes of [[threadgroup(i)]]
  uint64_t threadgroup_memory_limit;
  uint64_t seed;
  uint32_t shuffle;       // 0: threadgroups, simdgroups and lanes in order, 1: shuffled by the seed
  float fuzz;             // relative error of fast:: functions
  uint64_t max_accesses;  // a dispatch that makes more is stopped as a runaway; 0: no limit
};
struct Statistics {
  uint64_t switches;
  uint64_t accesses;
  uint64_t aborted;
};

// ---- state of a dispatch ----
enum class State : uint8_t {
  kReady,
  kInSimdFunction,
  kInThreadgroupBarrier,
  kInSimdBarrier,
  kDone
};

/// When a fibre touched memory of one kind. From the highest bit: its threadgroup, the threadgroup
/// barriers and the simdgroup barriers that it had passed, its thread + 1. Packed, since every byte
/// of every access compares two of them.
using Stamp = uint64_t;
constexpr int kSimdBarriersAt = 11;
constexpr int kBarriersAt = kSimdBarriersAt + 16;
constexpr int kGroupAt = kBarriersAt + 16;
constexpr uint32_t kMostGroups = 1u << (64 - kGroupAt);
constexpr Stamp kThreadMask = (Stamp{1} << kSimdBarriersAt) - 1;  // itself: several threads
constexpr Stamp kSimdBarrier = Stamp{1} << kSimdBarriersAt;
constexpr Stamp kBarrier = Stamp{1} << kBarriersAt;

struct Fiber {
  void* stack_pointer;
  uintptr_t stack_begin;
  State state;
  uint32_t thread, lane, simdgroup;
  Stamp threadgroup_memory, device_memory;
  // What a waiting fibre waits for.
  uint64_t site;
  const void* published;
  void* collected;
  uint32_t value_bytes;
  uint32_t barrier_flags;
  uint64_t participants;
  ThreadInputs inputs;
};

/// Last writer and reader of one byte, 0: nobody.
struct ByteHistory {
  Stamp written, read;
};

/// Histories of a buffer's bytes, in pages that exist from the first access on: a KV pool is large
/// and a dispatch touches little of it.
struct HistoryPage {
  static constexpr size_t kBytes = 4096;
  ByteHistory history[kBytes] = {};
  uint8_t written[kBytes];
  explicit HistoryPage(bool written_before);
};

struct Region {
  uintptr_t begin, end;
  int index;
  Access access;
  uintptr_t allocation;
  std::vector<std::unique_ptr<HistoryPage>> pages;  // empty for inputs

  HistoryPage& page(size_t offset);
};

struct Issue {
  std::string kind;
  std::string text;
  uint64_t address;  // in the kernel's code
};

struct Machine {
  Dispatch job;
  KernelArguments arguments;
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;  // nullptr in the scheduler
  void* scheduler_stack_pointer = nullptr;
  std::vector<Region> regions;
  std::array<uint32_t, 64> likely_region = {};             // by the access's place in the code
  std::vector<std::pair<uintptr_t, uintptr_t>> constants;  // the kernel library's own segments
  uintptr_t code_base = 0;
  uint32_t group_position[3] = {};
  uint32_t group_index = 0;

  uint8_t* arena = nullptr;
  size_t arena_used = kArenaBytes;  // all of it gets poisoned before its first use
  std::vector<ByteHistory> arena_history = std::vector<ByteHistory>(kArenaBytes);
  std::vector<uint8_t> arena_written = std::vector<uint8_t>(kArenaBytes);
  std::vector<uint8_t> arena_allocated = std::vector<uint8_t>(kArenaBytes);
  std::map<uint64_t, uint64_t> arena_blocks;  // (id, size) -> address

  std::vector<Issue> issues;
  std::set<std::string> reported;
  bool aborted = false;
  std::mt19937_64 random;
  Statistics statistics = {};

  bool on(Option o) const { return (job.options & o) != 0; }
};
extern Machine machine;

void report(const char* kind, uint64_t address, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
/// Hands control back to the scheduler.
void yield_fiber();
/// Ends the dispatch from inside a fibre; does not return.
[[noreturn]] void abort_dispatch();
/// Checks one access of the current fibre. `address` is the code's.
void check_access(uintptr_t p, size_t bytes, bool write, uint64_t address, bool aligned = false);
/// Whether an address would be aligned on a GPU, where buffers begin at page boundaries.
bool is_aligned(uintptr_t p, size_t alignment);
uint64_t allocate_threadgroup_memory(uint32_t id, uint64_t bytes);
/// Makes `fiber` ready to run the kernel from its start.
void start_fiber(Fiber& fiber);
void run_fiber(Fiber& fiber);
/// Runs `num_threads` fibres of one threadgroup to their end.
void run_threadgroup(uint32_t num_threads);

}  // namespace metal_host
