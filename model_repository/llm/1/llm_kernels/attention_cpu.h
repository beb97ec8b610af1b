// Paged attention in bf16: prefill and decode are the same kernel with more or fewer rows.
//
// The softmax is the online one of Milakov and Gimelshein (2018) in base 2; its weights are rounded to bf16 before they
// meet V. Geometry and the order of additions are those of paging_cpu.h. It does not know projections or rope.
#pragma once

#include <atomic>
#include <limits>

#include "linear_cpu.h"
#include "memory_cpu.h"
#include "paging_cpu.h"

namespace tokenstream {

constexpr int kVectors = 4;    // of 16 columns: 64 keys, or 64 of the head's dimensions
constexpr int kQueryRows = 6;  // 6 x 4 sums, 4 columns and a row fit the registers

inline int padded(int dim) { return (dim + kKeys - 1) / kKeys * kKeys; }

// Memory of one thread, reused for every unit.
class AttentionScratch {
 public:
  explicit AttentionScratch(const AttentionShape& s)
      : key_(kKeys * s.dim),
        value_(kKeys * padded(s.dim)),
        query_(s.unit_rows() * s.dim),
        weight_(kQueryRows * kKeys),
        score_(kQueryRows * kKeys),
        sum_(s.unit_rows() * padded(s.dim)),
        peak_(s.unit_rows()),
        total_(s.unit_rows() * kLanes) {}

  bf16* key() { return key_.get(); }        // [dim / 2][64][2]
  bf16* value() { return value_.get(); }    // [padded / 64][32][64][2]
  bf16* query() { return query_.get(); }    // [rows][dim]
  bf16* weight() { return weight_.get(); }  // [6][64]
  float* score() { return score_.get(); }   // [6][64]
  float* sum() { return sum_.get(); }       // [rows][padded]
  float* peak() { return peak_.get(); }     // [rows]
  float* total() { return total_.get(); }   // [rows][16]

 private:
  Aligned<bf16> key_, value_, query_, weight_;
  Aligned<float> score_, sum_, peak_, total_;
};

inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Slots to fetch while a key tile is worked on. Blocks lie at random places, where the hardware does not look ahead by
// itself.
struct Upcoming {
  std::int64_t slot[2 * kKeys];
  int count = 0;

  void add(const KeyTile& tile) {
    std::copy_n(tile.slot, tile.count, slot + count);
    count += tile.count;
  }
};

// Part `index` of `parts` of the upcoming slots: `width` elements behind `cache`, slots `stride` apart.
struct Fetch {
  const Upcoming& upcoming;
  const bf16* cache;
  std::int64_t stride;
  int width;
  Range part;

  void operator()(int index, int parts) const {
    const Range r = share(part.end - part.begin, index, parts);
    for (int i = part.begin + r.begin; i < part.begin + r.end; ++i)
      for (int d = 0; d < width; d += kCacheLine / 2) fetch_near(cache + upcoming.slot[i] * stride + d);
  }
};

// keys [64][dim] of one head -> [dim / 2][64][2]; keys behind the tile's count are zero.
inline void copy_keys(bf16* to, const bf16* cache, const KeyTile& tile, const Fetch& fetch, std::int64_t stride,
                      int dim) {
  const int chunks = (dim + 2 * kLanes - 1) / (2 * kLanes);
  for (int first = 0; first < kKeys; first += kLanes) {
    for (int d = 0; d < dim; d += 2 * kLanes) {
      fetch(first / kLanes * chunks + d / (2 * kLanes), kKeys / kLanes * chunks);
      if (first >= tile.count) continue;
      const __mmask16 m = lanes((dim - d) / 2);
      __m512i r[kLanes];
      for (int i = 0; i < kLanes; ++i)
        r[i] = first + i < tile.count ? _mm512_maskz_loadu_epi32(m, cache + tile.slot[first + i] * stride + d)
                                      : _mm512_setzero_si512();
      transpose(r);
      for (int i = 0; i < kLanes && d + 2 * i < dim; ++i)
        _mm512_store_si512(to + ((d / 2 + i) * kKeys + first) * 2, r[i]);
    }
  }
}

inline __m512i interleave_index(int first) {
  alignas(kCacheLine) std::int16_t index[2 * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    index[2 * i] = static_cast<std::int16_t>(first + i);
    index[2 * i + 1] = static_cast<std::int16_t>(first + i + 2 * kLanes);
  }
  return _mm512_load_si512(index);
}

// values [64][dim] of one head -> [dim / 64][32][64][2]: pairs of keys, column by column. Behind the count: zero, for a
// weight of 0 does not silence the NaN that a stale slot may hold.
inline void copy_values(bf16* to, const bf16* cache, const KeyTile& tile, const Fetch& fetch, std::int64_t stride,
                        int dim) {
  const __m512i low = interleave_index(0), high = interleave_index(kLanes);
  for (int k = 0; k < kKeys; k += 2) {
    fetch(k / 2, kKeys / 2);
    if (k >= tile.count) continue;
    for (int d = 0; d < dim; d += 2 * kLanes) {
      const auto m = static_cast<__mmask32>(dim - d >= 2 * kLanes ? 0xffffffffu : (1u << (dim - d)) - 1);
      const __m512i a = _mm512_maskz_loadu_epi16(m, cache + tile.slot[k] * stride + d);
      const __m512i b = k + 1 < tile.count ? _mm512_maskz_loadu_epi16(m, cache + tile.slot[k + 1] * stride + d)
                                           : _mm512_setzero_si512();
      bf16* at = to + (d / kKeys * (kKeys / 2) + k / 2) * 2 * kKeys + d % kKeys * 2;
      _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(at + 2 * kLanes, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + e^2y).
inline __m512 cap_score(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * kLog2E / cap)));
  return _mm512_mul_ps(_mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(one, e))),
                       _mm512_set1_ps(cap));
}

