// The formats of the KV cache: how a chunk is written and read, and how it is multiplied. Those in
// floating point are here; those with scales are in kv_scaled.h.
//
// Attention is two products, scores = queries x keys and output = weights x values. In both, a
// vector from the cache has 16 lanes with the next `kDepth` terms of 16 sums, and what it is
// multiplied by (*factors*: terms of a query, or weights of keys) is the same for all lanes:
//
//     lanes     term 0 1 | 0 1 | 0 1 | ...   16 tokens, or 16 dimensions
//     factors   term 0 1   to all of them
//     acc            sum | sum | sum | ...
//
// A line of the cache, 64 bytes, has the lanes of `kLineSteps` such steps. A format has factors in
// the type of its multiplication. Sums are float32, one term after the other, or exact
// integers. See attention.h for the order inside of a chunk.
//
// A format `Kv` has, besides `write`, `read` and `copy_token`,
//
//     Kv::Keys, Kv::Values   the two products
//     Kv::kScaled            its vectors have scales, and any bytes stand for finite numbers
//     Kv::kMaxRows           queries that are multiplied at a time
//
// and a product P has
//
//     P::kParts              of a factor, a row each: an integer may have a second one for its rest
//     P::kGroup              dimensions of the cache that share a scale; factors have rows for each
//     P::lanes<step>(line)   of a line, for multiply_add(sum, lanes, factors)
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "simd.h"

namespace octavo {

constexpr bool kManyRegisters = simd::kNumRegisters >= 32;

// Dimensions of a head that share a scale, for the product P, how many such groups there are, and
// the one of a dimension. If there is always one group, loops over groups cost nothing.
template <class P>
constexpr bool kOneGroup = P::kGroup >= kMaxHeadDim;
template <class P>
constexpr int group_dims(int dim) {
  return kOneGroup<P> || dim < P::kGroup ? dim : P::kGroup;
}
template <class P>
constexpr int num_groups(int dim) {
  return kOneGroup<P> ? 1 : (dim + P::kGroup - 1) / P::kGroup;
}
template <class P>
constexpr int group_of(int dimension) {
  return kOneGroup<P> ? 0 : dimension / P::kGroup;
}
// Factors of a row, in all groups.
template <class P>
constexpr int query_factors(int dim) {
  return num_groups<P>(dim) * P::row_factors(group_dims<P>(dim));
}
template <class P>
constexpr int weight_factors(int dim) {
  return num_groups<P>(dim) * P::row_factors(kTile);
}

// Factors that are just one value for each term.
struct FloatProduct {
  using Sum = simd::F32;
  static constexpr int kParts = 1;
  static constexpr int kUnroll = 1;  // lines that are not in a loop
  static constexpr int kGroup = kMaxHeadDim;
  static constexpr int row_factors(int terms) { return terms; }
  template <class Factor>
  static OCT_INLINE Sum start(const Factor*, int, int) { return simd::zero(); }
};

// Factors in float32.
struct WideProduct : FloatProduct {
  using Factor = float;
  using Lanes = simd::F32;
  static constexpr int kDepth = 1;
  static OCT_INLINE void store_factors(Factor* p, simd::F32 x) { simd::store(p, x); }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return simd::fma(x, simd::set1(f[0]), sum);
  }
};

struct F32Product : WideProduct {
  static constexpr int kLineSteps = 1, kUnroll = 2;
  template <int>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    return simd::load(reinterpret_cast<const float*>(line));
  }
};

struct WideBf16Product : WideProduct {
  static constexpr int kLineSteps = 2;
  template <int kStep>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    const simd::BF16 x = simd::load_pairs(line);
    return kStep == 0 ? simd::even(x) : simd::odd(x);
  }
};

// Factors rounded to bfloat16, for the instruction that multiplies such pairs.
struct PairedBf16Product : FloatProduct {
  using Factor = uint16_t;
  using Lanes = simd::BF16;
  static constexpr int kDepth = 2, kLineSteps = 1;
  template <int>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    return simd::load_pairs(line);
  }
  static OCT_INLINE void store_factors(Factor* p, simd::F32 x) {
    simd::store_bf16_factors(p, x);
  }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return simd::dot2(sum, x, simd::set1_pair(f));
  }
};

// Formats without scales.
template <class Product>
struct FloatKv {
  using Keys = Product;
  using Values = Product;
  static constexpr bool kScaled = false;
  static constexpr int kMaxRows = !kManyRegisters ? 4 : Product::kLineSteps > 1 ? 5 : 6;

  // A query, after norm and rope and times `factor`, in factors.
  static OCT_INLINE void store_query(const float* query, simd::F32 factor, int dim,
                                     typename Product::Factor* out) {
    for (int d = 0; d < dim; d += 16) {
      Product::store_factors(out + d, simd::mul(simd::load(query + d), factor));
    }
  }
  static OCT_INLINE simd::F32 score(simd::F32 sum, const typename Product::Factor*, int,
                                    const uint8_t*, int, int) {
    return sum;
  }
  static OCT_INLINE simd::F32 output(simd::F32 sum, simd::F32, const typename Product::Factor*) {
    return sum;
  }
};

struct F32Kv : FloatKv<F32Product> {
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
  // The key and value in a slot of one chunk to a slot of another one, or of the same.
  static void copy_token(int dim, const uint8_t* from, int slot, uint8_t* to, int to_slot) {
    const float* a = reinterpret_cast<const float*>(from);
    float* b = reinterpret_cast<float*>(to);
    for (int d = 0; d < dim; d++) b[d * kChunk + to_slot] = a[d * kChunk + slot];
    std::memmove(b + (kChunk + to_slot) * dim, a + (kChunk + slot) * dim, sizeof(float) * dim);
  }
  // A copy of a chunk's values with zeros for all tokens but the first `count`.
  static void copy_first(const uint8_t* values, int head_dim, int count, uint8_t* out) {
    const size_t bytes = sizeof(float) * count * head_dim;
    std::memcpy(out, values, bytes);
    std::memset(out + bytes, 0, sizeof(float) * kChunk * head_dim - bytes);
  }
};

struct Bf16Kv
    : FloatKv<std::conditional_t<simd::kHasDot2, PairedBf16Product, WideBf16Product>> {
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
  static void copy_token(int dim, const uint8_t* from, int slot, uint8_t* to, int to_slot) {
    const uint16_t* a = reinterpret_cast<const uint16_t*>(from);
    uint16_t* b = reinterpret_cast<uint16_t*>(to);
    for (int d = 0; d < dim; d += 2) {
      std::memmove(b + d * kChunk + 2 * to_slot, a + d * kChunk + 2 * slot, 4);
    }
    a += dim * (kChunk + slot / 2 * 2) + slot % 2;
    b += dim * (kChunk + to_slot / 2 * 2) + to_slot % 2;
    for (int d = 0; d < dim; d++) b[2 * d] = a[2 * d];
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
