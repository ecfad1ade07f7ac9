// Which fibre runs next, and what barriers and simdgroup functions wait for.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.h"

extern "C" uint64_t mtlh_fc_table[256];

namespace metal_host {
namespace {

enum MemoryFlag : uint32_t { kDeviceMemory = 1, kThreadgroupMemory = 2 };

unsigned long line_of(uint64_t site) {
  return static_cast<unsigned long>(site >> 12);
}

bool waits_for_simdgroup(const Fiber& f) {
  return f.state == State::kInSimdFunction || f.state == State::kInSimdBarrier;
}

/// No lane of the simdgroup can run: releases those that wait at its lowest call site. Returns
/// false where none waits in a simdgroup function.
bool release_simdgroup(Fiber* lanes, uint32_t n) {
  Fiber* first = nullptr;
  uint32_t returned = 0, in_barrier = 0;
  bool same_site = true;
  for (uint32_t i = 0; i < n; ++i) {
    Fiber& f = lanes[i];
    returned += f.state == State::kDone;
    in_barrier += f.state == State::kInThreadgroupBarrier;
    if (!waits_for_simdgroup(f)) continue;
    if (first != nullptr && f.site != first->site) same_site = false;
    if (first == nullptr || f.site < first->site) first = &f;
  }
  if (first == nullptr) return false;
  const uint64_t site = first->site;
  const State kind = first->state;
  if ((!same_site || returned || in_barrier) && machine.on(kStrict)) {
    machine.current = first;
    report("simd-divergence", site,
           "simdgroup function at line %lu is not reached by all lanes of the simdgroup (%u "
           "returned, %u in a threadgroup barrier, %s)",
           line_of(site), returned, in_barrier, same_site ? "rest here" : "others at another call");
    machine.current = nullptr;
  }
  uint64_t participants = 0;
  for (uint32_t i = 0; i < n; ++i) {
    if (lanes[i].state == kind && lanes[i].site == site) participants |= uint64_t{1} << i;
  }
  const auto each = [&](auto&& act) {
    for (uint32_t i = 0; i < n; ++i) {
      if (participants >> i & 1) act(lanes[i], i);
    }
  };
  if (kind == State::kInSimdFunction) {
    constexpr uint32_t kMostBytes = 64;
    const uint32_t bytes = first->value_bytes;
    uint8_t all[kSimdWidth * kMostBytes];
    memset(all, 0xff, sizeof all);
    each([&](Fiber& f, uint32_t i) { memcpy(all + i * bytes, f.published, bytes); });
    each([&](Fiber& f, uint32_t) { memcpy(f.collected, all, kSimdWidth * bytes); });
  }
  each([&](Fiber& f, uint32_t) {
    f.participants = participants;
    f.state = State::kReady;
    if (kind == State::kInSimdFunction) return;
    if (f.barrier_flags & kThreadgroupMemory) f.threadgroup_memory += kSimdBarrier;
    if (f.barrier_flags & kDeviceMemory) f.device_memory += kSimdBarrier;
  });
  return true;
}

/// Runs the ready lanes of a simdgroup until all wait or are done. Returns whether any ran.
bool run_simdgroup(Fiber* lanes, uint32_t n) {
  const bool shuffle = machine.job.shuffle != 0;
  bool progress = false;
  for (;;) {
    const uint32_t start = shuffle ? machine.random() % n : 0;
    const uint32_t step = shuffle && (machine.random() & 1) ? n - 1 : 1;
    for (uint32_t k = 0; k < n; ++k) {
      Fiber& f = lanes[(start + k * step) % n];
      if (f.state != State::kReady) continue;
      run_fiber(f);
      progress = true;
      if (machine.aborted) return true;
    }
    if (!release_simdgroup(lanes, n)) return progress;
    progress = true;
    if (shuffle && machine.random() % 4 == 0) return true;  // let another simdgroup run ahead
  }
}

/// Every fibre waits at a threadgroup barrier or has returned: checks that all are at one barrier
/// and opens it.
void open_threadgroup_barrier(uint32_t n, uint32_t waiting, uint32_t returned) {
  const auto in_barrier = [](const Fiber& f) { return f.state == State::kInThreadgroupBarrier; };
  const auto begin = machine.fibers.begin(), end = begin + n;
  Fiber& first = *std::find_if(begin, end, in_barrier);
  machine.current = &first;
  if (returned != 0) {
    report("barrier-divergence", first.site,
           "threadgroup_barrier at line %lu: %u threads wait, %u have returned",
           line_of(first.site), waiting, returned);
  }
  for (auto f = begin; f != end; ++f) {
    if (!in_barrier(*f) || f->site == first.site) continue;
    report("barrier-divergence", first.site,
           "threads wait at different barriers: line %lu and line %lu", line_of(first.site),
           line_of(f->site));
    break;
  }
  machine.current = nullptr;
  for (auto f = begin; f != end; ++f) {
    if (!in_barrier(*f)) continue;
    f->state = State::kReady;
    if (f->barrier_flags & kThreadgroupMemory) f->threadgroup_memory += kBarrier;
    if (f->barrier_flags & kDeviceMemory) f->device_memory += kBarrier;
  }
}

/// The loaded segments of the kernel's library: constants and string literals live there.
int collect_segments(struct dl_phdr_info* info, size_t, void* base) {
  if (info->dlpi_addr != *static_cast<uintptr_t*>(base)) return 0;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const auto& segment = info->dlpi_phdr[k];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
    machine.constants.push_back({begin, begin + segment.p_memsz});
  }
  return 0;
}

void set_inputs(Fiber& f, uint32_t thread, const uint32_t* size, const uint32_t* groups) {
  const Dispatch& job = machine.job;
  const uint32_t n = size[0] * size[1] * size[2];
  const uint32_t at[3] = {thread % size[0], thread / size[0] % size[1],
                          thread / (size[0] * size[1])};
  const uint32_t* group = machine.group_position;
  const auto vector = [&](int input, uint32_t x, uint32_t y, uint32_t z) {
    f.inputs.value[input][0] = x;
    f.inputs.value[input][1] = y;
    f.inputs.value[input][2] = z;
  };
  const uint32_t lane = thread % kSimdWidth;
  vector(0, group[0], group[1], group[2]);
  vector(1, at[0], at[1], at[2]);
  vector(2, group[0] * job.threadgroup[0] + at[0], group[1] * job.threadgroup[1] + at[1],
         group[2] * job.threadgroup[2] + at[2]);
  vector(3, size[0], size[1], size[2]);
  vector(4, groups[0], groups[1], groups[2]);
  vector(5, job.threads[0], job.threads[1], job.threads[2]);
  vector(6, thread, 0, 0);
  vector(7, thread / kSimdWidth, 0, 0);
  vector(8, lane, 0, 0);
  vector(9, (n + kSimdWidth - 1) / kSimdWidth, 0, 0);
  vector(10, kSimdWidth, 0, 0);
  vector(11, job.threadgroup[0], job.threadgroup[1], job.threadgroup[2]);
  vector(12, lane & 3, 0, 0);
  vector(13, lane >> 2, 0, 0);
}

/// The stacks stay mapped between dispatches; pages that no fibre touched cost nothing.
uintptr_t stacks_for(uint32_t threads) {
  static uint8_t* stacks = nullptr;
  static uint32_t count = 0;
  if (count < threads) {
    if (stacks != nullptr) munmap(stacks, count * kStackBytes);
    stacks = static_cast<uint8_t*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    count = threads;
  }
  return reinterpret_cast<uintptr_t>(stacks);
}

void bind_buffers() {
  for (uint32_t i = 0; i < machine.job.num_buffers; ++i) {
    const BoundBuffer& b = machine.job.buffers[i];
    machine.arguments.buffer[b.index] = b.address;
    Region r{b.address, b.address + b.bytes, b.index, b.access, b.allocation, {}};
    if (b.access != Access::kInput) {
      r.pages.resize((b.bytes + HistoryPage::kBytes - 1) / HistoryPage::kBytes);
    }
    machine.regions.push_back(std::move(r));
  }
}

void reset_machine(const Dispatch& job) {
  if (machine.arena == nullptr) {
    machine.arena = static_cast<uint8_t*>(
        mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  machine.job = job;
  machine.arguments = {};
  machine.regions.clear();
  machine.constants.clear();
  machine.issues.clear();
  machine.reported.clear();
  machine.aborted = false;
  machine.statistics = {};
  machine.random.seed(job.seed);
  machine.code_base = 0;
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(job.function), &library) != 0) {
    machine.code_base = reinterpret_cast<uintptr_t>(library.dli_fbase);
    dl_iterate_phdr(collect_segments, &machine.code_base);
  }
  const uintptr_t table = reinterpret_cast<uintptr_t>(mtlh_fc_table);
  machine.constants.push_back({table, table + sizeof mtlh_fc_table});
}

/// Fresh threadgroup memory, full of NaN.
void reset_arena() {
  const size_t used = machine.arena_used;
  memset(machine.arena, 0xff, used);
  std::fill_n(machine.arena_written.begin(), used, 0);
  std::fill_n(machine.arena_allocated.begin(), used, 0);
  std::fill_n(machine.arena_history.begin(), used, ByteHistory{});
  machine.arena_used = 0;
  machine.arena_blocks.clear();
  for (uint32_t i = 0; i < 32; ++i) {
    const uint64_t bytes = machine.job.threadgroup_memory[i];
    constexpr uint32_t kDynamic = 0x80000000u;  // apart from the ids of declared arrays
    if (bytes != 0) {
      machine.arguments.threadgroup[i] = allocate_threadgroup_memory(kDynamic + i, bytes);
    }
  }
}

std::string report_text() {
  std::string text;
  char line[160];
  for (const Issue& i : machine.issues) {
    // Call sites of MSL functions are line << 12 | column, far below any code address.
    const uint64_t offset = i.address > machine.code_base ? i.address - machine.code_base : 0;
    snprintf(line, sizeof line, "\t%lx\t", static_cast<unsigned long>(offset));
    text += i.kind + line + i.text + "\n";
  }
  if (machine.aborted) return text;
  for (const Region& r : machine.regions) {
    if (r.access != Access::kOutput) continue;
    const size_t bytes = r.end - r.begin;
    size_t written = 0;
    for (const auto& page : r.pages) {
      if (page != nullptr) written += std::count(page->written, std::end(page->written), 1);
    }
    if (written == bytes) continue;
    snprintf(line, sizeof line, "unwritten\t0\tbuffer(%d): %zu of %zu bytes were never written\n",
             r.index, bytes - written, bytes);
    text += line;
  }
  return text;
}

}  // namespace

