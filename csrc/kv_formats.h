// The formats of the KV cache in floating point: how a chunk is written and read, and how it is
// multiplied. The format in bytes is in kv_int8.h.
//
// Attention is two products, scores = queries x keys and output = weights x values. In both, a
// vector from the cache has 16 lanes with the next `kDepth` terms of 16 sums, and what it is
// multiplied by (*factors*: terms of a query, or weights of keys) is the same for all lanes:
//
//     lanes     term 0 1 | 0 1 | 0 1 | ...   16 tokens, or 16 dimensions
//     factors   term 0 1   to all of them
//     acc            sum | sum | sum | ...
//
// A format has factors in the type that its multiplication wants. Sums are float32, one term after
// the other. See attention.h for the order inside of a chunk.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "simd.h"

namespace octavo {

// Factors that are just one value for each term.
struct PlainFactors {
  using Sum = simd::F32;
  static constexpr int kQueryParts = 1, kWeightParts = 1;  // of a factor, a row each
  static constexpr int kDepth = 2;
  static constexpr int kBlock = 1;  // steps that are not in a loop
  static constexpr bool kQuantized = false;
  static constexpr int row_factors(int, int terms) { return terms; }

  template <class Factor>
  static OCT_INLINE Sum start(const Factor*, int, int, int) { return simd::zero(); }
  template <class Factor>
  static OCT_INLINE simd::F32 score(Sum sum, const Factor*, int, const uint8_t*) {
    return sum;
  }
  template <class Factor>
  static OCT_INLINE simd::F32 output(Sum sum, Sum, const Factor*) { return sum; }
};

// Two terms for each lane, in float32.
struct Pair {
  simd::F32 even, odd;
};

// Factors in float32.
struct WideFactors : PlainFactors {
  using Factor = float;
  using Lanes = Pair;
  static OCT_INLINE void store_factors(Factor* p, simd::F32 x) { simd::store(p, x); }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    sum = simd::fma(x.even, simd::set1(f[0]), sum);
    return simd::fma(x.odd, simd::set1(f[1]), sum);
  }
};

// Factors rounded to bfloat16, for the instruction that multiplies such pairs.
struct Bf16Factors : PlainFactors {
  using Factor = uint16_t;
  using Lanes = simd::BF16;
  static OCT_INLINE void store_factors(Factor* p, simd::F32 x) {
    simd::store_bf16_factors(p, x);
  }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return simd::dot2(sum, x, simd::set1_pair(f));
  }
};

// A query, after norm and rope and times `factor`, in the factors of a format.
template <class Kv>
OCT_INLINE void store_query(const float* query, simd::F32 factor, int dim,
                            typename Kv::Factor* out) {
  for (int d = 0; d < dim; d += 16) {
    Kv::store_factors(out + d, simd::mul(simd::load(query + d), factor));
  }
}

struct F32Kv : WideFactors {
  static constexpr int kStepLines = 2;  // of the cache, that a vector of lanes comes from
  static OCT_INLINE Lanes keys(const uint8_t* keys, int step) {
    const float* p = reinterpret_cast<const float*>(keys) + step * 2 * kChunk;
    return {simd::load(p), simd::load(p + kChunk)};
  }
  static OCT_INLINE Lanes values(const uint8_t* values, int head_dim, int step, int column) {
    const float* p = reinterpret_cast<const float*>(values) + step * 2 * head_dim + column;
    return {simd::load(p), simd::load(p + head_dim)};
  }


  // Keys and values, [count, D] each, of the tokens in `slot` and after it.
  static void write(const oct_attention_args& args, uint8_t* chunk, int slot, int count,
                    const float* keys, const float* values) {
    const int dim = args.head_dim;
    float* k = reinterpret_cast<float*>(chunk) + slot;
    float* v = reinterpret_cast<float*>(chunk) + dim * kChunk + slot * dim;
    for (int d = 0; d < dim; d++) {
      for (int i = 0; i < count; i++) k[d * kChunk + i] = keys[i * dim + d];
    }
    std::memcpy(v, values, sizeof(float) * count * dim);
  }
  static void read(const oct_attention_args& args, const uint8_t* chunk, int slot, float* key,
                   float* value) {
    const int dim = args.head_dim;
    const float* k = reinterpret_cast<const float*>(chunk) + slot;
    for (int d = 0; d < dim; d++) key[d] = k[d * kChunk];
    std::memcpy(value, k - slot + dim * kChunk + slot * dim, sizeof(float) * dim);
  }
  // A copy of a chunk's values with zeros for all tokens but the first `count`.
  static void copy_first(const uint8_t* values, int head_dim, int count, uint8_t* out) {
    const size_t bytes = sizeof(float) * count * head_dim;
    std::memcpy(out, values, bytes);
    std::memset(out + bytes, 0, sizeof(float) * kChunk * head_dim - bytes);
  }
};