// -inf where a row at `position` does not see the key.
inline __m512 hide(__m512 x, const AttentionShape& s, int first_key, int position) {
  const __m512i key = _mm512_add_epi32(_mm512_set1_epi32(first_key),
                                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  __mmask16 seen = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(position));
  if (s.window) seen &= _mm512_cmpgt_epi32_mask(key, _mm512_set1_epi32(position - s.window));
  return _mm512_mask_blend_ps(seen, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), x);
}

// A row's softmax so far: the largest score, and 16 partial totals of the weights relative to it.
struct Running {
  float* peak;
  float* total;  // [16]
  float* sum;    // [padded]: weights times values

  void raise(float top, float unit, int width) const {
    const __m512 shrink = exp2(_mm512_set1_ps((*peak - top) * unit));
    *peak = top;
    _mm512_store_ps(total, _mm512_mul_ps(_mm512_load_ps(total), shrink));
    for (int d = 0; d < width; d += kLanes) _mm512_store_ps(sum + d, _mm512_mul_ps(_mm512_load_ps(sum + d), shrink));
  }
};

// Take 64 scores of the row at `position` into its softmax; write their bf16 weights.
inline void softmax_row(const float* score, bf16* weight, const Running& row, const AttentionShape& s, int first_key,
                        int position) {
  __m512 x[kVectors];
  for (int v = 0; v < kVectors; ++v) x[v] = _mm512_load_ps(score + v * kLanes);
  if (s.softcap > 0)
    for (int v = 0; v < kVectors; ++v) x[v] = cap_score(_mm512_mul_ps(x[v], _mm512_set1_ps(s.scale)), s.softcap);
  if (s.window || first_key + kKeys - 1 > position)
    for (int v = 0; v < kVectors; ++v) x[v] = hide(x[v], s, first_key + v * kLanes, position);
  const __m512 top = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(*row.peak), _CMP_GT_OQ)) [[unlikely]]
    row.raise(_mm512_reduce_max_ps(top), s.unit(), padded(s.dim));
  const __m512 unit = _mm512_set1_ps(s.unit()), low = _mm512_set1_ps(*row.peak * s.unit());
  for (int v = 0; v < kVectors; ++v) x[v] = exp2<4>(_mm512_fmsub_ps(x[v], unit, low));
  const __m512 added = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
  _mm512_store_ps(row.total, _mm512_add_ps(_mm512_load_ps(row.total), added));
  for (int v = 0; v < kVectors; ++v) store(weight + v * kLanes, x[v]);
}

inline Multiply query_tile(int rows) { return pick<kVectors, 0>(rows, std::make_integer_sequence<int, kQueryRows>()); }

// Rows of the unit's key head `h` meet a copied key tile. Row r is query head r % group of position first_position + r
// / group.
inline void attend_tile(AttentionScratch& m, const AttentionShape& s, const Unit& u, int h, int first_key, int keys) {
  const int rows = u.rows * s.group(), width = padded(s.dim);
  for (int r = 0; r < rows; r += kQueryRows) {
    const int count = std::min(kQueryRows, rows - r), at = h * rows + r;
    if (first_key > u.first_position + (r + count - 1) / s.group()) continue;
    const Multiply tile = query_tile(count);
    float* sum = m.sum() + static_cast<std::ptrdiff_t>(at) * width;
    tile(m.score(), kKeys, false, m.query() + at * s.dim, s.dim, m.key(), s.dim / 2, nullptr);
    for (int i = 0; i < count; ++i)
      softmax_row(m.score() + i * kKeys, m.weight() + i * kKeys,
                  {m.peak() + at + i, m.total() + (at + i) * kLanes, sum + i * width}, s, first_key,
                  u.first_position + (r + i) / s.group());
    for (int d = 0; d < width; d += kKeys)
      tile(sum + d, width, true, m.weight(), kKeys, m.value() + d * kKeys, (keys + 1) / 2, nullptr);
  }
}

