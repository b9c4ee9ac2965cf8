// Products of float32 activations and codes that stand for floats: NF4, FP4 and E4M3.
//
// An output is, 16 inputs at a time, and always in this order:
//
//     sum = fma(level of the code, x, sum)      from 0 on, and from the first input to the last
//     acc = fma(sum, d, acc)                    d of the group
//
// (Groups are longer, but with one row a chain of all their inputs would be slower than memory.)
//
// Codes are laid out like integers of as many bits (pack.h): 16 lanes have 4 inputs of 16 outputs, in
// each byte one, or two in the nibbles. Only sums are rounded.
#include <utility>

#include "linear.h"

namespace octavo {
namespace {

using simd::F32;
using simd::I32;

constexpr int kWords = 8;   // inputs of a row that lie together
constexpr int kChain = 16;  // inputs that are summed up from 0 on

OCT_INLINE F32 set1_at(const uint8_t* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return simd::set1(value);
}

// The value of the code in bits `kFirst` and the following of each lane.
template <int kFormat, int kFirst>
OCT_INLINE F32 level(I32 lanes) {
  if constexpr (kFormat != OCT_E4M3) {
    return simd::look_up(float_levels(kFormat), simd::shift_right<kFirst>(lanes));
  } else {
    // Sign, exponent and mantissa where a float32 has them; its exponent is larger by 120.
    const I32 highest = simd::shift_right<4>(simd::shift_left<24 - kFirst>(lanes));
    const I32 bits = simd::bits_of(highest, static_cast<int32_t>(0x87f00000));
    return simd::mul(simd::float_of_bits(bits), simd::set1(0x1p120f));
  }
}

template <int kFormat, int kRows, int kTiles>
struct CodedKernel {
  static constexpr int kBits = traits_of(kFormat).bits;
  static constexpr int kUnits = traits_of(kFormat).group / kUnit;
  static constexpr int kUnitBytes = kBits * kLine;
  using Sums = F32[kTiles][kRows];

  // Input k of a unit; `block` is where its activations begin.
  template <int k>
  static OCT_INLINE void input(const Panel& panel, const uint8_t* unit, const uint8_t* block,
                               Sums& sums) {
    constexpr int kQuad = k / 4, kLineOf = kBits == 8 ? kQuad : kQuad / 2;
    constexpr int kFirst = k % 4 * 8 + (kBits == 8 ? 0 : kQuad % 2 * 4);
    F32 w[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const uint8_t* line = unit + t * panel.tile_bytes + kLineOf * kLine;
      w[t] = level<kFormat, kFirst>(simd::load(reinterpret_cast<const int32_t*>(line)));
    }
    const uint8_t* words = block + (k / kWords * kRows * kWords + k % kWords) * 4;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const F32 x = set1_at(words + r * kWords * 4);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) sums[t][r] = simd::fma(w[t], x, sums[t][r]);
    }
  }
  // Inputs kFrom and the following of a unit, and their sums onto the outputs so far.
  template <int kFrom, int... i>
  static OCT_INLINE_VECTORS void chain(const Panel& panel, const uint8_t* unit,
                                       const uint8_t* block, const F32 (&d)[kTiles], Sums& acc,
                                       std::integer_sequence<int, i...>) {
    Sums sums;
    for (int t = 0; t < kTiles; t++) {
      for (F32& sum : sums[t]) sum = simd::zero();
    }
    (input<kFrom + i>(panel, unit, block, sums), ...);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) acc[t][r] = simd::fma(sums[t][r], d[t], acc[t][r]);
    }
  }

  static void run(const Panel& panel, const uint8_t* block, float* out) {
    Sums acc;
    for (int t = 0; t < kTiles; t++) {
      for (F32& sum : acc[t]) sum = simd::zero();
    }
    const uint8_t* at = panel.tiles;
    const uint8_t* next = panel.next;
    for (int step = 0; step < panel.steps; step++) {
      for (int i = 0; i < panel.next_lines; i++, next += kLine) simd::prefetch(next);
      F32 d[kTiles];
      for (int t = 0; t < kTiles; t++) {
        const uint8_t* scales = at + kUnits * kUnitBytes + t * panel.tile_bytes;
        d[t] = simd::load(reinterpret_cast<const float*>(scales));
      }
      for (int u = 0; u < kUnits; u++) {
        constexpr std::make_integer_sequence<int, kChain> kInputs;
        chain<0>(panel, at, block, d, acc, kInputs);
        chain<kChain>(panel, at, block, d, acc, kInputs);
        at += kUnitBytes;
        block += kRows * kUnit * 4;
      }
      at += kLine;
    }
    for (int t = 0; t < kTiles; t++) {
      for (int r = 0; r < kRows; r++) simd::store(out + (r * kTiles + t) * kTile, acc[t][r]);
    }
  }
};

// The kernels of a format, by rows and tiles.
template <int kFormat, int kRows>
TileKernel with_tiles(int tiles) {
  if constexpr (kRows <= kMaxRows) {
    if (tiles == kMaxTiles) return CodedKernel<kFormat, kRows, kMaxTiles>::run;
  }
  return CodedKernel<kFormat, kRows, 1>::run;
}

template <int kFormat, int kRows = kMaxLoneFloats>
TileKernel with_rows(int rows, int tiles) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kFormat, kRows - 1>(rows, tiles);
  }
  return with_tiles<kFormat, kRows>(tiles);
}

}  // namespace

TileKernel coded_kernel(const Layout& layout, int rows, int tiles) {
  switch (layout.format) {
    case OCT_NF4: return with_rows<OCT_NF4>(rows, tiles);
    case OCT_FP4: return with_rows<OCT_FP4>(rows, tiles);
    default: return with_rows<OCT_E4M3>(rows, tiles);
  }
}

}  // namespace octavo
