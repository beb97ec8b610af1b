// Paged attention in float32 over a KV cache of float32 or bf16: prefill and decode are one kernel.
//
//     keys    [blocks][kv_heads][dim][block_size]      in lanes, so that nothing is copied if 16 divides block_size
//     values  [blocks][block_size][kv_heads][width]    width: dim, rounded up to lanes
//
// A score is one chain of fused multiply-adds over the head's dimensions, a value's sum one over the keys from the
// first to the last. The softmax is the online one of Milakov and Gimelshein (2018) in base 2, over tiles of 64 keys
// by position. A tile that a row does not see multiplies its sums by 1 and adds 0, so a row's bits depend on its
// context alone: not on its unit, chunk, neighbours, threads, block size or placement. It does not know projections.
#pragma once

#include <limits>
#include <vector>

#include "gemm.h"
#include "math.h"

namespace tokenstream {

constexpr int kKeys = 64;         // of a tile: 4 vectors
constexpr int kVectors = kKeys / kLanes;
constexpr int kTargetRows = 192;  // rows (positions x query heads of a key head) that share a tile of keys
constexpr int kMaxDim = 512;
constexpr int kQueryRows = kRegisters > 16 ? 6 : 3;   // of a register tile
constexpr int kTileVectors = kRegisters > 16 ? 4 : 2;

// Where a running softmax begins: below every score, and far enough from -inf that the difference of two is a number.
constexpr float kNoPeak = -1e30f;

// One layer's attention.
struct AttentionShape {
  int heads, kv_heads, dim, block_size;
  int window;                            // keys that a row sees, itself included; 0 for all
  float scale;
  float softcap;  // 0 for none

  int group() const { return heads / kv_heads; }
  bool in_lanes() const { return block_size % kLanes == 0; }  // else tiles are copied together first
  int width() const { return round_up(dim, kLanes); }
  float unit() const { return (softcap > 0 ? 1.0f : scale) * kLog2E; }  // of a score, in powers of 2
};

template <class T>
struct PagedKV {
  T* key;
  T* value;
  const std::int32_t* table;  // blocks of each sequence
  std::int64_t table_stride;

