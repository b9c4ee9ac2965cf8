// Encodes rows of activations for a linear, see activations.h.
#include "activations.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace octavo {
namespace {

using simd::F32;
using simd::I32;

constexpr int kLanes = 16;
constexpr float kSmallest = 1e-30f;  // 127 / it is still finite, by far
constexpr bool kPairs = simd::kHasDot2;  // bf16 stays bf16; otherwise it is widened once

// Only exactly rounded operations.
float mean_square(const float* x, int k) {
  F32 squares = simd::zero();
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const F32 value = simd::load(x + i);
    squares = simd::fma(value, value, squares);
  }
  if (i < k) {
    const F32 value = simd::load_first(x + i, k - i);
    squares = simd::fma(value, value, squares);
  }
  return simd::sum(squares) / static_cast<float>(k);
}

float inverse_rms(const float* x, int k, float eps) {
  return 1.0f / std::sqrt(mean_square(x, k) + eps);
}

// body(i, n): lanes i .. i + n of k; n is 16 except at the end.
template <class Body>
OCT_INLINE void for_lanes(int k, Body&& body) {
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) body(i, kLanes);
  if (i < k) body(i, k - i);
}

// Zeros up to a multiple of 128.
void pad(int k, float* x) {
  const int padded = (k + 127) / 128 * 128;
  std::memset(x + k, 0, static_cast<size_t>(padded - k) * 4);
}

bool all_finite(const float* x, int padded) {
  F32 zeros = simd::zero();  // infinity and NaN times 0 are NaN
  for (int i = 0; i < padded; i += kLanes) {
    zeros = simd::fma(simd::load(x + i), simd::zero(), zeros);
  }
  return !simd::any(simd::is_nan(zeros));
}

// The value to encode as an integer: a number, or its remainder.
struct Part {
  float scale, inverse;
  bool zero;  // whatever the numbers are

  OCT_INLINE I32 integers(F32 x) const {
    return zero ? simd::zero_i() : simd::to_int(simd::mul(x, simd::set1(inverse)));
  }
  OCT_INLINE F32 left(F32 x) const {
    return simd::fma(simd::to_float(integers(x)), simd::set1(-scale), x);
  }
};

// A group of a row, as row `r` of a block of `rows`. `from(i)`: numbers i to i + 15 of the group.
template <int kGroup, class From>
OCT_INLINE void encode_group(const Part& part, int r, int rows, uint8_t* block, From&& from) {
  constexpr int kChunk = kGroup < 32 ? 16 : 32;  // bytes of a row that lie together
  I32 total = simd::zero_i();
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; i += kLanes) {
    const I32 q = part.integers(from(i));
    total = simd::add(total, q);
    const size_t lies = static_cast<size_t>(i / kChunk * kChunk) * rows + r * kChunk + i % kChunk;
    simd::store_s8(reinterpret_cast<int8_t*>(block + lies), q);
  }
  const float sum = simd::sum(simd::to_float(total));  // sums of small integers: exact
  const float scaled = part.scale * sum;
  const int32_t integer = static_cast<int32_t>(sum);
  uint8_t* scalars = block + static_cast<size_t>(rows) * kGroup + r * 4;
  std::memcpy(scalars, &part.scale, 4);
  std::memcpy(scalars + rows * 4, &scaled, 4);
  std::memcpy(scalars + rows * 8, &integer, 4);
}

struct NoRemainders {
  static constexpr bool kAny = false;
};
struct RowRemainders {
  static constexpr bool kAny = true;
  float limit;
  const Remainders& all;
  int row;
};

template <int kGroup, class Remainder>
void encode_groups(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block,
                   const Remainder& remainder) {
  constexpr int kSpan = kGroup < 32 ? 32 : kGroup;  // that has a scale
  const size_t stride = static_cast<size_t>(rows) * (kGroup + 12);
  const bool finite = all_finite(x, (encoding.padded_k + 31) / 32 * 32);
  for (int first = 0; first < encoding.padded_k; first += kSpan) {
    F32 largest = simd::zero();
#pragma GCC unroll 8
    for (int i = 0; i < kSpan; i += kLanes) {
      largest = simd::max(simd::abs(simd::load(x + first + i)), largest);
    }
    const float amax = finite ? simd::max_of(largest) : 0.0f;
    const bool zero = !(amax >= kSmallest);
    const float scale = finite ? (zero ? 0.0f : amax / 127.0f)
                               : std::numeric_limits<float>::quiet_NaN();
    const Part part = {scale, 127.0f / amax, zero};
    for (int at = first; at < first + kSpan && at < encoding.padded_k; at += kGroup) {
      const auto number = [&](int i) { return simd::load(x + at + i); };
      encode_group<kGroup>(part, r, rows, block, number);
      block += stride;
      if constexpr (Remainder::kAny) {
        const Remainders& all = remainder.all;
        const int group = at / kGroup;
        const bool is_kept = !zero && !(amax <= remainder.limit);
        all.flags[static_cast<size_t>(group) * all.rows + remainder.row] = is_kept;
        if (is_kept) {
          encode_group<kGroup>({scale / 254.0f, 254.0f / scale, false}, 0, 1,
                               all.entry(group, remainder.row),
                               [&](int i) { return part.left(number(i)); });
        }
      }
    }
  }
}

