// linear() of the instruction set that this file is compiled for against float64, for machines that
// only an emulator stands for (scripts/test_neon.sh). Exits with 1 where anything is wrong.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "common/half.h"
#include "common/parallel.h"
#include "cpu/kernels/linear.h"

namespace {

using namespace mlxcel;

std::mt19937 engine(1);
std::normal_distribution<float> normal;

struct Weight {
  LinearParams params{};
  std::vector<char> stored;
  std::vector<float> scales, offsets;
  std::vector<double> values;  // (n, k)
};

template <class T>
void fill_dense(Weight& w) {
  for (size_t i = 0; i < w.values.size(); ++i) {
    const T value = from_float<T>(normal(engine));
    std::memcpy(w.stored.data() + i * sizeof(T), &value, sizeof(T));
    w.values[i] = to_float(value);
  }
}

void fill_quantized(Weight& w, int bits) {
  for (char& byte : w.stored) byte = static_cast<char>(engine());
  const size_t groups = w.values.size() / w.params.group_size;
  for (size_t g = 0; g < groups; ++g) {
    w.scales.push_back(0.01f + 0.001f * std::fabs(normal(engine)));
    w.offsets.push_back(0.1f * normal(engine));
  }
  for (size_t i = 0; i < w.values.size(); ++i) {
    const int byte = static_cast<unsigned char>(w.stored[i * bits / 8]);
    const int q = byte >> (i * bits % 8) & ((1 << bits) - 1);
    const size_t group = i / w.params.group_size;
    w.values[i] = w.scales[group] * static_cast<double>(q) + w.offsets[group];
  }
}

Weight make_weight(WeightFormat format, int n, int k, int group_size) {
  Weight w;
  w.params.n = w.params.out_stride = n;
  w.params.k = k;
  w.params.format = format;
  w.params.group_size = group_size;
  w.stored.resize(int64_t{n} * k * 4 / values_per_word(format));
  w.values.resize(int64_t{n} * k);
  if (format == WeightFormat::f32) fill_dense<float>(w);
  if (format == WeightFormat::f16) fill_dense<f16>(w);
  if (format == WeightFormat::bf16) fill_dense<bf16>(w);
  if (format == WeightFormat::q4) fill_quantized(w, 4);
  if (format == WeightFormat::q8) fill_quantized(w, 8);
  return w;
}

std::vector<float> run_packed(const Weight& w, LinearParams params, const std::vector<float>& x) {
  const int64_t groups = (params.n + kPackedRows - 1) / kPackedRows;
  const int per_word = values_per_word(params.format);
  const int64_t scales = params.group_size ? params.k / params.group_size : 0;
  std::vector<uint32_t> words(groups * kPackedRows * ((params.k + per_word - 1) / per_word));
  std::vector<float> packed_scales(groups * kPackedRows * scales), packed_offsets = packed_scales;
  cpu::LinearArrays arrays{};
  arrays.weight = w.stored.data();
  arrays.scales = w.scales.data();
  arrays.offsets = w.offsets.data();
  cpu::pack_linear(params, arrays, words.data(), packed_scales.data(), packed_offsets.data());
  std::vector<float> out(params.rows * params.n);
  params.packed = 1;
  cpu::linear(params, {x.data(), words.data(), packed_scales.data(), packed_offsets.data(), nullptr,
                       out.data()});
  return out;
}

/// The largest error, relative to the sum of the absolute products.
double largest_error(const Weight& w, const std::vector<float>& x, const std::vector<float>& out) {
  const int n = w.params.n, k = w.params.k;
  double worst = 0.0;
  for (size_t i = 0; i < out.size(); ++i) {
    double sum = 0.0, size = 0.0;
    for (int j = 0; j < k; ++j) {
      const double product = x[i / n * k + j] * w.values[i % n * k + j];
      sum += product;
      size += std::fabs(product);
    }
    const double error = std::fabs(out[i] - sum) / size;
    if (std::isnan(error)) return error;  // std::max would drop it
    worst = std::max(worst, error);
  }
  return worst;
}

bool check(WeightFormat format, int rows) {
  const bool quantized = format == WeightFormat::q4 || format == WeightFormat::q8;
  Weight w = make_weight(format, 100, quantized ? 320 : 331, quantized ? 32 : 0);
  w.params.rows = rows;
  std::vector<float> x(int64_t{rows} * w.params.k), out(int64_t{rows} * w.params.n);
  for (float& v : x) v = normal(engine);
  cpu::linear(w.params,
              {x.data(), w.stored.data(), w.scales.data(), w.offsets.data(), nullptr, out.data()});
  const double error = largest_error(w, x, out);
  const bool same = run_packed(w, w.params, x) == out;
  const bool right = error < 2e-6 && same;
  std::printf("format %d rows %d: error %.1e, packed %s%s\n", static_cast<int>(format), rows, error,
              same ? "has the same bits" : "differs", right ? "" : "  WRONG");
  return right;
}

}  // namespace

int main() {
  set_num_threads(2);
  bool right = true;
  for (const WeightFormat format : {WeightFormat::f32, WeightFormat::f16, WeightFormat::bf16,
                                    WeightFormat::q4, WeightFormat::q8}) {
    for (const int rows : {1, 2, 3, 4, 5, 6, 7, 30}) right = check(format, rows) && right;
  }
  return right ? 0 : 1;
}
