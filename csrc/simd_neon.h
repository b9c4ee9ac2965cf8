// simd.h on NEON with dot products (ARMv8.2), and with matrix products of int8 and bfloat16 (I8MM
// and BF16 of ARMv8.6) where there are: four registers of 4 lanes.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace octavo {
namespace simd {

template <class T>
struct Four {  // lanes 0-3, 4-7, 8-11, 12-15
  T a, b, c, d;
};
struct F32 : Four<float32x4_t> {};
struct I32 : Four<int32x4_t> {};
struct U8 : Four<uint8x16_t> {};
struct BF16 : Four<uint32x4_t> {};
struct Mask : Four<uint32x4_t> {};  // all bits of a lane, or none

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OCT_TWO_ROWS
constexpr bool kHasDot2 = true;
#else
constexpr bool kHasDot2 = false;
#endif
constexpr int kNumRegisters = 8;  // of 16 lanes

// f of each part.
template <class R, class F, class X>
OCT_INLINE R each(F f, X x) {
  return R{{f(x.a), f(x.b), f(x.c), f(x.d)}};
}
template <class R, class F, class X, class Y>
OCT_INLINE R each(F f, X x, Y y) {
  return R{{f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}};
}
template <class R, class F, class X, class Y, class Z>
OCT_INLINE R each(F f, X x, Y y, Z z) {
  return R{{f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)}};
}
using F4 = float32x4_t;
using I4 = int32x4_t;
using U4 = uint32x4_t;
using B16 = uint8x16_t;

