// The kernels as torch operators, namespace tokenstream: attention in float32 for every processor, and all that
// computes in bf16 where the compiler's target has the instructions. It does not know how they compute.
#include <omp.h>
#include <sys/mman.h>
#include <torch/library.h>

#include "checks_cpu.h"
#include "portable_cpu.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)
#define TOKENSTREAM_BF16
#include "model_operators_cpu.h"
#endif

namespace tokenstream {
namespace {

constexpr std::int64_t kHugePage = 2 << 20;

// A step's attention in one layer, checked.
struct Attention {
  AttentionShape shape;
  std::vector<Unit> units;
  const std::int32_t* block_table;
  std::int64_t table_stride;
  const float* sinks;  // or null
  int threads;

  template <class T>
  PagedKV<T> kv(const Tensor& key, const Tensor& value) const {
    return {data<T>(key), data<T>(value), block_table, table_stride};
  }
};

void attend(const Attention& a, const PagedKV<float>& kv, const float* q, float* out) {
  std::atomic<int> counter{0};
#pragma omp parallel num_threads(a.threads)
  portable::attention(a.shape, kv, a.units, counter, q, a.sinks, out);
}

#ifdef TOKENSTREAM_BF16
bool computes_in(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

void attend(const Attention& a, const PagedKV<bf16>& kv, const bf16* q, bf16* out) {
  std::atomic<int> counter{0};
#pragma omp parallel num_threads(a.threads)
  {
    AttentionScratch scratch(a.shape);
    attention(scratch, a.shape, kv, a.units, counter, q, static_cast<std::int64_t>(a.shape.heads) * a.shape.dim,
              a.sinks, out);
  }
}
#else
bool computes_in(at::ScalarType type) { return type == at::kFloat; }
#endif

template <class T>
void write(const Tensor& cache, const Tensor& rows, const Tensor& slots) {
  const auto width = rows.size(1) * rows.size(2);
  const auto* slot = slots.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows.size(0); ++row)
    std::memcpy(data<T>(cache) + slot[row] * width, data<T>(rows) + row * width, sizeof(T) * width);
}

template <class T>
Tensor run(const Attention& a, const Tensor& q, const Tensor& key, const Tensor& value, const Tensor& key_cache,
           const Tensor& value_cache, const Tensor& slots) {
  write<T>(key_cache, key, slots);
  write<T>(value_cache, value, slots);
  Tensor out = q.new_empty_symint(q.sym_sizes());
  attend(a, a.kv<T>(key_cache, value_cache), data<T>(q), data<T>(out));
  return out;
}

Tensor paged_attention(const Tensor& q, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slots, const Tensor& block_table,
                       const Tensor& query_start, const Tensor& context, std::int64_t block_size, double scale,
                       std::int64_t window, double softcap, const std::optional<Tensor>& sinks, std::int64_t threads) {
  const auto type = q.scalar_type();
  TORCH_CHECK(computes_in(type), "q must be of a dtype that has kernels here, got ", type);
  check(q, type, 3, "q");
  check(key, type, 3, "k");
  check(value, type, 3, "v");
  check(slots, at::kLong, 1, "slot_mapping");
  const AttentionShape s = attention_shape(q.size(1), key_cache, value_cache, type, block_size, window, scale, softcap);
  TORCH_CHECK(q.size(2) == s.dim && key.size(1) == s.kv_heads && key.size(2) == s.dim && key.sizes() == value.sizes() &&
                  key.size(0) == q.size(0) && slots.size(0) == q.size(0),
              "q, k, v, slot_mapping and the KV caches disagree in shape");
  check_range(slots, key_cache.size(0), "slot_mapping");
  check_contexts(query_start, context, block_table, q.size(0), block_size, key_cache.size(0));
  if (sinks) check(*sinks, at::kFloat, 1, "sinks");
  TORCH_CHECK(!sinks || sinks->size(0) == s.heads, "sinks must have ", s.heads, " elements");
  const int workers = check_threads(threads);
  const Attention a{s,
                    attention_units(s, query_start.const_data_ptr<std::int32_t>(),
                                    context.const_data_ptr<std::int32_t>(), static_cast<int>(context.size(0)), workers),
                    block_table.const_data_ptr<std::int32_t>(),
                    block_table.size(1),
                    sinks ? sinks->const_data_ptr<float>() : nullptr,
                    workers};
#ifdef TOKENSTREAM_BF16
  if (type == at::kBFloat16) return run<bf16>(a, q, key, value, key_cache, value_cache, slots);
#endif
  return run<float>(a, q, key, value, key_cache, value_cache, slots);
}

void advise_huge_pages(const Tensor& t) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + t.nbytes()) / kHugePage * kHugePage;
  // Advice: where the kernel has no huge pages, nothing is lost but speed.
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Tensor paged_attention_meta(const Tensor& q, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&, const Tensor&, const Tensor&, std::int64_t, double, std::int64_t, double,
                            const std::optional<Tensor>&, std::int64_t) {
  return q.new_empty_symint(q.sym_sizes());
}
void advise_huge_pages_meta(const Tensor&) {}

}  // namespace

TORCH_LIBRARY(tokenstream, m) {
  m.def("arithmetic() -> str", [] { return std::string(TOKENSTREAM_ARITHMETIC); });  // given by build.py
  m.def("advise_huge_pages(Tensor(a!) memory) -> ()");
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor block_table, Tensor query_start, Tensor context_len, int block_size, float scale, "
      "int window, float softcap, Tensor? sinks, int threads) -> Tensor");
#ifdef TOKENSTREAM_BF16
  m.def("pack_linear(Tensor weight, Tensor(a!) out) -> ()");
  m.def("linear(Tensor x, Tensor packed, int columns, Tensor? bias, int threads) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("row_max(Tensor logits) -> (Tensor, Tensor)");
  m.def(
      "llama_forward(Tensor token_ids, Tensor positions, Tensor slot_mapping, Tensor block_table, Tensor query_start, "
      "Tensor context_len, Tensor head_rows, Tensor embedding, Tensor cos, Tensor sin, Tensor[] weights, "
      "Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, int heads, int[] windows, int block_size, float scale, "
      "float eps, int threads, Tensor(c!)? seconds=None) -> Tensor");
#endif
}

TORCH_LIBRARY_IMPL(tokenstream, CPU, m) {
  m.impl("advise_huge_pages", advise_huge_pages);
  m.impl("paged_attention", paged_attention);
#ifdef TOKENSTREAM_BF16
  m.impl("pack_linear", pack_linear);
  m.impl("linear", linear_op);
  m.impl("rms_norm", rms_norm_op);
  m.impl("row_max", row_max);
  m.impl("llama_forward", llama_forward);
#endif
}

TORCH_LIBRARY_IMPL(tokenstream, Meta, m) {
  m.impl("advise_huge_pages", advise_huge_pages_meta);
  m.impl("paged_attention", paged_attention_meta);
#ifdef TOKENSTREAM_BF16
  m.impl("pack_linear", pack_linear_meta);
  m.impl("linear", linear_meta);
  m.impl("rms_norm", rms_norm_meta);
  m.impl("row_max", row_max_meta);
  m.impl("llama_forward", llama_forward_meta);
#endif
}

}  // namespace tokenstream
