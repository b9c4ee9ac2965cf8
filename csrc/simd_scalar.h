// simd.h without vector instructions, on arrays that compilers may vectorize. The meaning of each
// function can be read here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo {
namespace simd {

struct F32 {
  float v[16];
};
struct I32 {
  int32_t v[16];
};
struct U8 {
  uint8_t v[64];
};
struct BF16 {
  uint16_t v[32];
};
struct Mask {
  bool v[16];
};

constexpr bool kHasDot2 = false;
constexpr int kNumRegisters = 4;  // of 16 lanes, if a compiler uses SSE2

// A lane-by-lane result of type T: f(i) of each lane i.
template <class T, class F>
OCT_INLINE T lanes(F f) {
  T result;
  for (int i = 0; i < 16; i++) result.v[i] = f(i);
  return result;
}
template <class To, class From>
OCT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
// A 32-bit integer of any bits, without the undefined behaviour of overflows.
OCT_INLINE int32_t wrap(uint32_t x) { return bit_cast<int32_t>(x); }

OCT_INLINE F32 zero() { return F32{}; }
OCT_INLINE F32 set1(float x) {
  return lanes<F32>([&](int) { return x; });
}
OCT_INLINE F32 load(const float* p) {
  F32 x;
  std::memcpy(x.v, p, sizeof x);
  return x;
}
OCT_INLINE void store(float* p, F32 x) { std::memcpy(p, x.v, sizeof x); }
// Of the first n lanes only (n may be 16 or more); the others read as 0 and are not written.
OCT_INLINE Mask first(int n) {
  return lanes<Mask>([&](int i) { return i < n; });
}
OCT_INLINE F32 load_first(const float* p, int n) {
  return lanes<F32>([&](int i) { return i < n ? p[i] : 0.0f; });
}
OCT_INLINE void store_first(float* p, F32 x, int n) {
  for (int i = 0; i < 16 && i < n; i++) p[i] = x.v[i];
}

// a * b + c, rounded once. Without an instruction for it: the product of two floats is exact in
// double; the sum, rounded to the odd one of its two neighbours, still knows on which side of a tie
// it was, and becomes the right float.
OCT_INLINE float fma(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, addend = c;
  const double total = product + addend;
  const double part = total - product;
  const double error = (product - (total - part)) + (addend - part);
  const uint64_t bits = bit_cast<uint64_t>(total);
  const bool inexact = (error < 0) | (error > 0);  // neither for NaN
  const uint64_t towards = (error > 0) == (total > 0) ? 1 : ~uint64_t{0};
  return static_cast<float>(bit_cast<double>(inexact & !(bits & 1) ? bits + towards : bits));
#endif
}

OCT_INLINE F32 add(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] + b.v[i]; });
}
OCT_INLINE F32 sub(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] - b.v[i]; });
}
OCT_INLINE F32 mul(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] * b.v[i]; });
}
OCT_INLINE F32 div(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] / b.v[i]; });
}
OCT_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return lanes<F32>([&](int i) { return fma(a.v[i], b.v[i], c.v[i]); });
}
// b if either is NaN.
OCT_INLINE F32 max(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
OCT_INLINE F32 min(F32 a, F32 b) {
  return lanes<F32>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
OCT_INLINE F32 abs(F32 a) {
  return lanes<F32>([&](int i) { return __builtin_fabsf(a.v[i]); });
}

OCT_INLINE Mask less(F32 a, F32 b) {
  return lanes<Mask>([&](int i) { return a.v[i] < b.v[i]; });
}
OCT_INLINE Mask is_nan(F32 a) {
  return lanes<Mask>([&](int i) { return a.v[i] != a.v[i]; });
}
OCT_INLINE F32 select(Mask m, F32 yes, F32 no) {
  return lanes<F32>([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}
OCT_INLINE I32 select(Mask m, I32 yes, I32 no) {
  return lanes<I32>([&](int i) { return m.v[i] ? yes.v[i] : no.v[i]; });
}
OCT_INLINE bool any(Mask m) {
  bool found = false;
  for (bool x : m.v) found |= x;
  return found;
}

// Of lanes, as ((0+8)+(4+12)) + ...: halves onto halves, everywhere the same.
OCT_INLINE float sum(F32 x) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
  }
  return x.v[0];
}
OCT_INLINE float max_of(F32 x) {  // undefined with NaN
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  }
  return x.v[0];
}

OCT_INLINE I32 zero_i() { return I32{}; }
OCT_INLINE I32 set1(int32_t x) {
  return lanes<I32>([&](int) { return x; });
}
OCT_INLINE I32 load(const int32_t* p) {
  I32 x;
  std::memcpy(x.v, p, sizeof x);
  return x;
}
OCT_INLINE void store(int32_t* p, I32 x) { std::memcpy(p, x.v, sizeof x); }
OCT_INLINE I32 add(I32 a, I32 b) {
  return lanes<I32>([&](int i) { return wrap(uint32_t(a.v[i]) + uint32_t(b.v[i])); });
}
OCT_INLINE I32 sub(I32 a, I32 b) {
  return lanes<I32>([&](int i) { return wrap(uint32_t(a.v[i]) - uint32_t(b.v[i])); });
}
OCT_INLINE I32 load_u8(const uint8_t* p) {
  return lanes<I32>([&](int i) { return static_cast<int32_t>(p[i]); });
}
OCT_INLINE I32 load_s8(const uint8_t* p) {
  return lanes<I32>([&](int i) { return static_cast<int32_t>(bit_cast<int8_t>(p[i])); });
}
OCT_INLINE I32 bits_of(I32 a, int32_t mask) {
  return lanes<I32>([&](int i) { return a.v[i] & mask; });
}
template <int N>
OCT_INLINE I32 shift_right(I32 a) {  // arithmetic
  return lanes<I32>([&](int i) { return a.v[i] >> N; });
}
template <int N>
OCT_INLINE I32 shift_left(I32 a) {  // right by -N, with whatever comes in
  return lanes<I32>([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(a.v[i]);
    if constexpr (N < 0) return bit_cast<int32_t>(bits >> -N);
    return bit_cast<int32_t>(bits << (N < 0 ? 0 : N));
  });
}
OCT_INLINE I32 bits_of_float(F32 a) {
  return lanes<I32>([&](int i) { return bit_cast<int32_t>(a.v[i]); });
}
OCT_INLINE F32 float_of_bits(I32 a) {
  return lanes<F32>([&](int i) { return bit_cast<float>(a.v[i]); });
}
// table[the lower 4 bits], of 16 floats.
OCT_INLINE F32 look_up(const float* table, I32 a) {
  return lanes<F32>([&](int i) { return table[a.v[i] & 15]; });
}
OCT_INLINE F32 to_float(I32 a) {
  return lanes<F32>([&](int i) { return static_cast<float>(a.v[i]); });
}
// Nearest, ties to even; undefined for what is no int32.
OCT_INLINE I32 to_int(F32 a) {
  return lanes<I32>([&](int i) { return static_cast<int32_t>(std::lrint(a.v[i])); });
}
OCT_INLINE F32 power_of_two(I32 n) {  // for n in -126..127
  return lanes<F32>([&](int i) { return bit_cast<float>((uint32_t(n.v[i]) + 127u) << 23); });
}
// The low byte of each lane.
OCT_INLINE void store_s8(int8_t* p, I32 x) {
  for (int i = 0; i < 16; i++) p[i] = bit_cast<int8_t>(static_cast<uint8_t>(x.v[i]));
}

// The exponent and mantissa of a float16, moved to their places in a float32, are short of 112 in
// the exponent: a product makes up for it, and has denormals right. Infinities and NaN are of the
// largest exponent.
OCT_INLINE float from_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x & 0x7fff) << 13;
  const float finite = bit_cast<float>(rest) * bit_cast<float>(uint32_t{239} << 23);  // 2^112
  const uint32_t quiet = (x & 0x3ff) != 0 ? 0x400000 : 0;
  const uint32_t special = rest | 0x7f800000 | quiet;
  return bit_cast<float>(sign | ((x & 0x7c00) == 0x7c00 ? special : bit_cast<uint32_t>(finite)));
}
OCT_INLINE F32 load_f16(const uint16_t* p) {
  return lanes<F32>([&](int i) { return from_f16(p[i]); });
}
OCT_INLINE F32 load_bf16(const uint16_t* p) {
  return lanes<F32>([&](int i) { return bit_cast<float>(static_cast<uint32_t>(p[i]) << 16); });
}
// 16 floats to bfloat16, as to_bf16.
OCT_INLINE void store_bf16(uint16_t* p, F32 x) {
  for (int i = 0; i < 16; i++) {
    const uint32_t bits = bit_cast<uint32_t>(x.v[i]);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    p[i] = static_cast<uint16_t>(x.v[i] != x.v[i] ? (bits >> 16) | 0x40 : rounded);
  }
}

