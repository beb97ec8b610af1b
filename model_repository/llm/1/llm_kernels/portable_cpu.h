// Paged attention in float32 for any processor: vectors are the compiler's, as wide as the target's.
//
// Every product is one chain of multiply-adds over the head's dimensions, or over the keys from the first to the last;
// geometry and the order of additions are those of paging_cpu.h. The softmax is the online one of Milakov and
// Gimelshein (2018) in base 2. It does not know other dtypes, projections or rope.
#pragma once

#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "memory_cpu.h"
#include "paging_cpu.h"

namespace tokenstream::portable {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kVectors = 4;  // 6 x 4 sums, 4 columns and a row fit 32 registers
#elif defined(__AVX__)
constexpr int kBytes = 32, kVectors = 2;  // 6 x 2 sums, 2 columns and a row fit 16 registers
#else
constexpr int kBytes = 16, kVectors = 2;
#endif
constexpr int kWidth = kBytes / sizeof(float);
constexpr int kStep = kVectors * kWidth;  // columns of a register tile
constexpr int kRows = 6;

using Vector = float __attribute__((vector_size(kBytes)));
using Integers = std::int32_t __attribute__((vector_size(kBytes)));

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
inline Vector all(float x) { return Vector{} + x; }

inline int padded(int dim) { return (dim + kStep - 1) / kStep * kStep; }

// 2^x for x up to 126, 0 below -126, NaN for NaN. A minimax polynomial on [-1/2, 1/2], relative error 1e-7.
inline Vector exp2(Vector x) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: a sum with it has no room for a fraction
  const Vector shifted = x + round, f = x - (shifted - round);
  Vector p = f * 1.53533618e-4f + 1.33988744e-3f;
  p = p * f + 9.61843736e-3f;
  p = p * f + 5.55033247e-2f;
  p = p * f + 2.40226479e-1f;
  p = p * f + 6.93147203e-1f;
  p = p * f + 1.0f;
  const Integers exponent = std::bit_cast<Integers>(shifted) << 23;  // what `round` adds is shifted out
  const Vector power = std::bit_cast<Vector>(std::bit_cast<Integers>(p) + exponent);
  return x < -126.0f ? Vector{} : x == x ? power : x;
}

