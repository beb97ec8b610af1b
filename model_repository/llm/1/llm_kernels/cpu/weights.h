// How weights lie in memory: panels of 16 columns, one column a lane, in the weights' own format.
//
//     panel   [blocks of 32 along depth][quants of a block], then [blocks][16 scales], then [blocks][16 minima]
//     float32    [32][16] float32                              w
//     bfloat16   [16 pairs][16][2] bf16                        w
//     int8       [8 groups][16][4] int8                        w = scale * q, q from -127
//     int4       [4 pairs of groups][16][4] bytes, the         w = scale * q + minimum, q from 0 to 15
//                first group of a pair in the low nibbles
//     int5       as int4, then [16][4] bytes: bit g is the     w = scale * q + minimum, q from 0 to 31
//                fifth bit of group g
//
// Scales and minima are float16. What lies behind the last column or the depth is zero. It does not know products.
#pragma once

#include <array>

#include "simd.h"

namespace tokenstream {

constexpr int kPanel = kLanes;  // columns
constexpr int kBlock = 32;      // of depth, that share a scale
constexpr int kGroup = 4;       // of depth, that a lane of 32 bits holds in bytes
constexpr int kGroups = kBlock / kGroup;

enum Format : std::int32_t { kFloat32, kBFloat16, kInt8, kInt4, kInt5 };

struct Layout {
  int quants;  // bytes of a block of a panel
  int scales;  // vectors of 16 float16 per block
  int most;    // the largest q
};
constexpr Layout kLayouts[] = {{2048, 0, 0}, {1024, 0, 0}, {512, 1, 127}, {256, 2, 15}, {320, 2, 31}};

inline int round_up(int x, int step) { return (x + step - 1) / step * step; }
inline int blocks_of(int depth) { return (depth + kBlock - 1) / kBlock; }

// One linear's weight, packed; also the form in which Python hands it over.
struct Weight {
  const std::uint8_t* data;
  Format format;
  std::int32_t arithmetic;  // of gemm.h
  std::int32_t columns;
  std::int32_t depth;

