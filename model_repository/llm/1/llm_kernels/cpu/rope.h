// Sine and cosine in double precision by exact operations and polynomials alone, so that every processor's tables are
// equal; correct to within one rounding of float32.
#pragma once

#include <cmath>

namespace tokenstream {

struct Angle {
  float cos, sin;
};

inline Angle angle(float x) {
  // Cody and Waite (1980): the nearest multiple of pi / 2 is taken away in three parts, the first two of which have so
  // few bits that their products are exact.
  constexpr double quarter = 0.63661977236758134308;  // 2 / pi
  constexpr double parts[] = {0x1.921fb54400000p+0, 0x1.0b4611a600000p-34, 0x1.3198a2e037073p-69};
  const double n = std::nearbyint(static_cast<double>(x) * quarter);
  double r = static_cast<double>(x);
  for (double part : parts) r -= n * part;
  // Taylor's series up to r^17 and r^16, for |r| at most pi / 4.
  const double z = r * r;
  double s = 0, c = 0;
  for (int i = 17; i > 1; i -= 2) s = (1.0 + s) * -z / static_cast<double>(i * (i - 1));
  for (int i = 16; i > 0; i -= 2) c = (1.0 + c) * -z / static_cast<double>(i * (i - 1));
  s = r + r * s;
  c = 1.0 + c;
  switch (static_cast<long long>(n) & 3) {
    case 0:
      return {static_cast<float>(c), static_cast<float>(s)};
    case 1:
      return {static_cast<float>(-s), static_cast<float>(c)};
    case 2:
      return {static_cast<float>(-c), static_cast<float>(-s)};
    default:
      return {static_cast<float>(s), static_cast<float>(-c)};
  }
}

}  // namespace tokenstream