OCT_INLINE F32 set1(float x) {
  const F4 v = vdupq_n_f32(x);
  return F32{{v, v, v, v}};
}
OCT_INLINE F32 zero() { return set1(0.0f); }
OCT_INLINE F32 load(const float* p) {
  return F32{{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
OCT_INLINE void store(float* p, F32 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
// Of the first n lanes only (n may be 16 or more); the others read as 0 and are not written.
inline constexpr uint32_t kOnesThenZeros[32] = {
    ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
OCT_INLINE Mask first(int n) {
  const uint32_t* p = kOnesThenZeros + (n >= 16 ? 0 : 16 - n);
  return Mask{{vld1q_u32(p), vld1q_u32(p + 4), vld1q_u32(p + 8), vld1q_u32(p + 12)}};
}
OCT_INLINE F32 load_first(const float* p, int n) {
  if (n >= 16) return load(p);
  float lanes[16] = {};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return load(lanes);
}
OCT_INLINE void store_first(float* p, F32 x, int n) {
  if (n >= 16) return store(p, x);
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}

OCT_INLINE F32 add(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return vaddq_f32(x, y); }, a, b);
}
OCT_INLINE F32 sub(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return vsubq_f32(x, y); }, a, b);
}
OCT_INLINE F32 mul(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return vmulq_f32(x, y); }, a, b);
}
OCT_INLINE F32 div(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return vdivq_f32(x, y); }, a, b);
}
OCT_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c
  return each<F32>([](F4 x, F4 y, F4 z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
// a > b ? a : b, and a < b ? a : b: b if either is NaN; vmaxq and vminq would give NaN.
OCT_INLINE F4 larger(F4 x, F4 y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
OCT_INLINE F32 max(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return larger(x, y); }, a, b);
}
OCT_INLINE F32 min(F32 a, F32 b) {
  return each<F32>([](F4 x, F4 y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b);
}
OCT_INLINE F32 abs(F32 a) {
  return each<F32>([](F4 x) { return vabsq_f32(x); }, a);
}

OCT_INLINE Mask less(F32 a, F32 b) {
  return each<Mask>([](F4 x, F4 y) { return vcltq_f32(x, y); }, a, b);
}
OCT_INLINE Mask is_nan(F32 a) {
  return each<Mask>([](F4 x) { return vmvnq_u32(vceqq_f32(x, x)); }, a);
}
OCT_INLINE F32 select(Mask m, F32 yes, F32 no) {
  return each<F32>([](U4 x, F4 y, F4 z) { return vbslq_f32(x, y, z); }, m, yes, no);
}
OCT_INLINE I32 select(Mask m, I32 yes, I32 no) {
  return each<I32>([](U4 x, I4 y, I4 z) { return vbslq_s32(x, y, z); }, m, yes, no);
}
OCT_INLINE bool any(Mask m) {
  return vmaxvq_u32(vorrq_u32(vorrq_u32(m.a, m.b), vorrq_u32(m.c, m.d))) != 0;
}

// Of lanes, as ((0+8)+(4+12)) + ...: halves onto halves, everywhere the same.
OCT_INLINE float sum(F32 x) {
  const F4 four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
OCT_INLINE float max_of(F32 x) {  // undefined with NaN
  const F4 four = larger(larger(x.a, x.c), larger(x.b, x.d));
  const F4 two = larger(four, vextq_f32(four, four, 2));
  const F4 one = larger(two, vextq_f32(two, two, 1));
  return vgetq_lane_f32(one, 0);
}

OCT_INLINE I32 set1(int32_t x) {
  const I4 v = vdupq_n_s32(x);
  return I32{{v, v, v, v}};
}
OCT_INLINE I32 zero_i() { return set1(int32_t{0}); }
OCT_INLINE I32 load(const int32_t* p) {
  return I32{{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
OCT_INLINE void store(int32_t* p, I32 x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
OCT_INLINE I32 add(I32 a, I32 b) {
  return each<I32>([](I4 x, I4 y) { return vaddq_s32(x, y); }, a, b);
}
OCT_INLINE I32 sub(I32 a, I32 b) {
  return each<I32>([](I4 x, I4 y) { return vsubq_s32(x, y); }, a, b);
}
OCT_INLINE I32 load_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes)), hi = vmovl_u8(vget_high_u8(bytes));
  const auto part = [](uint16x4_t x) { return vreinterpretq_s32_u32(vmovl_u16(x)); };
  return I32{{part(vget_low_u16(lo)), part(vget_high_u16(lo)), part(vget_low_u16(hi)),
              part(vget_high_u16(hi))}};
}
OCT_INLINE I32 load_s8(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_s8(vget_high_s8(bytes));
  return I32{{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)),
              vmovl_s16(vget_low_s16(hi)), vmovl_s16(vget_high_s16(hi))}};
}
OCT_INLINE I32 bits_of(I32 a, int32_t mask) {
  return each<I32>([&](I4 x) { return vandq_s32(x, vdupq_n_s32(mask)); }, a);
}
template <int N>
OCT_INLINE I32 shift_right(I32 a) {  // arithmetic
  return each<I32>([](I4 x) { return vshrq_n_s32(x, N); }, a);
}
template <int N>
OCT_INLINE I32 shift_left(I32 a) {  // right by -N, with whatever comes in
  if constexpr (N < 0) return each<I32>([](I4 x) { return vshrq_n_s32(x, -N); }, a);
  if constexpr (N > 0) return each<I32>([](I4 x) { return vshlq_n_s32(x, N); }, a);
  return a;
}
OCT_INLINE I32 bits_of_float(F32 a) {
  return each<I32>([](F4 x) { return vreinterpretq_s32_f32(x); }, a);
}
OCT_INLINE F32 float_of_bits(I32 a) {
  return each<F32>([](I4 x) { return vreinterpretq_f32_s32(x); }, a);
}
// table[the lower 4 bits], of 16 floats: four bytes each, so a lane has four indices.
OCT_INLINE F32 look_up(const float* table, I32 a) {
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  return each<F32>(
      [&](I4 x) {
        const uint32x4_t first = vmulq_n_u32(
            vandq_u32(vreinterpretq_u32_s32(x), vdupq_n_u32(15)), 0x04040404u);
        const uint32x4_t indices = vaddq_u32(first, vdupq_n_u32(0x03020100u));
        return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(indices)));
      },
      a);
}
OCT_INLINE F32 to_float(I32 a) {
  return each<F32>([](I4 x) { return vcvtq_f32_s32(x); }, a);
}
// Nearest, ties to even; undefined for what is no int32.
OCT_INLINE I32 to_int(F32 a) {
  return each<I32>([](F4 x) { return vcvtnq_s32_f32(x); }, a);
}
OCT_INLINE F32 power_of_two(I32 n) {  // for n in -126..127
  return each<F32>(
      [](I4 x) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(x, vdupq_n_s32(127)), 23)); },
      n);
}
// The lower halves of 16 lanes.
OCT_INLINE uint16x8_t narrow(U4 x, U4 y) { return vcombine_u16(vmovn_u32(x), vmovn_u32(y)); }
// The low byte of each lane.
OCT_INLINE void store_s8(int8_t* p, I32 x) {
  const auto bits = [](I4 v) { return vreinterpretq_u32_s32(v); };
  const uint8x8_t lo = vmovn_u16(narrow(bits(x.a), bits(x.b)));
  const uint8x8_t hi = vmovn_u16(narrow(bits(x.c), bits(x.d)));
  vst1q_s8(p, vreinterpretq_s8_u8(vcombine_u8(lo, hi)));
}

