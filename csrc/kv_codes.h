// Codes in place of numbers, with scales: how a vector of the KV cache becomes codes, and where
// these lie in half a chunk, which is the keys or the values of 16 tokens.
//
//     Int8Codes     scale * (byte - 128)          a scale for each token and head
//     Fp8Codes      scale * (a float, e4m3)       a scale for each token and head
//     NibbleCodes   minimum + scale * nibble      both for each 32 dimensions, in bfloat16
//
// A vector with a value that is not finite gets scales of NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "simd.h"

namespace octavo {

// The largest magnitude; NaN if any of the values is not finite.
OCT_INLINE float largest(const float* x, int n) {
  simd::F32 top = simd::zero(), zeros = simd::zero();
  for (int i = 0; i < n; i += 16) {
    const simd::F32 value = simd::load(x + i);
    top = simd::max(top, simd::abs(value));
    zeros = simd::fma(value, simd::zero(), zeros);
  }
  return simd::any(simd::is_nan(zeros)) ? NAN : simd::max_of(top);
}

// Numbers as codes of a byte, in lines of four terms, and then a float32 scale for each token.
// `Code` makes codes of a vector, and returns their scale; it knows what one code stands for.
template <class Code>
struct ByteCodes {
  static constexpr int kGroup = kMaxHeadDim;  // dimensions that share a scale

  static int64_t bytes(int dim) { return kv_byte_half(dim); }
  static OCT_INLINE simd::F32 scales(const uint8_t* half, int dim, int = 0) {
    return simd::load(reinterpret_cast<const float*>(half + kChunk * dim));
  }
  static OCT_INLINE void fetch_scales(const uint8_t* half, int dim) {
    __builtin_prefetch(half + kChunk * dim, 0, 2);
  }

  static void write_key(uint8_t* half, int dim, int slot, const float* key) {
    alignas(64) uint8_t codes[kMaxHeadDim];
    const float scale = Code::encode(key, dim, codes);
    for (int d = 0; d < dim; d += 4) std::memcpy(half + d * kChunk + slot * 4, codes + d, 4);
    std::memcpy(half + kChunk * dim + 4 * slot, &scale, 4);
  }
  static void write_value(uint8_t* half, int dim, int slot, const float* value) {
    alignas(64) uint8_t codes[kMaxHeadDim];
    const float scale = Code::encode(value, dim, codes);
    uint8_t* four = half + slot / 4 * 4 * dim + slot % 4;
    for (int d = 0; d < dim; d++) four[4 * d] = codes[d];
    std::memcpy(half + kChunk * dim + 4 * slot, &scale, 4);
  }
  static void read_key(const uint8_t* half, int dim, int slot, float* key) {
    const float scale = scale_of(half, dim, slot);
    for (int d = 0; d < dim; d++) {
      key[d] = scale * Code::decode(half[(d / 4 * kChunk + slot) * 4 + d % 4]);
    }
  }
  static void read_value(const uint8_t* half, int dim, int slot, float* value) {
    const float scale = scale_of(half, dim, slot);
    for (int d = 0; d < dim; d++) {
      value[d] = scale * Code::decode(half[(slot / 4 * dim + d) * 4 + slot % 4]);
    }
  }
  static void copy_key(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    for (int d = 0; d < dim; d += 4) {
      std::memmove(to + d * kChunk + to_slot * 4, half + d * kChunk + slot * 4, 4);
    }
    copy_scale(half, dim, slot, to, to_slot);
  }
  static void copy_value(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    const uint8_t* a = half + slot / 4 * 4 * dim + slot % 4;
    uint8_t* b = to + to_slot / 4 * 4 * dim + to_slot % 4;
    for (int d = 0; d < dim; d++) b[4 * d] = a[4 * d];
    copy_scale(half, dim, slot, to, to_slot);
  }

