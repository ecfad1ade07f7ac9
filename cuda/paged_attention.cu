#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "kernels/paged_simple.cuh"
#include "launchers.h"
#include "paged_attention_dispatch.h"

namespace mlxcel::cuda {
namespace {

/// Calls f<D>() with the head dimension as a constant.
template <class F>
decltype(auto) with_head_dim(int head_dim, F&& f) {
  switch (head_dim) {
    case 64:
      return f.template operator()<64>();
    case 80:
      return f.template operator()<80>();
    case 96:
      return f.template operator()<96>();
    case 112:
      return f.template operator()<112>();
    case 128:
      return f.template operator()<128>();
    case 192:
      return f.template operator()<192>();
    case 256:
      return f.template operator()<256>();
  }
  throw std::runtime_error("[paged_attention] has no CUDA kernel for head_dim " +
                           std::to_string(head_dim) + ".");
}

const char* name(AttentionKernel kernel) {
  switch (kernel) {
    case AttentionKernel::decode_sm90:
      return "decode_sm90";
    case AttentionKernel::decode:
      return "decode";
    case AttentionKernel::ragged:
      return "ragged";
    case AttentionKernel::ragged_sm90:
      return "ragged_sm90";
    case AttentionKernel::mixed_sm90:
      return "mixed_sm90";
    default:
      return "simple";
  }
}

/// Every kernel that can serve the launch, best first.
struct Choices {
  AttentionConfig at[6];
  int count = 0;
  void add(AttentionConfig config) { at[count++] = config; }
};

Choices possible(const PagedAttentionParams& p, const DeviceInfo& device) {
  Choices choices;
  const int rows = query_rows(p);
  if (p.dtype != FloatType::f32) {
    const AttentionLimits limits =
        with_head_dim(p.head_dim, [&]<int D>() { return attention_limits<D>(); });
    const int tiles = rows <= 8 ? 1 : rows <= 16 ? 2 : 4, index = tiles / 2;
    if (!p.batch_invariant && rows <= 8 * std::min(tiles, limits.max_column_tiles)) {
      // One wave of blocks: eight warps a block fill an SM. More waves: two blocks of four, so that
      // one starts while the other is busy (2026-11-29, H200: up to 16 % and 2 to 5 % apart).
      const int wanted =
          static_cast<int64_t>(p.num_tiles) * p.num_kv_heads <= device.num_sms ? 8 : 4;
      const auto add = [&](AttentionKernel kernel, const AttentionLimits::Decode& bytes) {
        const int room = device.max_shared_bytes - bytes.other_bytes[index];
        const int warps = std::min(wanted, room / bytes.warp_bytes[index]);
        if (warps > 0) choices.add({kernel, tiles, warps});
      };
      if (p.page_size >= 8 && limits.has_sm90 && device.arch >= 90) {
        add(AttentionKernel::decode_sm90, limits.decode_sm90);
      }
      add(AttentionKernel::decode, limits.decode);
    }
    if (needs_queues(p) && limits.has_warpgroups && device.arch == 90) {
      choices.add({AttentionKernel::mixed_sm90, 0, 16});
    }
    if (rows <= 128 && p.page_size >= 8 && limits.has_warpgroups && device.arch == 90) {
      choices.add({AttentionKernel::ragged_sm90, 0, 4});
    }
    if (rows <= 128 && limits.ragged_bytes <= device.max_shared_bytes) {
      choices.add({AttentionKernel::ragged, 0, 0});
    }
  }
  choices.add({AttentionKernel::simple, 0, kSimpleWarps});
  return choices;
}

bool tracing() {
  static const bool on = [] {
    const char* text = std::getenv("MLXCEL_EXT_TRACE");
    return text != nullptr && std::string(text) == "1";
  }();
  return on;
}

/// Whether the last block of a query token merges its states, or a second kernel merges those of
/// all tokens: a block takes longer for many rows than a launch that all multiprocessors share.
bool merges_in_launch(const PagedAttentionParams& p, const AttentionConfig& config) {
  return (config.kernel == AttentionKernel::decode_sm90 ||
          config.kernel == AttentionKernel::decode || config.kernel == AttentionKernel::simple) &&
         query_rows(p) <= kMergeRows;
}

void trace(const PagedAttentionParams& p, const AttentionConfig& config) {
  std::ostringstream line;
  line << "[mlxcel] paged_attention heads " << p.num_qo_heads << "/" << p.num_kv_heads
       << " head_dim " << p.head_dim << " page " << p.page_size << " max_q_len " << p.max_q_len
       << " dtype " << static_cast<int>(p.dtype) << " -> " << config << "\n";
  static std::mutex mutex;
  static std::set<std::string> printed;
  std::lock_guard lock(mutex);
  if (printed.insert(line.str()).second) std::cerr << line.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const AttentionConfig& config) {
  out << name(config.kernel);
  if (config.kernel == AttentionKernel::decode || config.kernel == AttentionKernel::decode_sm90) {
    out << " columns " << 8 * config.column_tiles << " warps " << config.warps;
    if (config.cluster > 1) out << " cluster " << config.cluster;
  }
  return out;
}

AttentionConfig choose_attention(const PagedAttentionParams& params, bool whole,
                                 const DeviceInfo& device) {
  const Choices choices = possible(params, device);
  AttentionConfig config = choices.at[0];
  static const std::string forced = forced_kernel("paged_attention");
  if (!forced.empty()) {
    const auto* end = choices.at + choices.count;
    const auto* it = std::find_if(
        choices.at, end, [](const AttentionConfig& c) { return forced == name(c.kernel); });
    if (it == end) {
      throw std::runtime_error("[paged_attention] MLXCEL_EXT_FORCE asks for kernel '" + forced +
                               "', which cannot serve this launch.");
    }
    config = *it;
  }
  if (whole && config.kernel == AttentionKernel::decode_sm90 && config.column_tiles == 1 &&
      params.chunks_each > 1 && params.chunks_each <= device.max_cluster) {
    config.cluster = with_head_dim(params.head_dim, [&]<int D>() {
      return params.dtype == FloatType::f16 ? decode_cluster<f16, D>(config, params, device)
                                            : decode_cluster<bf16, D>(config, params, device);
    });
  }
  if (tracing()) trace(params, config);
  return config;
}

void launch_paged_attention(const PagedAttentionParams& params, const AttentionArrays& inputs,
                            Launch& launch) {
  if (params.num_tiles == 0) return;
  const bool whole = inputs.out != nullptr;
  const AttentionConfig config = choose_attention(params, whole, device_info());
  AttentionArrays arrays = inputs;
  // K and V of up to a few times the L2 cache stream past it: what it holds (dirty lines too, which
  // would have to be written back first) stays. Above, that costs 3 % of the bandwidth instead
  // (2026-11-29, H200).
  const int64_t kv_bytes = static_cast<int64_t>(inputs.num_indices) * params.page_size *
                           params.num_kv_heads * params.head_dim * 4;
  arrays.evict_first =
      params.has_token_order || kv_bytes <= int64_t{6} * device_info().l2_bytes ? 1 : 0;
  const bool merged = params.num_partials > 0 && whole && config.cluster == 1;
  const bool in_launch = whole && merges_in_launch(params, config);
  if (!in_launch && config.kernel != AttentionKernel::mixed_sm90) arrays.counters = nullptr;
  if (config.kernel == AttentionKernel::simple) {
    dispatch(params.dtype, [&](auto type) {
      launch(paged_simple_kernel<typename decltype(type)::type>,
             dim3(static_cast<unsigned>(params.num_tiles) * params.num_kv_heads),
             kSimpleWarps * kWarp, 0, params, arrays);
    });
  } else {
    with_head_dim(params.head_dim, [&]<int D>() {
      if (params.dtype == FloatType::f16)
        launch_attention<f16, D>(config, params, arrays, launch);
      else
        launch_attention<bf16, D>(config, params, arrays, launch);
    });
  }
  if (merged && !in_launch) {
    constexpr int kThreads = 128;
    const int items = params.num_qo_heads * (params.head_dim / kMergePiece);
    const dim3 grid(static_cast<unsigned>(params.num_q),
                    static_cast<unsigned>((items + kThreads - 1) / kThreads));
    dispatch(params.dtype, [&](auto type) {
      launch(paged_merge_kernel<typename decltype(type)::type>, grid, kThreads, 0, params, arrays);
    });
  }
}

}  // namespace mlxcel::cuda
