// Linear layers over packed bf16 weights: y = x W^T + bias, for one row or thousands, always by the same sums.
//
// A weight [columns, depth] lies in panels of 32 columns, each [depth / 2][32][2], so a tile streams it from front to
// back. Threads share panels, never depth. It does not know what a layer is for: `finish` gets the sums.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>
#include <numbers>

#include "tile_cpu.h"

namespace tokenstream {

constexpr int kPanel = 32;               // columns of a panel
constexpr int kTileRows = 14;            // 14 x 2 sums, 2 columns and a row fill the 32 vector registers
constexpr int kCachedBytes = 384 << 10;  // rows kept in the second-level cache while all panels pass by

struct Packed {
  const bf16* data;
  int columns;
  int depth;  // even

  int panels() const { return (columns + kPanel - 1) / kPanel; }
  const bf16* panel(int i) const { return data + static_cast<std::size_t>(i) * kPanel * depth; }
};

struct Range {
  int begin, end;
};

inline Range share(int count, int part, int parts) {
  return {static_cast<int>(static_cast<long>(count) * part / parts),
          static_cast<int>(static_cast<long>(count) * (part + 1) / parts)};
}

// Write panels [range) of weight [columns, depth] to `out`; columns behind the last are zero.
inline void pack_panels(bf16* out, const bf16* weight, int columns, int depth, Range range) {
  for (int panel = range.begin; panel < range.end; ++panel) {
    bf16* to = out + static_cast<std::size_t>(panel) * kPanel * depth;
    for (int c = 0; c < kPanel; ++c) {
      const int column = panel * kPanel + c;
      const bf16* from = weight + static_cast<std::size_t>(column) * depth;
      for (int k = 0; k < depth; ++k) to[(k / 2 * kPanel + c) * 2 + k % 2] = column < columns ? from[k] : 0;
    }
  }
}

inline Multiply linear_tile(int rows, int lines) {
  constexpr auto all = std::make_integer_sequence<int, kTileRows>();
  if (lines == 2) return pick<2, 2>(rows, all);
  return lines == 1 ? pick<2, 1>(rows, all) : pick<2, 0>(rows, all);
}

// Rows [0, rows) times one panel. While the first passes compute, `ahead` (the next panel) is fetched.
template <class Finish>
void linear_panel(const Packed& w, int panel, const bf16* x, int first_row, int rows, const bf16* ahead,
                  Finish& finish) {
  alignas(kCacheLine) float sums[kTileRows * kPanel];
  const int passes = (rows + kTileRows - 1) / kTileRows;
  const int pairs = w.depth / 2;
  const char* fetch = reinterpret_cast<const char*>(ahead);
  for (int pass = 0; pass < passes; ++pass) {
    const Range r = share(rows, pass, passes);
    const int lines = passes == 1 ? 2 : pass < 2 ? 1 : 0;
    const int row = first_row + r.begin;
    linear_tile(r.end - r.begin, lines)(sums, kPanel, false, x + static_cast<std::ptrdiff_t>(row) * w.depth, w.depth,
                                        w.panel(panel), pairs, fetch);
    fetch += pairs * kCacheLine;
    finish(row, r.end - r.begin, panel * kPanel, sums);
  }
}

// The panels of one linear, handed out to threads. Each takes its own share from front to back, so that it streams;
// whoever is done takes from the others', for the cores are shared with other programs and a thread may have to wait.
class Panels {
 public:
  explicit Panels(int threads) : taken_(threads) {}

  // What `thread` computes next of `blocks` blocks of rows times `panels` panels; false if nothing is left.
  bool take(int thread, int blocks, int panels, int& block, int& panel) {
    const int threads = static_cast<int>(taken_.size());
    for (int i = 0; i < threads; ++i) {
      const int owner = (thread + i) % threads;
      const Range own = share(panels, owner, threads);
      const int width = own.end - own.begin, count = blocks * width;
      std::atomic<int>& taken = taken_[owner].count;
      if (taken.load(std::memory_order_relaxed) >= count) continue;
      const int item = taken.fetch_add(1, std::memory_order_relaxed);
      if (item >= count) continue;
      block = item / width;
      panel = own.begin + item % width;
      return true;
    }
    return false;
  }

 private:
  struct alignas(kCacheLine) Taken {
    std::atomic<int> count{0};
  };
  std::vector<Taken> taken_;
};

// x [rows, depth] times the panels that `thread` gets; finish(row, count, column, sums [count][32]) takes each tile.
// `next` is what this thread reads afterwards. A panel is claimed while the one before it is computed, to be fetched.
template <class Finish>
void linear(const Packed& w, Panels& panels, int thread, const bf16* x, int rows, const bf16* next, Finish finish) {
  const int step = std::max(kTileRows, kCachedBytes / (2 * w.depth) / kTileRows * kTileRows);
  const int blocks = (rows + step - 1) / step;
  int block, panel, then_block = 0, then_panel = 0;
  bool more = panels.take(thread, blocks, w.panels(), block, panel);
  while (more) {
    more = panels.take(thread, blocks, w.panels(), then_block, then_panel);
    const int row = block * step;
    linear_panel(w, panel, x, row, std::min(step, rows - row), more ? w.panel(then_panel) : next, finish);
    block = then_block;
    panel = then_panel;
  }
}

// y = bf16(sum + bias), the rounding of torch's linear. y: [rows, columns].
struct Store {
  bf16* y;
  int columns;
  const bf16* bias;  // or null

  void operator()(int row, int count, int column, const float* sums) const {
    for (int half = 0; half < 2; ++half) {
      const int c = column + half * kLanes;
      if (c >= columns) return;
      const __mmask16 m = lanes(columns - c);
      const __m512 b = bias ? load(bias + c, m) : _mm512_setzero_ps();
      for (int r = 0; r < count; ++r)
        store(y + static_cast<std::size_t>(row + r) * columns + c,
              _mm512_add_ps(_mm512_load_ps(sums + r * kPanel + half * kLanes), b), m);
    }
  }
};

// x = bf16(x + bf16(sum)): the residual stream takes the output of a linear.
struct AddTo {
  bf16* x;
  int columns;

  void operator()(int row, int count, int column, const float* sums) const {
    for (int half = 0; half < 2; ++half) {
      const int c = column + half * kLanes;
      if (c >= columns) return;
      const __mmask16 m = lanes(columns - c);
      for (int r = 0; r < count; ++r) {
        bf16* at = x + static_cast<std::size_t>(row + r) * columns + c;
        store(at, _mm512_add_ps(load(at, m), rounded(_mm512_load_ps(sums + r * kPanel + half * kLanes))), m);
      }
    }
  }
};

// y = bf16(bf16(silu(gate)) * up), gate and up rounded first. A panel holds 16 columns of gate, then the same of up.
struct SiluTimes {
  bf16* y;
  int columns;  // of y: a multiple of 16

  void operator()(int row, int count, int column, const float* sums) const {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int r = 0; r < count; ++r) {
      const __m512 gate = rounded(_mm512_load_ps(sums + r * kPanel));
      const __m512 up = rounded(_mm512_load_ps(sums + r * kPanel + kLanes));
      const __m512 down = _mm512_add_ps(one, exp2(_mm512_mul_ps(gate, _mm512_set1_ps(-std::numbers::log2e_v<float>))));
      store(y + static_cast<std::size_t>(row + r) * columns + column / 2,
            _mm512_mul_ps(rounded(_mm512_div_ps(gate, down)), up));
    }
  }
};

}  // namespace tokenstream
