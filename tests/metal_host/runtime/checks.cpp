// What every load and store is checked for: bounds, read-only inputs, alignment, uninitialised
// memory, races.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace metal_host {

Machine machine;

HistoryPage::HistoryPage(bool written_before) {
  memset(written, written_before, sizeof written);
}

HistoryPage& Region::page(size_t offset) {
  auto& p = pages[offset / HistoryPage::kBytes];
  if (p == nullptr) p = std::make_unique<HistoryPage>(access == Access::kInOut);
  return *p;
}

void report(const char* kind, uint64_t address, const char* format, ...) {
  constexpr size_t kMostIssues = 200;
  char key[64];
  snprintf(key, sizeof key, "%s@%lx", kind, static_cast<unsigned long>(address));
  if (machine.issues.size() > kMostIssues || !machine.reported.insert(key).second) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const uint32_t* g = machine.group_position;
  const Fiber* f = machine.current;
  char where[160];
  snprintf(where, sizeof where, " [threadgroup (%u,%u,%u) thread %u simdgroup %u lane %u]", g[0],
           g[1], g[2], f ? f->thread : 0, f ? f->simdgroup : 0, f ? f->lane : 0);
  machine.issues.push_back({kind, std::string(text) + where, address});
}

namespace {

const char* verb(bool write) {
  return write ? "write" : "read";
}

int thread_of(Stamp s) {
  return (s & kThreadMask) == kThreadMask ? -1 : static_cast<int>(s & kThreadMask) - 1;
}

/// Whether nothing separates the current fibre's access, at `now`, from one at `then`.
inline bool unordered(Stamp now, Stamp then) {
  if (then == 0 || then == now) return false;
  const Stamp differs = now ^ then;
  if (differs >> kGroupAt) return true;  // nothing orders threadgroups
  if (differs >> kBarriersAt || !(differs & kThreadMask)) return false;
  const int other = thread_of(then);
  const bool same_simdgroup = other >= 0 && other / static_cast<int>(kSimdWidth) ==
                                                thread_of(now) / static_cast<int>(kSimdWidth);
  return !same_simdgroup || differs >> kSimdBarriersAt == 0;
}

/// `buffer`: index of the buffer, or kArena. Names are made only for reports: this runs at every
/// access.
constexpr int kArena = -1;

std::string name_of(int buffer) {
  return buffer == kArena ? "threadgroup memory" : "buffer(" + std::to_string(buffer) + ")";
}

void report_race(Stamp then, bool write, bool written, uint64_t address, int buffer,
                 size_t offset) {
  report("race", address,
         "%s of %s+%zu races with a %s by thread %d of threadgroup #%u (no barrier between)",
         verb(write), name_of(buffer).c_str(), offset, verb(written), thread_of(then),
         static_cast<uint32_t>(then >> kGroupAt));
}

void check_race(ByteHistory* h, size_t bytes, bool write, Stamp now, uint64_t address, int buffer,
                size_t offset) {
  bool told = false;
  for (size_t i = 0; i < bytes; ++i, ++h) {
    const bool after_write = unordered(now, h->written);
    if ((after_write || (write && unordered(now, h->read))) && !told) {
      report_race(after_write ? h->written : h->read, write, after_write, address, buffer,
                  offset + i);
      told = true;
    }
    if (write) {
      h->written = now;
    } else {
      const bool another_reader =
          h->read != 0 && h->read != now && (now ^ h->read) >> kSimdBarriersAt == 0;
      h->read = another_reader ? now | kThreadMask : now;
    }
  }
}

void check_arena(size_t offset, size_t bytes, bool write, uint64_t address) {
  for (size_t i = 0; i < bytes; ++i) {
    if (offset + i < kArenaBytes && machine.arena_allocated[offset + i]) continue;
    report("out-of-bounds", address, "%s of %zu bytes outside threadgroup memory (arena+%zu)",
           verb(write), bytes, offset);
    abort_dispatch();
  }
  if (write) {
    memset(&machine.arena_written[offset], 1, bytes);
  } else if (machine.on(kStrict) && memchr(&machine.arena_written[offset], 0, bytes) != nullptr) {
    report("uninitialised", address,
           "read of threadgroup memory that no thread has written (arena+%zu)", offset);
  }
  if (machine.on(kCheckRaces)) {
    check_race(&machine.arena_history[offset], bytes, write, machine.current->threadgroup_memory,
               address, kArena, offset);
  }
}

/// The region of an access, or nullptr. An access in the code mostly meets the same one again.
Region* find_region(uintptr_t p, size_t bytes, uint64_t address) {
  auto& regions = machine.regions;
  const auto inside = [&](const Region& r) { return p >= r.begin && p + bytes <= r.end; };
  uint32_t& likely = machine.likely_region[address / 8 % machine.likely_region.size()];
  if (likely < regions.size() && inside(regions[likely])) return &regions[likely];
  const auto found = std::find_if(regions.begin(), regions.end(), inside);
  if (found == regions.end()) return nullptr;
  likely = static_cast<uint32_t>(found - regions.begin());
  return &*found;
}

void check_region(Region& r, uintptr_t p, size_t bytes, bool write, uint64_t address,
                  bool aligned) {
  const size_t offset = p - r.begin;
  if (write && r.access == Access::kInput) {
    report("read-only", address, "write to buffer(%d), which is bound as an input", r.index);
    abort_dispatch();
  }
  if (aligned && (p - r.allocation) % bytes != 0) {
    report("misaligned", address, "%s of %zu bytes at buffer(%d)+%zu is not aligned", verb(write),
           bytes, r.index, offset);
  }
  for (size_t done = 0; done < bytes && !r.pages.empty();) {
    HistoryPage& page = r.page(offset + done);
    const size_t at = (offset + done) % HistoryPage::kBytes;
    const size_t n = std::min(bytes - done, HistoryPage::kBytes - at);
    if (write) {
      memset(&page.written[at], 1, n);
    } else if (machine.on(kStrict) && memchr(&page.written[at], 0, n) != nullptr) {
      report("uninitialised", address, "read of output buffer(%d)+%zu before any write", r.index,
             offset);
    }
    if (machine.on(kCheckRaces)) {
      check_race(&page.history[at], n, write, machine.current->device_memory, address, r.index,
                 offset + done);
    }
    done += n;
  }
}

[[noreturn]] void report_stray(uintptr_t p, size_t bytes, bool write, uint64_t address) {
  const Region* nearest = nullptr;
  uintptr_t distance = UINTPTR_MAX;
  for (const Region& r : machine.regions) {
    const uintptr_t d = p < r.begin ? r.begin - p : p >= r.end ? p - r.end : 0;
    if (d < distance) distance = d, nearest = &r;
  }
  if (nearest != nullptr) {
    report("out-of-bounds", address, "%s of %zu bytes %lu bytes %s buffer(%d) of %zu bytes",
           verb(write), bytes, static_cast<unsigned long>(distance),
           p < nearest->begin ? "before" : "past the end of", nearest->index,
           static_cast<size_t>(nearest->end - nearest->begin));
  } else {
    report("out-of-bounds", address, "%s of %zu bytes at %p", verb(write), bytes,
           reinterpret_cast<void*>(p));
  }
  abort_dispatch();
}

}  // namespace

