// The bf16 kernels as torch operators: checks of what comes in, and nothing else.
#pragma once

#include "checks_cpu.h"
#include "llama_cpu.h"

namespace tokenstream {

constexpr std::int64_t kLayerTensors = 9;  // in the order of Layer

// A packed weight [panels, depth / 2, 32, 2].
inline Packed packed(const Tensor& t, std::int64_t columns, const char* name) {
  check(t, at::kBFloat16, 4, name);
  TORCH_CHECK(t.size(2) == kPanel && t.size(3) == 2 && t.size(0) == (columns + kPanel - 1) / kPanel, name,
              " is not packed for ", columns, " columns");
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(t.data_ptr()) % kCacheLine == 0, name, " must lie on a cache line");
  return {data<bf16>(t), static_cast<int>(columns), static_cast<int>(2 * t.size(1))};
}

inline void pack_linear(const Tensor& weight, const Tensor& out) {
  check(weight, at::kBFloat16, 2, "weight");
  TORCH_CHECK(weight.size(1) % 2 == 0, "weight must have an even number of inputs, got ", weight.size(1));
  const Packed w = packed(out, weight.size(0), "out");
  TORCH_CHECK(w.depth == weight.size(1), "out is packed for ", w.depth, " inputs, weight has ", weight.size(1));
  pack_panels(data<bf16>(out), data<bf16>(weight), w.columns, w.depth, {0, w.panels()});
}

// A vector of `size` elements, or null where the model has none.
inline bf16* optional_vector(const Tensor& t, std::int64_t size, const char* name) {
  check(t, at::kBFloat16, 1, name);
  TORCH_CHECK(t.numel() == 0 || t.numel() == size, name, " must have ", size, " elements, got ", t.numel());
  return data<bf16>(t);
}

inline bf16* vector(const Tensor& t, std::int64_t size, const char* name) {
  TORCH_CHECK(t.numel() == size, name, " must have ", size, " elements, got ", t.numel());
  return optional_vector(t, size, name);
}

inline Tensor linear_op(const Tensor& x, const Tensor& weight, std::int64_t columns, const std::optional<Tensor>& bias,
                        std::int64_t threads) {
  check(x, at::kBFloat16, 2, "x");
  check_threads(threads);
  const Packed w = packed(weight, columns, "weight");
  TORCH_CHECK(x.size(1) == w.depth, "x has ", x.size(1), " columns, weight takes ", w.depth);
  Tensor y = x.new_empty({x.size(0), columns});
  const Store finish{data<bf16>(y), w.columns, bias ? vector(*bias, columns, "bias") : nullptr};
  Panels panels(static_cast<int>(threads));
#pragma omp parallel num_threads(threads)
  linear(w, panels, omp_get_thread_num(), data<bf16>(x), static_cast<int>(x.size(0)), w.data, finish);
  return y;
}

inline Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  check(x, at::kBFloat16, 2, "x");
  const auto width = static_cast<int>(x.size(1));
  const bf16* scale = vector(weight, width, "weight");
  Tensor y = x.new_empty_symint(x.sym_sizes());
  rms_norm(data<bf16>(y), data<bf16>(x), width, width, scale, width, static_cast<float>(eps),
           {0, static_cast<int>(x.size(0))});
  return y;
}

// Per row of logits [rows, columns]: the largest, bf16 [rows], NaN if there is any, and its first place, int64 [rows].
inline std::tuple<Tensor, Tensor> row_max(const Tensor& logits) {
  check(logits, at::kBFloat16, 2, "logits");
  const std::int64_t columns = logits.size(1);
  TORCH_CHECK(columns > 0, "logits must have at least one column");
  Tensor peak = logits.new_empty({logits.size(0)});
  Tensor place = logits.new_empty({logits.size(0)}, logits.options().dtype(at::kLong));
  for (std::int64_t row = 0; row < logits.size(0); ++row) {
    const bf16* from = data<bf16>(logits) + row * columns;
    place.mutable_data_ptr<std::int64_t>()[row] = first_peak(from, columns);
    data<bf16>(peak)[row] = from[place.const_data_ptr<std::int64_t>()[row]];
  }
  return {peak, place};
}

inline Layer layer(const Tensor* t, const AttentionShape& s, std::int64_t hidden, const Tensor& key,
                   const Tensor& value) {
  const std::int64_t columns = (s.heads + 2 * s.kv_heads) * s.dim;
  check(t[8], at::kBFloat16, 4, "down");
  const std::int64_t intermediate = 2 * t[8].size(1);
  return {vector(t[0], hidden, "input norm"),
          packed(t[1], columns, "q|k|v"),
          optional_vector(t[2], columns, "the bias of q|k|v"),
          optional_vector(t[3], s.dim, "q norm"),
          optional_vector(t[4], s.dim, "k norm"),
          packed(t[5], hidden, "o"),
          vector(t[6], hidden, "post norm"),
          packed(t[7], 2 * intermediate, "gate|up"),
          packed(t[8], hidden, "down"),
          data<bf16>(key),
          data<bf16>(value),
          s};
}

