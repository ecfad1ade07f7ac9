#include "common/cpu_features.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace mlxcel {
namespace {

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__)
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
  f.neon = true;
#endif
  const char* limit = std::getenv("MLXCEL_CPU_ISA");
  if (limit == nullptr || *limit == '\0') return f;
  const std::string isa = limit;
  if (isa == "baseline") {
    f.avx2 = f.avx512 = false;
  } else if (isa == "avx2") {
    f.avx512 = false;
  } else if (isa != "avx512") {
    throw std::invalid_argument("MLXCEL_CPU_ISA must be baseline, avx2 or avx512, got '" + isa +
                                "'.");
  }
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace mlxcel
