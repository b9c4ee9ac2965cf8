// The formats of the KV cache whose vectors are codes with scales (kv_codes.h).
//
// Keys are rotated before they are stored, and queries alike (kv_rotation.h).
//
// Of integers, products are exact, four terms a lane. A rotated query is good enough in one byte, a
// factor `high`. Weights are not: small ones of many keys would all become 0. They have a second
// byte for what the first one leaves, and twice the multiplications:
//
//     x  =  scale * (high + low / 254)      high, low in -127 .. 127;   scale = largest / 127
//
// Codes of e4m3 become float32, and so are their factors.
#pragma once

#include "kv_codes.h"
#include "kv_formats.h"
#include "kv_rotation.h"

namespace octavo {

// Keys and values as codes.
template <class KeyCodes, class ValueCodes>
struct CodedKv {
  static constexpr bool kScaled = true;

  static OCT_INLINE void fetch_scales(const uint8_t* keys, const uint8_t* values, int dim) {
    KeyCodes::fetch_scales(keys, dim);
    ValueCodes::fetch_scales(values, dim);
  }
  static void write(const oct_attention_args& args, uint8_t* chunk, int slot, int count,
                    const float* keys, const float* values) {
    const int dim = args.head_dim;
    for (int i = 0; i < count; i++) {
      alignas(64) float key[kMaxHeadDim];
      std::copy_n(keys + i * dim, dim, key);
      rotate(key, dim);
      KeyCodes::write_key(chunk, dim, slot + i, key);
      ValueCodes::write_value(chunk + KeyCodes::bytes(dim), dim, slot + i, values + i * dim);
    }
  }
  static void read(const oct_attention_args& args, const uint8_t* chunk, int slot, float* key,
                   float* value) {
    const int dim = args.head_dim;
    KeyCodes::read_key(chunk, dim, slot, key);
    rotate_back(key, dim);
    ValueCodes::read_value(chunk + KeyCodes::bytes(dim), dim, slot, value);
  }
  static void copy_token(int dim, const uint8_t* from, int slot, uint8_t* to, int to_slot) {
    KeyCodes::copy_key(from, dim, slot, to, to_slot);
    const int64_t values = KeyCodes::bytes(dim);
    ValueCodes::copy_value(from + values, dim, slot, to + values, to_slot);
  }
};

// The weights of a tile's chunks times the scales of the values that they are for, in `out`;
// returns the largest. What is not seen may have any scale.
template <class Codes>
OCT_INLINE simd::F32 scale_weights(const float* weights, const uint8_t* const* values, int begin,
                                   int end, int dim, int group, float* out) {
  simd::F32 top = simd::zero();
  for (int c = begin; c < end; c++) {
    const simd::F32 x = simd::load(weights + c * kChunk);
    const simd::F32 scaled =
        simd::select(simd::less(simd::zero(), x),
                     simd::mul(x, Codes::scales(values[c], dim, group)), simd::zero());
    simd::store(out + c * kChunk, scaled);
    top = simd::max(top, scaled);
  }
  return top;
}

// ---- Integers

// A row of factors, first all high ones, and then what belongs to all of them.
struct FactorScale {
  float scale;
  int32_t sums[2];  // of the high factors, of the low ones
  float base;       // of weights: what the minima of values add to each output
};

// The parts of products with integer codes: how the codes lie in a line and are
// multiplied, and the values of their sums. `start` is the start of a sum; `score` is made of
// a query's factors and 16 keys, of one group; `base` is the part that the minima of a tile's
// values add to all outputs of a group.
struct Int8Terms {
  using Codes = Int8Codes;
  static constexpr int kLineSteps = 1;
  template <int>
  static OCT_INLINE simd::U8 lanes(const uint8_t* line) {
    return simd::load_bytes(line);
  }
  static OCT_INLINE int32_t start(int32_t sum_of_factors) { return simd::centre(sum_of_factors); }
  static OCT_INLINE simd::I32 multiply_add(simd::I32 sum, simd::U8 x, simd::I32 factors) {
    return simd::dot4_centred(sum, x, factors);
  }
  static OCT_INLINE simd::F32 score(simd::F32 sum, const FactorScale& query, const uint8_t* keys,
                                    int dim, int group) {
    return simd::mul(sum, simd::mul(simd::set1(query.scale), Codes::scales(keys, dim, group)));
  }
  static OCT_INLINE float base(const float*, const uint8_t* const*, int, int, int, int) {
    return 0.0f;
  }
};

struct NibbleTerms {
  using Codes = NibbleCodes;
  static constexpr int kLineSteps = 2;
  template <int kStep>
  static OCT_INLINE simd::U8 lanes(const uint8_t* line) {
    const simd::U8 x = simd::load_bytes(line);
    return kStep == 0 ? simd::low_nibbles(x) : simd::high_nibbles(x);
  }
  static OCT_INLINE int32_t start(int32_t) { return 0; }
  static OCT_INLINE simd::I32 multiply_add(simd::I32 sum, simd::U8 x, simd::I32 factors) {
    return simd::dot4(sum, x, factors);
  }
  static OCT_INLINE simd::F32 score(simd::F32 sum, const FactorScale& query, const uint8_t* keys,
                                    int dim, int group) {
    const simd::F32 base = simd::mul(Codes::minima(keys, dim, group),
                                     simd::set1(static_cast<float>(query.sums[0])));
    const simd::F32 units = simd::fma(sum, Codes::scales(keys, dim, group), base);
    return simd::mul(units, simd::set1(query.scale));
  }
  static OCT_INLINE float base(const float* weights, const uint8_t* const* values, int begin,
                               int end, int dim, int group) {
    simd::F32 sum = simd::zero();
    for (int c = begin; c < end; c++) {
      const simd::F32 x = simd::load(weights + c * kChunk);
      const simd::F32 seen = simd::select(simd::less(simd::zero(), x),
                                          Codes::minima(values[c], dim, group), simd::zero());
      sum = simd::fma(x, seen, sum);
    }
    return simd::sum(sum);
  }
};

template <class Terms, int Parts>
struct IntegerProduct {
  using Factor = int8_t;
  using Lanes = simd::U8;
  using Sum = simd::I32;
  static constexpr int kParts = Parts, kGroup = Terms::Codes::kGroup;
  static constexpr int kDepth = 4, kLineSteps = Terms::kLineSteps;
  // GCC carries integer sums through a loop twice, as vectors of 32 and of 64 bits, and runs out of
  // registers; so the fewer iterations the better.
  static constexpr int kUnroll = 4 / kLineSteps;

