// Products of activations and weights in bfloat16, float16 or float32.
//
// An output is one chain of sums from the first input to the last:
//
//     bf16    acc = dot2(acc, pair of w, pair of x)      inputs 2i and 2i+1; simd::dot2
//     f32     acc = fma(w, x, acc)
//     f16     the same in float32, in two chains that are added up: 8 inputs each in turn
//
// (With one row, a single chain of float16 would be slower than memory.)
//
// Both operands of bf16 are rounded to it on all instruction sets. Only the rounding of the sums
// differs: BF16 instructions have their own, elsewhere a pair are two fused operations.
#include "linear.h"

namespace octavo {
namespace {

using simd::BF16;
using simd::F32;

constexpr int kWords = 8;  // 4 B each of a row that lie together

OCT_INLINE F32 set1_at(const uint8_t* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return simd::set1(value);
}

template <int kFormat, int kRows, int kTiles>
struct FloatKernel {
  // Of a BF16 pair, activations are a word, or two where there is no dot2 instruction.
  static constexpr bool kWide = kFormat == OCT_BF16 && !simd::kHasDot2;
  static constexpr int kWordBytes = kFormat == OCT_F16 ? kLine / 2 : kLine;  // of weights
  static constexpr int kLines = kWide ? kWords / 2 : kWords;  // of weights, to 8 words
  static constexpr bool kTwo = kFormat == OCT_BF16 && simd::kTwoRows && kRows > 1;
  static constexpr int kAtOnce = kTwo ? 2 : 1;  // lines
  static constexpr int kChains = kFormat == OCT_F16 ? 2 : 1;
  using Vectors = RowVectors<kRows, kTwo>;
  using Acc = F32[kTiles][Vectors::kCount];

  static OCT_INLINE void line(const Panel& panel, const uint8_t* weights, const uint8_t* words,
                              Acc& acc) {
    if constexpr (kTwo) {
      simd::TwoRows x[Vectors::kCount / 2];
#pragma GCC unroll 4
      for (int i = 0; i < Vectors::kCount / 2; i++) {
        x[i] = simd::load_two_rows(words + Vectors::row(2 * i) * kWords * 4,
                                   words + Vectors::companion(2 * i) * kWords * 4);
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) {
        const BF16 even = simd::load_pairs(weights + t * panel.tile_bytes);
        const BF16 odd = simd::load_pairs(weights + t * panel.tile_bytes + kLine);
        const BF16 low = simd::zip<0>(even, odd), high = simd::zip<1>(even, odd);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors::kCount; v++) {
          acc[t][v] = simd::dot4(acc[t][v], Vectors::half(v) == 0 ? low : high, x[v / 2]);
        }
      }
    } else if constexpr (kFormat != OCT_BF16) {
      F32 w[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) {
        const uint8_t* at = weights + t * panel.tile_bytes;
        w[t] = kFormat == OCT_F16 ? simd::load_f16(reinterpret_cast<const uint16_t*>(at))
                                  : simd::load(reinterpret_cast<const float*>(at));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const F32 x = set1_at(words + r * kWords * 4);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) acc[t][r] = simd::fma(w[t], x, acc[t][r]);
      }
    } else if constexpr (kWide) {
      F32 even[kTiles], odd[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) {
        const BF16 w = simd::load_pairs(weights + t * panel.tile_bytes);
        even[t] = simd::even(w);
        odd[t] = simd::odd(w);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const F32 first = set1_at(words + r * kWords * 4);
        const F32 second = set1_at(words + r * kWords * 4 + 4);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) {
          acc[t][r] = simd::fma(odd[t], second, simd::fma(even[t], first, acc[t][r]));
        }
      }
    } else {
      BF16 w[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) w[t] = simd::load_pairs(weights + t * panel.tile_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const BF16 x = simd::set1_pair(words + r * kWords * 4);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; t++) acc[t][r] = simd::dot2(acc[t][r], w[t], x);
      }
    }
  }

  static void run(const Panel& panel, const uint8_t* block, float* out) {
    Acc acc[kChains];
    for (int t = 0; t < kTiles; t++) {
      for (Acc& chain : acc) {
        for (F32& sum : chain[t]) sum = simd::zero();
      }
    }
    const uint8_t* weights = panel.tiles;
    const uint8_t* next = panel.next;
    for (int step = 0; step < panel.steps; step += kChains) {
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; chain++) {
        for (int i = 0; i < panel.next_lines; i++, next += kLine) simd::prefetch(next);
#pragma GCC unroll 2
        for (int i = 0; i < kLines; i += kAtOnce) {
          line(panel, weights + i * kWordBytes, block + i * (kWide ? 8 : 4), acc[chain]);
        }
        weights += kLines * kWordBytes;
        block += kRows * kWords * 4;
      }
    }
    for (int t = 0; t < kTiles; t++) {
      for (int r = 0; r < kRows; r++) {
        F32 sum = Vectors::outputs(acc[0][t], r);
        if constexpr (kChains == 2) sum = simd::add(sum, Vectors::outputs(acc[1][t], r));
        simd::store(out + (r * kTiles + t) * kTile, sum);
      }
    }
  }
};

// The kernels of a format, by rows and tiles.
template <int kFormat, int kRows>
TileKernel with_tiles(int tiles) {
  if constexpr (kRows <= kMaxRows) {
    if (tiles == kMaxTiles) return FloatKernel<kFormat, kRows, kMaxTiles>::run;
  }
  return FloatKernel<kFormat, kRows, 1>::run;
}

template <int kFormat, int kRows = kMaxLoneFloats>
TileKernel with_rows(int rows, int tiles) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kFormat, kRows - 1>(rows, tiles);
  }
  return with_tiles<kFormat, kRows>(tiles);
}

}  // namespace

TileKernel float_kernel(const Layout& layout, int rows, int tiles) {
  switch (layout.format) {
    case OCT_BF16: return with_rows<OCT_BF16>(rows, tiles);
    case OCT_F16: return with_rows<OCT_F16>(rows, tiles);
    default: return with_rows<OCT_F32>(rows, tiles);
  }
}

}  // namespace octavo
