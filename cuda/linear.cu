#include "kernels/linear.cuh"

#include "launchers.h"

namespace mlxcel::cuda {
namespace {

template <class T, int RowTiles, int TokenTiles, int kWarps, bool Gated>
void run(const LinearParams& p, const LinearArrays& a, Launch& launch) {
  constexpr int kFeatures = TileRows<RowTiles, Gated>::kFeatures;
  constexpr size_t kShared = sizeof(float4) * kWarps * RowTiles * TokenTiles * 32;
  const int features = Gated ? p.n / 2 : p.n;
  const unsigned blocks = (features + kFeatures - 1) / kFeatures;
  const T *x = static_cast<const T*>(a.x), *bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out);
  if (p.format == WeightFormat::q4) {
    launch(q4_linear_kernel<T, RowTiles, TokenTiles, Gated, kWarps>, blocks, kWarps * 32, kShared,
           p, x, static_cast<const uint32_t*>(a.weight), static_cast<const T*>(a.scales),
           static_cast<const T*>(a.offsets), bias, out);
  } else {
    launch(dense_linear_kernel<T, RowTiles, TokenTiles, Gated, kWarps>, blocks, kWarps * 32,
           kShared, p, x, static_cast<const T*>(a.weight), bias, out);
  }
}

/// Tiles and warps as measured on one H200, 2026-11-29, on the layers of Llama-3-8B.
template <class T, bool Gated>
void run_tokens(const LinearParams& p, const LinearArrays& a, Launch& launch) {
  if (p.rows <= 8) return run<T, 1, 1, 8, Gated>(p, a, launch);
  if (p.rows <= 16) return run<T, 2, 2, 8, Gated>(p, a, launch);
  if (p.rows <= 32) {
    if (p.format == WeightFormat::q4) return run<T, 2, 4, 8, Gated>(p, a, launch);
    return run<T, 1, 4, 8, Gated>(p, a, launch);
  }
  return run<T, 2, 8, 8, Gated>(p, a, launch);
}

}  // namespace

void launch_linear(const LinearParams& p, const LinearArrays& a, bool gated, Launch& launch) {
  if (p.rows == 0 || p.n == 0) return;
  const auto run_typed = [&](auto type) {
    using T = typename decltype(type)::type;
    if (gated)
      run_tokens<T, true>(p, a, launch);
    else
      run_tokens<T, false>(p, a, launch);
  };
  if (p.dtype == FloatType::f16)
    run_typed(Type<f16>{});
  else
    run_typed(Type<bf16>{});
}

}  // namespace mlxcel::cuda
