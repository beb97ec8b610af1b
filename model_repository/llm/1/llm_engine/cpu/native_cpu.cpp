// The kernels as torch operators, namespace tokenstream: checks of what comes in, and nothing else.
#include <sys/mman.h>
#include <torch/library.h>

#include "llama_cpu.h"

namespace tokenstream {
namespace {

using at::Tensor;
using at::TensorList;

constexpr std::int64_t kLayerTensors = 9;  // in the order of Layer
constexpr std::int64_t kHugePage = 2 << 20;

void check(const Tensor& t, at::ScalarType type, std::int64_t dims, const char* name) {
  TORCH_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous() && t.device().is_cpu(), name,
              " must be a contiguous ", type, " CPU tensor with ", dims, " dimensions");
}

bf16* data(const Tensor& t) { return t.numel() ? static_cast<bf16*>(t.data_ptr()) : nullptr; }

// A packed weight [panels, depth / 2, 32, 2].
Packed packed(const Tensor& t, std::int64_t columns, const char* name) {
  check(t, at::kBFloat16, 4, name);
  TORCH_CHECK(t.size(2) == kPanel && t.size(3) == 2 && t.size(0) == (columns + kPanel - 1) / kPanel, name,
              " is not packed for ", columns, " columns");
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(t.data_ptr()) % kCacheLine == 0, name, " must lie on a cache line");
  return {data(t), static_cast<int>(columns), static_cast<int>(2 * t.size(1))};
}

void check_range(const Tensor& t, std::int64_t end, const char* name) {
  const auto* p = t.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < t.numel(); ++i)
    TORCH_CHECK(p[i] >= 0 && p[i] < end, name, " must be from 0 to ", end - 1, ", got ", p[i]);
}

// Every context must lie in the table, and every block that it names in the cache.
void check_contexts(const Tensor& query_start, const Tensor& context, const Tensor& table, std::int64_t rows,
                    std::int64_t block, std::int64_t slots) {
  check(query_start, at::kInt, 1, "query_start");
  check(context, at::kInt, 1, "context_len");
  check(table, at::kInt, 2, "block_table");
  const auto* start = query_start.const_data_ptr<std::int32_t>();
  const std::int64_t sequences = context.size(0);
  TORCH_CHECK(query_start.size(0) == sequences + 1 && table.size(0) == sequences,
              "query_start, context_len and block_table disagree");
  TORCH_CHECK(start[0] == 0 && start[sequences] == rows, "query_start must go from 0 to the number of rows");
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t tokens = context.const_data_ptr<std::int32_t>()[i];
    TORCH_CHECK(start[i] <= start[i + 1] && start[i + 1] - start[i] <= tokens,
                "context_len must hold the rows of its sequence");
    TORCH_CHECK(tokens <= table.size(1) * block, "block_table is too short for a context of ", tokens);
    const auto* blocks = table.const_data_ptr<std::int32_t>() + i * table.size(1);
    for (std::int64_t b = 0; b * block < tokens; ++b)
      TORCH_CHECK(blocks[b] >= 0 && (blocks[b] + 1) * block <= slots, "block_table names block ", blocks[b],
                  ", which is not in the cache");
  }
}

AttentionShape attention_shape(std::int64_t heads, const Tensor& cache, std::int64_t block_size, std::int64_t window,
                               double scale, double softcap) {
  check(cache, at::kBFloat16, 3, "a KV cache");
  const auto kv_heads = cache.size(1), dim = cache.size(2);
  TORCH_CHECK(heads % kv_heads == 0 && dim % 2 == 0 && dim <= 256,
              "heads must be a multiple of kv_heads, head_dim even and at most 256");
  return {static_cast<int>(heads),      static_cast<int>(kv_heads), static_cast<int>(dim),
          static_cast<int>(block_size), static_cast<int>(window),   static_cast<float>(scale),
          static_cast<float>(softcap)};
}

void advise_huge_pages(const Tensor& t) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + t.nbytes()) / kHugePage * kHugePage;
  // Advice: where the kernel has no huge pages, nothing is lost but speed.
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void pack_linear(const Tensor& weight, const Tensor& out) {
  check(weight, at::kBFloat16, 2, "weight");
  TORCH_CHECK(weight.size(1) % 2 == 0, "weight must have an even number of inputs, got ", weight.size(1));
  const Packed w = packed(out, weight.size(0), "out");
  TORCH_CHECK(w.depth == weight.size(1), "out is packed for ", w.depth, " inputs, weight has ", weight.size(1));
  pack_panels(data(out), data(weight), w.columns, w.depth, {0, w.panels()});
}