template <class Remainder>
void encode_int8(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block,
                 const Remainder& remainder) {
  switch (encoding.group) {
    case 16: return encode_groups<16>(encoding, x, r, rows, block, remainder);
    case 32: return encode_groups<32>(encoding, x, r, rows, block, remainder);
    case 64: return encode_groups<64>(encoding, x, r, rows, block, remainder);
    default: return encode_groups<128>(encoding, x, r, rows, block, remainder);
  }
}

// 32 B of a row at a time.
void encode_words(const float* x, int count, int r, int rows, uint8_t* block) {
  for (int i = 0; i < count; i += 8) {
    std::memcpy(block + (static_cast<size_t>(i) * rows + r * 8) * 4, x + i, 32);
  }
}

void encode_bf16(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block) {
  alignas(64) uint16_t rounded[kLanes];
  alignas(64) float wide[kLanes];
  for (int i = 0; i < encoding.padded_k; i += kLanes) {
    simd::store_bf16(rounded, simd::load(x + i));
    if (kPairs) {
      std::memcpy(block + static_cast<size_t>(i) * 2 * rows + r * 32, rounded, 32);
    } else {
      simd::store(wide, simd::load_bf16(rounded));
      encode_words(wide, kLanes, r, rows, block + static_cast<size_t>(i) * 4 * rows);
    }
  }
}

}  // namespace

size_t Encoding::block_bytes(int rows) const {
  const size_t values = static_cast<size_t>(rows) * static_cast<size_t>(padded_k);
  switch (kind) {
    case kInt8:
      return values + values / static_cast<size_t>(group) * 12;
    case kBf16:
      return values * (kPairs ? 2 : 4);
    case kF32:
      return values * 4;
  }
  return 0;
}

Encoding encoding_for(const Layout& layout) {
  // Codes of floats also take float32 activations, in blocks of their group size.
  const Encoding::Kind kind = is_quantized(layout.format) ? Encoding::kInt8
                              : layout.format == OCT_BF16 ? Encoding::kBf16
                                                          : Encoding::kF32;
  return {kind, layout.group, layout.padded_k};
}

void prepare_row(const oct_linear_args& args, int r, bool store_sum, float* x) {
  const int k = args.k;
  const int64_t from = args.row_index ? args.row_index[r] : r;
  const float* in = args.in + from * args.ldin;
  const float* source = in;
  if (args.add) {
    const float* add = args.add + r * args.ldin;
    if (args.add_norm) {
      const F32 scale = simd::set1(inverse_rms(add, k, args.add_eps));
      for_lanes(k, [&](int i, int n) {
        F32 normed = simd::mul(simd::load_first(add + i, n), scale);
        normed = simd::mul(normed, simd::load_first(args.add_norm + i, n));
        simd::store_first(x + i, simd::add(simd::load_first(in + i, n), normed), n);
      });
    } else {
      for_lanes(k, [&](int i, int n) {
        const F32 sum = simd::add(simd::load_first(in + i, n), simd::load_first(add + i, n));
        simd::store_first(x + i, sum, n);
      });
    }
    if (store_sum) std::memcpy(args.x_out + r * args.ldin, x, static_cast<size_t>(k) * 4);
    source = x;
  }
  if (args.norm) {
    const F32 scale = simd::set1(inverse_rms(source, k, args.eps));
    for_lanes(k, [&](int i, int n) {
      const F32 normed = simd::mul(simd::load_first(source + i, n), scale);
      simd::store_first(x + i, simd::mul(normed, simd::load_first(args.norm + i, n)), n);
    });
  } else if (source != x) {
    std::memcpy(x, source, static_cast<size_t>(k) * 4);
  }
  pad(k, x);
}

void gather_inputs(const float* x, const int32_t* columns, int k, float* out) {
  for (int i = 0; i < k; i++) out[i] = x[columns[i]];
  pad(k, out);
}

float remainder_limit(const float* x, int k, float above) {
  return above * std::sqrt(mean_square(x, k));
}

void encode_row(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block) {
  switch (encoding.kind) {
    case Encoding::kInt8:
      return encode_int8(encoding, x, r, rows, block, NoRemainders{});
    case Encoding::kBf16:
      return encode_bf16(encoding, x, r, rows, block);
    case Encoding::kF32:
      return encode_words(x, encoding.padded_k, r, rows, block);
  }
}

void encode_row(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block,
                float limit, const Remainders& remainders, int row) {
  encode_int8(encoding, x, r, rows, block, RowRemainders{limit, remainders, row});
}

}  // namespace octavo