  static constexpr int row_factors(int terms) {
    return Parts * terms + static_cast<int>(sizeof(FactorScale));
  }
  static OCT_INLINE FactorScale scale_of(const Factor* row, int terms) {
    FactorScale scale;
    std::memcpy(&scale, row + Parts * terms, sizeof scale);
    return scale;
  }
  template <int kStep>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    return Terms::template lanes<kStep>(line);
  }
  static OCT_INLINE Sum start(const Factor* row, int terms, int part) {
    return simd::set1(Terms::start(scale_of(row, terms).sums[part]));
  }
  static OCT_INLINE Sum multiply_add(Sum sum, Lanes x, const Factor* f) {
    return Terms::multiply_add(sum, x, simd::set1_quad(f));
  }

  // A row is written 16 terms at a time, as multiples of the scale, and their sums.
  class Writer {
   public:
    OCT_INLINE Writer(Factor* row, int terms, float largest, float base = 0.0f)
        : row_(row),
          terms_(terms),
          scale_(largest / 127),
          inverse_(largest > 1e-30f ? 127 / largest : 0.0f),
          base_(base) {}
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
      FactorScale scale = {scale_, {}, base_};
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
    float scale_, inverse_, base_;
    simd::I32 sums_[2] = {simd::zero_i(), simd::zero_i()};
  };
};

