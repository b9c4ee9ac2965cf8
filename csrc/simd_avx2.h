// simd.h on AVX2 with FMA and F16C: two registers of 8 lanes. With AVX-VNNI 8-bit products are one
// instruction, as on AVX-512; without, three.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace octavo {
namespace simd {

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
struct U8 {
  __m256i lo, hi;
};
struct BF16 {
  __m256i lo, hi;
};
struct Mask {  // all bits of a lane, or none
  __m256 lo, hi;
};

constexpr bool kHasDot2 = false;
constexpr int kNumRegisters = 8;  // of 16 lanes

OCT_INLINE F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCT_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCT_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCT_INLINE void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
// Of the first n lanes only (n may be 16 or more); the others read as 0 and are not written.
inline constexpr int32_t kOnesThenZeros[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                               -1, -1, -1, -1, -1, -1, -1, -1};
OCT_INLINE Mask first(int n) {
  const float* p = reinterpret_cast<const float*>(kOnesThenZeros + (n >= 16 ? 0 : 16 - n));
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
OCT_INLINE F32 load_first(const float* p, int n) {
  const Mask m = first(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
OCT_INLINE void store_first(float* p, F32 x, int n) {
  const Mask m = first(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), x.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), x.hi);
}

OCT_INLINE F32 add(F32 a, F32 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
OCT_INLINE F32 sub(F32 a, F32 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
OCT_INLINE F32 mul(F32 a, F32 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
OCT_INLINE F32 div(F32 a, F32 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
OCT_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// a > b ? a : b, and a < b ? a : b: b if either is NaN.
OCT_INLINE F32 max(F32 a, F32 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
OCT_INLINE F32 min(F32 a, F32 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
OCT_INLINE F32 abs(F32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

OCT_INLINE Mask less(F32 a, F32 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
OCT_INLINE Mask is_nan(F32 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
OCT_INLINE F32 select(Mask m, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
OCT_INLINE I32 select(Mask m, I32 yes, I32 no) {
  return {_mm256_blendv_epi8(no.lo, yes.lo, _mm256_castps_si256(m.lo)),
          _mm256_blendv_epi8(no.hi, yes.hi, _mm256_castps_si256(m.hi))};
}
OCT_INLINE bool any(Mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }

// Of lanes, as ((0+8)+(4+12)) + ...: halves onto halves, everywhere the same.
OCT_INLINE float sum(F32 x) {
  const __m256 eight = _mm256_add_ps(x.lo, x.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCT_INLINE float max_of(F32 x) {  // undefined with NaN
  const __m256 eight = _mm256_max_ps(x.lo, x.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

OCT_INLINE I32 zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
OCT_INLINE I32 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCT_INLINE I32 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
OCT_INLINE void store(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
OCT_INLINE I32 add(I32 a, I32 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
OCT_INLINE I32 sub(I32 a, I32 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
OCT_INLINE I32 load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
OCT_INLINE I32 load_s8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
OCT_INLINE I32 bits_of(I32 a, int32_t mask) {
  const __m256i bits = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.lo, bits), _mm256_and_si256(a.hi, bits)};
}
template <int N>
OCT_INLINE I32 shift_right(I32 a) {  // arithmetic
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
template <int N>
OCT_INLINE I32 shift_left(I32 a) {  // right by -N, with whatever comes in
  if constexpr (N < 0) return {_mm256_srli_epi32(a.lo, -N), _mm256_srli_epi32(a.hi, -N)};
  constexpr int kLeft = N < 0 ? 0 : N;
  return {_mm256_slli_epi32(a.lo, kLeft), _mm256_slli_epi32(a.hi, kLeft)};
}
OCT_INLINE I32 bits_of_float(F32 a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
OCT_INLINE F32 float_of_bits(I32 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
OCT_INLINE __m256 look_up(__m256 first, __m256 second, __m256i a) {
  const __m256 is_second = _mm256_castsi256_ps(_mm256_slli_epi32(a, 28));  // bit 3, for its sign
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, a), _mm256_permutevar8x32_ps(second, a),
                          is_second);
}
// table[the lower 4 bits], of 16 floats.
OCT_INLINE F32 look_up(const float* table, I32 a) {
  const __m256 first = _mm256_load_ps(table), second = _mm256_load_ps(table + 8);
  return {look_up(first, second, a.lo), look_up(first, second, a.hi)};
}
OCT_INLINE F32 to_float(I32 a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
// Nearest, ties to even; undefined for what is no int32.
OCT_INLINE I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
OCT_INLINE F32 power_of_two(I32 n) {  // for n in -126..127
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
// 16 lanes whose upper halves are 0, as uint16. Packing works on halves of registers: put in order.
OCT_INLINE __m256i narrow_u16(__m256i lo, __m256i hi) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
}
// The low byte of each lane.
OCT_INLINE void store_s8(int8_t* p, I32 x) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i words = narrow_u16(_mm256_and_si256(x.lo, byte), _mm256_and_si256(x.hi, byte));
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

OCT_INLINE F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
OCT_INLINE F32 load_bf16(const uint16_t* p) {
  const __m128i lo = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i hi = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
}
// The upper halves of 8 floats, rounded to bfloat16.
OCT_INLINE __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(is_nan));
}
// 16 floats to bfloat16, as to_bf16.
OCT_INLINE void store_bf16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      narrow_u16(round_bf16(x.lo), round_bf16(x.hi)));
}

// ---- bfloat16 products: acc + a.even * b.even + a.odd * b.odd, lane by lane.
OCT_INLINE BF16 load_pairs(const void* p) {
  const __m256i* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
OCT_INLINE BF16 set1_pair(const void* pair) {  // two bfloat16 to all lanes
  int32_t bits;
  __builtin_memcpy(&bits, pair, 4);
  return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
OCT_INLINE F32 even(BF16 a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(a.hi, 16))};
}
OCT_INLINE F32 odd(BF16 a) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(a.lo, upper)),
          _mm256_castsi256_ps(_mm256_and_si256(a.hi, upper))};
}
OCT_INLINE F32 dot2(F32 acc, BF16 a, BF16 b) {
  return fma(odd(a), odd(b), fma(even(a), even(b), acc));
}

// ---- 8-bit products: acc + sum over a lane's 4 bytes of w * a.
OCT_INLINE U8 load_bytes(const void* p) {
  const __m256i* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
OCT_INLINE U8 low_nibbles(U8 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
}
OCT_INLINE U8 high_nibbles(U8 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.lo, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.hi, 4), mask)};
}
// Bytes shifted right by N bits, left by -N: those that come from a neighbour are not defined.
template <int N>
OCT_INLINE U8 shifted(U8 x) {
  if constexpr (N < 0) return {_mm256_slli_epi16(x.lo, -N), _mm256_slli_epi16(x.hi, -N)};
  if constexpr (N > 0) return {_mm256_srli_epi16(x.lo, N), _mm256_srli_epi16(x.hi, N)};
  return x;
}
OCT_INLINE U8 bits_of(U8 x, int mask) {
  const __m256i bits = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(x.lo, bits), _mm256_and_si256(x.hi, bits)};
}
OCT_INLINE U8 with_bits_of(U8 base, U8 x, int mask) {  // base | (x & mask)
  const U8 bits = bits_of(x, mask);
  return {_mm256_or_si256(base.lo, bits.lo), _mm256_or_si256(base.hi, bits.hi)};
}
// table[x], of bytes below 16.
OCT_INLINE U8 look_up(const uint8_t* table, U8 x) {
  const __m256i bytes =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(bytes, x.lo), _mm256_shuffle_epi8(bytes, x.hi)};
}
// Four int8 activations to all lanes.
OCT_INLINE I32 set1_quad(const int8_t* quad) {
  int32_t bits;
  __builtin_memcpy(&bits, quad, 4);
  return set1(bits);
}

#if defined(__AVXVNNI__)

// w is unsigned and at most 127, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  return {_mm256_dpbusd_avx_epi32(acc.lo, w.lo, a.lo), _mm256_dpbusd_avx_epi32(acc.hi, w.hi, a.hi)};
}
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127.
OCT_INLINE int32_t centre(int32_t sum_of_a) { return -128 * sum_of_a; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }

#else

// A step of a sum that stays a step: compilers like to make trees of sums of integers, which have
// more leaves than there are registers.
OCT_INLINE __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
// Products of unsigned and signed bytes. Pairs are added up in 16 bits, and saturate: so the
// unsigned ones may be at most 128, with signed ones of at most 127.
OCT_INLINE __m256i dot4_half(__m256i acc, __m256i u, __m256i s) {
  const __m256i pairs = _mm256_maddubs_epi16(u, s);
  return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
// w is unsigned and at most 127, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  return {dot4_half(acc.lo, w.lo, a.lo), dot4_half(acc.hi, w.hi, a.hi)};
}
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127. Here as |w - 128| * (a with the sign of w - 128).
OCT_INLINE int32_t centre(int32_t) { return 0; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) {
  const __m256i flip = _mm256_set1_epi8(-128);
  const __m256i lo = _mm256_xor_si256(w.lo, flip), hi = _mm256_xor_si256(w.hi, flip);
  return {dot4_half(acc.lo, _mm256_abs_epi8(lo), _mm256_sign_epi8(a.lo, lo)),
          dot4_half(acc.hi, _mm256_abs_epi8(hi), _mm256_sign_epi8(a.hi, hi))};
}

// Products of nibbles are added up in 16 bits: 8 times 2 products of at most 15 * 127 fit.
#define OCT_SHORT_NIBBLE_SUMS
struct NibbleSum {
  __m256i lo, hi;  // 16 int16 each
};
OCT_INLINE NibbleSum begin_nibbles(I32) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
OCT_INLINE NibbleSum add_nibbles(NibbleSum sum, U8 w, I32 a) {
  return {in_order(_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, a.lo))),
          in_order(_mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, a.hi)))};
}
OCT_INLINE I32 end_nibbles(I32 acc, NibbleSum sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(sum.lo, ones)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(sum.hi, ones))};
}
// 2 times 2 products of at most 63 * 127 fit 16 bits, too.
OCT_INLINE __m256i dot4_twice_half(__m256i acc, __m256i v, __m256i a, __m256i w, __m256i b) {
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(v, a), _mm256_maddubs_epi16(w, b));
  return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
OCT_INLINE I32 dot4_twice(I32 acc, U8 v, I32 a, U8 w, I32 b) {
  return {dot4_twice_half(acc.lo, v.lo, a.lo, w.lo, b.lo),
          dot4_twice_half(acc.hi, v.hi, a.hi, w.hi, b.hi)};
}

#endif

OCT_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
OCT_INLINE void pause() { _mm_pause(); }

}  // namespace simd
}  // namespace octavo
