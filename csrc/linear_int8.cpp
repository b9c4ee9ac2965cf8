// Products of int8 activations and weights of 4 or 8 bits.
//
// An output is, group by group, and always in this order:
//
//     dot = sum of w * a over the group                       int32, exact
//     acc = fma(float(dot), d * scale, acc)                   d of the weights, scale of the row
//     acc = fma(m, scale * sum of a, acc)                     asymmetric formats only
//
// Weights are unsigned in memory. The zero point of symmetric ones is paid once per group and row:
// the sum starts at -8 * (sum of a), or at what simd::centre makes of 128. Asymmetric formats of 8
// bits take that back, as some instruction sets can only multiply signed weights.
#include "linear.h"

namespace octavo {
namespace {

using simd::F32;
using simd::I32;
using simd::U8;

constexpr int kScalars = 3;  // of a row and group: scale, scale * sum, sum

// How products of a format are summed up over a chunk of inputs.
template <bool kNibbles>
struct Sum;
template <>
struct Sum<true> {
  simd::NibbleSum value;
  OCT_INLINE void begin(I32 acc) { value = simd::begin_nibbles(acc); }
  OCT_INLINE void add(U8 w, I32 a) { value = simd::add_nibbles(value, w, a); }
  OCT_INLINE I32 end(I32 acc) const { return simd::end_nibbles(acc, value); }
};
template <>
struct Sum<false> {
  I32 value;
  OCT_INLINE void begin(I32 acc) { value = acc; }
  OCT_INLINE void add(U8 w, I32 a) { value = simd::dot4_centred(value, w, a); }
  OCT_INLINE I32 end(I32) const { return value; }
};

// kUnits: quads of inputs that lie together, 8 of them; 4 where groups are of 16. kInner: how often
// that is in a group, if it is once, as in most files; 0 if the panel has to be asked.
template <int kFormat, int kUnits, int kInner, int kRows, int kTiles>
struct Int8Kernel {
  static constexpr bool kNibbles = kFormat == OCT_W4S || kFormat == OCT_W4A;
  static constexpr bool kMin = kFormat == OCT_W4A || kFormat == OCT_W8A;

  static OCT_INLINE int inner_of(const Panel& panel) { return kInner ? kInner : panel.inner; }

  static OCT_INLINE I32 start_at(int32_t sum) {
    if (kFormat == OCT_W4S) return simd::set1(-8 * sum);
    if (kFormat == OCT_W4A) return simd::zero_i();
    const I32 centre = simd::centre(sum);
    return kFormat == OCT_W8S ? centre : simd::add(centre, simd::set1(128 * sum));
  }

  // One group of all tiles: `quants` and `scales` of the first, the rows' part of the block.
  static OCT_INLINE const uint8_t* group(const Panel& panel, const uint8_t* quants,
                                         const uint8_t* scales, const uint8_t* block,
                                         F32 (&acc)[kTiles][kRows]) {
    const int inner = inner_of(panel);
    const uint8_t* scalars = block + static_cast<size_t>(inner) * kUnits * 4 * kRows;
    I32 dot[kTiles][kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      int32_t sum;
      __builtin_memcpy(&sum, scalars + (2 * kRows + r) * 4, 4);
      const I32 start = start_at(sum);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) dot[t][r] = start;
    }
    for (int i = 0; i < inner; i++) {
      products(panel, quants, block, dot);
      quants += kUnits * (kNibbles ? 32 : 64);
      block += kUnits * 4 * kRows;
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const uint16_t* halves =
          reinterpret_cast<const uint16_t*>(scales + t * panel.tile_bytes);
      const F32 d = simd::load_f16(halves);
      const F32 m = kMin ? simd::load_f16(halves + kTile) : simd::zero();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const F32 step = simd::mul(d, scalar(scalars, r));
        acc[t][r] = simd::fma(simd::to_float(dot[t][r]), step, acc[t][r]);
        if (kMin) acc[t][r] = simd::fma(m, scalar(scalars, kRows + r), acc[t][r]);
      }
    }
    return scalars + kScalars * 4 * kRows;
  }

  static OCT_INLINE F32 scalar(const uint8_t* scalars, int i) {
    float value;
    __builtin_memcpy(&value, scalars + i * 4, 4);
    return simd::set1(value);
  }