void check_access(uintptr_t p, size_t bytes, bool write, uint64_t address, bool aligned) {
  const Fiber* f = machine.current;
  if (f == nullptr || p - f->stack_begin < kStackBytes) return;
  if (++machine.statistics.accesses == machine.job.max_accesses) {
    report("runaway", address, "the dispatch made %lu accesses and goes on",
           static_cast<unsigned long>(machine.job.max_accesses));
    abort_dispatch();
  }
  const size_t arena_offset = p - reinterpret_cast<uintptr_t>(machine.arena);
  if (arena_offset < kArenaBytes) return check_arena(arena_offset, bytes, write, address);
  if (Region* r = find_region(p, bytes, address))
    return check_region(*r, p, bytes, write, address, aligned);
  if (!write) {
    for (const auto& [begin, end] : machine.constants) {
      if (p >= begin && p < end) return;
    }
  }
  report_stray(p, bytes, write, address);
}

bool is_aligned(uintptr_t p, size_t alignment) {
  const Region* r = find_region(p, 1, 0);
  return (p - (r == nullptr ? 0 : r->allocation)) % alignment == 0;
}

uint64_t allocate_threadgroup_memory(uint32_t id, uint64_t bytes) {
  constexpr size_t kGap = 32;  // unallocated bytes between allocations catch overruns
  const uint64_t key = uint64_t{id} << 32 | bytes;
  if (auto it = machine.arena_blocks.find(key); it != machine.arena_blocks.end()) return it->second;
  const size_t offset = (machine.arena_used + kGap + 15) & ~size_t{15};
  if (offset + bytes > kArenaBytes) {
    report("threadgroup-memory", id, "more threadgroup memory than the emulation has");
    machine.aborted = true;
    if (machine.current != nullptr) abort_dispatch();
    return 0;
  }
  machine.arena_used = offset + bytes;
  memset(&machine.arena_allocated[offset], 1, bytes);
  const uint64_t address = reinterpret_cast<uint64_t>(machine.arena + offset);
  machine.arena_blocks[key] = address;
  size_t used = 0;
  for (const auto& [k, unused] : machine.arena_blocks)
    used += ((k & 0xffffffff) + 15) & ~size_t{15};
  if (used > machine.job.threadgroup_memory_limit) {
    report("threadgroup-memory", id, "uses %zu bytes of threadgroup memory, the limit is %lu", used,
           static_cast<unsigned long>(machine.job.threadgroup_memory_limit));
  }
  return address;
}

}  // namespace metal_host