OCT_INLINE F32 load_f16(const uint16_t* p) {
  const auto part = [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i))); };
  return F32{{part(0), part(4), part(8), part(12)}};
}
OCT_INLINE F32 load_bf16(const uint16_t* p) {
  const auto part = [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + i), 16)); };
  return F32{{part(0), part(4), part(8), part(12)}};
}
#if defined(OCT_TWO_ROWS)
// 16 floats to bfloat16, as to_bf16.
OCT_INLINE void store_bf16(uint16_t* p, F32 x) {
  const auto eight = [](F4 lo, F4 hi) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(lo), hi));
  };
  vst1q_u16(p, eight(x.a, x.b));
  vst1q_u16(p + 8, eight(x.c, x.d));
}
#else
// The upper halves of floats, rounded to bfloat16.
OCT_INLINE U4 round_bf16(F4 x) {
  const U4 bits = vreinterpretq_u32_f32(x);
  const U4 upper = vshrq_n_u32(bits, 16);
  const U4 odd = vandq_u32(upper, vdupq_n_u32(1));
  const U4 rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  return vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(upper, vdupq_n_u32(0x40)));
}
// 16 floats to bfloat16, as to_bf16.
OCT_INLINE void store_bf16(uint16_t* p, F32 x) {
  vst1q_u16(p, narrow(round_bf16(x.a), round_bf16(x.b)));
  vst1q_u16(p + 8, narrow(round_bf16(x.c), round_bf16(x.d)));
}
#endif

// ---- bfloat16 products: acc + a.even * b.even + a.odd * b.odd, lane by lane.
OCT_INLINE BF16 load_pairs(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  const auto part = [&](int i) { return vreinterpretq_u32_u8(vld1q_u8(bytes + i)); };
  return BF16{{part(0), part(16), part(32), part(48)}};
}
OCT_INLINE BF16 set1_pair(const void* pair) {  // two bfloat16 to all lanes
  uint32_t bits;
  __builtin_memcpy(&bits, pair, 4);
  const U4 v = vdupq_n_u32(bits);
  return BF16{{v, v, v, v}};
}
OCT_INLINE F32 even(BF16 a) {
  return each<F32>([](U4 x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }, a);
}
OCT_INLINE F32 odd(BF16 a) {
  return each<F32>(
      [](U4 x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000))); }, a);
}
#if defined(OCT_TWO_ROWS)
// BFDOT rounds to odd, the sum of both products and then that with acc, and takes denormals for 0.
// (With EBF16, a program may select the rounding of IEEE 754, which octavo does not.)
OCT_INLINE F32 dot2(F32 acc, BF16 a, BF16 b) {
  return each<F32>(
      [](F4 x, U4 y, U4 z) {
        return vbfdotq_f32(x, vreinterpretq_bf16_u32(y), vreinterpretq_bf16_u32(z));
      },
      acc, a, b);
}
#else
OCT_INLINE F32 dot2(F32 acc, BF16 a, BF16 b) {
  return fma(odd(a), odd(b), fma(even(a), even(b), acc));
}
#endif

// ---- 8-bit products: acc + sum over a lane's 4 bytes of w * a.
OCT_INLINE U8 load_bytes(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return U8{{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}
OCT_INLINE U8 low_nibbles(U8 x) {
  return each<U8>([](B16 v) { return vandq_u8(v, vdupq_n_u8(15)); }, x);
}
OCT_INLINE U8 high_nibbles(U8 x) {
  return each<U8>([](B16 v) { return vshrq_n_u8(v, 4); }, x);
}
// Bytes shifted right by N bits, left by -N: on x86, some bits come from a neighbour.
template <int N>
OCT_INLINE U8 shifted(U8 x) {
  if constexpr (N < 0) return each<U8>([](B16 v) { return vshlq_n_u8(v, -N); }, x);
  if constexpr (N > 0) return each<U8>([](B16 v) { return vshrq_n_u8(v, N); }, x);
  return x;
}
OCT_INLINE U8 bits_of(U8 x, int mask) {
  const B16 bits = vdupq_n_u8(static_cast<uint8_t>(mask));
  return each<U8>([&](B16 v) { return vandq_u8(v, bits); }, x);
}
OCT_INLINE U8 with_bits_of(U8 base, U8 x, int mask) {  // base | (x & mask)
  const B16 bits = vdupq_n_u8(static_cast<uint8_t>(mask));
  return each<U8>([&](B16 b, B16 v) { return vorrq_u8(b, vandq_u8(v, bits)); }, base, x);
}
// table[x], of bytes below 16.
OCT_INLINE U8 look_up(const uint8_t* table, U8 x) {
  const B16 bytes = vld1q_u8(table);
  return each<U8>([&](B16 v) { return vqtbl1q_u8(bytes, v); }, x);
}
// Four int8 activations to all lanes.
OCT_INLINE I32 set1_quad(const int8_t* quad) {
  int32_t bits;
  __builtin_memcpy(&bits, quad, 4);
  return set1(bits);
}
#if defined(OCT_TWO_ROWS)
// w is unsigned, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  return each<I32>([](I4 x, B16 y, I4 z) { return vusdotq_s32(x, y, vreinterpretq_s8_s32(z)); },
                   acc, w, a);
}
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127.
OCT_INLINE int32_t centre(int32_t sum_of_a) { return -128 * sum_of_a; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }

