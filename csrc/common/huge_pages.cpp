#include "common/huge_pages.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace mlxcel {

namespace {

constexpr uintptr_t kHuge = 2 << 20;

#if defined(__linux__)
/// The whole pages of that size within a range.
MemoryRange whole_pages(MemoryRange range, uintptr_t size) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin), end = begin + range.bytes;
  const uintptr_t first = (begin + size - 1) / size * size, last = end / size * size;
  return {reinterpret_cast<void*>(first), first < last ? last - first : 0};
}
#endif

}  // namespace

void prefer_huge_pages([[maybe_unused]] MemoryRange range) {
#if defined(__linux__)
  const MemoryRange huge = whole_pages(range, kHuge);
  if (huge.bytes > 0) madvise(huge.begin, huge.bytes, MADV_HUGEPAGE);
#endif
}

void zero_lazily(MemoryRange range) {
#if defined(__linux__)
  // Anonymous private pages, as malloc's are, read as zeros after MADV_DONTNEED.
  const MemoryRange pages = whole_pages(range, sysconf(_SC_PAGESIZE));
  if (pages.bytes > 0 && madvise(pages.begin, pages.bytes, MADV_DONTNEED) == 0) {
    char *begin = static_cast<char*>(range.begin), *first = static_cast<char*>(pages.begin);
    std::memset(begin, 0, first - begin);
    std::memset(first + pages.bytes, 0, begin + range.bytes - (first + pages.bytes));
    return;
  }
#endif
  std::memset(range.begin, 0, range.bytes);
}

void collapse_into_huge_pages([[maybe_unused]] std::span<const MemoryRange> ranges) {
#if defined(__linux__)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
  std::map<uintptr_t, size_t> filled;  // bytes of each huge page that the ranges take
  for (const MemoryRange& range : ranges) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin), end = begin + range.bytes;
    for (uintptr_t page = begin / kHuge * kHuge; page < end; page += kHuge) {
      filled[page] += std::min(end, page + kHuge) - std::max(begin, page);
    }
  }
  for (const auto& [page, bytes] : filled) {
    if (bytes >= kHuge / 2) madvise(reinterpret_cast<void*>(page), kHuge, MADV_COLLAPSE);
  }
#endif
}

}  // namespace mlxcel
