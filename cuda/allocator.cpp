#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "encoder.h"
#include "mlx/memory.h"

namespace mlxcel::cuda {
namespace {

using mx::cu::CudaBuffer;

/// Buffers that wait for reuse on one stream. Work on a stream runs in order, so a buffer may be
/// handed out again while kernels that use it are still queued.
class StreamPool {
 public:
  CudaBuffer* take(size_t bytes, int device, cudaStream_t stream) {
    const size_t size = size_class(bytes);
    {
      std::lock_guard lock(mutex_);
      auto& free = free_[size];
      if (!free.empty()) {
        CudaBuffer* buffer = free.back();
        free.pop_back();
        cached_bytes_ -= size;
        return buffer;
      }
    }
    void* data = nullptr;
    cudaError_t status = cudaMallocAsync(&data, size, stream);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      clear();
      mx::clear_cache();
      status = cudaMallocAsync(&data, size, stream);
    }
    check("cudaMallocAsync", status);
    return new CudaBuffer{data, size, device};
  }

  void give(CudaBuffer* buffer) {
    std::lock_guard lock(mutex_);
    // MLX moves a buffer that the host reads to managed memory (device -1). A small one stays
    // there: an output that is read once is read every step. A large one would only slow kernels
    // down.
    const bool keep = buffer->device >= 0 || buffer->size <= kMaxManagedBytes;
    if (keep && cached_bytes_ + buffer->size <= kMaxCachedBytes) {
      free_[buffer->size].push_back(buffer);
      cached_bytes_ += buffer->size;
    } else {
      release(buffer);
    }
  }

  void clear() {
    std::lock_guard lock(mutex_);
    for (auto& [size, buffers] : free_) {
      for (CudaBuffer* buffer : buffers) release(buffer);
    }
    free_.clear();
    cached_bytes_ = 0;
  }

 private:
  static constexpr size_t kMaxManagedBytes = 64 << 10;
  static constexpr size_t kMaxCachedBytes = size_t{1} << 30;

  /// At most a quarter more than asked for, in few classes, so that steps of varying size reuse.
  static size_t size_class(size_t bytes) {
    const size_t step = std::max<size_t>(std::bit_floor(bytes) / 4, 512);
    return (bytes + step - 1) / step * step;
  }

  static void release(CudaBuffer* buffer) {
    cudaFree(buffer->data);  // waits for the device: kernels may still use the buffer
    delete buffer;
  }

  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<CudaBuffer*>> free_;
  size_t cached_bytes_ = 0;
};

/// Pools live as long as the process: arrays may outlive every static object. Uploads have their
/// own, since outputs that the host reads end in managed memory.
std::shared_ptr<StreamPool> pool_of(const mx::Stream& stream, bool uploads) {
  static auto* mutex = new std::mutex;
  static auto* pools = new std::unordered_map<int, std::shared_ptr<StreamPool>>;
  std::lock_guard lock(*mutex);
  auto& pool = (*pools)[2 * stream.index + (uploads ? 1 : 0)];
  if (pool == nullptr) pool = std::make_shared<StreamPool>();
  return pool;
}

mx::allocator::Data take(size_t bytes, const mx::Stream& stream, bool upload) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  std::shared_ptr<StreamPool> pool = pool_of(stream, upload);
  CudaBuffer* buffer =
      pool->take(std::max<size_t>(bytes, 1), encoder.device().cuda_device(), encoder.stream());
  return mx::allocator::Data(mx::allocator::Buffer(buffer), [pool](mx::allocator::Buffer b) {
    pool->give(static_cast<CudaBuffer*>(b.ptr()));
  });
}

}  // namespace

mx::allocator::Data allocate(size_t bytes, const mx::Stream& stream) {
  return take(bytes, stream, false);
}

void allocate_output(mx::array& out, const mx::Stream& stream) {
  if (out.data_shared_ptr() == nullptr) out.set_data(allocate(out.nbytes(), stream));
}

mx::array workspace(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream) {
  mx::array a(std::move(shape), dtype, nullptr, {});
  a.set_data(allocate(a.nbytes(), stream));
  mx::cu::get_command_encoder(stream).add_temporary(a);
  return a;
}

mx::array upload(const void* data, const mx::Shape& shape, mx::Dtype dtype,
                 const mx::Stream& stream) {
  size_t bytes = dtype.size();
  for (int n : shape) bytes *= n;
  mx::array a(take(bytes, stream, true), shape, dtype);
  // From pageable memory: up to 64 KB the driver takes the data along and returns at once. MLX
  // would put them into managed memory, whose pages move when a kernel first looks at them.
  auto& encoder = mx::cu::get_command_encoder(stream);
  MLXCEL_CUDA_CHECK(
      cudaMemcpyAsync(device_ptr<void>(a), data, bytes, cudaMemcpyHostToDevice, encoder.stream()));
  return a;
}

void download(const mx::array& a, void* data) {
  const auto* buffer = static_cast<const CudaBuffer*>(a.buffer().ptr());
  if (buffer->device < 0) {
    std::memcpy(data, device_ptr<void>(a), a.nbytes());
    return;
  }
  MLXCEL_CUDA_CHECK(cudaSetDevice(buffer->device));
  // A stream of its own: the array is there, and work that was submitted after it is not waited
  // for.
  thread_local cudaStream_t stream = [] {
    cudaStream_t made;
    MLXCEL_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  MLXCEL_CUDA_CHECK(
      cudaMemcpyAsync(data, device_ptr<void>(a), a.nbytes(), cudaMemcpyDeviceToHost, stream));
  MLXCEL_CUDA_CHECK(cudaStreamSynchronize(stream));
}

mx::array stream_counters(int count, const mx::Stream& stream) {
  // A stream is evaluated by one thread.
  thread_local std::unordered_map<int, mx::array> counters;
  auto it = counters.find(stream.index);
  if (it != counters.end() && it->second.size() >= static_cast<size_t>(count)) return it->second;
  constexpr int kMinimum = 16 << 10;
  mx::array fresh({std::max<int>(std::bit_ceil(static_cast<unsigned>(count)), kMinimum)}, mx::int32,
                  nullptr, {});
  fresh.set_data(allocate(fresh.nbytes(), stream));
  auto& encoder = mx::cu::get_command_encoder(stream);
  // Runs before the graph under construction, which is launched later on the same stream.
  MLXCEL_CUDA_CHECK(cudaMemsetAsync(device_ptr<void>(fresh), 0, fresh.nbytes(), encoder.stream()));
  if (it != counters.end()) {
    encoder.add_temporary(it->second);
    it->second = fresh;
  } else {
    counters.emplace(stream.index, fresh);
  }
  return fresh;
}

}  // namespace mlxcel::cuda