Tensor linear_op(const Tensor& x, const Tensor& weight, std::int64_t columns, const std::optional<Tensor>& bias,
                 std::int64_t threads) {
  check(x, at::kBFloat16, 2, "x");
  const Packed w = packed(weight, columns, "weight");
  TORCH_CHECK(x.size(1) == w.depth, "x has ", x.size(1), " columns, weight takes ", w.depth);
  Tensor y = x.new_empty({x.size(0), columns});
  const Store finish{data(y), w.columns, bias ? data(*bias) : nullptr};
#pragma omp parallel num_threads(threads)
  {
    const Range range = share(w.panels(), omp_get_thread_num(), omp_get_num_threads());
    linear(w, range, data(x), static_cast<int>(x.size(0)), w.panel(range.begin), finish);
  }
  return y;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  check(x, at::kBFloat16, 2, "x");
  check(weight, at::kBFloat16, 1, "weight");
  const auto width = static_cast<int>(x.size(1));
  TORCH_CHECK(weight.size(0) == width, "weight must have ", width, " elements");
  Tensor y = x.new_empty_symint(x.sym_sizes());
  rms_norm(data(y), data(x), width, width, data(weight), width, static_cast<float>(eps),
           {0, static_cast<int>(x.size(0))});
  return y;
}

Tensor paged_attention(const Tensor& q, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slots, const Tensor& block_table,
                       const Tensor& query_start, const Tensor& context, std::int64_t block_size, double scale,
                       std::int64_t window, double softcap, const std::optional<Tensor>& sinks, std::int64_t threads) {
  for (const auto& t : {q, key, value}) check(t, at::kBFloat16, 3, "q, k or v");
  check(slots, at::kLong, 1, "slot_mapping");
  const AttentionShape s = attention_shape(q.size(1), key_cache, block_size, window, scale, softcap);
  TORCH_CHECK(value_cache.sizes() == key_cache.sizes() && value_cache.is_contiguous(), "the KV caches must be alike");
  TORCH_CHECK(q.size(2) == s.dim && key.size(1) == s.kv_heads && key.size(2) == s.dim && key.sizes() == value.sizes() &&
                  key.size(0) == q.size(0) && slots.size(0) == q.size(0),
              "q, k, v, slot_mapping and the KV caches disagree in shape");
  check_range(slots, key_cache.size(0), "slot_mapping");
  check_contexts(query_start, context, block_table, q.size(0), block_size, key_cache.size(0));
  if (sinks) check(*sinks, at::kFloat, 1, "sinks");
  const auto* slot = slots.const_data_ptr<std::int64_t>();
  const int width = s.kv_heads * s.dim;
  for (std::int64_t row = 0; row < q.size(0); ++row) {
    std::memcpy(data(key_cache) + slot[row] * width, data(key) + row * width, 2 * width);
    std::memcpy(data(value_cache) + slot[row] * width, data(value) + row * width, 2 * width);
  }
  Tensor out = q.new_empty_symint(q.sym_sizes());
  const auto units =
      attention_units(s, query_start.const_data_ptr<std::int32_t>(), context.const_data_ptr<std::int32_t>(),
                      static_cast<int>(context.size(0)), static_cast<int>(threads));
  const PagedKV kv{data(key_cache), data(value_cache), block_table.const_data_ptr<std::int32_t>(), block_table.size(1)};
  std::atomic<int> counter{0};
#pragma omp parallel num_threads(threads)
  {
    AttentionScratch scratch(s);
    attention(scratch, s, kv, units, counter, data(q), static_cast<std::int64_t>(s.heads) * s.dim,
              sinks ? sinks->const_data_ptr<float>() : nullptr, data(out));
  }
  return out;
}

// A vector of `size` elements, or null where the model has none.
bf16* optional_vector(const Tensor& t, std::int64_t size, const char* name) {
  check(t, at::kBFloat16, 1, name);
  TORCH_CHECK(t.numel() == 0 || t.numel() == size, name, " must have ", size, " elements, got ", t.numel());
  return data(t);
}

bf16* vector(const Tensor& t, std::int64_t size, const char* name) {
  TORCH_CHECK(t.numel() == size, name, " must have ", size, " elements, got ", t.numel());
  return optional_vector(t, size, name);
}

Layer layer(const Tensor* t, const AttentionShape& s, std::int64_t hidden, const Tensor& key, const Tensor& value) {
  const std::int64_t columns = (s.heads + 2 * s.kv_heads) * s.dim;
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
          data(key),
          data(value),
          s};
}

Model llama(const Tensor& embedding, const Tensor& cos, const Tensor& sin, TensorList weights, TensorList keys,
            TensorList values, std::int64_t heads, at::IntArrayRef windows, std::int64_t block_size, double scale,
            double eps) {
  const std::int64_t layers = static_cast<std::int64_t>(keys.size());
  TORCH_CHECK(static_cast<std::int64_t>(weights.size()) == layers * kLayerTensors + 2 && values.size() == keys.size() &&
                  windows.size() == keys.size() && layers > 0,
              "weights must hold ", kLayerTensors,
              " tensors per layer, then norm and head; KV caches and windows one per layer");
  Model m{data(embedding),
          data(cos),
          data(sin),
          {},
          vector(weights[layers * kLayerTensors], embedding.size(1), "norm"),
          {},
          static_cast<float>(eps)};
  m.head = packed(weights[layers * kLayerTensors + 1], embedding.size(0), "head");
  TORCH_CHECK(m.hidden() == embedding.size(1), "head and embedding disagree in shape");
  for (std::int64_t i = 0; i < layers; ++i) {
    const Tensor* t = &weights[i * kLayerTensors];
    const AttentionShape s = attention_shape(heads, keys[i], block_size, windows[i], scale, 0);
    TORCH_CHECK(cos.size(1) * 2 == s.dim && values[i].sizes() == keys[i].sizes() && keys[i].sizes() == keys[0].sizes(),
                "cos, sin and the KV caches disagree in shape");
    m.layers.push_back(layer(t, s, m.hidden(), keys[i], values[i]));
    const Layer& l = m.layers.back();
    TORCH_CHECK(l.qkv.depth == m.hidden() && l.gate_up.depth == m.hidden() && l.o.depth == s.heads * s.dim, "layer ", i,
                ": weights disagree in shape");
  }
  return m;
}

