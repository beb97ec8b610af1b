// The geometry of paged attention: what a layer looks like, how a ragged batch is cut into units of work, and in which
// slots the keys of a sequence lie.
//
//        keys of one sequence, by position
//        0 .. 63   | 64 .. 127 | 128 ..        Each key tile is gathered once through the block table and shared by all
//        heads                                 rows of a unit. Tiles are taken from the first to the row's own, never
//   rows [  S = Q K^T, softmax so far,         another way.
//         O = O * shrink + P V      ]
//
// A tile that a row does not see multiplies its sums by 1 and adds 0, so a row's bits depend on its context alone: not
// on its unit, chunk, neighbours, threads, block size or placement. It does not know arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numbers>
#include <vector>

namespace tokenstream {

constexpr int kKeys = 64;         // keys of a tile
constexpr int kTargetRows = 192;  // rows (positions x query heads per key head) that share a copied key tile
constexpr int kMaxDim = 256;

constexpr float kLog2E = std::numbers::log2e_v<float>;

// Where a running softmax begins: below every score, and far enough from -inf that the difference of two is a number.
constexpr float kNoPeak = -1e30f;

// One layer's attention. Strides are in elements; a slot holds [kv_heads, dim].
struct AttentionShape {
  int heads;
  int kv_heads;
  int dim;  // at most kMaxDim
  int block_size;
  int window;  // keys that a row sees, itself included; 0 for all
  float scale;
  float softcap;  // 0 for none

  int group() const { return heads / kv_heads; }
  int slot_size() const { return kv_heads * dim; }
  // Of a score as the softmax gets it, in powers of 2.
  float unit() const { return (softcap > 0 ? 1.0f : scale) * kLog2E; }
  // Rows that a unit may hold: one key head's query tile, or one position of all heads.
  int unit_rows() const { return std::max(kTargetRows, heads); }
};

template <class T>
struct PagedKV {
  const T* key;
  const T* value;
  const std::int32_t* block_table;  // [sequences, table_stride]
  std::int64_t table_stride;
};

// What one thread computes at a time: some rows of one sequence, for some key heads.
struct Unit {
  int sequence;
  int first_row;  // in the batch
  int rows;
  int first_position;
  int first_head, heads;  // key heads
};

// Cut the batch into units, the longest contexts of each sequence first. query_start: [sequences + 1] rows of the
// batch; context: [sequences] tokens after this step.
inline std::vector<Unit> attention_units(const AttentionShape& s, const std::int32_t* query_start,
                                         const std::int32_t* context, int sequences, int threads) {
  const int tile = std::max(1, kTargetRows / s.group());
  // A decode row reads all heads of a slot together, for they are neighbours in memory, if there are rows enough.
  const bool together = sequences >= 2 * threads;
  std::vector<Unit> units;
  for (int i = 0; i < sequences; ++i) {
    const int first = query_start[i], count = query_start[i + 1] - first;
    for (int end = count; end > 0; end -= tile) {
      const int begin = std::max(0, end - tile);
      const int position = context[i] - count + begin;
      const int heads = together && count == 1 ? s.kv_heads : 1;
      for (int head = 0; head < s.kv_heads; head += heads)
        units.push_back({i, first + begin, end - begin, position, head, heads});
    }
  }
  return units;
}

// Slots of one key tile; `count` keys are there, the rest of the tile is behind the context.
struct KeyTile {
  std::int64_t slot[kKeys];
  int count;
};

template <class T>
KeyTile key_tile(const PagedKV<T>& kv, const AttentionShape& s, int sequence, int first, int end) {
  KeyTile tile;
  tile.count = std::clamp(end - first, 0, kKeys);
  if (!tile.count) return tile;
  const std::int32_t* table = kv.block_table + sequence * kv.table_stride;
  int block = first / s.block_size, offset = first % s.block_size;
  for (int i = 0; i < tile.count; ++i) {
    tile.slot[i] = static_cast<std::int64_t>(table[block]) * s.block_size + offset;
    if (++offset == s.block_size) ++block, offset = 0;
  }
  return tile;
}

// The first key tile that any row of the unit sees.
inline int first_tile(const AttentionShape& s, const Unit& u) {
  return s.window ? std::max(0, u.first_position - s.window + 1) / kKeys * kKeys : 0;
}

// Where row `i` of a unit's scratch lies in the batch. A unit's rows go by key head, position, query head.
struct Place {
  std::int64_t row;
  int head;
};

inline Place place(const AttentionShape& s, const Unit& u, int i) {
  const int rows = u.rows * s.group();
  return {u.first_row + i % rows / s.group(), (u.first_head + i / rows) * s.group() + i % s.group()};
}

}  // namespace tokenstream
