#pragma once

namespace mlxcel {

/// Instruction sets of the machine this process runs on, read once.
struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA and F16C
  bool avx512 = false;  // AVX-512 F, BW, VL, DQ
  bool neon = false;
};

/// MLXCEL_CPU_ISA=baseline|avx2|avx512 lowers what is reported, for tests and A/B runs.
const CpuFeatures& cpu_features();

}  // namespace mlxcel
