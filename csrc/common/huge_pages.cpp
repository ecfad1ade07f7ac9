#include "common/huge_pages.h"

#include <algorithm>
#include <cstdint>
#include <map>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mlxcel {

namespace {

constexpr uintptr_t kHuge = 2 << 20;

}  // namespace

void prefer_huge_pages([[maybe_unused]] MemoryRange range) {
#if defined(__linux__)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin), end = begin + range.bytes;
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = end / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
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