  // Where keys of `block` begin that lie `offset` behind its first; a dimension's are block_size apart.
  T* keys(const AttentionShape& s, std::int64_t block, int head, int offset) const {
    return key + ((block * s.kv_heads + head) * s.dim) * s.block_size + offset;
  }
  T* values(const AttentionShape& s, std::int64_t block, int head, int offset) const {
    return value + ((block * s.block_size + offset) * s.kv_heads + head) * s.width();
  }
};

// What a thread computes at a time: some rows of one sequence, for one key head.
struct Unit {
  int sequence, first_row, rows, first_position, head;
};

inline std::vector<Unit> attention_units(const AttentionShape& s, const std::int32_t* query_start,
                                         const std::int32_t* context, int sequences) {
  const int tile = std::max(1, kTargetRows / s.group());
  std::vector<Unit> units;
  for (int i = 0; i < sequences; ++i) {
    const int first = query_start[i], count = query_start[i + 1] - first;
    for (int end = count; end > 0; end -= tile) {
      const int begin = std::max(0, end - tile);
      for (int head = 0; head < s.kv_heads; ++head)
        units.push_back({i, first + begin, end - begin, context[i] - count + begin, head});
    }
  }
  return units;
}

// Memory of one thread.
struct AttentionScratch {
  AttentionScratch(const AttentionShape& s)
      : rows(std::max(kTargetRows, s.group())),
        query(static_cast<std::size_t>(rows) * s.dim),
        score(kQueryRows * kKeys),
        sum(static_cast<std::size_t>(rows) * s.width()),
        peak(rows),
        total(static_cast<std::size_t>(rows) * kLanes),
        key(s.in_lanes() ? 0 : static_cast<std::size_t>(kKeys) * s.dim),
        value(s.in_lanes() ? 0 : static_cast<std::size_t>(kKeys) * s.width()) {}
  int rows;
  Aligned<float> query;  // [rows][dim]
  Aligned<float> score;  // [kQueryRows][64]: scores, then weights
  Aligned<float> sum;    // [rows][width]
  Aligned<float> peak;   // [rows]
  Aligned<float> total;  // [rows][16]
  Aligned<float> key;    // [dim][64], of a tile whose blocks are no multiple of 16 keys, as value [64][width]
  Aligned<float> value;
};

// Where the 4 x 16 keys of a tile begin; `count` of them are there. Strides: from a key's dimension to the next, and
// from a value to the next.
template <class T>
struct KeyTile {
  const T* key[kVectors];
  const T* value[kVectors];
  int count, key_stride, value_stride;
};

template <class T>
KeyTile<T> key_tile(const PagedKV<T>& kv, const AttentionShape& s, const Unit& u, int first, int end) {
  KeyTile<T> tile;
  tile.count = std::min(end - first, kKeys);
  tile.key_stride = s.block_size;
  tile.value_stride = s.kv_heads * s.width();
  const std::int32_t* table = kv.table + u.sequence * kv.table_stride;
  for (int v = 0; v < kVectors; ++v) {
    const int key = std::min(first + v * kLanes, (end - 1) / kLanes * kLanes);  // behind the end: any that is there
    const std::int64_t block = table[key / s.block_size];
    tile.key[v] = kv.keys(s, block, u.head, key % s.block_size);
    tile.value[v] = kv.values(s, block, u.head, key % s.block_size);
  }
  return tile;
}

// The same tile of blocks of any size, copied together. Behind the end are keys of tiles before, hidden from every row.
template <class T>
KeyTile<float> copy_tile(AttentionScratch& m, const PagedKV<T>& kv, const AttentionShape& s, const Unit& u, int first,
                         int end) {
  KeyTile<float> tile;
  tile.count = std::min(end - first, kKeys);
  tile.key_stride = kKeys;
  tile.value_stride = s.width();
  const std::int32_t* table = kv.table + u.sequence * kv.table_stride;
  for (int i = 0; i < tile.count; ++i) {
    const std::int64_t block = table[(first + i) / s.block_size];
    const int offset = (first + i) % s.block_size;
    const T* key = kv.keys(s, block, u.head, offset);
    for (int d = 0; d < s.dim; ++d) {
      if constexpr (sizeof(T) == sizeof(float))
        m.key.get()[d * kKeys + i] = key[static_cast<std::ptrdiff_t>(d) * s.block_size];
      else
        m.key.get()[d * kKeys + i] = std::bit_cast<float>(
            static_cast<std::uint32_t>(key[static_cast<std::ptrdiff_t>(d) * s.block_size]) << 16);
    }
    const T* value = kv.values(s, block, u.head, offset);
    for (int d = 0; d < s.width(); d += kLanes) store(m.value.get() + i * s.width() + d, load(value + d));
  }
  for (int v = 0; v < kVectors; ++v) {
    tile.key[v] = m.key.get() + v * kLanes;
    tile.value[v] = m.value.get() + v * kLanes * s.width();
  }
  return tile;
}

template <int R, int V, class T>
void score_rows(float* score, const float* query, const T* const* key, int dim, int block_size) {
  Floats s[R][V];
  for (auto& row : s)
    for (auto& v : row) v = all(0.0f);
  for (int d = 0; d < dim; ++d) {
    Floats k[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) k[v] = load(key[v] + static_cast<std::ptrdiff_t>(d) * block_size);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats q = all(query[r * dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) s[r][v] = fma(k[v], q, s[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(score + r * kKeys + v * kLanes, s[r][v]);
}

template <int R, int V, class T>
void add_values(float* sum, int width, const float* weight, const KeyTile<T>& tile, int column, int stride) {
  Floats s[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) s[r][v] = load(sum + r * width + column + v * kLanes);
  for (int first = 0; first < tile.count; first += kLanes) {
    const T* from = tile.value[first / kLanes] + column;
    const int count = std::min(kLanes, tile.count - first);
    for (int i = 0; i < count; ++i) {
      Floats x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = load(from + static_cast<std::ptrdiff_t>(i) * stride + v * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Floats w = all(weight[r * kKeys + first + i]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) s[r][v] = fma(x[v], w, s[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sum + r * width + column + v * kLanes, s[r][v]);
}

// Take 64 scores of the row at `position` into its softmax; their weights take their place.
inline void softmax_row(float* score, float* sum, float& peak_so_far, float* total, const AttentionShape& s,
                        int first_key, int position) {
  Floats x[kVectors];
  const bool hiding = s.window || first_key + kKeys - 1 > position;
  for (int v = 0; v < kVectors; ++v) {
    x[v] = load(score + v * kLanes);
    if (s.softcap > 0) x[v] = all(s.softcap) * tanh(x[v] * all(s.scale / s.softcap));
    if (hiding) {
      const Floats hidden = all(-std::numeric_limits<float>::infinity());
      const Ints key = counting() + all(first_key + v * kLanes);
      x[v] = where_less(all(position), key, hidden, x[v]);
      if (s.window) x[v] = where_less(key, all(position - s.window + 1), hidden, x[v]);
    }
  }
  const Floats top = larger(larger(x[0], x[1]), larger(x[2], x[3]));
  if (any_less(all(peak_so_far), top)) {
    const float largest = peak(top);
    const Floats shrink = exp2(all((peak_so_far - largest) * s.unit()));
    peak_so_far = largest;
    store(total, load(total) * shrink);
    for (int d = 0; d < s.width(); d += kLanes) store(sum + d, load(sum + d) * shrink);
  }
  const Floats unit = all(s.unit()), low = all(peak_so_far);
  for (int v = 0; v < kVectors; ++v) {
    x[v] = exp2((x[v] - low) * unit);
    store(score + v * kLanes, x[v]);
  }
  store(total, load(total) + ((x[0] + x[1]) + (x[2] + x[3])));
}

template <int R, class T>
void attend_rows(AttentionScratch& m, const AttentionShape& s, const Unit& u, const KeyTile<T>& tile, int first_key,
                 int row) {
  float* score = m.score.get();
  for (int v = 0; v < kVectors; v += kTileVectors)
    score_rows<R, kTileVectors>(score + v * kLanes, m.query.get() + row * s.dim, tile.key + v, s.dim, tile.key_stride);
  float* sum = m.sum.get() + static_cast<std::ptrdiff_t>(row) * s.width();
  for (int r = 0; r < R; ++r)
    softmax_row(score + r * kKeys, sum + r * s.width(), m.peak.get()[row + r], m.total.get() + (row + r) * kLanes, s,
                first_key, u.first_position + (row + r) / s.group());
  const int stride = tile.value_stride;
  int d = 0;
  for (; d + kTileVectors * kLanes <= s.width(); d += kTileVectors * kLanes)
    add_values<R, kTileVectors>(sum, s.width(), score, tile, d, stride);
  for (; d < s.width(); d += kLanes) add_values<R, 1>(sum, s.width(), score, tile, d, stride);
}

template <class T, int... I>
void attend_some(int rows, AttentionScratch& m, const AttentionShape& s, const Unit& u, const KeyTile<T>& tile,
                 int first_key, int row, std::integer_sequence<int, I...>) {
  static constexpr decltype(&attend_rows<1, T>) kernels[] = {attend_rows<I + 1, T>...};
  kernels[rows - 1](m, s, u, tile, first_key, row);
}

// All rows of a unit meet one tile, but for those that lie before it.
template <class T>
void attend_tile(AttentionScratch& m, const AttentionShape& s, const Unit& u, const KeyTile<T>& tile, int first_key) {
  const int rows = u.rows * s.group();
  for (int r = 0; r < rows; r += kQueryRows) {
    const int count = std::min(kQueryRows, rows - r);
    if (first_key > u.first_position + (r + count - 1) / s.group()) continue;
    attend_some(count, m, s, u, tile, first_key, r, std::make_integer_sequence<int, kQueryRows>());
  }
}

// One unit. q: rows of [heads][dim], `q_stride` apart; out: rows of [heads][dim], `out_stride` apart. A sink is a key
// with a score and without a value: sinks [heads] or null.
template <class T>
void attend(AttentionScratch& m, const AttentionShape& s, const PagedKV<T>& kv, const Unit& u, const float* q,
            std::ptrdiff_t q_stride, const float* sinks, float* out, std::ptrdiff_t out_stride) {
  const int rows = u.rows * s.group();  // row r: query head r % group of position first_position + r / group
  for (int r = 0; r < rows; ++r) {
    const int head = u.head * s.group() + r % s.group();
    std::copy_n(q + (u.first_row + r / s.group()) * q_stride + head * s.dim, s.dim, m.query.get() + r * s.dim);
    m.peak.get()[r] = sinks ? sinks[head] * (kLog2E / s.unit()) : kNoPeak;
    std::fill_n(m.total.get() + r * kLanes, kLanes, 0.0f);
    if (sinks) m.total.get()[r * kLanes] = 1.0f;
  }
  std::fill_n(m.sum.get(), static_cast<std::size_t>(rows) * s.width(), 0.0f);
  const int end = u.first_position + u.rows;
  const int begin = s.window ? std::max(0, u.first_position - s.window + 1) / kKeys * kKeys : 0;
  for (int key = begin; key < end; key += kKeys) {
    if (s.in_lanes())
      attend_tile(m, s, u, key_tile(kv, s, u, key, end), key);
    else
      attend_tile(m, s, u, copy_tile(m, kv, s, u, key, end), key);
  }
  for (int r = 0; r < rows; ++r) {
    const int head = u.head * s.group() + r % s.group();
    float* to = out + (u.first_row + r / s.group()) * out_stride + head * s.dim;
    const Floats total = all(sum(load(m.total.get() + r * kLanes)));
    for (int d = 0; d < s.dim; d += kLanes)
      store(to + d, load(m.sum.get() + static_cast<std::ptrdiff_t>(r) * s.width() + d) / total, s.dim - d);
  }
}

// Write a row's keys and values [kv_heads][dim] into its slot.
template <class T>
void write_kv(const PagedKV<T>& kv, const AttentionShape& s, std::int64_t slot, const float* key, const float* value) {
  const std::int64_t block = slot / s.block_size;
  const int offset = static_cast<int>(slot % s.block_size);
  for (int head = 0; head < s.kv_heads; ++head) {
    T narrowed[kMaxDim + kLanes];
    for (int d = 0; d < s.dim; d += kLanes) store(narrowed + d, load(key + head * s.dim + d, s.dim - d));
    T* to = kv.keys(s, block, head, offset);
    for (int d = 0; d < s.dim; ++d) to[static_cast<std::ptrdiff_t>(d) * s.block_size] = narrowed[d];
    T* values = kv.values(s, block, head, offset);
    for (int d = 0; d < s.dim; d += kLanes) store(values + d, load(value + head * s.dim + d, s.dim - d));
  }
}

}  // namespace tokenstream
