// What must be true of tensors before a kernel reads them; whoever breaks it is told which input is wrong.
//
// Kernels trust what they get, so every index that they follow is checked here. It does not know what is computed.
#pragma once

#include <torch/library.h>

#include <limits>

#include "paging_cpu.h"

namespace tokenstream {

using at::Tensor;
using at::TensorList;

inline void check(const Tensor& t, at::ScalarType type, std::int64_t dims, const char* name) {
  TORCH_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous() && t.device().is_cpu(), name,
              " must be a contiguous ", type, " CPU tensor with ", dims, " dimensions");
}

template <class T>
T* data(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

inline int check_threads(std::int64_t threads) {
  TORCH_CHECK(threads > 0 && threads <= 1024, "threads must be from 1 to 1024, got ", threads);
  return static_cast<int>(threads);
}

inline void check_range(const Tensor& t, std::int64_t end, const char* name) {
  const auto* p = t.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < t.numel(); ++i)
    TORCH_CHECK(p[i] >= 0 && p[i] < end, name, " must be from 0 to ", end - 1, ", got ", p[i]);
}

// Every context must lie in the table, and every block that it names in the cache.
inline void check_contexts(const Tensor& query_start, const Tensor& context, const Tensor& table, std::int64_t rows,
                           std::int64_t block, std::int64_t slots) {
  check(query_start, at::kInt, 1, "query_start");
  check(context, at::kInt, 1, "context_len");
  check(table, at::kInt, 2, "block_table");
  TORCH_CHECK(block > 0, "block_size must be at least 1, got ", block);
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
      TORCH_CHECK(blocks[b] >= 0 && blocks[b] < slots / block, "block_table names block ", blocks[b],
                  ", which is not in the cache");
  }
}

// The shape of a layer with this KV cache, key and value [slots, kv_heads, dim].
inline AttentionShape attention_shape(std::int64_t heads, const Tensor& key, const Tensor& value, at::ScalarType type,
                                      std::int64_t block_size, std::int64_t window, double scale, double softcap) {
  check(key, type, 3, "the key cache");
  check(value, type, 3, "the value cache");
  TORCH_CHECK(key.sizes() == value.sizes(), "the key cache and the value cache disagree in shape");
  const auto kv_heads = key.size(1), dim = key.size(2);
  TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "heads (", heads,
              ") must be a multiple of the KV cache's (", kv_heads, ")");
  TORCH_CHECK(dim > 0 && dim % 2 == 0 && dim <= kMaxDim, "head_dim must be even and at most ", kMaxDim, ", got ", dim);
  TORCH_CHECK(block_size > 0 && block_size <= key.size(0), "block_size must be from 1 to ", key.size(0), ", got ",
              block_size);
  TORCH_CHECK(window >= 0, "window must not be negative, got ", window);
  TORCH_CHECK(softcap >= 0, "softcap must not be negative, got ", softcap);
  const auto limit = static_cast<std::int64_t>(std::numeric_limits<int>::max());
  return {static_cast<int>(heads),
          static_cast<int>(kv_heads),
          static_cast<int>(dim),
          static_cast<int>(block_size),
          static_cast<int>(std::min(window, limit)),
          static_cast<float>(scale),
          static_cast<float>(softcap)};
}

}  // namespace tokenstream