  const Layout& layout() const { return kLayouts[format]; }
  int blocks() const { return blocks_of(depth); }
  int panels() const { return (columns + kPanel - 1) / kPanel; }
  std::size_t panel_bytes() const {
    return round_up(blocks() * (layout().quants + layout().scales * kPanel * 2), kCacheLine);
  }
  std::size_t bytes() const { return panels() * panel_bytes(); }
  const std::uint8_t* panel(int i) const { return data + i * panel_bytes(); }
  const std::uint8_t* quants(int i, int block) const { return panel(i) + block * layout().quants; }
  const half* scales(int i, int block) const {
    return reinterpret_cast<const half*>(panel(i) + blocks() * layout().quants) + block * kPanel;
  }
  const half* minima(int i, int block) const { return scales(i, blocks() + block); }
};

// Group G of a block of an int4 or int5 panel, or of an int8 one: 4 of depth by 16 columns.
template <Format F, int G>
Bytes group(const std::uint8_t* block) {
  if constexpr (F == kInt8) {
    return load_bytes(block + G * kCacheLine);
  } else {
    const Bytes both = load_bytes(block + G / 2 * kCacheLine);
    const Bytes low = (G % 2 ? right16<4>(both) : both) & all_bytes(15);
    if constexpr (F == kInt4) {
      return low;
    } else {
      const Bytes fifth = load_bytes(block + 4 * kCacheLine);
      if constexpr (G < 4)
        return low | (left16<4 - G>(fifth) & all_bytes(16));
      else
        return low | (right16<G - 4>(fifth) & all_bytes(16));
    }
  }
}

// The values of group G, 4 of depth by 16 columns.
template <Format F, int G>
void read_group(const std::uint8_t* block, Ints* q) {
  const Ints four = ints(group<F, G>(block));
  const auto one = [&]<int J>(std::integral_constant<int, J>) {
    const Ints byte = right<8 * J>(four) & all(255);
    q[J] = F == kInt8 ? (byte ^ all(128)) - all(128) : byte;
  };
  [&]<int... J>(std::integer_sequence<int, J...>) {
    (one(std::integral_constant<int, J>{}), ...);
  }(std::make_integer_sequence<int, kGroup>());
}

// q[k]: 32 of depth by 16 columns as integers.
template <Format F>
void read_quants(const std::uint8_t* block, Ints (&q)[kBlock]) {
  [&]<int... G>(std::integer_sequence<int, G...>) {
    (read_group<F, G>(block, q + G * kGroup), ...);
  }(std::make_integer_sequence<int, kGroups>());
}

template <Format F>
void unpack_quants(const Weight& w, int panel, float* to) {
  for (int b = 0; b < w.blocks(); ++b) {
    Ints q[kBlock];
    read_quants<F>(w.quants(panel, b), q);
    const Floats scale = load_halves(w.scales(panel, b));
    const Floats minimum = F == kInt8 ? all(0.0f) : load_halves(w.minima(panel, b));
    for (int k = 0; k < kBlock; ++k) store(to + (b * kBlock + k) * kPanel, fma(scale, to_floats(q[k]), minimum));
  }
}

// A panel as float32 [padded depth][16]: exact, but for one rounding where a minimum is added.
inline void unpack_panel(const Weight& w, int panel, float* to) {
  switch (w.format) {
    case kFloat32:
      std::memcpy(to, w.panel(panel), static_cast<std::size_t>(w.blocks()) * kBlock * kPanel * sizeof(float));
      return;
    case kBFloat16:
      for (int p = 0; p < w.blocks() * kBlock / 2; ++p) {
        const Bytes pair = load_bytes(w.panel(panel) + p * kCacheLine);
        store(to + 2 * p * kPanel, first_of_pairs(pair));
        store(to + (2 * p + 1) * kPanel, second_of_pairs(pair));
      }
      return;
    case kInt8:
      return unpack_quants<kInt8>(w, panel, to);
    case kInt4:
      return unpack_quants<kInt4>(w, panel, to);
    case kInt5:
      return unpack_quants<kInt5>(w, panel, to);
  }
}

inline float widen(half h) {
  const half sixteen[kLanes] = {h};
  float lane[kLanes];
  store(lane, load_halves(sixteen));
  return lane[0];
}

// One column as float32 [depth], the values that unpack_panel gives.
inline void read_column(const Weight& w, int column, float* to) {
  const int panel = column / kPanel, lane = column % kPanel;
  if (w.format == kFloat32) {
    const auto* from = reinterpret_cast<const float*>(w.panel(panel));
    for (int k = 0; k < w.depth; ++k) to[k] = from[k * kPanel + lane];
    return;
  }
  if (w.format == kBFloat16) {
    const auto* from = reinterpret_cast<const bf16*>(w.panel(panel));
    for (int k = 0; k < w.depth; ++k)
      to[k] = std::bit_cast<float>(static_cast<std::uint32_t>(from[(k / 2 * kPanel + lane) * 2 + k % 2]) << 16);
    return;
  }
  for (int b = 0; b < w.blocks(); ++b) {
    const std::uint8_t* block = w.quants(panel, b);
    const float scale = widen(w.scales(panel, b)[lane]);
    const float minimum = w.format == kInt8 ? 0.0f : widen(w.minima(panel, b)[lane]);
    for (int i = 0; i < kBlock && b * kBlock + i < w.depth; ++i) {
      const int g = i / kGroup, at = lane * kGroup + i % kGroup;
      int q;
      if (w.format == kInt8) {
        q = static_cast<std::int8_t>(block[g * kCacheLine + at]);
      } else {
        q = block[g / 2 * kCacheLine + at] >> (g % 2 ? 4 : 0) & 15;
        if (w.format == kInt5) q |= (block[4 * kCacheLine + at] >> g & 1) << 4;
      }
      to[b * kBlock + i] = std::fma(scale, static_cast<float>(q), minimum);
    }
  }
}

}  // namespace tokenstream