inline Model llama(const Tensor& embedding, const Tensor& cos, const Tensor& sin, TensorList weights, TensorList keys,
                   TensorList values, std::int64_t heads, at::IntArrayRef windows, std::int64_t block_size,
                   double scale, double eps) {
  const std::int64_t layers = static_cast<std::int64_t>(keys.size());
  TORCH_CHECK(static_cast<std::int64_t>(weights.size()) == layers * kLayerTensors + 2 && values.size() == keys.size() &&
                  windows.size() == keys.size() && layers > 0,
              "weights must hold ", kLayerTensors,
              " tensors per layer, then norm and head; KV caches and windows one per layer");
  Model m{data<bf16>(embedding),
          data<bf16>(cos),
          data<bf16>(sin),
          {},
          vector(weights[layers * kLayerTensors], embedding.size(1), "norm"),
          {},
          static_cast<float>(eps)};
  m.head = packed(weights[layers * kLayerTensors + 1], embedding.size(0), "head");
  TORCH_CHECK(m.hidden() == embedding.size(1), "head and embedding disagree in shape");
  for (std::int64_t i = 0; i < layers; ++i) {
    const Tensor* t = &weights[i * kLayerTensors];
    const AttentionShape s =
        attention_shape(heads, keys[i], values[i], at::kBFloat16, block_size, windows[i], scale, 0);
    TORCH_CHECK(cos.size(1) * 2 == s.dim && sin.sizes() == cos.sizes() && keys[i].sizes() == keys[0].sizes(),
                "cos, sin and the KV caches disagree in shape");
    m.layers.push_back(layer(t, s, m.hidden(), keys[i], values[i]));
    const Layer& l = m.layers.back();
    TORCH_CHECK(l.qkv.depth == m.hidden() && l.gate_up.depth == m.hidden() && l.o.depth == s.heads * s.dim &&
                    l.down.depth == m.layers[0].down.depth && l.down.depth % kLanes == 0,
                "layer ", i, ": weights disagree in shape");
  }
  return m;
}

inline Tensor llama_forward(const Tensor& token_ids, const Tensor& positions, const Tensor& slots,
                            const Tensor& block_table, const Tensor& query_start, const Tensor& context,
                            const Tensor& head_rows, const Tensor& embedding, const Tensor& cos, const Tensor& sin,
                            TensorList weights, TensorList keys, TensorList values, std::int64_t heads,
                            at::IntArrayRef windows, std::int64_t block_size, double scale, double eps,
                            std::int64_t threads, const std::optional<Tensor>& seconds) {
  check(token_ids, at::kLong, 1, "token_ids");
  check(positions, at::kLong, 1, "positions");
  check(slots, at::kLong, 1, "slot_mapping");
  check(head_rows, at::kLong, 1, "head_rows");
  check(embedding, at::kBFloat16, 2, "embedding");
  check(cos, at::kBFloat16, 2, "cos");
  check(sin, at::kBFloat16, 2, "sin");
  const Model m = llama(embedding, cos, sin, weights, keys, values, heads, windows, block_size, scale, eps);
  const auto rows = token_ids.size(0);
  TORCH_CHECK(positions.size(0) == rows && slots.size(0) == rows && rows > 0,
              "token_ids, positions and slot_mapping disagree in shape");
  check_range(token_ids, embedding.size(0), "token_ids");
  check_range(positions, cos.size(0), "positions");
  check_range(slots, keys[0].size(0), "slot_mapping");
  check_range(head_rows, rows, "head_rows");
  check_contexts(query_start, context, block_table, rows, block_size, keys[0].size(0));
  const Layer& l = m.layers[0];
  const std::int64_t widths[] = {m.hidden(), m.hidden(), l.qkv.columns, l.o.depth, l.down.depth};
  Tensor memory = embedding.new_empty(
      {std::max(rows, head_rows.size(0)) * (widths[0] + widths[1] + widths[2] + widths[3] + widths[4])});
  bf16* part[5] = {data<bf16>(memory)};
  for (int i = 1; i < 5; ++i) part[i] = part[i - 1] + std::max(rows, head_rows.size(0)) * widths[i - 1];
  Tensor logits = embedding.new_empty({head_rows.size(0), embedding.size(0)});
  const Step step{static_cast<int>(rows),
                  static_cast<int>(context.size(0)),
                  token_ids.const_data_ptr<std::int64_t>(),
                  positions.const_data_ptr<std::int64_t>(),
                  slots.const_data_ptr<std::int64_t>(),
                  query_start.const_data_ptr<std::int32_t>(),
                  context.const_data_ptr<std::int32_t>(),
                  block_table.const_data_ptr<std::int32_t>(),
                  block_table.size(1),
                  head_rows.const_data_ptr<std::int64_t>(),
                  static_cast<int>(head_rows.size(0))};
  if (seconds) check(*seconds, at::kDouble, 1, "seconds");
  TORCH_CHECK(!seconds || seconds->numel() == 4, "seconds must have 4 elements");
  forward(m, step, {part[0], part[1], part[2], part[3], part[4]}, data<bf16>(logits), check_threads(threads),
          seconds ? reinterpret_cast<Seconds*>(seconds->data_ptr<double>()) : nullptr);
  return logits;
}

inline Tensor linear_meta(const Tensor& x, const Tensor&, std::int64_t columns, const std::optional<Tensor>&,
                          std::int64_t) {
  return x.new_empty_symint({x.sym_size(0), columns});
}
inline std::tuple<Tensor, Tensor> row_max_meta(const Tensor& logits) {
  return {logits.new_empty_symint({logits.sym_size(0)}),
          logits.new_empty_symint({logits.sym_size(0)}, logits.options().dtype(at::kLong))};
}
inline Tensor rms_norm_meta(const Tensor& x, const Tensor&, double) { return x.new_empty_symint(x.sym_sizes()); }
inline Tensor llama_forward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                 const Tensor&, const Tensor& head_rows, const Tensor& embedding, const Tensor&,
                                 const Tensor&, TensorList, TensorList, TensorList, std::int64_t, at::IntArrayRef,
                                 std::int64_t, double, double, std::int64_t, const std::optional<Tensor>&) {
  return embedding.new_empty_symint({head_rows.sym_size(0), embedding.sym_size(0)});
}
inline void pack_linear_meta(const Tensor&, const Tensor&) {}

}  // namespace tokenstream