// ---- Products of two rows: simd.h says what these are.
OCT_INLINE F4 zip_low(F4 a, F4 b) { return vzip1q_f32(a, b); }
OCT_INLINE F4 zip_high(F4 a, F4 b) { return vzip2q_f32(a, b); }
OCT_INLINE U4 zip_low(U4 a, U4 b) { return vzip1q_u32(a, b); }
OCT_INLINE U4 zip_high(U4 a, U4 b) { return vzip2q_u32(a, b); }
OCT_INLINE B16 zip_low(B16 a, B16 b) {
  return vreinterpretq_u8_u32(zip_low(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
OCT_INLINE B16 zip_high(B16 a, B16 b) {
  return vreinterpretq_u8_u32(zip_high(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
template <int kHalf, class X>
OCT_INLINE X zip(X x, X y) {
  if constexpr (kHalf == 0) {
    return X{{zip_low(x.a, y.a), zip_high(x.a, y.a), zip_low(x.b, y.b), zip_high(x.b, y.b)}};
  } else {
    return X{{zip_low(x.c, y.c), zip_high(x.c, y.c), zip_low(x.d, y.d), zip_high(x.d, y.d)}};
  }
}
template <int kOdd>
OCT_INLINE F32 unzip(F32 x, F32 y) {
  const auto part = [](F4 lo, F4 hi) { return kOdd ? vuzp2q_f32(lo, hi) : vuzp1q_f32(lo, hi); };
  return F32{{part(x.a, x.b), part(x.c, x.d), part(y.a, y.b), part(y.c, y.d)}};
}
OCT_INLINE F32 set2(float even, float odd) {
  const F4 v = {even, odd, even, odd};
  return F32{{v, v, v, v}};
}
OCT_INLINE I32 set2(int32_t even, int32_t odd) {
  const I4 v = {even, odd, even, odd};
  return I32{{v, v, v, v}};
}
struct TwoRows {
  B16 bytes;
};
OCT_INLINE TwoRows load_two_rows(const uint8_t* first, const uint8_t* second) {
  return {vcombine_u8(vld1_u8(first), vld1_u8(second))};
}
OCT_INLINE I32 dot8(I32 acc, U8 w, TwoRows x) {
  return each<I32>(
      [&](I4 sum, B16 y) { return vusmmlaq_s32(sum, y, vreinterpretq_s8_u8(x.bytes)); }, acc, w);
}
// BFMMLA rounds as two BFDOT, one after the other: a row has the same bits alone.
OCT_INLINE F32 dot4(F32 acc, BF16 w, TwoRows x) {
  const bfloat16x8_t rows = vreinterpretq_bf16_u8(x.bytes);
  return each<F32>(
      [&](F4 sum, U4 y) { return vbfmmlaq_f32(sum, vreinterpretq_bf16_u32(y), rows); }, acc, w);
}
#else
OCT_INLINE I4 dot4_part(I4 acc, B16 w, I4 a) {  // both signed
  return vdotq_s32(acc, vreinterpretq_s8_u8(w), vreinterpretq_s8_s32(a));
}
// w is unsigned and at most 127, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  return each<I32>([](I4 x, B16 y, I4 z) { return dot4_part(x, y, z); }, acc, w, a);
}
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127. Here w - 128 is w with its top bit flipped.
OCT_INLINE int32_t centre(int32_t) { return 0; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) {
  return each<I32>([](I4 x, B16 y, I4 z) { return dot4_part(x, veorq_u8(y, vdupq_n_u8(128)), z); },
                   acc, w, a);
}
#endif

OCT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
OCT_INLINE void pause() { asm volatile("yield"); }

}  // namespace simd
}  // namespace octavo
