// Vectors of sixteen lanes on any machine: one register with AVX-512, two with AVX2, four with NEON,
// arrays elsewhere. A kernel is written once with these, and compiled once per instruction set.
//
//   F32   16 float32              I32   16 int32
//   U8    64 bytes: 16 lanes of 4 consecutive inputs of an output column
//   BF16  32 bfloat16: 16 lanes of 2
//   Mask  16 truth values
//
// Every function is exactly rounded or made of such ones in a fixed order, so that all instruction
// sets give the same bits; except dot2, which has its own rounding where BF16 instructions exist.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define OCT_INLINE inline __attribute__((always_inline))
// Of long bodies: lane by lane they are so much code that they are compiled once, and called.
#define OCT_INLINE_VECTORS OCT_INLINE

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_scalar.h"
#undef OCT_INLINE_VECTORS
#define OCT_INLINE_VECTORS __attribute__((noinline))
#endif

namespace octavo {
namespace simd {

// Sums of up to 8 dot4 of nibbles, where 16 bits for them are faster than 32:
//     sum = begin_nibbles(acc);  sum = add_nibbles(sum, w, a) ...;  acc = end_nibbles(acc, sum)
// There, integers below 64 are multiplied by twos, too:
//     acc = dot4_twice(acc, v, a, w, b)      dot4 of v and a, and of w and b
#if defined(OCT_SHORT_NIBBLE_SUMS)
constexpr bool kShortSums = true;
#else
constexpr bool kShortSums = false;
using NibbleSum = I32;
OCT_INLINE NibbleSum begin_nibbles(I32 acc) { return acc; }
OCT_INLINE NibbleSum add_nibbles(NibbleSum sum, U8 w, I32 a) { return dot4(sum, w, a); }
OCT_INLINE I32 end_nibbles(I32, NibbleSum sum) { return sum; }
OCT_INLINE I32 dot4_twice(I32 acc, U8 v, I32 a, U8 w, I32 b) { return dot4(dot4(acc, v, a), w, b); }
#endif

// Products of two rows at once, where instructions multiply matrices. Sums of 16 outputs of two
// rows are two vectors, in which rows alternate:
//
//     half 0   | output 0 of row 0, of row 1 | output 1 of row 0, of row 1 | ... | output 7
//     half 1   | output 8                    | output 9                    | ... | output 15
//
//   zip<half>(x, y)       lanes of this half of x and of y, alternating: from two lines with 4 bytes
//                         of 16 outputs each, 8 bytes of 8 outputs
//   unzip<odd>(x, y)      the even, or the odd, lanes of x and then of y: of two halves, a row
//   set2(even, odd)       to alternating lanes
//   load_two_rows(p, q)   8 bytes of activations of each row
//   dot8, dot4            acc + sum over 8 bytes, w unsigned and x signed; over 4 bfloat16
#if defined(OCT_TWO_ROWS)
constexpr bool kTwoRows = true;
#else
constexpr bool kTwoRows = false;  // kernels that would call these are not compiled
struct TwoRows {};
template <int kHalf, class X> X zip(X x, X y);
template <int kOdd> F32 unzip(F32 x, F32 y);
F32 set2(float even, float odd);
I32 set2(int32_t even, int32_t odd);
TwoRows load_two_rows(const uint8_t* first, const uint8_t* second);
I32 dot8(I32 acc, U8 w, TwoRows x);
F32 dot4(F32 acc, BF16 w, TwoRows x);
#endif

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
OCT_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
OCT_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// As store_bf16, but denormals may become 0: for dot2, which takes them for 0 anyway.
OCT_INLINE void store_bf16_factors(uint16_t* p, F32 x) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  store_bf16(p, x);
#endif
}
// Two such vectors, lane by lane: 16 pairs.
OCT_INLINE void store_bf16_pairs(uint16_t* p, F32 even, F32 odd) {
#if defined(__AVX512BF16__)
  const auto lanes = [](__m256bh x) {
    return _mm512_cvtepu16_epi32(reinterpret_cast<const __m256i&>(x));
  };
  _mm512_storeu_si512(p, _mm512_or_si512(lanes(_mm512_cvtneps_pbh(even)),
                                         _mm512_slli_epi32(lanes(_mm512_cvtneps_pbh(odd)), 16)));
#else
  uint16_t first[16], second[16];
  store_bf16_factors(first, even);
  store_bf16_factors(second, odd);
  for (int i = 0; i < 16; i++) {
    p[2 * i] = first[i];
    p[2 * i + 1] = second[i];
  }
#endif
}

// e^x with an error of about one unit in the last place: 0 below -87.3, as of -inf; inf above 88.7;
// NaN of NaN. Cody-Waite reduction by ln 2, then a polynomial of degree 6.
OCT_INLINE F32 exp(F32 x) {
  // The variable comes second: max and min then keep a NaN.
  const F32 clipped = min(set1(89.0f), max(set1(-88.0f), x));
  const F32 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32 shifted = fma(clipped, set1(1.44269504f), magic);
  const F32 n = sub(shifted, magic);
  F32 r = fma(n, set1(-0.693359375f), clipped);
  r = fma(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.3981999e-3f);
  p = fma(p, r, set1(8.3334519e-3f));
  p = fma(p, r, set1(4.1665796e-2f));
  p = fma(p, r, set1(1.6666665e-1f));
  p = fma(p, r, set1(5.0e-1f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  // Twice half the exponent: 2^128 alone does not fit a float.
  const I32 exponent = to_int(n);
  const I32 half = shift_right<1>(exponent);
  p = mul(p, power_of_two(half));
  p = mul(p, power_of_two(sub(exponent, half)));
  return select(less(x, set1(-87.3f)), zero(), p);
}

OCT_INLINE F32 silu(F32 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// tanh x = 1 - 2 / (e^2x + 1), with the odd series near 0 where that would cancel.
OCT_INLINE F32 tanh(F32 x) {
  const F32 square = mul(x, x);
  F32 series = set1(2.1869489e-2f);
  series = fma(series, square, set1(-5.3968254e-2f));
  series = fma(series, square, set1(1.3333333e-1f));
  series = fma(series, square, set1(-3.3333333e-1f));
  series = fma(mul(series, square), x, x);
  const F32 far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
  return select(less(square, set1(0.09f)), series, far);
}

// With an absolute error of 3e-7 (Abramowitz and Stegun, 7.1.26), odd exactly.
OCT_INLINE F32 erf(F32 x) {
  const F32 magnitude = abs(x);
  const F32 t = div(set1(1.0f), fma(magnitude, set1(0.3275911f), set1(1.0f)));
  F32 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F32 tail = mul(mul(p, t), exp(sub(zero(), mul(x, x))));
  const F32 positive = sub(set1(1.0f), tail);
  return select(less(x, zero()), sub(zero(), positive), positive);
}

OCT_INLINE F32 gelu_tanh(F32 x) {
  const F32 cube = mul(mul(x, x), x);
  const F32 inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

OCT_INLINE F32 gelu_erf(F32 x) {
  const F32 wide = add(set1(1.0f), erf(mul(x, set1(0.7071067812f))));
  return mul(mul(set1(0.5f), x), wide);
}

}  // namespace simd
}  // namespace octavo
