#include "common/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace mlxcel {
namespace {

constexpr int kMaxThreads = 64;

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  // cgroup v2: "quota period" in microseconds, or "max period".
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0) {
    cores = std::min(cores, std::max(1, static_cast<int>(std::stod(quota) / period + 0.5)));
  }
#endif
  return std::clamp(cores, 1, kMaxThreads);
}

/// One parallel_for in flight. Ranges are claimed by an atomic counter, so a late worker costs
/// nothing.
struct Job {
  detail::Body body;
  void* context;
  size_t n;
  size_t step;
  std::atomic<size_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void work() {
    for (;;) {
      const size_t begin = next.fetch_add(step, std::memory_order_relaxed);
      if (begin >= n) return;
      try {
        body(context, begin, std::min(n, begin + step));
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    }
  }
};

thread_local bool inside_parallel = false;

class Pool {
 public:
  static Pool& instance() {
    // Leaked: joining threads in a static destructor can deadlock when the interpreter exits.
    static Pool* pool = new Pool;
    return *pool;
  }

  int threads() const { return threads_.load(); }
  void set_threads(int n) { threads_.store(std::clamp(n, 1, kMaxThreads)); }

  void run(Job& job, int helpers) {
    std::unique_lock caller(caller_mutex_, std::try_to_lock);
    if (!caller.owns_lock()) {  // another thread's job holds the workers: do it alone
      job.work();
      return;
    }
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < helpers) {
        const int index = static_cast<int>(workers_.size());
        workers_.emplace_back([this, index] { loop(index); });
        workers_.back().detach();
      }
      job_ = &job;
      wanted_ = helpers;
      generation_.store(generation_ + 1);
    }
    wake_.notify_all();
    inside_parallel = true;
    job.work();
    inside_parallel = false;
    std::unique_lock lock(mutex_);
    job_ = nullptr;  // workers that have not woken yet never see this job
    const auto idle = [this] { return active_ == 0; };
    look(lock, idle);
    done_.wait(lock, idle);
  }

  std::atomic<int> keep_awake{0};

 private:
  /// Without the lock, until `found` or for as long as KeepAwake allows.
  template <class Found>
  void look(std::unique_lock<std::mutex>& lock, const Found& found) {
    if (found() || keep_awake == 0) return;
    lock.unlock();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(15);
    while (!found() && keep_awake != 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    lock.lock();
  }

  void loop(int index) {
    inside_parallel = true;
    unsigned long seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto called = [&] { return generation_ != seen; };
      look(lock, called);
      wake_.wait(lock, called);
      seen = generation_;
      Job* job = job_;
      if (job == nullptr || index >= wanted_) continue;
      active_.store(active_ + 1);
      lock.unlock();
      job->work();
      lock.lock();
      active_.store(active_ - 1);
      if (active_ == 0) done_.notify_one();
    }
  }

  std::atomic<int> threads_{usable_cores()};
  std::mutex caller_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int wanted_ = 0;
  std::atomic<int> active_{0};  // written under the lock, as is generation_
  std::atomic<unsigned long> generation_{0};
};

}  // namespace

KeepAwake::KeepAwake() {
  ++Pool::instance().keep_awake;
}

KeepAwake::~KeepAwake() {
  --Pool::instance().keep_awake;
}

int num_threads() {
  return Pool::instance().threads();
}

void set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads) {
    throw std::invalid_argument("[set_num_threads] n must be in 1.." + std::to_string(kMaxThreads) +
                                ", got " + std::to_string(n) + ".");
  }
  Pool::instance().set_threads(n);
}

namespace detail {
namespace {

int threads_for(size_t ranges) {
  return inside_parallel ? 1 : static_cast<int>(std::min<size_t>(num_threads(), ranges));
}

void run(size_t n, size_t step, int threads, Body body, void* context) {
  Job job{body, context, n, step, {}, {}, {}};
  Pool::instance().run(job, threads - 1);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace

void parallel_for(size_t n, size_t grain, Body body, void* context) {
  if (n == 0) return;
  grain = std::max<size_t>(grain, 1);
  const int threads = threads_for((n + grain - 1) / grain);
  if (threads == 1) return body(context, 0, n);
  // Four ranges a thread even out unequal work and stolen time slices.
  run(n, std::max(grain, (n + 4 * threads - 1) / (4 * threads)), threads, body, context);
}

void parallel_tasks(size_t n, Body body, void* context) {
  if (n == 0) return;
  const int threads = threads_for(n);
  if (threads == 1) return body(context, 0, n);
  run(n, 1, threads, body, context);
}

}  // namespace detail
}  // namespace mlxcel