template <class KeyTerms, class ValueTerms>
struct IntegerKv : CodedKv<typename KeyTerms::Codes, typename ValueTerms::Codes> {
  using Keys = IntegerProduct<KeyTerms, 1>;
  using Values = IntegerProduct<ValueTerms, 2>;
  static constexpr int kMaxRows = kManyRegisters ? 3 : 2;

  static void store_query(const float* query, simd::F32 factor, int dim, int8_t* out) {
    alignas(64) float rotated[kMaxHeadDim];
    rotate_query(query, factor, dim, rotated);
    const int size = group_dims<Keys>(dim);
    for (int first = 0; first < dim; first += size, out += Keys::row_factors(size)) {
      const int terms = std::min(size, dim - first);
      typename Keys::Writer writer(out, size, largest(rotated + first, terms));
      for (int d = 0; d < terms; d += 16) writer.put(d, simd::load(rotated + first + d));
      writer.finish();
    }
  }
  static OCT_INLINE simd::F32 score(simd::I32 sum, const int8_t* query, int terms,
                                    const uint8_t* keys, int dim, int group) {
    return KeyTerms::score(simd::to_float(sum), Keys::scale_of(query, terms), keys, dim, group);
  }
  static void store_weights(const float* weights, const uint8_t* const* values, int begin, int end,
                            int dim, int8_t* out) {
    for (int group = 0; group < num_groups<Values>(dim); group++) {
      alignas(64) float scaled[kTile];
      const simd::F32 top = scale_weights<typename ValueTerms::Codes>(weights, values, begin, end,
                                                                      dim, group, scaled);
      const float base = ValueTerms::base(weights, values, begin, end, dim, group);
      typename Values::Writer writer(out, kTile, simd::max_of(top), base);
      for (int c = begin; c < end; c++) writer.put(c * kChunk, simd::load(scaled + c * kChunk));
      writer.finish();
      out += Values::row_factors(kTile);
    }
  }
  static OCT_INLINE simd::F32 output(simd::I32 high, simd::I32 low, const int8_t* weights) {
    const FactorScale of = Values::scale_of(weights, kTile);
    const simd::F32 total =
        simd::fma(simd::to_float(low), simd::set1(1.0f / 254), simd::to_float(high));
    return simd::fma(total, simd::set1(of.scale), simd::set1(of.base));
  }
};

using Int8Kv = IntegerKv<Int8Terms, Int8Terms>;
using Int4Kv = IntegerKv<NibbleTerms, NibbleTerms>;
using K8V4Kv = IntegerKv<Int8Terms, NibbleTerms>;

// ---- Floats of a byte

struct Fp8Product : WideProduct {
  static constexpr int kLineSteps = 4;
  template <int kStep>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    return E4m3Code::decode<kStep>(simd::load(reinterpret_cast<const int32_t*>(line)));
  }
};

struct Fp8Kv : CodedKv<Fp8Codes, Fp8Codes> {
  using Keys = Fp8Product;
  using Values = Fp8Product;
  static constexpr int kMaxRows = kManyRegisters ? 4 : 3;

  static void store_query(const float* query, simd::F32 factor, int dim, float* out) {
    rotate_query(query, factor, dim, out);
  }
  static OCT_INLINE simd::F32 score(simd::F32 sum, const float*, int, const uint8_t* keys, int dim,
                                    int group) {
    return simd::mul(sum, Fp8Codes::scales(keys, dim, group));
  }
  static void store_weights(const float* weights, const uint8_t* const* values, int begin, int end,
                            int dim, float* out) {
    scale_weights<Fp8Codes>(weights, values, begin, end, dim, 0, out);
  }
  static OCT_INLINE simd::F32 output(simd::F32 sum, simd::F32, const float*) { return sum; }
};

}  // namespace octavo
