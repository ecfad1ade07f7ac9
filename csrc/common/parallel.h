#pragma once

#include <cstddef>
#include <type_traits>

namespace mlxcel {

/// Threads that parallel_for uses: by default the cores this process may run on (affinity mask and
/// cgroup quota), at most 64.
int num_threads();
void set_num_threads(int n);

/// While one exists, threads that wait for work or for each other look for it up to 15 us before
/// they block, and let other threads of the machine go first meanwhile (yield). For a chain of
/// short parallel_for, as the layers of a small model are: waking a thread takes as long as one of
/// them. Two threads through 150 jobs of 40 us, with 13 busy threads on the two cores: 24 ms
/// instead of 28, and 8.1 ms of CPU time instead of 8.8.
class KeepAwake {
 public:
  KeepAwake();
  ~KeepAwake();
  KeepAwake(const KeepAwake&) = delete;
  KeepAwake& operator=(const KeepAwake&) = delete;
};

namespace detail {
using Body = void (*)(void* context, size_t begin, size_t end);
void parallel_for(size_t n, size_t grain, Body body, void* context);
void parallel_tasks(size_t n, Body body, void* context);
}  // namespace detail

/// Calls fn(begin, end) over disjoint ranges that cover [0, n); ranges hold at least `grain` items.
/// The caller works too and returns when all is done. Workers block between calls: cores are shared
/// with other processes, where a spinning barrier costs whole time slices. Calls nest: an inner
/// call runs on the calling thread alone. An exception of fn is rethrown here.
template <class Fn>
void parallel_for(size_t n, size_t grain, Fn&& fn) {
  detail::parallel_for(
      n, grain,
      [](void* context, size_t begin, size_t end) {
        (*static_cast<std::remove_reference_t<Fn>*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

/// The same for items that take very different times: each is a range of its own.
template <class Fn>
void parallel_tasks(size_t n, Fn&& fn) {
  detail::parallel_tasks(
      n,
      [](void* context, size_t begin, size_t end) {
        (*static_cast<std::remove_reference_t<Fn>*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace mlxcel
