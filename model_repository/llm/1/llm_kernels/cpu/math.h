// Functions of sixteen lanes at once, by polynomials and exact operations alone: the same bits on every processor.
#pragma once

#include <numbers>

#include "simd.h"

namespace tokenstream {

constexpr float kLog2E = std::numbers::log2e_v<float>;

// 2^x for x up to 126, 0 below -126, NaN for NaN. A minimax polynomial on [-1/2, 1/2], relative error 1e-7.
inline Floats exp2(Floats x) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: a sum with it has no room for a fraction
  const Floats shifted = x + all(round), f = x - (shifted - all(round));
  Floats p = fma(f, all(1.53533618e-4f), all(1.33988744e-3f));
  p = fma(p, f, all(9.61843736e-3f));
  p = fma(p, f, all(5.55033247e-2f));
  p = fma(p, f, all(2.40226479e-1f));
  p = fma(p, f, all(6.93147203e-1f));
  p = fma(p, f, all(1.0f));
  const Floats power = floats(bits(p) + left<23>(bits(shifted)));  // what `round` adds is shifted out
  return where_less(x, all(-126.0f), all(0.0f), power + (x - x));  // x - x: 0, or NaN for NaN
}

inline Floats smaller(Floats x, float bound) { return where_less(all(bound), x, all(bound), x); }

// 1 + e^x, at most 1 + 2^126; NaN for NaN.
inline Floats one_and_exp(Floats x) { return all(1.0f) + exp2(smaller(x * all(kLog2E), 126.0f)); }

// e^x for x from -104 to 87, 0 below -87.4. Relative error below 2e-7.
inline Floats exp(Floats x) {
  constexpr float log2e_rest = 1.92596303e-8f;  // what kLog2E lacks
  const Floats y = x * all(kLog2E), p = exp2(y);
  const Floats rest = fma(x, all(log2e_rest), fma(x, all(kLog2E), all(0.0f) - y));
  return fma(p, rest * all(std::numbers::ln2_v<float>), p);
}

// ln(1 + x) for x from -1 + 2^-24 to 2^24. With 1 + x = 2^k (1 + f), f from 1/sqrt(2) - 1 to sqrt(2) - 1, a minimax
// polynomial of f. Relative error below 2e-7.
inline Floats log1p(Floats x) {
  constexpr std::int32_t one_less_root = 0x3f800000 - 0x3f3504f3;  // 1 and 1/sqrt(2), as their bits
  const Ints biased = right<23>(bits(x + all(1.0f)) + all(one_less_root));
  const Floats k = to_floats(biased - all(127)), scale = floats(left<23>(all(254) - biased));  // 2^-k
  const Floats f = fma(x, scale, scale - all(1.0f));
  Floats p = fma(f, all(-0.0762306079f), all(0.129055023f));
  p = fma(p, f, all(-0.132429808f));
  p = fma(p, f, all(0.141816348f));
  p = fma(p, f, all(-0.166090563f));
  p = fma(p, f, all(0.200019851f));
  p = fma(p, f, all(-0.250015855f));
  p = fma(p, f, all(0.333333254f));
  p = fma(p, f, all(-0.499999881f));
  constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // k * ln2_high is exact
  return fma(k, all(ln2_high), f + fma(f * f, p, k * all(ln2_low)));
}

inline Floats tanh(Floats x) { return all(1.0f) - all(2.0f) / one_and_exp(x + x); }

inline Floats silu(Floats x) { return x / one_and_exp(all(0.0f) - x); }

// The GELU with tanh (Hendrycks and Gimpel 2016).
inline Floats gelu_tanh(Floats x) {
  const Floats inner = fma(x * x * x, all(0.044715f), x) * all(0.797884561f);
  return all(0.5f) * x * (all(1.0f) + tanh(inner));
}

}  // namespace tokenstream