 private:
  static void copy_scale(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    std::memmove(to + kChunk * dim + 4 * to_slot, half + kChunk * dim + 4 * slot, 4);
  }
  static float scale_of(const uint8_t* half, int dim, int slot) {
    float scale;
    std::memcpy(&scale, half + kChunk * dim + 4 * slot, 4);
    return scale;
  }
};

struct Int8Code {
  static OCT_INLINE float encode(const float* x, int dim, uint8_t* codes) {
    const float top = largest(x, dim);
    const simd::F32 factor = simd::set1(top > 1e-30f ? 127 / top : 0.0f);
    for (int d = 0; d < dim; d += 16) {
      const simd::I32 units = simd::to_int(simd::mul(simd::load(x + d), factor));
      simd::store_s8(reinterpret_cast<int8_t*>(codes + d), simd::add(units, simd::set1(128)));
    }
    return top / 127;
  }
  static float decode(uint8_t code) { return static_cast<float>(code - 128); }
};

// A number of e4m3 has its sign, exponent and mantissa in the order of a float32, whose exponent is
// larger by 120.
struct E4m3Code {
  static OCT_INLINE float encode(const float* x, int dim, uint8_t* codes) {
    const float top = largest(x, dim);
    float best = kTops[0], least = INFINITY;
    for (const float to : kTops) {
      const simd::F32 factor = simd::set1(inverse(top, to)), scale = simd::set1(top / to);
      simd::F32 errors = simd::zero();
      for (int d = 0; d < dim; d += 16) {
        const simd::F32 value = simd::load(x + d);
        const simd::F32 rounded = round(simd::mul(value, factor));
        const simd::F32 error = simd::sub(simd::mul(rounded, scale), value);
        errors = simd::fma(error, error, errors);
      }
      const float sum = simd::sum(errors);
      if (sum < least) best = to, least = sum;
    }
    const simd::F32 factor = simd::set1(inverse(top, best));
    for (int d = 0; d < dim; d += 16) {
      const simd::F32 rounded = round(simd::mul(simd::load(x + d), factor));
      const simd::I32 bits = simd::bits_of_float(simd::mul(rounded, simd::set1(0x1p-120f)));
      const simd::I32 sign = simd::bits_of(simd::shift_left<-24>(bits), 0x80);
      const simd::I32 rest = simd::bits_of(simd::shift_left<-20>(bits), 0x7f);
      simd::store_s8(reinterpret_cast<int8_t*>(codes + d), simd::add(sign, rest));
    }
    return top / best;
  }
  static float decode(uint8_t code) {
    const uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    return value * 0x1p120f;
  }
  // The numbers of byte kByte of each lane.
  template <int kByte>
  static OCT_INLINE simd::F32 decode(simd::I32 lanes) {
    const simd::I32 first = simd::shift_left<24 - 8 * kByte>(lanes);
    const simd::I32 placed =
        simd::bits_of(simd::shift_right<4>(first), static_cast<int32_t>(0x87f00000u));
    return simd::mul(simd::float_of_bits(placed), simd::set1(0x1p120f));
  }

 private:
  // How large the largest number becomes. Numbers are coarse above a power of two, and fine below:
  // which of these leaves the least error depends on where the others lie.
  static constexpr float kTops[] = {448, 288, 256, 240};

  static float inverse(float top, float to) { return top > 1e-30f ? to / top : 0.0f; }
  // To the nearest, ties to even, of what is at most 448: four significant bits, but below 2^-6
  // multiples of 2^-9.
  static OCT_INLINE simd::F32 round(simd::F32 x) {
    const simd::I32 bits = simd::bits_of_float(x);
    const simd::I32 odd = simd::bits_of(simd::shift_right<20>(bits), 1);
    const simd::I32 up = simd::add(simd::add(bits, odd), simd::set1(0x7ffff));
    const simd::F32 normal = simd::float_of_bits(simd::bits_of(up, -(1 << 20)));
    const simd::F32 magic = simd::set1(0x1.8p14f);  // adding it rounds to multiples of 2^-9
    const simd::F32 tiny = simd::sub(simd::add(x, magic), magic);
    return simd::select(simd::less(simd::abs(x), simd::set1(0x1p-6f)), tiny, normal);
  }
};

using Int8Codes = ByteCodes<Int8Code>;
using Fp8Codes = ByteCodes<E4m3Code>;

// Two codes to a byte: in a line, the terms 0 to 3 of each lane in the low nibbles, and 4 to 7 in
// the high ones. Behind all codes there is a line for each group of dimensions, with scales
// of 16 tokens and then their minima. As the minimum is rounded to bfloat16, and the scale covers
// what is above it, no number is off by more than half a scale and that rounding.
struct NibbleCodes {
  static constexpr int kGroup = kNibbleGroup;

  static int64_t bytes(int dim) { return kv_nibble_half(dim); }
  static OCT_INLINE simd::F32 scales(const uint8_t* half, int dim, int group) {
    return simd::load_bf16(scales_at(const_cast<uint8_t*>(half), dim, group));
  }
  static OCT_INLINE simd::F32 minima(const uint8_t* half, int dim, int group) {
    return simd::load_bf16(scales_at(const_cast<uint8_t*>(half), dim, group) + kChunk);
  }
  static OCT_INLINE void fetch_scales(const uint8_t* half, int dim) {
    for (int at = kChunk * dim / 2; at < bytes(dim); at += 64) __builtin_prefetch(half + at, 0, 2);
  }

