// The arithmetic that every kernel shares: bf16 vectors, exp2, and one register tile of a matrix product.
//
// `multiply` is the only place where products of bf16 are added: each sum is one chain of vdpbf16ps over the depth,
// from the first pair to the last, so its bits depend on its own row and column alone, not on the tile that computes
// it. It does not know matrices larger than a tile, threads, or what the numbers mean.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "memory_cpu.h"

namespace tokenstream {

using bf16 = std::uint16_t;

constexpr int kLanes = 16;  // floats in a vector

// 16 values each. Narrowing rounds to nearest even and takes subnormals for zero.
inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i narrow(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

inline __mmask16 lanes(int count) { return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1u << count) - 1); }

inline __m512 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store(bf16* p, __m512 x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }

// Into the first-level cache, or only into the second. In assembly, for g++ 12 drops calls of functions that only
// prefetch.
inline void fetch_near(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }
inline void fetch_far(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }

// The order of bf16 as one of 16-bit integers: both zeros alike, every NaN above everything.
inline __m512i ordered(__m512i x) {
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
  const __m512i value =
      _mm512_mask_sub_epi16(magnitude, _mm512_movepi16_mask(x), _mm512_setzero_si512(), magnitude);
  const __mmask32 nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
  return _mm512_mask_blend_epi16(nan, value, _mm512_set1_epi16(0x7fff));
}

// The first place of the largest of `count` > 0 values.
inline std::int64_t first_peak(const bf16* x, std::int64_t count) {
  constexpr int width = 2 * kLanes;
  const auto at = [=](std::int64_t i) {
    const auto m = static_cast<__mmask32>(count - i >= width ? 0xffffffffu : (1u << (count - i)) - 1);
    return _mm512_mask_blend_epi16(m, _mm512_set1_epi16(-0x8000), ordered(_mm512_maskz_loadu_epi16(m, x + i)));
  };
  __m512i peaks = at(0);
  for (std::int64_t i = width; i < count; i += width) peaks = _mm512_max_epi16(peaks, at(i));
  alignas(kCacheLine) std::int16_t lane[width];
  _mm512_store_si512(lane, peaks);
  const __m512i peak = _mm512_set1_epi16(*std::max_element(lane, lane + width));
  for (std::int64_t i = 0;; i += width)
    if (const __mmask32 found = _mm512_cmpeq_epi16_mask(at(i), peak)) return i + __builtin_ctz(found);
}

// 2^x, 0 for -inf, NaN for NaN: minimax polynomials on [-1/2, 1/2], relative error 1e-7 (degree 6, rounding) or 3e-6
// (degree 4).
template <int Degree = 6>
inline __m512 exp2(__m512 x) {
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512 f = _mm512_reduce_ps(x, rounding);  // what rounding takes away; 0 for -inf
  constexpr float six[] = {
      1.53533618e-4f, 1.33988744e-3f, 9.61843736e-3f, 5.55033247e-2f, 2.40226479e-1f, 6.93147203e-1f, 1.0f};
  constexpr float four[] = {9.58285287e-3f, 5.59064249e-2f, 2.40240986e-1f, 6.93124193e-1f, 1.0f};
  const float* c = Degree == 6 ? six : four;
  __m512 p = _mm512_set1_ps(c[0]);
  for (int i = 1; i <= Degree; ++i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[i]));
  return _mm512_scalef_ps(p, _mm512_roundscale_ps(x, rounding));
}

// One register tile: sum[r][c] = (add ? sum[r][c] : 0) + sum over pairs p of a[r][2p] * b[p][c][0] + a[r][2p+1] *
// b[p][c][1]
//
//     a: R rows of bf16, `a_stride` apart           b: [pairs][16 V columns][2] bf16, 64-byte aligned
//     sum: R rows of 16 V floats, `sum_stride` apart
//
// `Lines` cache lines behind `ahead` are fetched per pair, for whoever comes next; 16 V columns are V lines.
template <int R, int V, int Lines>
void multiply(float* sum, std::ptrdiff_t sum_stride, bool add, const bf16* a, std::ptrdiff_t a_stride, const bf16* b,
              int pairs, const char* ahead) {
  __m512 s[R][V];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      s[r][v] = add ? _mm512_loadu_ps(sum + r * sum_stride + v * kLanes) : _mm512_setzero_ps();
  for (int p = 0; p < pairs; ++p) {
    __m512bh column[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) column[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + (p * V + v) * 2 * kLanes));
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const auto pair = *reinterpret_cast<const std::int32_t __attribute__((may_alias))*>(a + r * a_stride + 2 * p);
      const auto row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) s[r][v] = _mm512_dpbf16_ps(s[r][v], row, column[v]);
    }
#pragma GCC unroll 4
    for (int l = 0; l < Lines; ++l) fetch_far(ahead + (p * Lines + l) * kCacheLine);
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(sum + r * sum_stride + v * kLanes, s[r][v]);
}

using Multiply = void (*)(float*, std::ptrdiff_t, bool, const bf16*, std::ptrdiff_t, const bf16*, int, const char*);

template <int V, int Lines, int... R>
constexpr Multiply pick(int rows, std::integer_sequence<int, R...>) {
  constexpr Multiply kernels[] = {multiply<R + 1, V, Lines>...};
  return kernels[rows - 1];
}

}  // namespace tokenstream