Tensor llama_forward(const Tensor& token_ids, const Tensor& positions, const Tensor& slots, const Tensor& block_table,
                     const Tensor& query_start, const Tensor& context, const Tensor& head_rows, const Tensor& embedding,
                     const Tensor& cos, const Tensor& sin, TensorList weights, TensorList keys, TensorList values,
                     std::int64_t heads, at::IntArrayRef windows, std::int64_t block_size, double scale, double eps,
                     std::int64_t threads, const std::optional<Tensor>& seconds) {
  for (const auto& t : {token_ids, positions, slots, head_rows})
    check(t, at::kLong, 1, "token_ids, positions, slot_mapping or head_rows");
  for (const auto& t : {embedding, cos, sin}) check(t, at::kBFloat16, 2, "embedding, cos or sin");
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
  bf16* part[5] = {data(memory)};
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
  TORCH_CHECK(threads > 0, "threads must be at least 1, got ", threads);
  if (seconds) check(*seconds, at::kDouble, 1, "seconds");
  TORCH_CHECK(!seconds || seconds->numel() == 4, "seconds must have 4 elements");
  forward(m, step, {part[0], part[1], part[2], part[3], part[4]}, data(logits), static_cast<int>(threads),
          seconds ? reinterpret_cast<Seconds*>(seconds->data_ptr<double>()) : nullptr);
  return logits;
}

Tensor linear_meta(const Tensor& x, const Tensor&, std::int64_t columns, const std::optional<Tensor>&, std::int64_t) {
  return x.new_empty_symint({x.sym_size(0), columns});
}
Tensor rms_norm_meta(const Tensor& x, const Tensor&, double) { return x.new_empty_symint(x.sym_sizes()); }
Tensor paged_attention_meta(const Tensor& q, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&, const Tensor&, const Tensor&, std::int64_t, double, std::int64_t, double,
                            const std::optional<Tensor>&, std::int64_t) {
  return q.new_empty_symint(q.sym_sizes());
}
Tensor llama_forward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor& head_rows, const Tensor& embedding, const Tensor&, const Tensor&, TensorList,
                          TensorList, TensorList, std::int64_t, at::IntArrayRef, std::int64_t, double, double,
                          std::int64_t, const std::optional<Tensor>&) {
  return embedding.new_empty_symint({head_rows.sym_size(0), embedding.sym_size(0)});
}
void pack_linear_meta(const Tensor&, const Tensor&) {}
void advise_huge_pages_meta(const Tensor&) {}

}  // namespace

TORCH_LIBRARY(tokenstream, m) {
  m.def("advise_huge_pages(Tensor(a!) memory) -> ()");
  m.def("pack_linear(Tensor weight, Tensor(a!) out) -> ()");
  m.def("linear(Tensor x, Tensor packed, int columns, Tensor? bias, int threads) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
      "slot_mapping, "
      "Tensor block_table, Tensor query_start, Tensor context_len, int block_size, float scale, int window, float "
      "softcap, "
      "Tensor? sinks, int threads) -> Tensor");
  m.def(
      "llama_forward(Tensor token_ids, Tensor positions, Tensor slot_mapping, Tensor block_table, Tensor query_start, "
      "Tensor context_len, Tensor head_rows, Tensor embedding, Tensor cos, Tensor sin, Tensor[] weights, Tensor(a!)[] "
      "key_caches, "
      "Tensor(b!)[] value_caches, int heads, int[] windows, int block_size, float scale, float eps, int threads, "
      "Tensor(c!)? seconds=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(tokenstream, CPU, m) {
  m.impl("advise_huge_pages", advise_huge_pages);
  m.impl("pack_linear", pack_linear);
  m.impl("linear", linear_op);
  m.impl("rms_norm", rms_norm_op);
  m.impl("paged_attention", paged_attention);
  m.impl("llama_forward", llama_forward);
}

TORCH_LIBRARY_IMPL(tokenstream, Meta, m) {
  m.impl("advise_huge_pages", advise_huge_pages_meta);
  m.impl("pack_linear", pack_linear_meta);
  m.impl("linear", linear_meta);
  m.impl("rms_norm", rms_norm_meta);
  m.impl("paged_attention", paged_attention_meta);
  m.impl("llama_forward", llama_forward_meta);
}

}  // namespace tokenstream