  static void write_key(uint8_t* half, int dim, int slot, const float* key) {
    alignas(64) uint8_t codes[kMaxHeadDim];
    encode(half, dim, slot, key, codes);
    for (int d = 0; d < dim; d += 8) {
      uint8_t* four = half + d / 8 * 64 + slot * 4;
      for (int i = d; i < d + 4; i++) *four++ = static_cast<uint8_t>(codes[i] | codes[i + 4] << 4);
    }
  }
  static void write_value(uint8_t* half, int dim, int slot, const float* value) {
    alignas(64) uint8_t codes[kMaxHeadDim];
    encode(half, dim, slot, value, codes);
    const int shift = shift_of(slot), other = 0xf0 >> shift;  // bits of another token
    uint8_t* bytes = half + slot / 8 * 4 * dim + slot % 4;
    for (int d = 0; d < dim; d++) {
      bytes[4 * d] = static_cast<uint8_t>((bytes[4 * d] & other) | codes[d] << shift);
    }
  }
  static void read_key(const uint8_t* half, int dim, int slot, float* key) {
    for (int d = 0; d < dim; d++) {
      const int code = half[d / 8 * 64 + slot * 4 + d % 4] >> shift_of(d) & 15;
      key[d] = decode(half, dim, slot, d, code);
    }
  }
  static void read_value(const uint8_t* half, int dim, int slot, float* value) {
    for (int d = 0; d < dim; d++) {
      const int code = half[(slot / 8 * dim + d) * 4 + slot % 4] >> shift_of(slot) & 15;
      value[d] = decode(half, dim, slot, d, code);
    }
  }
  static void copy_key(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    for (int at = 0; at < kChunk * dim / 2; at += 64) {
      std::memmove(to + at + to_slot * 4, half + at + slot * 4, 4);
    }
    copy_scales(half, dim, slot, to, to_slot);
  }
  static void copy_value(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    const int from = shift_of(slot), shift = shift_of(to_slot), other = 0xf0 >> shift;
    const uint8_t* a = half + slot / 8 * 4 * dim + slot % 4;
    uint8_t* b = to + to_slot / 8 * 4 * dim + to_slot % 4;
    for (int d = 0; d < dim; d++) {
      const int code = a[4 * d] >> from & 15;
      b[4 * d] = static_cast<uint8_t>((b[4 * d] & other) | code << shift);
    }
    copy_scales(half, dim, slot, to, to_slot);
  }

 private:
  static int shift_of(int term) { return term % 8 / 4 * 4; }
  static OCT_INLINE uint16_t* scales_at(uint8_t* half, int dim, int group) {
    return reinterpret_cast<uint16_t*>(half + kChunk * dim / 2 + group * 64);
  }
  static void copy_scales(const uint8_t* half, int dim, int slot, uint8_t* to, int to_slot) {
    for (int group = 0; group * kGroup < dim; group++) {
      const uint16_t* a = scales_at(const_cast<uint8_t*>(half), dim, group);
      uint16_t* b = scales_at(to, dim, group);
      b[to_slot] = a[slot];
      b[kChunk + to_slot] = a[kChunk + slot];
    }
  }
  static float decode(const uint8_t* half, int dim, int slot, int d, int code) {
    const uint16_t* scales = scales_at(const_cast<uint8_t*>(half), dim, d / kGroup);
    return simd::from_bf16(scales[kChunk + slot]) +
           simd::from_bf16(scales[slot]) * static_cast<float>(code);
  }
  static OCT_INLINE void encode(uint8_t* half, int dim, int slot, const float* x, uint8_t* codes) {
    const bool is_finite = !std::isnan(largest(x, dim));
    for (int first = 0; first < dim; first += kGroup) {
      const int end = std::min(first + kGroup, dim);
      simd::F32 most = simd::load(x + first), least = most;
      for (int d = first + 16; d < end; d += 16) {
        most = simd::max(most, simd::load(x + d));
        least = simd::min(least, simd::load(x + d));
      }
      const float low = -simd::max_of(simd::sub(simd::zero(), least));
      const uint16_t minimum = simd::to_bf16(low);
      const float base = simd::from_bf16(minimum);
      const uint16_t scale = simd::to_bf16(is_finite ? (simd::max_of(most) - base) / 15 : NAN);
      const float step = simd::from_bf16(scale);
      const simd::F32 factor = simd::set1(step > 1e-30f ? 1 / step : 0.0f);
      for (int d = first; d < end; d += 16) {
        const simd::F32 units = simd::mul(simd::sub(simd::load(x + d), simd::set1(base)), factor);
        const simd::F32 inside = simd::min(simd::max(units, simd::zero()), simd::set1(15.0f));
        simd::store_s8(reinterpret_cast<int8_t*>(codes + d), simd::to_int(inside));
      }
      uint16_t* scales = scales_at(half, dim, first / kGroup);
      scales[slot] = scale;
      scales[kChunk + slot] = minimum;
    }
  }
};

}  // namespace octavo
