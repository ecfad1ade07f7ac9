#pragma once

#include <cmath>
#include <cstdint>

#include "params/sample.h"

// Philox4x32-10 [Salmon 2011, https://doi.org/10.1145/2063384.2063405] and the noise made of it.
// Word w of element block b is the noise of token 4 * b + w, so a token's noise depends on (seed,
// draw index, token) alone: not on the batch, the filters or the backend.

namespace mlxcel::cpu {
namespace {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMul0 = 0xd2511f53u;
constexpr uint32_t kPhiloxMul1 = 0xcd9e8d57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9u;
constexpr uint32_t kPhiloxWeyl1 = 0xbb67ae85u;

struct PhiloxBlock {
  uint32_t word[4];
};

inline PhiloxBlock philox(const SampleRow& row, uint32_t block, RngStream stream) {
  uint32_t c0 = block, c1 = static_cast<uint32_t>(stream), c2 = row.draw[0], c3 = row.draw[1];
  uint32_t k0 = row.seed[0], k1 = row.seed[1];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMul0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMul1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// In [2^-24, 1 - 2^-24], exact in f32: log and log1p of it are finite.
inline double uniform(uint32_t bits) {
  return (static_cast<double>(bits >> 9) + 0.5) * 0x1p-23;
}

/// -log(-log(u)): between -2.82 and kMaxGumbel.
inline double gumbel(uint32_t bits) {
  return -std::log(-std::log(uniform(bits)));
}

constexpr double kMaxGumbel = 16.6356;  // rounded up

}  // namespace
}  // namespace mlxcel::cpu
