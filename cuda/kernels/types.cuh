#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params/dtype.h"

namespace mlxcel::cuda {

using f16 = __half;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(f16 x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, f16>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, bf16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

/// N elements that move as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

/// For data that is read once: it leaves the caches first.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_vec_once(const T* p) {
  if constexpr (sizeof(Vec<T, N>) == 16) {
    const int4 raw = __ldcs(reinterpret_cast<const int4*>(p));
    return *reinterpret_cast<const Vec<T, N>*>(&raw);
  } else {
    return load_vec<T, N>(p);
  }
}

/// Past the L1 cache: for data that other blocks of the same launch wrote.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_vec_l2(const T* p) {
  if constexpr (sizeof(Vec<T, N>) == 16) {
    const int4 raw = __ldcg(reinterpret_cast<const int4*>(p));
    return *reinterpret_cast<const Vec<T, N>*>(&raw);
  } else {
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) v.at[i] = __ldcg(p + i);
    return v;
  }
}

template <class T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Elements of a 16-byte access.
template <class T>
inline constexpr int kWide = 16 / sizeof(T);

template <class... Pointers>
bool all_aligned(size_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

template <class T>
struct Type {
  using type = T;
};

/// Calls f(Type<T>{}) with the C++ type of a FloatType.
template <class F>
decltype(auto) dispatch(FloatType dtype, F&& f) {
  switch (dtype) {
    case FloatType::f16:
      return f(Type<f16>{});
    case FloatType::bf16:
      return f(Type<bf16>{});
    default:
      return f(Type<float>{});
  }
}

}  // namespace mlxcel::cuda
