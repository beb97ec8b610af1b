// Sixteen lanes, however wide the registers are: the only file that knows an instruction set.
//
//     Floats   16 x float32        Ints   16 x int32        Bytes   64 bytes, of which lane i holds 4i to 4i + 3
//
// Every operation has one result on every processor: products and sums are rounded each by itself or fused where `fma`
// says so, reductions across lanes go over the 16 lanes in one fixed tree, and nothing is approximated. So what is
// built of them has the same bits in a zmm register, two ymm or a loop. It does not know what is computed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace tokenstream {

// Ends what a compiler may think of `x`: of sums in one chain g++ makes a tree, for which it has too few registers.
#if defined(__AVX512F__)
#define TOKENSTREAM_CHAIN(x) asm("" : "+v"(x))
#else
#define TOKENSTREAM_CHAIN(x) asm("" : "+x"(x))
#endif

constexpr int kLanes = 16;
constexpr int kCacheLine = 64;  // bytes

using bf16 = std::uint16_t;
using half = std::uint16_t;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr int kRegisters = 32;  // of 16 lanes

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

inline Floats all(float x) { return {_mm512_set1_ps(x)}; }
inline Ints all(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Ints load(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(std::int32_t* p, Ints x) { _mm512_storeu_si512(p, x.v); }
inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats magnitude(Floats x) { return {_mm512_abs_ps(x.v)}; }

inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
Ints left(Ints x) {
  return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
Ints right(Ints x) {  // zeros come in
  return {_mm512_srli_epi32(x.v, N)};
}
inline Ints bits(Floats x) { return {_mm512_castps_si512(x.v)}; }
inline Floats floats(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Ints nearest(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }

inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Floats where_less(Ints a, Ints b, Floats yes, Floats no) {
  return {_mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(a.v, b.v), no.v, yes.v)};
}
inline bool any_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0; }

inline Floats load_halves(const half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_bf16(const bf16* p) {
  return floats(left<16>({_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}));
}
inline void store_low_halves(bf16* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
inline void store_bytes(std::int8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
inline Ints load_signed_bytes(const std::int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

// The lanes' sum: lane i and i + 8, then i and i + 4, i + 2, i + 1.
inline float sum(Floats x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

template <int N>
Bytes right16(Bytes x) {  // of 16-bit lanes
  return {_mm512_srli_epi16(x.v, N)};
}
template <int N>
Bytes left16(Bytes x) {
  return {_mm512_slli_epi16(x.v, N)};
}
inline Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Bytes all_bytes(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
inline Ints ints(Bytes x) { return {x.v}; }

#if defined(__AVX512VNNI__)

// 32 products per lane, of weights by one row's activations: exact. Bits: of a weight; 8 are signed, fewer unsigned.
template <int Bits>
struct Dot {
  __m512i s;
  static Bytes weight(Bytes w) {
    if constexpr (Bits == 8) return {_mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)))};
    return w;
  }
  // `total` of the row's 32 activations: what weights that were made unsigned add too much.
  explicit Dot(std::int32_t total) : s(Bits == 8 ? _mm512_set1_epi32(-128 * total) : _mm512_setzero_si512()) {}
  void add(Bytes w, std::int32_t four) { s = _mm512_dpbusd_epi32(s, w.v, _mm512_set1_epi32(four)); }
  Ints result() const { return {s}; }
};

#else

template <int Bits>
struct Dot {
  __m512i s = _mm512_setzero_si512();
  static Bytes weight(Bytes w) { return w; }
  explicit Dot(std::int32_t) {}
  void add(Bytes w, std::int32_t four) {
    const __m512i a = _mm512_set1_epi32(four);
    if constexpr (Bits == 8) {
      const __m512i signed_weight = _mm512_mask_sub_epi8(w.v, _mm512_movepi8_mask(a), _mm512_setzero_si512(), w.v);
      s = _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(a), signed_weight),
                                                _mm512_set1_epi16(1)));
    } else if constexpr (Bits == 4) {  // 8 x 2 x 15 x 127 fit 16 bits
      s = _mm512_add_epi16(s, _mm512_maddubs_epi16(w.v, a));
    } else {
      s = _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, a), _mm512_set1_epi16(1)));
    }
    TOKENSTREAM_CHAIN(s);
  }
  Ints result() const { return {Bits == 4 ? _mm512_madd_epi16(s, _mm512_set1_epi16(1)) : s}; }
};