// sum[r][c] = (add ? sum[r][c] : 0) + sum over k of a[r][k] * b[k][c], for R rows and `columns` (a multiple of kStep)
// columns; rows lie `_stride` apart.
template <int R>
void multiply(float* sum, int sum_stride, bool add, const float* a, int a_stride, const float* b, int b_stride,
              int depth, int columns) {
  for (int column = 0; column < columns; column += kStep) {
    Vector s[R][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) s[r][v] = add ? load(sum + r * sum_stride + column + v * kWidth) : Vector{};
    for (int k = 0; k < depth; ++k) {
      Vector x[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[v] = load(b + k * b_stride + column + v * kWidth);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) s[r][v] += x[v] * a[r * a_stride + k];
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(sum + r * sum_stride + column + v * kWidth, s[r][v]);
  }
}

using Multiply = void (*)(float*, int, bool, const float*, int, const float*, int, int, int);

template <int... R>
constexpr Multiply pick(int rows, std::integer_sequence<int, R...>) {
  constexpr Multiply kernels[] = {multiply<R + 1>...};
  return kernels[rows - 1];
}

// Memory of one thread, reused for every unit.
struct Scratch {
  explicit Scratch(const AttentionShape& s)
      : key(kKeys * s.dim),
        value(kKeys * padded(s.dim)),
        query(s.unit_rows() * s.dim),
        score(kRows * kKeys),
        sum(s.unit_rows() * padded(s.dim)),
        peak(s.unit_rows()),
        total(s.unit_rows() * kWidth) {
    std::fill_n(key.get(), kKeys * s.dim, 0.0f);
    std::fill_n(value.get(), kKeys * padded(s.dim), 0.0f);
  }

  Aligned<float> key;    // [dim][64]
  Aligned<float> value;  // [64][padded]; columns behind dim stay zero
  Aligned<float> query;  // [rows][dim]
  Aligned<float> score;  // [kRows][64]: scores, then weights
  Aligned<float> sum;    // [rows][padded]
  Aligned<float> peak;   // [rows]
  Aligned<float> total;  // [rows][kWidth]
};

using Four = float __attribute__((vector_size(16)));

// to[d][i] = from[i][d] for four keys; `to` rows are 64 apart.
inline void transpose(float* to, const float* const (&from)[4], int dim) {
  int d = 0;
  for (; d + 4 <= dim; d += 4) {
    Four r[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&r[i], from[i] + d, sizeof(Four));
    const Four a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), e = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(c, e, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(c, e, 2, 3, 6, 7);
    for (int i = 0; i < 4; ++i) std::memcpy(to + (d + i) * kKeys, &r[i], sizeof(Four));
  }
  for (; d < dim; ++d)
    for (int i = 0; i < 4; ++i) to[d * kKeys + i] = from[i][d];
}

// One head's keys and values of a tile. What lies behind the tile's count stays as it was: such keys are hidden from
// every row, and such values are not multiplied, for a weight of 0 does not silence the NaN of a stale slot.
inline void copy_tile(Scratch& m, const AttentionShape& s, const PagedKV<float>& kv, const KeyTile& tile, int head) {
  const auto at = [&](const float* cache, int i) { return cache + tile.slot[i] * s.slot_size() + head * s.dim; };
  for (int i = 0; i < tile.count; i += 4) {
    const float* from[4];
    for (int j = 0; j < 4; ++j) from[j] = at(kv.key, std::min(i + j, tile.count - 1));
    transpose(m.key.get() + i, from, s.dim);
  }
  for (int i = 0; i < tile.count; ++i)
    std::memcpy(m.value.get() + i * padded(s.dim), at(kv.value, i), sizeof(float) * s.dim);
}

// cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + e^2y).
inline Vector cap_score(Vector x, float cap) {
  const Vector power = x * (2 * kLog2E / cap);
  return cap - 2 * cap / (1.0f + exp2(power > 100.0f ? all(100.0f) : power));
}

inline Integers counting() {
  Integers x;
  for (int i = 0; i < kWidth; ++i) x[i] = i;
  return x;
}

// -inf where a row at `position` does not see the key.
inline Vector hide(Vector x, const AttentionShape& s, int first_key, int position) {
  const Integers key = counting() + first_key;
  Integers seen = key <= position;
  if (s.window) seen &= key > position - s.window;
  return seen ? x : all(-std::numeric_limits<float>::infinity());
}

// A row's softmax so far: the largest score, and partial totals of the weights relative to it.
struct Running {
  float* peak;
  float* total;  // [kWidth]
  float* sum;    // [width]: weights times values

  void raise(float top, float unit, int width) const {
    const Vector shrink = exp2(all((*peak - top) * unit));
    *peak = top;
    store(total, load(total) * shrink);
    for (int d = 0; d < width; d += kWidth) store(sum + d, load(sum + d) * shrink);
  }
};

// Take 64 scores of the row at `position` into its softmax; their weights take their place.
inline void softmax_row(float* score, const Running& row, const AttentionShape& s, int first_key, int position) {
  constexpr int count = kKeys / kWidth;
  Vector x[count], top = all(kNoPeak);
  const bool hiding = s.window || first_key + kKeys - 1 > position;
  for (int v = 0; v < count; ++v) {
    x[v] = load(score + v * kWidth);
    if (s.softcap > 0) x[v] = cap_score(x[v] * s.scale, s.softcap);
    if (hiding) x[v] = hide(x[v], s, first_key + v * kWidth, position);
    top = x[v] > top ? x[v] : top;
  }
  float largest = top[0];
  for (int i = 1; i < kWidth; ++i) largest = std::max(largest, top[i]);
  if (largest > *row.peak) row.raise(largest, s.unit(), padded(s.dim));
  const float peak = *row.peak;
  Vector added = load(row.total);
  for (int v = 0; v < count; ++v) {
    x[v] = exp2((x[v] - peak) * s.unit());
    added += x[v];
    store(score + v * kWidth, x[v]);
  }
  store(row.total, added);
}

// Rows of the unit's key head `h` meet a copied key tile. Row r is query head r % group of position first_position + r
// / group.
inline void attend_tile(Scratch& m, const AttentionShape& s, const Unit& u, int h, int first_key, int keys) {
  const int rows = u.rows * s.group(), width = padded(s.dim);
  for (int r = 0; r < rows; r += kRows) {
    const int count = std::min(kRows, rows - r), at = h * rows + r;
    if (first_key > u.first_position + (r + count - 1) / s.group()) continue;
    const Multiply tile = pick(count, std::make_integer_sequence<int, kRows>());
    float* sum = m.sum.get() + static_cast<std::ptrdiff_t>(at) * width;
    float* score = m.score.get();
    tile(score, kKeys, false, m.query.get() + at * s.dim, s.dim, m.key.get(), kKeys, s.dim, kKeys);
    for (int i = 0; i < count; ++i)
      softmax_row(score + i * kKeys, {m.peak.get() + at + i, m.total.get() + (at + i) * kWidth, sum + i * width}, s,
                  first_key, u.first_position + (r + i) / s.group());
    tile(sum, width, true, score, kKeys, m.value.get(), width, keys, width);
  }
}

// Copy the unit's queries together, and start its running softmax. A sink is a key with a score and without a value.
inline void begin_unit(Scratch& m, const AttentionShape& s, const Unit& u, const float* q, const float* sinks) {
  const int rows = u.heads * u.rows * s.group();
  for (int i = 0; i < rows; ++i) {
    const Place at = place(s, u, i);
    std::memcpy(m.query.get() + i * s.dim, q + (at.row * s.heads + at.head) * s.dim, sizeof(float) * s.dim);
    m.peak.get()[i] = sinks ? sinks[at.head] * kLog2E / s.unit() : kNoPeak;
    Vector total{};
    total[0] = sinks ? 1.0f : 0.0f;
    store(m.total.get() + i * kWidth, total);
  }
  std::fill_n(m.sum.get(), rows * padded(s.dim), 0.0f);
}

inline void end_unit(const Scratch& m, const AttentionShape& s, const Unit& u, float* out) {
  for (int i = 0; i < u.heads * u.rows * s.group(); ++i) {
    const Place at = place(s, u, i);
    float* to = out + (at.row * s.heads + at.head) * s.dim;
    const float* sum = m.sum.get() + static_cast<std::ptrdiff_t>(i) * padded(s.dim);
    float total = 0;
    for (int lane = 0; lane < kWidth; ++lane) total += m.total.get()[i * kWidth + lane];
    for (int d = 0; d < s.dim; ++d) to[d] = sum[d] / total;
  }
}

// One unit. q, out: [rows, heads, dim].
inline void attend(Scratch& m, const AttentionShape& s, const PagedKV<float>& kv, const Unit& u, const float* q,
                   const float* sinks, float* out) {
  begin_unit(m, s, u, q, sinks);
  const int end = u.first_position + u.rows;
  for (int key = first_tile(s, u); key < end; key += kKeys) {
    const KeyTile tile = key_tile(kv, s, u.sequence, key, end);
    for (int h = 0; h < u.heads; ++h) {
      copy_tile(m, s, kv, tile, u.first_head + h);
      attend_tile(m, s, u, h, key, tile.count);
    }
  }
  end_unit(m, s, u, out);
}

// Take units from the shared counter until none is left.
inline void attention(const AttentionShape& s, const PagedKV<float>& kv, const std::vector<Unit>& units,
                      std::atomic<int>& counter, const float* q, const float* sinks, float* out) {
  Scratch scratch(s);
  const int count = static_cast<int>(units.size());
  for (int i = counter.fetch_add(1, std::memory_order_relaxed); i < count;
       i = counter.fetch_add(1, std::memory_order_relaxed))
    attend(scratch, s, kv, units[i], q, sinks, out);
}

}  // namespace tokenstream::portable
