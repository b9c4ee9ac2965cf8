// The KV cache in bytes: per token and head a scale, and value = scale * (byte - 128).
//
// Products are of integers, four terms a lane. The factors, queries and weights, would lose too
// much in one byte: small weights of many keys would all become 0. They have two, the second one
// for what the first one leaves:
//
//     x  =  scale * (high + low / 254)      high, low in -127 .. 127;   scale = largest / 127
//
// for twice the multiplications, which are as many as bfloat16 needs. Sums are exact; a query and a
// tile's weights each have one scale.
#pragma once

#include <cmath>

#include "kv_formats.h"

namespace octavo {

struct Int8Kv {
  using Factor = int8_t;
  using Lanes = simd::U8;
  using Sum = simd::I32;
  static constexpr int kParts = 2;  // of a factor: kDepth times high, kDepth times low, ...
  static constexpr int kDepth = 4;
  // GCC carries integer sums through a loop twice, as vectors of 32 and of 64 bits, and runs out of
  // registers; so the fewer rounds the better.
  static constexpr int kBlock = 4;
  static constexpr int kStepLines = 1;
  static constexpr bool kQuantized = true;

  // A row of factors, and then what belongs to all of them.
  struct Scale {
    float scale;
    int32_t sum_high, sum_low;
    int32_t unused;
  };
  static constexpr int row_factors(int terms) {
    return 2 * terms + static_cast<int>(sizeof(Scale));
  }
  static OCT_INLINE Scale scale_of(const Factor* row, int terms) {
    Scale scale;
    std::memcpy(&scale, row + 2 * terms, sizeof scale);
    return scale;
  }

  // ---- Multiply

  static OCT_INLINE Lanes keys(const uint8_t* keys, int step) {
    return simd::load_bytes(keys + step * 4 * kChunk);
  }
  static OCT_INLINE Lanes values(const uint8_t* values, int head_dim, int step, int column) {
    return simd::load_bytes(values + (step * head_dim + column) * 4);
  }
  static OCT_INLINE void fetch_scales(const uint8_t* half, int dim) {
    __builtin_prefetch(half + kChunk * dim, 0, 2);
  }
  static OCT_INLINE Sum start(const Factor* row, int terms, int part) {
    const Scale scale = scale_of(row, terms);
    return simd::set1(simd::centre(part == 0 ? scale.sum_high : scale.sum_low));
  }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return simd::dot4_centred(sum, x, simd::set1_quad(f));
  }
  static OCT_INLINE simd::F32 total(Sum high, Sum low) {
    return simd::fma(simd::to_float(low), simd::set1(1.0f / 254), simd::to_float(high));
  }
  static OCT_INLINE simd::F32 score(Sum high, Sum low, const Factor* query, int dim,
                                    const uint8_t* keys) {
    const simd::F32 scale = simd::set1(scale_of(query, dim).scale);
    return simd::mul(total(high, low), simd::mul(scale, scales(keys, dim)));
  }
  static OCT_INLINE simd::F32 output(Sum high, Sum low, const Factor* weights) {
    return simd::mul(total(high, low), simd::set1(scale_of(weights, kTile).scale));
  }

  // ---- Factors

  // 16 terms at a time, as multiples of the scale; `scale` collects their sums.
  class Writer {
   public:
    OCT_INLINE Writer(Factor* row, int terms, float largest)
        : row_(row), terms_(terms), scale_(largest / 127), inverse_(inverse(largest)) {}
    OCT_INLINE void put(int term, simd::F32 x) {
      const simd::F32 units = simd::mul(x, simd::set1(inverse_));
      const simd::I32 high = simd::to_int(units);
      const simd::F32 rest = simd::sub(units, simd::to_float(high));
      const simd::I32 low = simd::to_int(simd::mul(rest, simd::set1(254.0f)));
      alignas(16) Factor bytes[2][16];
      simd::store_s8(bytes[0], high);
      simd::store_s8(bytes[1], low);
      for (int quad = 0; quad < 4; quad++) {
        std::memcpy(row_ + 2 * term + 8 * quad, bytes[0] + 4 * quad, 4);
        std::memcpy(row_ + 2 * term + 8 * quad + 4, bytes[1] + 4 * quad, 4);
      }
      high_ = simd::add(high_, high);
      low_ = simd::add(low_, low);
    }
    OCT_INLINE void finish() {
      // Small integers: their sums are exact in float32.
      const Scale scale = {scale_, static_cast<int32_t>(simd::sum(simd::to_float(high_))),
                           static_cast<int32_t>(simd::sum(simd::to_float(low_))), 0};
      std::memcpy(row_ + 2 * terms_, &scale, sizeof scale);
    }