void run_threadgroup(uint32_t num_threads) {
  std::vector<uint32_t> order((num_threads + kSimdWidth - 1) / kSimdWidth);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  for (uint32_t i = 0; i < num_threads; ++i) start_fiber(machine.fibers[i]);
  for (;;) {
    bool progress = false;
    if (machine.job.shuffle) std::shuffle(order.begin(), order.end(), machine.random);
    for (uint32_t simdgroup : order) {
      const uint32_t first = simdgroup * kSimdWidth;
      progress |= run_simdgroup(&machine.fibers[first], std::min(kSimdWidth, num_threads - first));
      if (machine.aborted) return;
    }
    uint32_t waiting = 0, returned = 0;
    for (uint32_t i = 0; i < num_threads; ++i) {
      waiting += machine.fibers[i].state == State::kInThreadgroupBarrier;
      returned += machine.fibers[i].state == State::kDone;
    }
    if (returned == num_threads) return;
    if (waiting + returned == num_threads) {
      open_threadgroup_barrier(num_threads, waiting, returned);
    } else if (!progress) {
      report("deadlock", 0, "no thread can run");
      machine.aborted = true;
      return;
    }
  }
}

static void run_dispatch() {
  const Dispatch& job = machine.job;
  const uint32_t most_threads = job.threadgroup[0] * job.threadgroup[1] * job.threadgroup[2];
  machine.fibers.resize(most_threads);
  const uintptr_t stacks = stacks_for(most_threads);
  uint32_t groups[3];
  for (int k = 0; k < 3; ++k) {
    groups[k] = (job.threads[k] + job.threadgroup[k] - 1) / job.threadgroup[k];
  }
  std::vector<uint32_t> order(groups[0] * groups[1] * groups[2]);
  if (order.size() > kMostGroups) {
    report("grid", 0, "more threadgroups than the emulation can tell apart");
    machine.aborted = true;
    return;
  }
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  if (job.shuffle) std::shuffle(order.begin(), order.end(), machine.random);
  for (uint32_t index : order) {
    uint32_t* at = machine.group_position;
    at[0] = index % groups[0];
    at[1] = index / groups[0] % groups[1];
    at[2] = index / (groups[0] * groups[1]);
    machine.group_index = index;
    uint32_t size[3];  // dispatchThreads makes smaller groups at the edges
    for (int k = 0; k < 3; ++k) {
      size[k] = std::min(job.threadgroup[k], job.threads[k] - at[k] * job.threadgroup[k]);
    }
    const uint32_t n = size[0] * size[1] * size[2];
    reset_arena();
    for (uint32_t i = 0; i < n; ++i) {
      Fiber& f = machine.fibers[i];
      f.stack_begin = stacks + i * kStackBytes;
      f.thread = i;
      f.lane = i % kSimdWidth;
      f.simdgroup = i / kSimdWidth;
      set_inputs(f, i, size, groups);
    }
    run_threadgroup(n);
    if (machine.aborted) return;
  }
}

}  // namespace metal_host

/// Runs one dispatch. Returns one line an issue, "kind\tcode address\ttext"; empty: all was well.
extern "C" const char* mtlh_dispatch(const metal_host::Dispatch* job,
                                     metal_host::Statistics* statistics) {
  static std::string text;
  metal_host::reset_machine(*job);
  metal_host::bind_buffers();
  metal_host::run_dispatch();
  text = metal_host::report_text();
  *statistics = metal_host::machine.statistics;
  statistics->aborted = metal_host::machine.aborted;
  return text.c_str();
}
