#pragma once

#include "kernels/types.cuh"

namespace mlxcel::cuda {

// Warpgroup matrix products of sm_90a. A warpgroup's four warps hold 16 rows of the result each, in
// the layout of mma.m16n8k16 (mma.cuh) for every eight columns.

/// Descriptor of a swizzled operand: `group` is the distance of its groups of eight rows, `leading`
/// that of the 64-column blocks where columns are the outer dimension of the product.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared, int group, int leading) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (static_cast<uint64_t>(group >> 4) << 32) |
         (static_cast<uint64_t>(leading >> 4) << 16) | ((shared & 0x3ffff) >> 4);
}

/// The same operand `bytes` further on: an addition to the low word alone, since addresses of
/// shared memory do not carry out of it.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor & 0xffffffff00000000) | low;
}

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most `Pending` groups of products run. Calls in two branches differ in `Branch`:
/// the compiler would make one of them, ahead of the branch.
template <int Pending, int Branch = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;  // %1" ::"n"(Pending), "n"(Branch) : "memory");
}

/// Ties registers that a product in flight writes to this point of the program.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define MLXCEL_D8(d, i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])
#define MLXCEL_D32(d, i) MLXCEL_D8(d, i), MLXCEL_D8(d, i+8), MLXCEL_D8(d, i+16), MLXCEL_D8(d, i+24)
#define MLXCEL_R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MLXCEL_R64 MLXCEL_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MLXCEL_WGMMA_SHARED(TYPE)                                                               \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                      \
               " {" MLXCEL_R32 "}, %32, %33, p, 1, 1, 0, 0;}"                                   \
               : MLXCEL_D32(d, 0) : "l"(a), "l"(b), "r"(add))
#define MLXCEL_WGMMA_SHARED_128(TYPE)                                                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"                                        \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                     \
               " {" MLXCEL_R64 "}, %64, %65, p, 1, 1, 0, 0;}"                                   \
               : MLXCEL_D32(d, 0), MLXCEL_D32(d, 32) : "l"(a), "l"(b), "r"(add))
#define MLXCEL_WGMMA_REGISTERS(TYPE, N, REGISTERS, A0, A1, A2, A3, B)                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE                   \
               " {" REGISTERS "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", 1, 1, 1, 1;"            \
               : MLXCEL_OUT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/// d[64 x 64] = a b^T (+ d where `add`): both operands in shared memory, 16 of their columns.
template <class T>
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, f16>) MLXCEL_WGMMA_SHARED("f16");
  else MLXCEL_WGMMA_SHARED("bf16");
}

/// d[64 x 128] = a b^T (+ d where `add`)
template <class T>
__device__ __forceinline__ void wgmma_64x128(float (&d)[64], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, f16>) MLXCEL_WGMMA_SHARED_128("f16");
  else MLXCEL_WGMMA_SHARED_128("bf16");
}

/// d[64 x 128] += a b: a in registers (16 columns), b 16 rows in shared memory.
template <class T>
__device__ __forceinline__ void wgmma_add(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
#define MLXCEL_OUT MLXCEL_D32(d, 0), MLXCEL_D32(d, 32)
  if constexpr (std::is_same_v<T, f16>) MLXCEL_WGMMA_REGISTERS("f16", "128", MLXCEL_R64, "%64", "%65", "%66", "%67", "%68");
  else MLXCEL_WGMMA_REGISTERS("bf16", "128", MLXCEL_R64, "%64", "%65", "%66", "%67", "%68");
#undef MLXCEL_OUT
}

/// d[64 x 64] += a b
template <class T>
__device__ __forceinline__ void wgmma_add(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
#define MLXCEL_OUT MLXCEL_D32(d, 0)
  if constexpr (std::is_same_v<T, f16>) MLXCEL_WGMMA_REGISTERS("f16", "64", MLXCEL_R32, "%32", "%33", "%34", "%35", "%36");
  else MLXCEL_WGMMA_REGISTERS("bf16", "64", MLXCEL_R32, "%32", "%33", "%34", "%35", "%36");
#undef MLXCEL_OUT
}
// clang-format on

#undef MLXCEL_D8
#undef MLXCEL_D32
#undef MLXCEL_R32
#undef MLXCEL_R64
#undef MLXCEL_WGMMA_SHARED
#undef MLXCEL_WGMMA_SHARED_128
#undef MLXCEL_WGMMA_REGISTERS

}  // namespace mlxcel::cuda
