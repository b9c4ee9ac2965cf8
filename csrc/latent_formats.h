// Formats of a row of latent attention: its numbers side by side, and then a float32 scale of the
// latent part and one of the rotated part, if they are codes of a byte.
//
// A format `Rows` has
//
//     Rows::Product                  what scores and outputs are made by, see kv_formats.h
//     Rows::bytes(width)             of a row
//     Rows::write(row, x, args)      x is float32 [padded(rank)] and then [padded(rope)]
//     Rows::read(row, args, out)     float32 [rank + rope]: `out`, with room for 16 more, or row
//
// Where there are products of bfloat16 pairs, those of rows that have no more than that are such:
// codes become bfloat16, which adds an eighth to their own rounding at most.
#pragma once

#include "kv_codes.h"
#include "kv_formats.h"
#include "latent.h"

namespace octavo {

using NarrowProduct = std::conditional_t<simd::kHasDot2, PairedBf16Product, F32Product>;

struct F32Rows {
  using Product = F32Product;
  static int64_t bytes(int width) { return int64_t{4} * width; }
  static void write(uint8_t* row, const float* x, const oct_latent_args& args) {
    std::memcpy(row, x, sizeof(float) * args.rank);
    std::memcpy(row + sizeof(float) * args.rank, x + padded(args.rank),
                sizeof(float) * args.rope_dim);
  }
  static OCT_INLINE const float* read(const uint8_t* row, const oct_latent_args&, float*) {
    return reinterpret_cast<const float*>(row);
  }
};

struct Bf16Rows {
  using Product = NarrowProduct;
  static int64_t bytes(int width) { return int64_t{2} * width; }
  static void write(uint8_t* row, const float* x, const oct_latent_args& args) {
    uint16_t* out = reinterpret_cast<uint16_t*>(row);
    for (int i = 0; i < args.rank; i++) out[i] = simd::to_bf16(x[i]);
    x += padded(args.rank);
    for (int i = 0; i < args.rope_dim; i++) out[args.rank + i] = simd::to_bf16(x[i]);
  }
  static OCT_INLINE const float* read(const uint8_t* row, const oct_latent_args& args, float* out) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(row);
    const int width = latent_width(args);
    int i = 0;
    for (; i + 16 <= width; i += 16) simd::store(out + i, simd::load_bf16(x + i));
    for (; i < width; i++) out[i] = simd::from_bf16(x[i]);
    return out;
  }
};

// `Code` makes codes of a vector, see kv_codes.h.
template <class Code>
struct CodedRows {
  using Product = NarrowProduct;
  static int64_t bytes(int width) { return width + 8; }
  static void write(uint8_t* row, const float* x, const oct_latent_args& args) {
    alignas(64) uint8_t codes[kMaxLatent];
    float scales[2];
    scales[0] = Code::encode(x, padded(args.rank), codes);
    std::memcpy(row, codes, args.rank);
    scales[1] = Code::encode(x + padded(args.rank), padded(args.rope_dim), codes);
    std::memcpy(row + args.rank, codes, args.rope_dim);
    std::memcpy(row + latent_width(args), scales, sizeof scales);
  }
  static OCT_INLINE const float* read(const uint8_t* row, const oct_latent_args& args, float* out) {
    float scales[2];
    std::memcpy(scales, row + latent_width(args), sizeof scales);
    read_part(row, args.rank, scales[0], out);
    read_part(row + args.rank, args.rope_dim, scales[1], out + args.rank);
    return out;
  }

 private:
  static OCT_INLINE void read_part(const uint8_t* codes, int count, float scale, float* out) {
    const simd::F32 factor = simd::set1(scale);
    int i = 0;
    for (; i + 16 <= count; i += 16) {
      simd::store(out + i, simd::mul(factor, decode(Code(), simd::load_u8(codes + i))));
    }
    for (; i < count; i++) out[i] = scale * Code::decode(codes[i]);
  }
  static OCT_INLINE simd::F32 decode(Int8Code, simd::I32 codes) {
    return simd::to_float(simd::sub(codes, simd::set1(128)));
  }
  static OCT_INLINE simd::F32 decode(E4m3Code, simd::I32 codes) {
    return E4m3Code::decode<0>(codes);
  }
};

// The numbers of a row as the factors of F32Product.
template <class Rows>
const float* read_factors(const uint8_t* row, const oct_latent_args& args, float* out) {
  return Rows::read(row, args, out);
}

// As those of PairedBf16Product: there is a zero behind the latent part if it is odd.
template <class Rows>
const uint16_t* read_factors(const uint8_t* row, const oct_latent_args& args, uint16_t* out) {
  if (std::is_same_v<Rows, Bf16Rows> && args.rank % 2 == 0) {
    return reinterpret_cast<const uint16_t*>(row);
  }
  alignas(64) float numbers[kMaxLatent + 16];
  const float* x = Rows::read(row, args, numbers);
  const auto round = [&](const float* part, int count, uint16_t* to) {
    for (int i = 0; i < count; i += 16) {
      simd::store_bf16_factors(to + i, simd::load_first(part + i, count - i));
    }
  };
  round(x, args.rank, out);
  if (args.rank % 2 != 0) out[args.rank] = 0;
  round(x + args.rank, args.rope_dim, out + args.rank + args.rank % 2);
  return out;
}

// Calls `use` with an object of the type of a KV format; false if rows are not kept so.
template <class Use>
bool with_row_format(int32_t format, const Use& use) {
  switch (format) {
    case OCT_KV_F32: return use(F32Rows()), true;
    case OCT_KV_BF16: return use(Bf16Rows()), true;
    case OCT_KV_INT8: return use(CodedRows<Int8Code>()), true;
    case OCT_KV_FP8: return use(CodedRows<E4m3Code>()), true;
  }
  return false;
}

inline int64_t latent_row_bytes(int32_t format, int width) {
  int64_t bytes = 0;
  with_row_format(format, [&](auto rows) { bytes = decltype(rows)::bytes(width); });
  return bytes;
}

}  // namespace octavo
