// Linear layers over packed weights: for one row or thousands, always by the same sums.
//
//     fma32    x widened to float32; every (row, column) is one chain of fused multiply-adds over the depth
//     q8dot    x in int8 by blocks of 32; a block's products are summed as integers, and one chain over the blocks
//              adds  dot * (weight scale * x scale)  and, for int4 and int5,  minimum * (x scale * sum of x)
//     dpbf16   x rounded to bf16; one chain of vdpbf16ps over pairs of the depth
//
// A sum's bits depend on its own row and column alone, not on the tile, the thread or (but for dpbf16) the processor
// that computes it. Threads share panels, never depth. It does not know what a layer is for: `finish` gets the sums.
#pragma once

#include <memory>
#include <new>
#include <utility>

#include "threads.h"
#include "weights.h"

namespace tokenstream {

enum Arithmetic : std::int32_t { kFma32, kQ8Dot, kDpBF16, kArithmetics };

// `count` elements on a cache line, all zero.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::size_t count)
      : memory_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kCacheLine}))) {
    std::memset(memory_.get(), 0, count * sizeof(T));
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{kCacheLine}); }
  };
  std::unique_ptr<T, Free> memory_;
};

// Rows of a linear's input in every arithmetic's form. Each row has `stride` elements, a multiple of 32, zero behind
// its width.
struct Inputs {
  float* x;
  bf16* rounded;
  std::int8_t* q;
  float* scale;           // of a block
  float* shift;           // scale * total
  std::int32_t* total;    // of a block's q
  int stride;

  int blocks() const { return stride / kBlock; }
  float* row(int i) const { return x + static_cast<std::ptrdiff_t>(i) * stride; }
};

class InputMemory {
 public:
  InputMemory(int rows, int width)
      : stride_(round_up(width, kBlock)),
        x_(static_cast<std::size_t>(rows) * stride_),
        rounded_(static_cast<std::size_t>(rows) * stride_),
        q_(static_cast<std::size_t>(rows) * stride_),
        scale_(static_cast<std::size_t>(rows) * stride_ / kBlock),
        shift_(static_cast<std::size_t>(rows) * stride_ / kBlock),
        total_(static_cast<std::size_t>(rows) * stride_ / kBlock) {}
  // As rows of `width`, which must be at most that of the memory.
  Inputs view(int width) const {
    return {x_.get(), rounded_.get(), q_.get(), scale_.get(), shift_.get(), total_.get(), round_up(width, kBlock)};
  }

 private:
  int stride_;
  Aligned<float> x_;
  Aligned<bf16> rounded_;
  Aligned<std::int8_t> q_;
  Aligned<float> scale_, shift_;
  Aligned<std::int32_t> total_;
};

constexpr float kLeastPeak = 0x1p-100f;  // a block of less counts as 0: 127 / less might be infinite

// Give row `row` of the inputs, whose x is there, the form of `arithmetic`. Of int8: x / (largest / 127), to nearest
// even; a block with infinity or NaN makes all that it is multiplied with NaN.
inline void prepare_row(const Inputs& in, int row, Arithmetic arithmetic) {
  const float* x = in.row(row);
  if (arithmetic == kDpBF16) {
    for (int k = 0; k < in.stride; k += kLanes)
      store(in.rounded + static_cast<std::ptrdiff_t>(row) * in.stride + k, load(x + k));
    return;
  }
  if (arithmetic != kQ8Dot) return;
  std::int8_t* q = in.q + static_cast<std::ptrdiff_t>(row) * in.stride;
  for (int b = 0; b < in.blocks(); ++b) {
    const Floats low = load(x + b * kBlock), high = load(x + b * kBlock + kLanes);
    const float most = peak(larger(magnitude(low), magnitude(high)));
    const float up = most >= kLeastPeak ? 127.0f / most : 0.0f;
    const Ints a = nearest(low * all(up)), c = nearest(high * all(up));
    store_bytes(q + b * kBlock, a);
    store_bytes(q + b * kBlock + kLanes, c);
    const Floats broken = (low - low) + (high - high);     // 0, or NaN for what is not finite
    const float total = sum(to_floats(a + c) + broken);  // of integers below 2^12: exact
    const bool sound = total == total;
    const int at = row * in.blocks() + b;
    in.scale[at] = sound ? most / 127.0f : total;
    in.total[at] = sound ? static_cast<std::int32_t>(total) : 0;
    in.shift[at] = in.scale[at] * total;
  }
}

// sums[r][16 c ..] for R rows from `row` and C panels from `panel`.
using Tile = void (*)(float* sums, const Weight& w, int panel, const Inputs& in, int row, const float* unpacked);

