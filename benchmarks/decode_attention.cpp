// The CPU's decode attention alone, with keys and values from memory: 30 layers of SmolLM2's shape
// (9 query and 3 KV heads of 64, pages of 16) a step, over enough pools that no cache holds them,
// interleaved with a plain read loop over as many bytes. Prints medians.
//
//   g++ -O3 -std=c++20 -fno-math-errno -march=native -Icsrc -o decode \
//     benchmarks/decode_attention.cpp csrc/cpu/kernels/{paged_attention,merge_states}*.cpp \
//     csrc/common/{parallel,cpu_features}.cpp csrc/plan/attention_plan.cpp
//   ./decode f32|f16|bf16 THREADS REQUESTS TOKENS [MIB]
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/parallel.h"
#include "cpu/kernels/paged_attention.h"
#include "plan/attention_plan.h"

using namespace mlxcel;

namespace {

constexpr int kHeads = 9, kKvHeads = 3, kDim = 64, kPage = 16, kLayers = 30, kRounds = 20;

double milliseconds(const auto& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v[v.size() / 2];
}

/// Huge pages, of which a virtual machine reads more a second. Filled with 0.0625 in f32, and small
/// numbers in 16 bits.
char* pools(size_t bytes) {
  constexpr size_t kHuge = 2 << 20;
  void* p =
      mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* out = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) / kHuge * kHuge);
  madvise(out, bytes, MADV_HUGEPAGE);
  std::fill_n(reinterpret_cast<uint32_t*>(out), bytes / 4, 0x3d803d80u);
  return out;
}

long sum_lines(const char* begin, const char* end) {
  typedef long vector __attribute__((vector_size(32), may_alias));
  vector a{}, b{}, c{}, d{};
  for (const char* p = begin; p + 128 <= end; p += 128) {
    const auto* v = reinterpret_cast<const vector*>(p);
    a += v[0];
    b += v[1];
    c += v[2];
    d += v[3];
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return std::puts("decode f32|f16|bf16 THREADS REQUESTS TOKENS [MIB]"), 2;
  const std::string name = argv[1];
  const int threads = std::atoi(argv[2]), batch = std::atoi(argv[3]), tokens = std::atoi(argv[4]);
  const FloatType dtype = name == "f32"   ? FloatType::f32
                          : name == "f16" ? FloatType::f16
                                          : FloatType::bf16;
  set_num_threads(threads);
  const int pages = (tokens + kPage - 1) / kPage;
  const size_t pool =
      size_t(pages) * batch * kPage * kKvHeads * kDim * (dtype == FloatType::f32 ? 4 : 2);
  const size_t layers =
      std::max<size_t>(4, (size_t(argc > 5 ? std::atoi(argv[5]) : 600) << 20) / (2 * pool));
  const char* memory = pools(2 * pool * layers);

  std::vector<int32_t> indptr{0}, indices, last(batch, tokens - (pages - 1) * kPage);
  for (int i = 0; i < batch * pages; ++i) indices.push_back(i);
  for (int i = 1; i <= batch; ++i) indptr.push_back(i * pages);
  const auto plan = plan::plan_attention(
      {indptr.data(), nullptr, batch, kPage, kKvHeads, kHeads / kKvHeads, -1, true, true, false},
      {threads, 64, 4, 256, 32, 8, 2048});
  PagedAttentionParams p{};
  p.num_q = p.num_requests = batch;
  p.num_qo_heads = kHeads;
  p.num_kv_heads = kKvHeads;
  p.head_dim = kDim;
  p.page_size = kPage;
  p.stride_page = kPage * kKvHeads * kDim;
  p.stride_token = kKvHeads * kDim;
  p.stride_head = kDim;
  p.num_tiles = static_cast<int32_t>(plan.tiles.size());
  p.num_partials = plan.num_partials;
  p.max_q_len = 1;
  p.window_left = -1;
  p.causal = 1;
  p.sm_scale_log2 = 0.125f * 1.442695f;
  p.kv_dtype = dtype;
  const std::vector<float> q(size_t(batch) * kHeads * kDim, 0.5f);
  std::vector<float> out(q.size()), lse(size_t(batch) * kHeads);
  AttentionInputs in{};
  in.q = q.data();
  in.kv_indptr = indptr.data();
  in.kv_indices = indices.data();
  in.kv_last_page_len = last.data();
  in.tiles = plan.tiles.data();
  in.merge_indptr = plan.merge_indptr.data();

  const KeepAwake keep_awake;
  std::vector<double> attention, read;
  std::atomic<long> sum{0};
  size_t layer = 0;
  const auto next = [&] { return memory + 2 * pool * (layer++ % layers); };
  for (int round = 0; round < kRounds; ++round) {
    attention.push_back(milliseconds([&] {
      for (int i = 0; i < kLayers; ++i) {
        in.k_pages = next();
        in.v_pages = static_cast<const char*>(in.k_pages) + pool;
        cpu::paged_attention(p, in, out.data(), lse.data());
      }
    }));
    read.push_back(milliseconds([&] {
      for (int i = 0; i < kLayers; ++i) {
        const char* begin = next();
        parallel_for(2 * pool / 4096, 2 * pool / 4096 / threads, [&](size_t a, size_t b) {
          sum += sum_lines(begin + a * 4096, begin + b * 4096);
        });
      }
    }));
  }
  // All tokens are alike: the answer is the value.
  const float want = dtype == FloatType::f16 ? 1.375f : 0.0625f;
  for (const float x : out) {
    if (std::abs(x - want) > 0.01f * want) return std::printf("wrong: %g\n", x), 1;
  }
  const double megabytes = 2e-6 * static_cast<double>(pool) * kLayers;
  std::printf(
      "%s, %d threads, %d of %d tokens: %.1f MB a step, attention %.2f ms, %.1f GB/s; plain read "
      "%.2f ms [%ld]\n",
      name.c_str(), threads, batch, tokens, megabytes, median(attention),
      megabytes / median(attention), median(read), sum.load() & 1);
}