#endif

#if defined(__AVX512BF16__)
#define TOKENSTREAM_DPBF16
// s + w * x for pairs of bf16, as vdpbf16ps adds them.
inline Floats dot_pairs(Floats s, Bytes w, std::int32_t pair) {
  return {_mm512_dpbf16_ps(s.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(w.v))};
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int kRegisters = 8;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints all(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints load(const std::int32_t* p) { return {load32(p), load32(p + 8)}; }
inline void store(std::int32_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline Bytes load_bytes(const void* p) { return {load32(p), load32(static_cast<const char*>(p) + 32)}; }

inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats magnitude(Floats x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}

inline Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints operator-(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Ints operator*(Ints x, Ints y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline Ints operator&(Ints x, Ints y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Ints operator|(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Ints operator^(Ints x, Ints y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
Ints left(Ints x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
Ints right(Ints x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
inline Ints bits(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline Floats floats(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints nearest(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }

inline Floats where_less(Floats x, Floats y, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline Floats where_less(Ints x, Ints y, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a))),
          _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b)))};
}
inline bool any_less(Floats x, Floats y) {
  return _mm256_movemask_ps(
      _mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)));
}

inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Floats load_halves(const half* p) { return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 8))}; }
inline Floats load_bf16(const bf16* p) {
  return floats(left<16>({_mm256_cvtepu16_epi32(load16(p)), _mm256_cvtepu16_epi32(load16(p + 8))}));
}
inline void store_low_halves(bf16* p, Ints x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_bytes(std::int8_t* p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline Ints load_signed_bytes(const std::int8_t* p) {
  const __m128i x = load16(p);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}

inline float sum(Floats x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

template <int N>
Bytes right16(Bytes x) {
  return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
template <int N>
Bytes left16(Bytes x) {
  return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
}
inline Bytes operator&(Bytes x, Bytes y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes all_bytes(int x) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
inline Ints ints(Bytes x) { return {x.a, x.b}; }

#if defined(__AVXVNNI__)

template <int Bits>
struct Dot {
  __m256i a, b;
  static Bytes weight(Bytes w) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    if constexpr (Bits == 8) return {_mm256_xor_si256(w.a, flip), _mm256_xor_si256(w.b, flip)};
    return w;
  }
  explicit Dot(std::int32_t total) : a(_mm256_set1_epi32(Bits == 8 ? -128 * total : 0)), b(a) {}
  void add(Bytes w, std::int32_t four) {
    const __m256i x = _mm256_set1_epi32(four);
    a = _mm256_dpbusd_avx_epi32(a, w.a, x);
    b = _mm256_dpbusd_avx_epi32(b, w.b, x);
  }
  Ints result() const { return {a, b}; }
};

#else

template <int Bits>
struct Dot {
  __m256i a = _mm256_setzero_si256(), b = a;
  static Bytes weight(Bytes w) { return w; }
  explicit Dot(std::int32_t) {}
  void add(Bytes w, std::int32_t four) {
    const __m256i x = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1);
    if constexpr (Bits == 8) {
      const __m256i m = _mm256_abs_epi8(x);
      a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(m, _mm256_sign_epi8(w.a, x)), one));
      b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_maddubs_epi16(m, _mm256_sign_epi8(w.b, x)), one));
    } else if constexpr (Bits == 4) {  // 8 x 2 x 15 x 127 fit 16 bits
      a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, x));
      b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, x));
    } else {
      a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, x), one));
      b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, x), one));
    }
    TOKENSTREAM_CHAIN(a);
    TOKENSTREAM_CHAIN(b);
  }
  Ints result() const {
    const __m256i one = _mm256_set1_epi16(1);
    if constexpr (Bits == 4) return {_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)};
    return {a, b};
  }
};