struct Bf16Kv : std::conditional_t<simd::kHasDot2, Bf16Factors, WideFactors> {
  static constexpr int kStepLines = 1;
  static OCT_INLINE Lanes keys(const uint8_t* keys, int step) {
    return lanes<Lanes>(simd::load_pairs(keys + step * 4 * kChunk));
  }
  static OCT_INLINE Lanes values(const uint8_t* values, int head_dim, int step, int column) {
    return lanes<Lanes>(simd::load_pairs(values + (step * head_dim + column) * 4));
  }

  static void write(const oct_attention_args& args, uint8_t* chunk, int slot, int count,
                    const float* keys, const float* values) {
    const int dim = args.head_dim;
    alignas(64) uint16_t rows[kChunk * kMaxHeadDim];
    round(keys, count * dim, rows);
    uint16_t* k = reinterpret_cast<uint16_t*>(chunk) + 2 * slot;
    for (int d = 0; d < dim; d += 2) {
      for (int i = 0; i < count; i++) std::memcpy(k + d * kChunk + 2 * i, rows + i * dim + d, 4);
    }
    round(values, count * dim, rows);
    uint16_t* v = reinterpret_cast<uint16_t*>(chunk) + dim * kChunk;
    for (int i = 0; i < count;) {
      const int token = slot + i;
      uint16_t* two = v + token / 2 * 2 * dim;
      if (token % 2 == 0 && i + 1 < count) {
        interleave(rows + i * dim, rows + (i + 1) * dim, dim, two);
        i += 2;
      } else {
        for (int d = 0; d < dim; d++) two[2 * d + token % 2] = rows[i * dim + d];
        i += 1;
      }
    }
  }
  static void read(const oct_attention_args& args, const uint8_t* chunk, int slot, float* key,
                   float* value) {
    const int dim = args.head_dim;
    const uint16_t* k = reinterpret_cast<const uint16_t*>(chunk);
    const uint16_t* v = k + dim * kChunk + slot / 2 * 2 * dim;
    for (int d = 0; d < dim; d++) {
      key[d] = simd::from_bf16(k[(d / 2 * kChunk + slot) * 2 + d % 2]);
      value[d] = simd::from_bf16(v[2 * d + slot % 2]);
    }
  }
  static void copy_first(const uint8_t* values, int head_dim, int count, uint8_t* out) {
    const size_t bytes = size_t{4} * head_dim * ((count + 1) / 2);
    std::memcpy(out, values, bytes);
    std::memset(out + bytes, 0, size_t{2} * kChunk * head_dim - bytes);
    if (count % 2 == 0) return;
    uint16_t* last = reinterpret_cast<uint16_t*>(out + bytes - 4 * head_dim);
    for (int d = 0; d < head_dim; d++) last[2 * d + 1] = 0;
  }

 private:
  template <class L>
  static OCT_INLINE L lanes(simd::BF16 x) {
    if constexpr (std::is_same_v<L, Pair>) {
      return {simd::even(x), simd::odd(x)};
    } else {
      return x;
    }
  }
  static OCT_INLINE void round(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; i += 16) simd::store_bf16(out + i, simd::load(x + i));
  }
  static OCT_INLINE void interleave(const uint16_t* __restrict a, const uint16_t* __restrict b,
                                    int n, uint16_t* __restrict out) {
    for (int d = 0; d < n; d++) {
      out[2 * d] = a[d];
      out[2 * d + 1] = b[d];
    }
  }
};

}  // namespace octavo
