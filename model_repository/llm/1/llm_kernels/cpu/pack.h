// From rows of a checkpoint, float or in GGUF's blocks, to packed panels. It does not know how panels are multiplied.
//
// Blocks of 32 with one scale are taken as they are: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Of Q4_K and Q5_K the quants are
// taken and scales and minima rounded to float16. Everything else is read as float32 and quantised, if it must be.
#pragma once

#include "weights.h"

namespace tokenstream {

// GGUF's numbers of what rows may hold.
enum Kind : std::int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// To nearest even.
inline half narrow(float x) {
  const std::uint32_t b = std::bit_cast<std::uint32_t>(x), sign = b >> 16 & 0x8000u;
  const float a = std::fabs(x);
  if (!(a < 65520.0f)) return static_cast<half>(sign | (a == a ? 0x7c00u : 0x7e00u));
  if (a < 0x1p-14f) return static_cast<half>(sign | static_cast<std::uint32_t>(std::nearbyint(a * 0x1p24f)));
  const std::uint32_t m = std::bit_cast<std::uint32_t>(a) - (112u << 23);
  return static_cast<half>(sign | (m + 0xfffu + (m >> 13 & 1u)) >> 13);
}

inline bool is_finite(half h) { return (h & 0x7c00) != 0x7c00; }

struct Quants {
  int q[kBlock];
  half scale, minimum;
};

template <class T>
T read(const std::uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Scale and minimum `i` of 8 in a super-block of Q4_K or Q5_K: six bits each, of which the last four's are split.
inline std::array<int, 2> six_bits(const std::uint8_t* s, int i) {
  if (i < 4) return {s[i] & 63, s[i + 4] & 63};
  return {(s[i + 4] & 15) | (s[i - 4] >> 6) << 4, s[i + 4] >> 4 | (s[i] >> 6) << 4};
}

// The format that takes a kind's rows as they are, or with the least loss.
inline Format own_format(Kind kind) {
  switch (kind) {
    case kQ4_0:
    case kQ4_1:
    case kQ4_K:
      return kInt4;
    case kQ5_0:
    case kQ5_1:
    case kQ5_K:
      return kInt5;
    case kQ8_0:
    case kQ6_K:
      return kInt8;
    case kBF16:
      return kBFloat16;
    default:
      return kFloat32;
  }
}

inline bool has_quants(Kind kind) { return own_format(kind) >= kInt8 && kind != kQ6_K; }

// Block `b` of a row, of a kind with quants.
inline Quants read_block(Kind kind, const std::uint8_t* row, int b) {
  Quants x{};
  const auto nibbles = [&](const std::uint8_t* p) {
    for (int i = 0; i < 16; ++i) x.q[i] = p[i] & 15, x.q[i + 16] = p[i] >> 4;
  };
  const auto fifths = [&](std::uint32_t high) {
    for (int i = 0; i < kBlock; ++i) x.q[i] |= (high >> i & 1) << 4;
  };
  switch (kind) {
    case kQ4_0:
      row += b * 18;
      nibbles(row + 2);
      x.minimum = narrow(-8 * widen(read<half>(row)));
      break;
    case kQ4_1:
      row += b * 20;
      nibbles(row + 4);
      x.minimum = read<half>(row + 2);
      break;
    case kQ5_0:
      row += b * 22;
      nibbles(row + 6);
      fifths(read<std::uint32_t>(row + 2));
      x.minimum = narrow(-16 * widen(read<half>(row)));
      break;
    case kQ5_1:
      row += b * 24;
      nibbles(row + 8);
      fifths(read<std::uint32_t>(row + 4));
      x.minimum = read<half>(row + 2);
      break;
    case kQ8_0:
      row += b * 34;
      // A product's operand is negated on some processors, and -128 has no opposite.
      for (int i = 0; i < kBlock; ++i) x.q[i] = std::max(-127, int{static_cast<std::int8_t>(row[2 + i])});
      break;
    default: {  // Q4_K, Q5_K: 256 values, 8 blocks
      row += b / 8 * (kind == kQ4_K ? 144 : 176);
      const int i = b % 8;
      const auto [scale, minimum] = six_bits(row + 4, i);
      const std::uint8_t* low = row + (kind == kQ4_K ? 16 : 48) + i / 2 * kBlock;
      for (int k = 0; k < kBlock; ++k) {
        x.q[k] = i % 2 ? low[k] >> 4 : low[k] & 15;
        if (kind == kQ5_K) x.q[k] |= (row[16 + k] >> i & 1) << 4;
      }
      x.scale = narrow(widen(read<half>(row)) * static_cast<float>(scale));
      x.minimum = narrow(-widen(read<half>(row + 2)) * static_cast<float>(minimum));
      return x;
    }
  }
  x.scale = read<half>(row);
  return x;
}

// Values of block `b`, `count` of them within the depth; the rest are 0.
inline void read_values(Kind kind, const std::uint8_t* row, int b, int count, float (&x)[kBlock]) {
  std::fill_n(x, kBlock, 0.0f);
  if (kind == kF32) {
    std::memcpy(x, row + b * kBlock * 4, 4 * static_cast<std::size_t>(count));
  } else if (kind == kF16 || kind == kBF16) {
    for (int i = 0; i < count; ++i) {
      const auto v = read<std::uint16_t>(row + (b * kBlock + i) * 2);
      x[i] = kind == kF16 ? widen(v) : std::bit_cast<float>(static_cast<std::uint32_t>(v) << 16);
    }
  } else if (kind == kQ6_K) {
    row += b / 8 * 210;
    const float d = widen(read<half>(row + 208));
    const int part = b % 8 / 4, quarter = b % 4;
    for (int i = 0; i < kBlock; ++i) {
      const std::uint8_t low = row[part * 64 + quarter % 2 * 32 + i], high = row[128 + part * 32 + i];
      const int q = ((quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4) - 32;
      const int scale = static_cast<std::int8_t>(row[192 + part * 8 + quarter * 2 + i / 16]);
      x[i] = d * static_cast<float>(scale) * static_cast<float>(q);
    }
  } else {
    const Quants s = read_block(kind, row, b);
    for (int i = 0; i < kBlock; ++i) x[i] = std::fma(widen(s.scale), static_cast<float>(s.q[i]), widen(s.minimum));
  }
}

// Round finite values to the nearest of the format's, between the smallest and the largest or, of int8, to both sides
// of 0. The scale or the minimum is infinite where float16 does not reach so far.
inline Quants quantise(Format format, const float (&x)[kBlock]) {
  Quants s{};
  const auto [low, high] = std::minmax_element(x, x + kBlock);
  const int most = kLayouts[format].most, least = format == kInt8 ? -most : 0;
  const float width = format == kInt8 ? std::max(std::fabs(*low), std::fabs(*high)) : *high - *low;
  s.scale = narrow(width / static_cast<float>(most));
  s.minimum = format == kInt8 ? half{0} : narrow(*low);
  if (!is_finite(s.scale) || !is_finite(s.minimum)) return s;
  const float scale = widen(s.scale), minimum = widen(s.minimum);
  for (int i = 0; i < kBlock; ++i)
    s.q[i] = scale > 0 ? std::clamp(static_cast<int>(std::nearbyint((x[i] - minimum) / scale)), least, most) : 0;
  return s;
}

// Write block `b` of a column of quants.
inline void put(const Weight& w, std::uint8_t* data, int column, int b, const Quants& s) {
  const int panel = column / kPanel, lane = column % kPanel;
  std::uint8_t* to = data + (w.quants(panel, b) - w.data);
  for (int i = 0; i < kBlock; ++i) {
    const int g = i / kGroup, at = lane * kGroup + i % kGroup;
    if (w.format == kInt8) {
      to[g * kCacheLine + at] = static_cast<std::uint8_t>(s.q[i]);
    } else {
      to[g / 2 * kCacheLine + at] |= static_cast<std::uint8_t>((s.q[i] & 15) << (g % 2 ? 4 : 0));
      if (w.format == kInt5) to[4 * kCacheLine + at] |= static_cast<std::uint8_t>((s.q[i] >> 4) << g);
    }
  }
  const auto place = [&](const half* p) {
    return reinterpret_cast<half*>(data + (reinterpret_cast<const std::uint8_t*>(p) - w.data));
  };
  place(w.scales(panel, b))[lane] = s.scale;
  if (w.layout().scales == 2) place(w.minima(panel, b))[lane] = s.minimum;
}

// Write rows [first, first + count) of a weight into its panels, which must be zero before. rows: `count` of the kind,
// `row_bytes` apart. False if a scale or a value is not finite.
inline bool pack_rows(const Weight& w, std::uint8_t* data, int first, int count, Kind kind, const std::uint8_t* rows,
                      std::size_t row_bytes) {
  bool sound = true;
  for (int r = 0; r < count; ++r, rows += row_bytes) {
    const int column = first + r, panel = column / kPanel, lane = column % kPanel;
    for (int b = 0; b < w.blocks(); ++b) {
      const int left = std::min(kBlock, w.depth - b * kBlock);
      if (has_quants(kind) && own_format(kind) == w.format) {
        const Quants s = read_block(kind, rows, b);
        sound &= is_finite(s.scale) && is_finite(s.minimum);
        put(w, data, column, b, s);
        continue;
      }
      float x[kBlock];
      read_values(kind, rows, b, left, x);
      if (!std::all_of(x, x + kBlock, [](float v) { return std::isfinite(v); })) return false;
      if (w.format >= kInt8) {
        const Quants s = quantise(w.format, x);
        sound &= is_finite(s.scale) && is_finite(s.minimum);
        put(w, data, column, b, s);
      } else if (w.format == kFloat32) {
        auto* to = reinterpret_cast<float*>(data + (w.panel(panel) - w.data));
        for (int i = 0; i < left; ++i) to[(b * kBlock + i) * kPanel + lane] = x[i];
      } else {
        auto* to = reinterpret_cast<bf16*>(data + (w.panel(panel) - w.data));
        bf16 narrowed[kBlock];
        store(narrowed, load(x));
        store(narrowed + kLanes, load(x + kLanes));
        for (int i = 0; i < left; ++i) {
          sound &= (narrowed[i] & 0x7f80) != 0x7f80;
          to[((b * kBlock + i) / 2 * kPanel + lane) * 2 + i % 2] = narrowed[i];
        }
      }
    }
  }
  return sound;
}

}  // namespace tokenstream