#endif

#else  // any processor: loops, which a compiler may turn into its vectors

constexpr int kRegisters = 8;

struct Floats {
  float v[kLanes];
};
struct Ints {
  std::int32_t v[kLanes];
};
struct Bytes {
  std::uint8_t v[4 * kLanes];
};

template <class To, class F>
To each(F f) {
  To x;
  for (int i = 0; i < static_cast<int>(sizeof(x.v) / sizeof(x.v[0])); ++i) x.v[i] = f(i);
  return x;
}

inline Floats all(float x) {
  return each<Floats>([=](int) { return x; });
}
inline Ints all(std::int32_t x) {
  return each<Ints>([=](int) { return x; });
}
template <class T>
T load_as(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Floats load(const float* p) { return load_as<Floats>(p); }
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
inline Ints load(const std::int32_t* p) { return load_as<Ints>(p); }
inline void store(std::int32_t* p, Ints x) { std::memcpy(p, &x, sizeof x); }
inline Bytes load_bytes(const void* p) { return load_as<Bytes>(p); }

inline Floats operator+(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats operator-(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats operator*(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats operator/(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Floats larger(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}

inline std::int32_t wrapped(std::uint32_t x) { return static_cast<std::int32_t>(x); }
inline std::uint32_t plain(std::int32_t x) { return static_cast<std::uint32_t>(x); }
inline Ints operator+(Ints a, Ints b) {
  return each<Ints>([&](int i) { return wrapped(plain(a.v[i]) + plain(b.v[i])); });
}
inline Ints operator-(Ints a, Ints b) {
  return each<Ints>([&](int i) { return wrapped(plain(a.v[i]) - plain(b.v[i])); });
}
inline Ints operator*(Ints a, Ints b) {
  return each<Ints>([&](int i) { return wrapped(plain(a.v[i]) * plain(b.v[i])); });
}
inline Ints operator&(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.v[i] & b.v[i]; });
}
inline Ints operator|(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.v[i] | b.v[i]; });
}
inline Ints operator^(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int N>
Ints left(Ints x) {
  return each<Ints>([&](int i) { return wrapped(plain(x.v[i]) << N); });
}
template <int N>
Ints right(Ints x) {
  return each<Ints>([&](int i) { return wrapped(plain(x.v[i]) >> N); });
}
inline Ints bits(Floats x) { return std::bit_cast<Ints>(x); }
inline Floats floats(Ints x) { return std::bit_cast<Floats>(x); }
inline Floats magnitude(Floats x) { return floats(bits(x) & all(0x7fffffff)); }
inline Floats to_floats(Ints x) {
  return each<Floats>([&](int i) { return static_cast<float>(x.v[i]); });
}
inline Ints nearest(Floats x) {  // half to even, as the processors round by default, and what does not fit to -2^31
  return each<Ints>([&](int i) {
    return std::fabs(x.v[i]) < 0x1p31f ? static_cast<std::int32_t>(std::nearbyint(x.v[i])) : INT32_MIN;
  });
}

inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline Floats where_less(Ints a, Ints b, Floats yes, Floats no) {
  return each<Floats>([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline bool any_less(Floats a, Floats b) {
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= a.v[i] < b.v[i];
  return found;
}

inline float widen_half(half h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -small : small;
}
inline Floats load_halves(const half* p) {
  return each<Floats>([=](int i) { return widen_half(p[i]); });
}
inline Floats load_bf16(const bf16* p) {
  return each<Floats>([=](int i) { return std::bit_cast<float>(static_cast<std::uint32_t>(p[i]) << 16); });
}
inline void store_low_halves(bf16* p, Ints x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<bf16>(x.v[i]);
}
inline void store_bytes(std::int8_t* p, Ints x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int8_t>(x.v[i]);
}
inline Ints load_signed_bytes(const std::int8_t* p) {
  return each<Ints>([=](int i) { return std::int32_t{p[i]}; });
}

inline float sum(Floats x) {
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) x.v[i] += x.v[i + n];
  return x.v[0];
}

template <class F>
Bytes each16(Bytes x, F f) {
  std::uint16_t w[2 * kLanes];
  std::memcpy(w, x.v, sizeof w);
  for (auto& v : w) v = static_cast<std::uint16_t>(f(v));
  std::memcpy(x.v, w, sizeof w);
  return x;
}
template <int N>
Bytes right16(Bytes x) {
  return each16(x, [](unsigned v) { return v >> N; });
}
template <int N>
Bytes left16(Bytes x) {
  return each16(x, [](unsigned v) { return v << N; });
}
inline Bytes operator&(Bytes a, Bytes b) {
  return each<Bytes>([&](int i) { return static_cast<std::uint8_t>(a.v[i] & b.v[i]); });
}
inline Bytes operator|(Bytes a, Bytes b) {
  return each<Bytes>([&](int i) { return static_cast<std::uint8_t>(a.v[i] | b.v[i]); });
}
inline Bytes all_bytes(int x) {
  return each<Bytes>([=](int) { return static_cast<std::uint8_t>(x); });
}
inline Ints ints(Bytes x) { return std::bit_cast<Ints>(x); }

template <int Bits>
struct Dot {
  Ints s = all(0);
  static Bytes weight(Bytes w) { return w; }
  explicit Dot(std::int32_t) {}
  void add(Bytes w, std::int32_t four) {
    const auto a = std::bit_cast<std::uint32_t>(four);
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < 4; ++j) {
        const std::uint8_t byte = w.v[4 * i + j];
        s.v[i] += (Bits == 8 ? static_cast<std::int8_t>(byte) : byte) * static_cast<std::int8_t>(a >> 8 * j);
      }
  }
  Ints result() const { return s; }
};

#endif

// What follows is built of the above.

// The largest lane; no lane is NaN.
inline float peak(Floats x) {
  float lane[kLanes];
  store(lane, x);
  return *std::max_element(lane, lane + kLanes);
}

inline Ints counting() {
  static constexpr std::int32_t lane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lane);
}

// The first `count` lanes from memory, the others 0; and the first `count` lanes into memory.
inline Floats load(const float* p, int count) {
  if (count >= kLanes) return load(p);
  float lane[kLanes] = {};
  std::copy_n(p, count, lane);
  return load(lane);
}
inline Ints load(const std::int32_t* p, int count) {
  if (count >= kLanes) return load(p);
  std::int32_t lane[kLanes] = {};
  std::copy_n(p, count, lane);
  return load(lane);
}
inline void store(float* p, Floats x, int count) {
  if (count >= kLanes) return store(p, x);
  float lane[kLanes];
  store(lane, x);
  std::copy_n(lane, count, p);
}

// Pairs of bf16: the first of each lane's two, and the second, widened.
inline Floats first_of_pairs(Bytes x) { return floats(left<16>(ints(x))); }
inline Floats second_of_pairs(Bytes x) { return floats(ints(x) & all(std::int32_t{-65536})); }

// To nearest even; NaN stays NaN.
inline Ints to_bf16(Floats x) {
  const Ints b = bits(x), odd = right<16>(b) & all(1);
  const Ints rounded = right<16>(b + all(0x7fff) + odd), quiet = right<16>(b) | all(0x40);
  return bits(where_less(bits(magnitude(x)), all(0x7f800001), floats(rounded), floats(quiet)));
}
inline void store(bf16* p, Floats x) { store_low_halves(p, to_bf16(x)); }
inline void store(bf16* p, Floats x, int count) {
  if (count >= kLanes) return store(p, x);
  bf16 lane[kLanes];
  store(lane, x);
  std::copy_n(lane, count, p);
}
inline Floats load(const bf16* p) { return load_bf16(p); }

// Into the first-level cache, or only into the second.
inline void fetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace tokenstream