// Copy the unit's queries together, and start its running softmax. A sink is a key with a score and without a value.
inline void begin_unit(AttentionScratch& m, const AttentionShape& s, const Unit& u, const bf16* q,
                       std::int64_t q_stride, const float* sinks) {
  const int rows = u.heads * u.rows * s.group();
  for (int i = 0; i < rows; ++i) {
    const Place at = place(s, u, i);
    std::memcpy(m.query() + i * s.dim, q + at.row * q_stride + at.head * s.dim, 2 * s.dim);
    m.peak()[i] = sinks ? sinks[at.head] * kLog2E / s.unit() : kNoPeak;
    _mm512_store_ps(m.total() + i * kLanes, _mm512_maskz_mov_ps(sinks ? 1 : 0, _mm512_set1_ps(1.0f)));
  }
  std::memset(m.sum(), 0, sizeof(float) * rows * padded(s.dim));
}

inline void end_unit(AttentionScratch& m, const AttentionShape& s, const Unit& u, bf16* out) {
  for (int i = 0; i < u.heads * u.rows * s.group(); ++i) {
    const Place at = place(s, u, i);
    bf16* to = out + (at.row * s.heads + at.head) * s.dim;
    const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(m.total() + i * kLanes)));
    for (int d = 0; d < s.dim; d += kLanes)
      store(to + d, _mm512_div_ps(_mm512_load_ps(m.sum() + i * padded(s.dim) + d), total), lanes(s.dim - d));
  }
}

// One unit. q: [rows, heads, dim], rows `q_stride` apart; out: [rows, heads, dim]. `then` is this thread's next unit.
inline void attend(AttentionScratch& m, const AttentionShape& s, const PagedKV<bf16>& kv, const Unit& u,
                   const Unit* then, const bf16* q, std::int64_t q_stride, const float* sinks, bf16* out) {
  begin_unit(m, s, u, q, q_stride, sinks);
  const std::int64_t stride = s.slot_size();
  const int end = u.first_position + u.rows;
  KeyTile next = key_tile(kv, s, u.sequence, first_tile(s, u), end);
  for (int key = first_tile(s, u); key < end; key += kKeys) {
    const KeyTile tile = next;
    next = key_tile(kv, s, u.sequence, key + kKeys, end);
    Upcoming upcoming;
    upcoming.add(next);
    // A short last tile takes too little time to fetch the next unit behind it.
    if (then && next.count < kKeys) {
      upcoming.add(key_tile(kv, s, then->sequence, first_tile(s, *then), then->first_position + then->rows));
      then = nullptr;
    }
    for (int h = 0; h < u.heads; ++h) {
      // All heads of a slot are fetched as one piece, a part of the slots during each head.
      const Range part = share(upcoming.count, h, u.heads);
      const std::int64_t first = u.first_head * s.dim, head = first + h * s.dim;
      copy_keys(m.key(), kv.key + head, tile, Fetch{upcoming, kv.key + first, stride, u.heads * s.dim, part}, stride,
                s.dim);
      copy_values(m.value(), kv.value + head, tile, Fetch{upcoming, kv.value + first, stride, u.heads * s.dim, part},
                  stride, s.dim);
      attend_tile(m, s, u, h, key, tile.count);
    }
  }
  end_unit(m, s, u, out);
}

// Take units from the shared counter until none is left; the next one is claimed early, so that it can be fetched.
inline void attention(AttentionScratch& m, const AttentionShape& s, const PagedKV<bf16>& kv,
                      const std::vector<Unit>& units, std::atomic<int>& counter, const bf16* q, std::int64_t q_stride,
                      const float* sinks, bf16* out) {
  const int count = static_cast<int>(units.size());
  for (int i = counter.fetch_add(1, std::memory_order_relaxed); i < count;) {
    const int then = counter.fetch_add(1, std::memory_order_relaxed);
    attend(m, s, kv, units[i], then < count ? &units[then] : nullptr, q, q_stride, sinks, out);
    i = then;
  }
}

}  // namespace tokenstream
