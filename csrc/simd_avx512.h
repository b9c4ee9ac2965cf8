// simd.h on AVX-512 with VNNI, and BF16 where available.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes its own headers' undefined operands for uninitialized variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace octavo {
namespace simd {

using F32 = __m512;
using I32 = __m512i;
struct U8 {
  __m512i v;
};
struct BF16 {
  __m512i v;
};
using Mask = __mmask16;

#if defined(__AVX512BF16__)
constexpr bool kHasDot2 = true;
#else
constexpr bool kHasDot2 = false;
#endif
constexpr int kNumRegisters = 32;  // of 16 lanes

OCT_INLINE F32 zero() { return _mm512_setzero_ps(); }
OCT_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
OCT_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
OCT_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
// Of the first n lanes only (n may be 16 or more); the others read as 0 and are not written.
OCT_INLINE Mask first(int n) { return static_cast<Mask>(n >= 16 ? 0xffff : (1u << n) - 1); }
OCT_INLINE F32 load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
OCT_INLINE void store_first(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

OCT_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
OCT_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
OCT_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
OCT_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
OCT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
// a > b ? a : b, and a < b ? a : b: b if either is NaN.
OCT_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
OCT_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
OCT_INLINE F32 abs(F32 a) { return _mm512_abs_ps(a); }

OCT_INLINE Mask less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
OCT_INLINE Mask is_nan(F32 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
OCT_INLINE F32 select(Mask m, F32 yes, F32 no) { return _mm512_mask_blend_ps(m, no, yes); }
OCT_INLINE I32 select(Mask m, I32 yes, I32 no) { return _mm512_mask_blend_epi32(m, no, yes); }
OCT_INLINE bool any(Mask m) { return m != 0; }

// Of lanes, as ((0+8)+(4+12)) + ...: halves onto halves, everywhere the same.
OCT_INLINE float sum(F32 x) {
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castsi256_ps(_mm512_extracti64x4_epi64(
                                                   _mm512_castps_si512(x), 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCT_INLINE float max_of(F32 x) {  // undefined with NaN
  const __m256 eight =
      _mm256_max_ps(_mm512_castps512_ps256(x), _mm256_castsi256_ps(_mm512_extracti64x4_epi64(
                                                   _mm512_castps_si512(x), 1)));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

OCT_INLINE I32 zero_i() { return _mm512_setzero_si512(); }
OCT_INLINE I32 set1(int32_t x) { return _mm512_set1_epi32(x); }
OCT_INLINE I32 load(const int32_t* p) { return _mm512_loadu_si512(p); }
OCT_INLINE void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x); }
OCT_INLINE I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
OCT_INLINE I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
OCT_INLINE I32 load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
OCT_INLINE I32 load_s8(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
OCT_INLINE I32 bits_of(I32 a, int32_t mask) { return _mm512_and_si512(a, set1(mask)); }
template <int N>
OCT_INLINE I32 shift_right(I32 a) {  // arithmetic
  return _mm512_srai_epi32(a, N);
}
template <int N>
OCT_INLINE I32 shift_left(I32 a) {  // right by -N, with whatever comes in
  if constexpr (N < 0) return _mm512_srli_epi32(a, -N);
  return _mm512_slli_epi32(a, N < 0 ? 0 : N);
}
OCT_INLINE I32 bits_of_float(F32 a) { return _mm512_castps_si512(a); }
OCT_INLINE F32 float_of_bits(I32 a) { return _mm512_castsi512_ps(a); }
// table[the lower 4 bits], of 16 floats.
OCT_INLINE F32 look_up(const float* table, I32 a) {
  return _mm512_permutexvar_ps(a, _mm512_load_ps(table));
}
OCT_INLINE F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
// Nearest, ties to even; undefined for what is no int32.
OCT_INLINE I32 to_int(F32 a) { return _mm512_cvtps_epi32(a); }
OCT_INLINE F32 power_of_two(I32 n) {  // for n in -126..127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// The low byte of each lane.
OCT_INLINE void store_s8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

OCT_INLINE F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
OCT_INLINE F32 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// 16 floats to bfloat16, as to_bf16.
OCT_INLINE void store_bf16(uint16_t* p, F32 x) {
  const I32 bits = _mm512_castps_si512(x);
  const I32 odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  I32 rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const I32 nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_blend_epi32(is_nan(x), rounded, nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// ---- bfloat16 products: acc + a.even * b.even + a.odd * b.odd, lane by lane.
OCT_INLINE BF16 load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
OCT_INLINE BF16 set1_pair(const void* pair) {  // two bfloat16 to all lanes
  int32_t bits;
  __builtin_memcpy(&bits, pair, 4);
  return {_mm512_set1_epi32(bits)};
}
OCT_INLINE F32 even(BF16 a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)); }
OCT_INLINE F32 odd(BF16 a) {
  return _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff0000)));
}
OCT_INLINE F32 dot2(F32 acc, BF16 a, BF16 b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v));
#else
  return fma(odd(a), odd(b), fma(even(a), even(b), acc));
#endif
}

// ---- 8-bit products: acc + sum over a lane's 4 bytes of w * a.
OCT_INLINE U8 load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
OCT_INLINE U8 low_nibbles(U8 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
OCT_INLINE U8 high_nibbles(U8 x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
// Bytes shifted right by N bits, left by -N: those that come from a neighbour are not defined.
template <int N>
OCT_INLINE U8 shifted(U8 x) {
  if constexpr (N < 0) return {_mm512_slli_epi16(x.v, -N)};
  if constexpr (N > 0) return {_mm512_srli_epi16(x.v, N)};
  return x;
}
OCT_INLINE U8 bits_of(U8 x, int mask) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
OCT_INLINE U8 with_bits_of(U8 base, U8 x, int mask) {  // base | (x & mask)
  return {_mm512_ternarylogic_epi32(base.v, x.v, _mm512_set1_epi8(static_cast<char>(mask)), 0xf8)};
}
// table[x], of bytes below 16.
OCT_INLINE U8 look_up(const uint8_t* table, U8 x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), x.v)};
}
// Four int8 activations to all lanes.
OCT_INLINE I32 set1_quad(const int8_t* quad) {
  int32_t bits;
  __builtin_memcpy(&bits, quad, 4);
  return _mm512_set1_epi32(bits);
}
// w is unsigned and at most 127, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) { return _mm512_dpbusd_epi32(acc, w.v, a); }
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127.
OCT_INLINE int32_t centre(int32_t sum_of_a) { return -128 * sum_of_a; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) { return _mm512_dpbusd_epi32(acc, w.v, a); }

OCT_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
OCT_INLINE void pause() { _mm_pause(); }

}  // namespace simd
}  // namespace octavo
