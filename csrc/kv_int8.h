// The KV cache in bytes: per token and head a scale, and value = scale * (byte - 128).
//
// A few dimensions of a model's keys are many times as large as the others, and one scale for all
// leaves these little. So keys are rotated before they are stored, by a Hadamard matrix, which spreads
// each dimension evenly over all; queries are rotated alike, and their products stay what they were.
//
// Products are of integers, four terms a lane. A rotated query is good enough in one byte, a factor
// `high`. Weights are not: small ones of many keys would all become 0. They have a second byte for
// what the first one leaves, and twice the multiplications:
//
//     x  =  scale * (high + low / 254)      high, low in -127 .. 127;   scale = largest / 127
//
// Sums are exact; a query and a tile's weights each have one scale.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_formats.h"

namespace octavo {

// A Hadamard matrix of 16: signs by the number of ones that the bits of row and column share.
struct HadamardSigns {
  float of[16][16];
  constexpr HadamardSigns() : of() {
    for (int i = 0; i < 16; i++) {
      for (int j = 0; j < 16; j++) {
        const int both = i & j, ones = both ^ both >> 1 ^ both >> 2 ^ both >> 3;
        of[i][j] = ones & 1 ? -1.0f : 1.0f;
      }
    }
  }
};
alignas(64) inline constexpr HadamardSigns kHadamardSigns;

// Dimensions that are rotated together: the largest power of two that divides those of a head.
inline int rotated_together(int dim) { return dim & -dim; }

// In place, without the factor that would keep lengths: twice makes x times rotated_together(dim).
inline void rotate(float* x, int dim) {
  for (int d = 0; d < dim; d += 16) {
    simd::F32 sum = simd::zero();
    for (int i = 0; i < 16; i++) {
      sum = simd::fma(simd::set1(x[d + i]), simd::load(kHadamardSigns.of[i]), sum);
    }
    simd::store(x + d, sum);
  }
  for (int apart = 16; apart < rotated_together(dim); apart *= 2) {
    for (int d = 0; d < dim; d += 16) {
      if (d & apart) continue;
      const simd::F32 a = simd::load(x + d), b = simd::load(x + d + apart);
      simd::store(x + d, simd::add(a, b));
      simd::store(x + d + apart, simd::sub(a, b));
    }
  }
}

struct Int8Kv {
  using Factor = int8_t;
  using Lanes = simd::U8;
  using Sum = simd::I32;
  static constexpr int kQueryParts = 1, kWeightParts = 2;
  static constexpr int kDepth = 4;
  // GCC carries integer sums through a loop twice, as vectors of 32 and of 64 bits, and runs out of
  // registers; so the fewer rounds the better.
  static constexpr int kBlock = 4;
  static constexpr int kStepLines = 1;
  static constexpr bool kQuantized = true;

  // A row of factors, first all high ones, and then what belongs to all of them.
  struct Scale {
    float scale;
    int32_t sums[2];  // of the high factors, of the low ones
    int32_t unused;
  };
  static constexpr int row_factors(int parts, int terms) {
    return parts * terms + static_cast<int>(sizeof(Scale));
  }
  static OCT_INLINE Scale scale_of(const Factor* row, int parts, int terms) {
    Scale scale;
    std::memcpy(&scale, row + parts * terms, sizeof scale);
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
  static OCT_INLINE Sum start(const Factor* row, int parts, int terms, int part) {
    return simd::set1(simd::centre(scale_of(row, parts, terms).sums[part]));
  }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return simd::dot4_centred(sum, x, simd::set1_quad(f));
  }
  static OCT_INLINE simd::F32 score(Sum sum, const Factor* query, int dim, const uint8_t* keys) {
    const simd::F32 scale = simd::set1(scale_of(query, kQueryParts, dim).scale);
    return simd::mul(simd::to_float(sum), simd::mul(scale, scales(keys, dim)));
  }
  static OCT_INLINE simd::F32 output(Sum high, Sum low, const Factor* weights) {
    const simd::F32 total =
        simd::fma(simd::to_float(low), simd::set1(1.0f / 254), simd::to_float(high));
    return simd::mul(total, simd::set1(scale_of(weights, kWeightParts, kTile).scale));
  }

  // ---- Factors

  // 16 terms at a time, as multiples of the scale, and their sums.
  template <int Parts>
  class Writer {
   public:
    OCT_INLINE Writer(Factor* row, int terms, float largest)
        : row_(row), terms_(terms), scale_(largest / 127), inverse_(inverse(largest)) {}
    OCT_INLINE void put(int term, simd::F32 x) {
      const simd::F32 units = simd::mul(x, simd::set1(inverse_));
      const simd::I32 high = simd::to_int(units);
      add(0, term, high);
      if constexpr (Parts == 2) {
        const simd::F32 rest = simd::sub(units, simd::to_float(high));
        add(1, term, simd::to_int(simd::mul(rest, simd::set1(254.0f))));
      }
    }
    OCT_INLINE void finish() {
      Scale scale = {scale_, {}, 0};
      // Small integers: their sums are exact in float32.
      for (int part = 0; part < Parts; part++) {
        scale.sums[part] = static_cast<int32_t>(simd::sum(simd::to_float(sums_[part])));
      }
      std::memcpy(row_ + Parts * terms_, &scale, sizeof scale);
    }

   private:
    OCT_INLINE void add(int part, int term, simd::I32 factors) {
      simd::store_s8(row_ + part * terms_ + term, factors);
      sums_[part] = simd::add(sums_[part], factors);
    }

    Factor* row_;
    int terms_;
    float scale_, inverse_;
    simd::I32 sums_[2] = {simd::zero_i(), simd::zero_i()};
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
    Writer<kWeightParts> writer(out, kTile, simd::max_of(top));
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
      alignas(64) float key[kMaxHeadDim];
      std::copy_n(keys + i * dim, dim, key);
      rotate(key, dim);
      write_scale(chunk, dim, slot + i, quantize(key, dim, bytes));
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
    rotate(key, dim);
    const float factor = 1.0f / static_cast<float>(rotated_together(dim));
    for (int d = 0; d < dim; d++) key[d] *= factor;
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
  // Query and key are rotated, each without its factor: here are both, a power of two.
  const simd::F32 both =
      simd::mul(factor, simd::set1(1.0f / static_cast<float>(rotated_together(dim))));
  for (int d = 0; d < dim; d += 16) {
    simd::store(scaled + d, simd::mul(simd::load(query + d), both));
  }
  rotate(scaled, dim);
  Int8Kv::Writer<Int8Kv::kQueryParts> writer(out, dim, Int8Kv::largest(scaled, dim));
  for (int d = 0; d < dim; d += 16) writer.put(d, simd::load(scaled + d));
  writer.finish();
}

}  // namespace octavo