// ---- bfloat16 products: acc + a.even * b.even + a.odd * b.odd, lane by lane.
OCT_INLINE BF16 load_pairs(const void* p) {
  BF16 x;
  std::memcpy(x.v, p, sizeof x);
  return x;
}
OCT_INLINE BF16 set1_pair(const void* pair) {  // two bfloat16 to all lanes
  BF16 x;
  for (int i = 0; i < 16; i++) std::memcpy(x.v + 2 * i, pair, 4);
  return x;
}
OCT_INLINE F32 even(BF16 a) {
  return lanes<F32>([&](int i) { return bit_cast<float>(uint32_t{a.v[2 * i]} << 16); });
}
OCT_INLINE F32 odd(BF16 a) {
  return lanes<F32>([&](int i) { return bit_cast<float>(uint32_t{a.v[2 * i + 1]} << 16); });
}
OCT_INLINE F32 dot2(F32 acc, BF16 a, BF16 b) {
  return fma(odd(a), odd(b), fma(even(a), even(b), acc));
}

// ---- 8-bit products: acc + sum over a lane's 4 bytes of w * a.
OCT_INLINE U8 load_bytes(const void* p) {
  U8 x;
  std::memcpy(x.v, p, sizeof x);
  return x;
}
OCT_INLINE U8 low_nibbles(U8 x) {
  for (uint8_t& b : x.v) b &= 15;
  return x;
}
OCT_INLINE U8 high_nibbles(U8 x) {
  for (uint8_t& b : x.v) b >>= 4;
  return x;
}
// Bytes shifted right by N bits, left by -N: on x86, some bits come from a neighbour.
template <int N>
OCT_INLINE U8 shifted(U8 x) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>(N < 0 ? b << (N < 0 ? -N : 0) : b >> (N < 0 ? 0 : N));
  return x;
}
OCT_INLINE U8 bits_of(U8 x, int mask) {
  for (uint8_t& b : x.v) b = static_cast<uint8_t>(b & mask);
  return x;
}
OCT_INLINE U8 with_bits_of(U8 base, U8 x, int mask) {  // base | (x & mask)
  for (int i = 0; i < 64; i++) base.v[i] = static_cast<uint8_t>(base.v[i] | (x.v[i] & mask));
  return base;
}
// table[x], of bytes below 16.
OCT_INLINE U8 look_up(const uint8_t* table, U8 x) {
  for (uint8_t& b : x.v) b = table[b];
  return x;
}
// Four int8 activations to all lanes.
OCT_INLINE I32 set1_quad(const int8_t* quad) {
  int32_t bits;
  std::memcpy(&bits, quad, 4);
  return set1(bits);
}
OCT_INLINE I32 dot4_from(I32 acc, U8 w, int zero_point, I32 a) {
  int8_t bytes[64];
  std::memcpy(bytes, a.v, 64);
  for (int i = 0; i < 16; i++) {
    for (int j = 4 * i; j < 4 * i + 4; j++) acc.v[i] += (w.v[j] - zero_point) * bytes[j];
  }
  return acc;
}
// w is unsigned and at most 127, a signed.
OCT_INLINE I32 dot4(I32 acc, U8 w, I32 a) { return dot4_from(acc, w, 0, a); }
// w is unsigned with a zero point of 128. Accumulators start at centre(sum of the a's), and end as
// the sum of (w - 128) * a. `a` is in -127..127.
OCT_INLINE int32_t centre(int32_t) { return 0; }
OCT_INLINE I32 dot4_centred(I32 acc, U8 w, I32 a) { return dot4_from(acc, w, 128, a); }

OCT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
OCT_INLINE void pause() {}

}  // namespace simd
}  // namespace octavo