template <int R, int C>
void tile_float32(float* sums, const Weight& w, int panel, const Inputs& in, int row, const float* unpacked) {
  const float *x[R], *from[C];
  for (int r = 0; r < R; ++r) x[r] = in.row(row + r);
  for (int c = 0; c < C; ++c)
    from[c] = unpacked ? unpacked + static_cast<std::ptrdiff_t>(c) * in.stride * kPanel
                       : reinterpret_cast<const float*>(w.panel(panel + c));
  Floats s[R][C];
  for (auto& of_row : s)
    for (auto& v : of_row) v = all(0.0f);
  for (int k = 0; k < in.stride; ++k) {
    Floats column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) column[c] = load(from[c] + k * kPanel);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const Floats a = all(x[r][k]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[r][c] = fma(column[c], a, s[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kPanel, s[r][c]);
}

template <int R, int C>
void tile_bfloat16(float* sums, const Weight& w, int panel, const Inputs& in, int row, const float*) {
  const float* x[R];
  const std::uint8_t* from[C];
  for (int r = 0; r < R; ++r) x[r] = in.row(row + r);
  for (int c = 0; c < C; ++c) from[c] = w.panel(panel + c);
  Floats s[R][C];
  for (auto& of_row : s)
    for (auto& v : of_row) v = all(0.0f);
  for (int k = 0; k < in.stride; k += 2) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Bytes pair = load_bytes(from[c] + k * kCacheLine / 2);
      const Floats first = first_of_pairs(pair), second = second_of_pairs(pair);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) s[r][c] = fma(first, all(x[r][k]), s[r][c]);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) s[r][c] = fma(second, all(x[r][k + 1]), s[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kPanel, s[r][c]);
}

#if defined(TOKENSTREAM_DPBF16)
template <int R, int C>
void tile_pairs(float* sums, const Weight& w, int panel, const Inputs& in, int row, const float*) {
  const bf16* x[R];
  const std::uint8_t* from[C];
  for (int r = 0; r < R; ++r) x[r] = in.rounded + static_cast<std::ptrdiff_t>(row + r) * in.stride;
  for (int c = 0; c < C; ++c) from[c] = w.panel(panel + c);
  Floats s[R][C];
  for (auto& of_row : s)
    for (auto& v : of_row) v = all(0.0f);
  for (int k = 0; k < in.stride; k += 2) {
    Bytes column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) column[c] = load_bytes(from[c] + k * kCacheLine / 2);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, x[r] + k, sizeof pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[r][c] = dot_pairs(s[r][c], column[c], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kPanel, s[r][c]);
}
#endif

constexpr int bits_of(Format f) { return f == kInt8 ? 8 : f == kInt4 ? 4 : 5; }

template <Format F, int R, int C>
void tile_quants(float* sums, const Weight& w, int panel, const Inputs& in, int row, const float*) {
  using D = Dot<bits_of(F)>;
  const int blocks = in.blocks();
  const std::uint8_t* from[C];
  const half* scales[C];
  for (int c = 0; c < C; ++c) from[c] = w.quants(panel + c, 0), scales[c] = w.scales(panel + c, 0);
  const std::int8_t* x[R];
  for (int r = 0; r < R; ++r) x[r] = in.q + static_cast<std::ptrdiff_t>(row + r) * in.stride;
  Floats s[R][C];
  for (auto& of_row : s)
    for (auto& v : of_row) v = all(0.0f);
  for (int b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const std::uint8_t* block = from[c] + b * kLayouts[F].quants;
      const auto dots = [&]<int... I>(std::integer_sequence<int, I...>) {
        return std::array<D, R>{D(in.total[(row + I) * blocks + b])...};
      };
      std::array<D, R> d = dots(std::make_integer_sequence<int, R>());
      const auto add = [&]<int G>(std::integral_constant<int, G>) {
        const Bytes q = D::weight(group<F, G>(block));
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          std::int32_t four;
          std::memcpy(&four, x[r] + b * kBlock + G * kGroup, sizeof four);
          d[r].add(q, four);
        }
      };
      [&]<int... G>(std::integer_sequence<int, G...>) {
        (add(std::integral_constant<int, G>{}), ...);
      }(std::make_integer_sequence<int, kGroups>());
      const Floats scale = load_halves(scales[c] + b * kPanel);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r)
        s[r][c] = fma(to_floats(d[r].result()), scale * all(in.scale[(row + r) * blocks + b]), s[r][c]);
      if constexpr (F != kInt8) {
        const Floats minimum = load_halves(scales[c] + (blocks + b) * kPanel);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) s[r][c] = fma(minimum, all(in.shift[(row + r) * blocks + b]), s[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kPanel, s[r][c]);
}

constexpr int kMostColumns = 4;                           // panels of a tile
constexpr int kMostRows = kRegisters > 16 ? 14 : 6;       // rows of a tile of floats
constexpr int kMostDotRows = kRegisters > 16 ? 8 : 4;     // and of one of quants
constexpr int kWideRows = kRegisters > 16 ? 6 : 1;        // up to so many rows a tile has kMostColumns panels

inline bool unpacks(const Weight& w) { return w.arithmetic == kFma32 && w.format >= kInt8; }
inline int most_rows(const Weight& w) { return w.arithmetic == kQ8Dot ? kMostDotRows : kMostRows; }

template <int C, int... I>
Tile tile_of(const Weight& w, int rows, std::integer_sequence<int, I...>) {
  static constexpr Tile floats[] = {tile_float32<I + 1, C>...};
  static constexpr Tile halves[] = {tile_bfloat16<I + 1, C>...};
  if (w.arithmetic == kFma32) return w.format == kBFloat16 ? halves[rows - 1] : floats[rows - 1];
#if defined(TOKENSTREAM_DPBF16)
  static constexpr Tile pairs[] = {tile_pairs<I + 1, C>...};
  if (w.arithmetic == kDpBF16) return pairs[rows - 1];
#endif
  constexpr int most = std::min<int>(sizeof...(I), kMostDotRows);
  return [&]<int... J>(std::integer_sequence<int, J...>) {
    static constexpr Tile eight[] = {tile_quants<kInt8, J + 1, C>...};
    static constexpr Tile four[] = {tile_quants<kInt4, J + 1, C>...};
    static constexpr Tile five[] = {tile_quants<kInt5, J + 1, C>...};
    return w.format == kInt8 ? eight[rows - 1] : w.format == kInt4 ? four[rows - 1] : five[rows - 1];
  }(std::make_integer_sequence<int, most>());
}

inline int wide_rows(const Weight& w) { return w.arithmetic == kQ8Dot ? std::min(kWideRows, 2) : kWideRows; }

inline Tile find_tile(const Weight& w, int rows, int columns) {
  if (columns == 4) return tile_of<4>(w, rows, std::make_integer_sequence<int, kWideRows>());
  if (columns == 2) return tile_of<2>(w, rows, std::make_integer_sequence<int, (kRegisters > 16 ? 14 : 3)>());
  return tile_of<1>(w, rows, std::make_integer_sequence<int, kMostRows>());
}

// How many of `panels` panels the next tile of so many rows takes.
inline int tile_columns(const Weight& w, int rows, int panels) {
  if (panels >= 4 && rows <= wide_rows(w)) return 4;
  if (panels >= 2 && rows <= (kRegisters > 16 ? most_rows(w) : 3)) return 2;
  return 1;
}

constexpr int kSums = 56 * kPanel;  // of the largest tile: 14 x 4

// Rows [first, first + rows) times panels [panels); finish(row, count, panel, columns, sums [count][columns][16]).
// `scratch` holds kMostColumns unpacked panels where weights are unpacked.
template <class Finish>
void multiply_panels(const Weight& w, Range panels, const Inputs& in, int first, int rows, float* scratch,
                     Finish&& finish) {
  alignas(kCacheLine) float sums[kSums];
  const int passes = (rows + most_rows(w) - 1) / most_rows(w), largest = (rows + passes - 1) / passes;
  for (int panel = panels.begin; panel < panels.end;) {
    const int columns = tile_columns(w, largest, panels.end - panel);
    const float* unpacked = nullptr;
    if (unpacks(w)) {
      for (int c = 0; c < columns; ++c)
        unpack_panel(w, panel + c, scratch + static_cast<std::ptrdiff_t>(c) * in.stride * kPanel);
      unpacked = scratch;
    }
    for (int pass = 0; pass < passes; ++pass) {
      const Range r = share(rows, pass, passes);
      const int count = r.end - r.begin;
      find_tile(w, count, columns)(sums, w, panel, in, first + r.begin, unpacked);
      finish(first + r.begin, count, panel, columns, sums);
    }
    panel += columns;
  }
}

constexpr int kCachedBytes = 256 << 10;  // of rows kept in the second-level cache while panels pass by

// How many rows go through a run of panels at a time.
inline int block_rows(const Weight& w, int rows) {
  const int bytes = w.arithmetic == kQ8Dot ? 1 : w.arithmetic == kDpBF16 ? 2 : 4;
  const int most = most_rows(w);
  return std::min(rows, std::max(most, kCachedBytes / (bytes * w.depth) / most * most));
}

}  // namespace tokenstream
