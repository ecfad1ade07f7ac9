#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "common/check.h"

namespace mlxcel {

/// Dimensions and strides (in elements) of a pair of page pools.
struct PoolLayout {
  int32_t num_pages;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t head_dim;
  int64_t stride_page;
  int64_t stride_token;
  int64_t stride_head;
};

/// Checks the pools' shapes and dtypes against each other and reads their layout, "NHD" or "HND".
inline PoolLayout pool_layout(const char* op, const mx::array& k_pages, const mx::array& v_pages,
                              const std::string& kv_layout) {
  const bool nhd = kv_layout == "NHD";
  if (!nhd && kv_layout != "HND") {
    fail(op, "kv_layout must be 'NHD' or 'HND', got '", kv_layout, "'.");
  }
  check_ndim(op, "k_pages", k_pages, 4,
             nhd ? "[num_pages, page_size, num_kv_heads, head_dim]"
                 : "[num_pages, num_kv_heads, page_size, head_dim]");
  check_shape(op, "v_pages", v_pages, k_pages.shape());
  check_dtype(op, "v_pages", v_pages, k_pages.dtype());
  PoolLayout p;
  p.num_pages = k_pages.shape(0);
  p.page_size = k_pages.shape(nhd ? 1 : 2);
  p.num_kv_heads = k_pages.shape(nhd ? 2 : 1);
  p.head_dim = k_pages.shape(3);
  if (p.page_size < 1 || p.page_size > 256 || (p.page_size & (p.page_size - 1)) != 0) {
    fail(op, "the page size of k_pages must be a power of two from 1 to 256, got ", p.page_size,
         ".");
  }
  if (p.num_kv_heads < 1)
    fail(op, "k_pages must have at least one KV head, got shape ", k_pages.shape(), ".");
  const int64_t d = p.head_dim;
  p.stride_page = d * p.num_kv_heads * p.page_size;
  p.stride_token = nhd ? d * p.num_kv_heads : d;
  p.stride_head = nhd ? d : d * p.page_size;
  return p;
}

/// The pools' FloatType: that of the activations; on CPU also 16 bits beside f32 activations, which
/// halves what a step reads.
inline FloatType pool_dtype(const char* op, mx::Dtype activations, const mx::array& k_pages,
                            mx::Device device) {
  if (activations != mx::float32 || device != mx::Device::cpu) {
    check_dtype(op, "k_pages", k_pages, activations);
  }
  return float_type(op, "k_pages", k_pages);
}

/// Throws where the pool, now evaluated, is not laid out as pool_layout assumes.
inline void check_pool_contiguous(const char* op, const char* argument, const mx::array& pool) {
  if (!pool.flags().row_contiguous) {
    fail(op, argument, " must be row-contiguous: a pool is never copied. Got strides (",
         pool.strides(), ") for shape ", pool.shape(), ".");
  }
}

/// Throws where two pools that are written in place, now evaluated, share memory.
inline void check_pools_apart(const char* op, const mx::array& k_pages, const mx::array& v_pages) {
  const auto bytes = static_cast<int64_t>(k_pages.nbytes());
  // By buffer and offset: data() would bring a GPU's buffer to the host.
  if (bytes > 0 && k_pages.buffer().ptr() == v_pages.buffer().ptr() &&
      std::abs(k_pages.offset() - v_pages.offset()) < bytes) {
    fail(op, "k_pages and v_pages must not share memory: both are written in place.");
  }
}

}  // namespace mlxcel