   private:
    Factor* row_;
    int terms_;
    float scale_, inverse_;
    simd::I32 high_ = simd::zero_i(), low_ = simd::zero_i();
  };

  // The weights of a tile's chunks, times the scales of the values that they are for.
  static OCT_INLINE void store_weights(float* weights, const uint8_t* const* values, int begin,
                                       int end, int dim, Factor* out) {
    simd::F32 top = simd::zero();
    for (int c = begin; c < end; c++) {
      const simd::F32 x = simd::load(weights + c * kChunk);
      // What is not seen may have any scale.
      const simd::F32 scaled = simd::select(simd::less(simd::zero(), x),
                                            simd::mul(x, scales(values[c], dim)), simd::zero());
      simd::store(weights + c * kChunk, scaled);
      top = simd::max(top, scaled);
    }
    Writer writer(out, kTile, simd::max_of(top));
    for (int c = begin; c < end; c++) {
      writer.put(c * kChunk, simd::load(weights + c * kChunk));
    }
    writer.finish();
  }

  // ---- Chunks

  static void write(const oct_attention_args& args, uint8_t* chunk, int slot, int count,
                    const float* keys, const float* values) {
    const int dim = args.head_dim;
    uint8_t* k = chunk + slot * 4;
    uint8_t* v = chunk + kv_chunk_bytes(OCT_KV_INT8, dim) / 2;
    for (int i = 0; i < count; i++, k += 4) {
      alignas(64) uint8_t bytes[kMaxHeadDim];
      write_scale(chunk, dim, slot + i, quantize(keys + i * dim, dim, bytes));
      for (int d = 0; d < dim; d += 4) std::memcpy(k + d * kChunk, bytes + d, 4);
      write_scale(v, dim, slot + i, quantize(values + i * dim, dim, bytes));
      uint8_t* four = v + (slot + i) / 4 * 4 * dim + (slot + i) % 4;
      for (int d = 0; d < dim; d++) four[4 * d] = bytes[d];
    }
  }
  static void read(const oct_attention_args& args, const uint8_t* chunk, int slot, float* key,
                   float* value) {
    const int dim = args.head_dim;
    const uint8_t* v = chunk + kv_chunk_bytes(OCT_KV_INT8, dim) / 2;
    float key_scale, value_scale;
    std::memcpy(&key_scale, chunk + kChunk * dim + 4 * slot, 4);
    std::memcpy(&value_scale, v + kChunk * dim + 4 * slot, 4);
    for (int d = 0; d < dim; d++) {
      key[d] = key_scale * (chunk[(d / 4 * kChunk + slot) * 4 + d % 4] - 128);
      value[d] = value_scale * (v[(slot / 4 * dim + d) * 4 + slot % 4] - 128);
    }
  }

  // NaN if any of the values is not finite.
  static OCT_INLINE float largest(const float* x, int n) {
    simd::F32 top = simd::zero(), zeros = simd::zero();
    for (int i = 0; i < n; i += 16) {
      const simd::F32 value = simd::load(x + i);
      top = simd::max(top, simd::abs(value));
      zeros = simd::fma(value, simd::zero(), zeros);
    }
    return simd::any(simd::is_nan(zeros)) ? NAN : simd::max_of(top);
  }

 private:
  static OCT_INLINE simd::F32 scales(const uint8_t* half, int dim) {
    return simd::load(reinterpret_cast<const float*>(half + kChunk * dim));
  }
  static OCT_INLINE float inverse(float largest) { return largest > 1e-30f ? 127 / largest : 0.0f; }
  static OCT_INLINE void write_scale(uint8_t* half, int dim, int slot, float scale) {
    std::memcpy(half + kChunk * dim + 4 * slot, &scale, 4);
  }
  static OCT_INLINE float quantize(const float* x, int dim, uint8_t* bytes) {
    const float top = largest(x, dim);
    const simd::F32 factor = simd::set1(inverse(top));
    for (int d = 0; d < dim; d += 16) {
      const simd::I32 units = simd::to_int(simd::mul(simd::load(x + d), factor));
      simd::store_s8(reinterpret_cast<int8_t*>(bytes + d), simd::add(units, simd::set1(128)));
    }
    return top / 127;
  }
};

template <>
OCT_INLINE void store_query<Int8Kv>(const float* query, simd::F32 factor, int dim, int8_t* out) {
  alignas(64) float scaled[kMaxHeadDim];
  for (int d = 0; d < dim; d += 16) {
    simd::store(scaled + d, simd::mul(simd::load(query + d), factor));
  }
  Int8Kv::Writer writer(out, dim, Int8Kv::largest(scaled, dim));
  for (int d = 0; d < dim; d += 16) writer.put(d, simd::load(scaled + d));
  writer.finish();
}

}  // namespace octavo
