#include "ops/decoder_stack.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "common/layout.h"
#include "common/pool.h"
#include "mlx/transforms.h"

namespace mlxcel {
namespace {

constexpr const char* kOp = "decoder_stack";

/// An array that is never computed: for checks that read a shape and a dtype alone.
mx::array stand_in(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(std::move(shape), dtype, nullptr, {});
}

/// Checks layers of one input; returns the sum of their out_features.
int check_layers(std::vector<StackLinear>& parts, int in_features, mx::Dtype dtype) {
  int columns = 0;
  for (StackLinear& part : parts) {
    const auto checked = part.packed ? packed_linear_params : stored_linear_params;
    part.params =
        checked(kOp, stand_in({1, in_features}, dtype), part.arrays, part.layout, part.bias);
    columns += part.params.n;
  }
  return columns;
}

void check_columns(const char* name, int columns, int wanted) {
  if (columns != wanted) {
    fail(kOp, name, " must have ", wanted, " out_features in all, got ", columns, ".");
  }
}

void check_layer(DecoderLayer& layer, const DecoderStack::Weights& w, mx::Dtype dtype) {
  const int heads = w.shape.num_qo_heads, kv_heads = w.shape.num_kv_heads, dim = w.shape.head_dim;
  check_columns("qkv", check_layers(layer.qkv, w.hidden, dtype), (heads + 2 * kv_heads) * dim);
  check_columns("output", check_layers(layer.output, heads * dim, dtype), w.hidden);
  check_columns("gate_up", check_layers(layer.gate_up, w.hidden, dtype), 2 * w.intermediate);
  check_columns("down", check_layers(layer.down, w.intermediate, dtype), w.hidden);
  const auto check_norm = [&](const char* name, const mx::array& norm, int size) {
    check_shape(kOp, name, norm, {size});
    check_dtype(kOp, name, norm, dtype);
  };
  check_norm("input_norm", layer.input_norm, w.hidden);
  check_norm("post_norm", layer.post_norm, w.hidden);
  if (layer.q_norm.has_value() != layer.k_norm.has_value()) {
    fail(kOp, "q_norm and k_norm must be given together.");
  }
  if (layer.q_norm) {
    check_norm("q_norm", *layer.q_norm, dim);
    check_norm("k_norm", *layer.k_norm, dim);
  }
}

/// Calls f(name, array) for each weight.
template <class F>
void for_each_weight(const DecoderStack::Weights& w, const F& f) {
  f("final_norm", w.final_norm);
  f("inv_freq", w.inv_freq);
  for (const DecoderLayer& layer : w.layers) {
    f("input_norm", layer.input_norm);
    f("post_norm", layer.post_norm);
    if (layer.q_norm) {
      f("q_norm", *layer.q_norm);
      f("k_norm", *layer.k_norm);
    }
    for (const auto& [name, parts] : {std::pair{"qkv", &layer.qkv},
                                      {"output", &layer.output},
                                      {"gate_up", &layer.gate_up},
                                      {"down", &layer.down}}) {
      for (const StackLinear& part : *parts) {
        for (const mx::array& a : part.arrays) f(name, a);
        if (part.bias) f(name, *part.bias);
      }
    }
  }
}

RopeAppendParams rope_params(const PagedAttentionParams& attention, const DecoderStack::Weights& w,
                             int num_pages) {
  RopeAppendParams p{};
  p.num_tokens = attention.num_q;
  p.num_qo_heads = attention.num_qo_heads;
  p.num_kv_heads = attention.num_kv_heads;
  p.head_dim = attention.head_dim;
  p.rotary_dim = 2 * w.inv_freq.shape(0);
  p.page_size = attention.page_size;
  p.num_pages = num_pages;
  p.stride_page = attention.stride_page;
  p.stride_token = attention.stride_token;
  p.stride_head = attention.stride_head;
  p.scale = w.shape.rope_scale;
  p.dtype = attention.dtype;
  p.kv_dtype = attention.kv_dtype;
  return p;
}

}  // namespace

DecoderStack::DecoderStack(std::vector<DecoderLayer> layers, const mx::array& final_norm,
                           const mx::array& inv_freq, const DecoderShape& shape) {
  if (layers.empty() || layers[0].down.empty()) {
    fail(kOp, "layers must hold at least one layer with all of its weights.");
  }
  check_ndim(kOp, "final_norm", final_norm, 1, "[hidden]");
  check_ndim(kOp, "inv_freq", inv_freq, 1, "[rotary_dim / 2]");
  check_dtype(kOp, "inv_freq", inv_freq, mx::float32);
  Weights w{std::move(layers), final_norm, inv_freq, shape, final_norm.shape(0), 0};
  w.intermediate = w.layers[0].down[0].layout.in_features;
  if (2 * inv_freq.shape(0) > shape.head_dim) {
    fail(kOp, "inv_freq must have at most head_dim / 2 = ", shape.head_dim / 2, " elements, got ",
         inv_freq.shape(0), ".");
  }
  for (DecoderLayer& layer : w.layers) check_layer(layer, w, final_norm.dtype());
  Arrays all;
  for_each_weight(w, [&](const char*, const mx::array& a) { all.push_back(a); });
  mx::eval(all);  // kernels read the buffers without a graph, as rows one behind the other
  for_each_weight(w, [](const char* name, const mx::array& a) {
    if (!a.flags().row_contiguous) {
      fail(kOp, name, " must be row-contiguous (mx.contiguous), got shape ", a.shape(),
           " with strides ", a.strides(), ".");
    }
  });
  weights_ = std::make_shared<const Weights>(std::move(w));
}

Arrays DecoderStack::operator()(const mx::array& hidden, const Arrays& k_pages,
                                const Arrays& v_pages, const mx::array& slots,
                                const mx::array& positions, const AttentionTable& table,
                                const AttentionTiles& tiles,
                                const std::optional<mx::array>& logit_rows,
                                const std::string& kv_layout, mx::StreamOrDevice s_) const {
  const Weights& w = *weights_;
  check_ndim(kOp, "hidden", hidden, 2, "[tokens, hidden size]");
  const int tokens = hidden.shape(0);
  check_shape(kOp, "hidden", hidden, {tokens, w.hidden});
  check_dtype(kOp, "hidden", hidden, w.final_norm.dtype());
  if (k_pages.size() != w.layers.size() || v_pages.size() != w.layers.size()) {
    fail(kOp, "k_pages and v_pages must have one pool for each of ", w.layers.size(),
         " layers, got ", k_pages.size(), " and ", v_pages.size(), ".");
  }
  for (const auto& [name, a] : {std::pair{"slots", &slots}, {"positions", &positions}}) {
    check_shape(kOp, name, *a, {tokens});
    check_dtype(kOp, name, *a, mx::int32);
  }
  if (logit_rows) {
    check_ndim(kOp, "logit_rows", *logit_rows, 1, "[rows]");
    check_dtype(kOp, "logit_rows", *logit_rows, mx::int32);
    if (logit_rows->shape(0) > tokens) {
      fail(kOp, "logit_rows must have at most ", tokens, " rows, one a token, got ",
           logit_rows->shape(0), ".");
    }
  }
  for (size_t i = 0; i < k_pages.size(); ++i) {
    pool_layout(kOp, k_pages[i], v_pages[i], kv_layout);
    check_shape(kOp, "k_pages", k_pages[i], k_pages[0].shape());
    check_dtype(kOp, "k_pages", k_pages[i], k_pages[0].dtype());
  }
  const mx::array q = stand_in({tokens, w.shape.num_qo_heads, w.shape.head_dim}, hidden.dtype());
  AttentionOptions options;
  options.kv_layout = kv_layout;
  options.sm_scale = 1.0f / std::sqrt(static_cast<float>(w.shape.head_dim));
  const mx::Stream s = mx::to_stream(s_);
  const PagedAttentionParams attention = attention_params(kOp, q, k_pages[0], v_pages[0], table,
                                                          tiles, std::nullopt, options, s.device);

  Arrays inputs{row_contiguous(hidden, s), row_contiguous(slots, s), row_contiguous(positions, s)};
  if (logit_rows) inputs.push_back(row_contiguous(*logit_rows, s));
  const int rows = logit_rows ? logit_rows->shape(0) : tokens;
  std::vector<mx::Shape> shapes{{rows, w.hidden}};
  for (size_t i = 0; i < k_pages.size(); ++i) {
    inputs.insert(inputs.end(), {k_pages[i], v_pages[i]});
    shapes.insert(shapes.end(), 2, k_pages[i].shape());
  }
  const Arrays rest =
      attention_inputs(hidden, k_pages[0], v_pages[0], table, tiles, std::nullopt, s);
  inputs.insert(inputs.end(), rest.begin(), rest.end());
  std::vector<mx::Dtype> dtypes(shapes.size(), k_pages[0].dtype());
  dtypes[0] = hidden.dtype();
  DecoderStackParams params{weights_, attention, rope_params(attention, w, k_pages[0].shape(0)),
                            logit_rows.has_value()};
  return mx::array::make_arrays(
      shapes, dtypes, std::make_shared<RunDecoderStack>(s, std::move(params)), std::move(inputs));
}

bool DecoderStack::runs_on_gpu(int tokens) const {
  const GpuBackend* backend = gpu_backend();
  if (backend == nullptr || backend->decoder_stack == nullptr) return false;
  const auto fits = [&](const StackLinear& part) {
    LinearParams params = part.params;
    params.rows = tokens;
    return gpu_linear(params);
  };
  return std::ranges::all_of(weights_->layers, [&](const DecoderLayer& layer) {
    // Gate and up in one matrix; no norms of heads.
    return layer.gate_up.size() == 1 && !layer.q_norm && std::ranges::all_of(layer.qkv, fits) &&
           std::ranges::all_of(layer.output, fits) && std::ranges::all_of(layer.gate_up, fits) &&
           std::ranges::all_of(layer.down, fits);
  });
}

void RunDecoderStack::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  if (params_.has_logit_rows) fail(op_, "logit_rows must be None on a GPU.");
  for (size_t i = 1; i < outputs.size(); ++i) {
    check_pool_contiguous(op_, i % 2 == 1 ? "k_pages" : "v_pages", inputs[2 + i]);
  }
  gpu_launcher(op_, &GpuBackend::decoder_stack)(params_, inputs, outputs, stream());
}

}  // namespace mlxcel