  // Of kUnits quads of inputs, onto the sums so far.
  static OCT_INLINE void products(const Panel& panel, const uint8_t* quants, const uint8_t* block,
                                  I32 (&dot)[kTiles][kRows]) {
    Sum<kNibbles> part[kTiles][kRows];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) part[t][r].begin(dot[t][r]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kUnits; j += 2) {
      U8 first[kTiles], second[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) {
        const uint8_t* line = quants + t * panel.tile_bytes + j * (kNibbles ? 32 : 64);
        const U8 bytes = simd::load_bytes(line);
        first[t] = kNibbles ? simd::low_nibbles(bytes) : bytes;
        second[t] = kNibbles ? simd::high_nibbles(bytes) : simd::load_bytes(line + kLine);
      }
      quad(first, block + j * 4, part);
      quad(second, block + j * 4 + 4, part);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) dot[t][r] = part[t][r].end(dot[t][r]);
    }
  }

  static OCT_INLINE void quad(const U8 (&w)[kTiles], const uint8_t* activations,
                              Sum<kNibbles> (&part)[kTiles][kRows]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const I32 a =
          simd::set1_quad(reinterpret_cast<const int8_t*>(activations + r * kUnits * 4));
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) part[t][r].add(w[t], a);
    }
  }

  static void run(const Panel& panel, const uint8_t* block, float* out) {
    F32 acc[kTiles][kRows];
    for (int t = 0; t < kTiles; t++) {
      for (int r = 0; r < kRows; r++) acc[t][r] = simd::zero();
    }
    const int64_t bytes =
        static_cast<int64_t>(kUnits) * (kNibbles ? 32 : 64) * inner_of(panel);
    const uint8_t* quants = panel.tiles;
    const uint8_t* next = panel.next;
    auto look_ahead = [&] {
      for (int i = 0; i < panel.next_lines; i++, next += kLine) simd::prefetch(next);
    };
    if (kMin) {
      for (int g = 0; g < panel.steps; g++) {
        look_ahead();
        block = group(panel, quants, quants + bytes, block, acc);
        quants += bytes + kLine;
      }
    } else {  // scales behind every second group
      int g = 0;
      for (; g + 2 <= panel.steps; g += 2) {
        look_ahead();
        block = group(panel, quants, quants + 2 * bytes, block, acc);
        look_ahead();
        block = group(panel, quants + bytes, quants + 2 * bytes + kLine / 2, block, acc);
        quants += 2 * bytes + kLine;
      }
      if (g < panel.steps) group(panel, quants, quants + bytes, block, acc);
    }
    for (int t = 0; t < kTiles; t++) {
      for (int r = 0; r < kRows; r++) simd::store(out + (t * kRows + r) * kTile, acc[t][r]);
    }
  }
};

// The kernels of a format, by rows and tiles.
template <int kFormat, int kUnits, int kInner, int kRows>
TileKernel with_tiles(int tiles) {
  if (kMaxTiles == 2 && tiles == 2) {
    return Int8Kernel<kFormat, kUnits, kInner, kRows, kMaxTiles>::run;
  }
  return Int8Kernel<kFormat, kUnits, kInner, kRows, 1>::run;
}

template <int kFormat, int kUnits, int kInner, int kRows = kMaxRows>
TileKernel with_rows(int rows, int tiles) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kFormat, kUnits, kInner, kRows - 1>(rows, tiles);
  }
  return with_tiles<kFormat, kUnits, kInner, kRows>(tiles);
}

template <int kFormat>
TileKernel with_group(int group, int rows, int tiles) {
  constexpr bool kBytes = kFormat == OCT_W8S || kFormat == OCT_W8A;
  if constexpr (kBytes) {
    if (group == 16) return with_rows<kFormat, 4, 1>(rows, tiles);
  }
  if (group == 32) return with_rows<kFormat, 8, 1>(rows, tiles);
  return with_rows<kFormat, 8, 0>(rows, tiles);
}

}  // namespace

TileKernel int8_kernel(const Layout& layout, int rows, int tiles) {
  switch (layout.format) {
    case OCT_W4S: return with_group<OCT_W4S>(layout.group, rows, tiles);
    case OCT_W4A: return with_group<OCT_W4A>(layout.group, rows, tiles);
    case OCT_W8S: return with_group<OCT_W8S>(layout.group, rows, tiles);
    default: return with_group<OCT_W8A>(layout.group, rows, tiles);
  }
}

}  // namespace octavo
