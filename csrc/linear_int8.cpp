// Products of int8 activations and weights of 2 to 8 bits.
//
// An output is, group by group, and always in this order:
//
//     dot = sum of w * a over the group                       int32, exact
//     acc = fma(float(dot), d * scale, acc)                   d of the weights, scale of the row
//     acc = fma(m, scale * sum of a, acc)                     asymmetric formats only
//
// where d (and m) of K formats is a product of a float16 and a small integer, and so exact too.
//
// Weights are unsigned in memory. The zero point of symmetric ones is applied once per group and row:
// the sum starts at -zero * (sum of a), or at simd::centre of 128. Asymmetric formats of 8
// bits undo that, as some instruction sets can only multiply signed weights.
//
// Where there are few registers, more than kAtOnce rows go through a group in parts. Its weights are
// unpacked for each, out of the L1 cache.
//
// Where instructions multiply matrices, rows go by twos, and all of the above happens in lanes of
// which every other one is of the same row (simd.h). The numbers are the same.
#include <utility>

#include "linear.h"

namespace octavo {
namespace {

using simd::F32;
using simd::I32;
using simd::U8;

constexpr int kScalars = 3;  // of a row and group: scale, scale * sum, sum
constexpr int kQuads = 8;    // of a unit

// Quad j of the integers of a unit (pack.h): planes are merged, the low bits first.
template <int kBits, int j>
OCT_INLINE U8 quad_of(const uint8_t* unit) {
  if constexpr (kBits == 8) return simd::load_bytes(unit + j * kLine);
  U8 value = {};
  if constexpr ((kBits & 4) != 0) {
    const U8 line = simd::load_bytes(unit + j / 2 * kLine);
    value = j % 2 == 0 ? simd::low_nibbles(line) : simd::high_nibbles(line);
    unit += 4 * kLine;
  }
  if constexpr ((kBits & 2) != 0) {
    constexpr int kPlace = kBits & 4;
    const U8 line = simd::shifted<j % 4 * 2 - kPlace>(simd::load_bytes(unit + j / 4 * kLine));
    value = kPlace == 0 ? simd::bits_of(line, 3) : simd::with_bits_of(value, line, 3 << kPlace);
    unit += 2 * kLine;
  }
  if constexpr ((kBits & 1) != 0) {
    constexpr int kPlace = kBits & 6;
    const U8 line = simd::shifted<j - kPlace>(simd::load_bytes(unit));
    value = simd::with_bits_of(value, line, 1 << kPlace);
  }
  return value;
}

// Compilers would keep values that two passes over a group read, and run out of registers.
OCT_INLINE void read_anew() { asm volatile("" ::: "memory"); }

// How products of a format are summed up over a unit, or a group if that is less.
enum class Integers { kNibbles, kSmall, kCentred };  // below 16, below 64, 128 is zero

template <Integers kIntegers>
struct Sum;
template <>
struct Sum<Integers::kNibbles> {
  simd::NibbleSum value;
  OCT_INLINE void begin(I32 acc) { value = simd::begin_nibbles(acc); }
  OCT_INLINE void add(U8 w, I32 a) { value = simd::add_nibbles(value, w, a); }
  OCT_INLINE I32 end(I32 acc) const { return simd::end_nibbles(acc, value); }
};
template <>
struct Sum<Integers::kSmall> {
  I32 value;
  OCT_INLINE void begin(I32 acc) { value = acc; }
  OCT_INLINE void add(U8 w, I32 a) { value = simd::dot4(value, w, a); }
  OCT_INLINE I32 end(I32) const { return value; }
};
template <>
struct Sum<Integers::kCentred> {
  I32 value;
  OCT_INLINE void begin(I32 acc) { value = acc; }
  OCT_INLINE void add(U8 w, I32 a) { value = simd::dot4_centred(value, w, a); }
  OCT_INLINE I32 end(I32) const { return value; }
};

// kGroup: inputs of a group, if these are 16 or 32, as in most files; 0 for the panel's group.
template <int kFormat, int kGroup, int kRows, int kTiles>
struct Int8Kernel {
  static constexpr Traits kTraits = traits_of(kFormat);
  static constexpr int kBits = kTraits.bits;
  static constexpr bool kMin = kTraits.has_min;
  static constexpr int kUnitBytes = kBits * kLine;
  static constexpr Integers kIntegers = kBits == 8 || kTraits.levels ? Integers::kCentred
                                        : kBits <= 4                 ? Integers::kNibbles
                                                                     : Integers::kSmall;
  // Of activations that lie together.
  static constexpr int kGroupQuads = kGroup == 16 ? 4 : kQuads;
  static constexpr int kGroupsOfUnit = kQuads / kGroupQuads;
  static constexpr int kChunkBytes = kGroupQuads * 4 * kRows;

  static constexpr bool kTwo = simd::kTwoRows && kRows > 1;
  using Vectors = RowVectors<kRows, kTwo>;
  static constexpr int kVectors = Vectors::kCount;

  static constexpr bool kTwice = simd::kShortSums && kIntegers == Integers::kSmall;
  // Rows whose sums of a group are in registers at once.
  static constexpr int kAtOnce = !simd::kShortSums                   ? kRows
                                 : kIntegers == Integers::kNibbles ? 6
                                                                     : 4;
  static constexpr int kParts = (kRows + kAtOnce - 1) / kAtOnce;
  static_assert(kParts <= 2);
  // Where parts begin and end; they differ by one row at most, as blocks do.
  template <int kPart>
  static constexpr int kBegin = kPart == 0 ? 0 : (kRows + 1) / 2;
  template <int kPart>
  static constexpr int kEnd = kPart + 1 == kParts ? kVectors : (kRows + 1) / 2;

  using Acc = F32[kTiles][kVectors];
  using Dot = I32[kTiles][kVectors];
  using Scales = F32[kTiles][Vectors::kHalves];

  static OCT_INLINE int32_t start_at(const uint8_t* scalars, int row) {
    const int32_t sum = scalar<int32_t>(scalars, 2, row);
    if (kIntegers != Integers::kCentred) return -kTraits.zero * sum;
    return simd::centre(sum) + (kMin ? 128 * sum : 0);
  }
  template <int kPart = 0>
  static OCT_INLINE void start(const uint8_t* scalars, Dot& dot) {
#pragma GCC unroll 8
    for (int v = kBegin<kPart>; v < kEnd<kPart>; v++) {
      const int32_t first = start_at(scalars, Vectors::row(v));
      I32 value;
      if constexpr (kTwo) {
        value = simd::set2(first, start_at(scalars, Vectors::companion(v)));
      } else {
        value = simd::set1(first);
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) dot[t][v] = value;
    }
  }

  // Quads of a unit of all tiles from kFirst on, as many as lie together, onto the sums of a part
  // of the rows so far.
  template <int kFirst, int kPart = 0>
  static OCT_INLINE_VECTORS void products(const Panel& panel, const uint8_t* unit,
                                          const uint8_t* block, Dot& dot) {
    if constexpr (kTwo) {
      pairs<kFirst>(panel, unit, block, dot, std::make_integer_sequence<int, kGroupQuads / 2>());
    } else if constexpr (kTwice) {
      twos<kFirst, kPart>(panel, unit, block, dot,
                          std::make_integer_sequence<int, kGroupQuads / 2>());
    } else {
      sums<kFirst, kPart>(panel, unit, block, dot);
    }
  }
  template <int kFirst, int kPart>
  static OCT_INLINE void sums(const Panel& panel, const uint8_t* unit, const uint8_t* block,
                              Dot& dot) {
    Sum<kIntegers> part[kTiles][kRows];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int r = kBegin<kPart>; r < kEnd<kPart>; r++) part[t][r].begin(dot[t][r]);
    }
    quads<kFirst, kPart>(panel, unit, block, part, std::make_integer_sequence<int, kGroupQuads>());
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int r = kBegin<kPart>; r < kEnd<kPart>; r++) dot[t][r] = part[t][r].end(dot[t][r]);
    }
  }
  template <int kFirst, int kPart, int... i>
  static OCT_INLINE void twos(const Panel& panel, const uint8_t* unit, const uint8_t* block,
                              Dot& dot, std::integer_sequence<int, i...>) {
    (two_quads<kFirst + 2 * i, kPart>(panel, unit, block + i * 8, dot), ...);
  }
  // Quads j and j + 1, for a row at a time.
  template <int j, int kPart>
  static OCT_INLINE void two_quads(const Panel& panel, const uint8_t* unit,
                                   const uint8_t* activations, Dot& dot) {
    U8 v[kTiles], w[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      v[t] = weights<j>(unit + t * panel.tile_bytes);
      w[t] = weights<j + 1>(unit + t * panel.tile_bytes);
    }
#pragma GCC unroll 8
    for (int r = kBegin<kPart>; r < kEnd<kPart>; r++) {
      const auto* at = reinterpret_cast<const int8_t*>(activations + r * kGroupQuads * 4);
      const I32 a = simd::set1_quad(at), b = simd::set1_quad(at + 4);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) {
        dot[t][r] = simd::dot4_twice(dot[t][r], v[t], a, w[t], b);
      }
    }
  }
  template <int kFirst, int... i>
  static OCT_INLINE void pairs(const Panel& panel, const uint8_t* unit, const uint8_t* block,
                               Dot& dot, std::integer_sequence<int, i...>) {
    (pair<kFirst + 2 * i>(panel, unit, block + i * 8, dot), ...);
  }
  // Quads j and j + 1, for two rows at a time.
  template <int j>
  static OCT_INLINE void pair(const Panel& panel, const uint8_t* unit, const uint8_t* activations,
                              Dot& dot) {
    simd::TwoRows a[kVectors / 2];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors / 2; i++) {
      a[i] = simd::load_two_rows(activations + Vectors::row(2 * i) * kGroupQuads * 4,
                                 activations + Vectors::companion(2 * i) * kGroupQuads * 4);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const U8 even = weights<j>(unit + t * panel.tile_bytes);
      const U8 odd = weights<j + 1>(unit + t * panel.tile_bytes);
      const U8 low = simd::zip<0>(even, odd), high = simd::zip<1>(even, odd);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v++) {
        dot[t][v] = simd::dot8(dot[t][v], Vectors::half(v) == 0 ? low : high, a[v / 2]);
      }
    }
  }
  template <int kFirst, int kPart, int... j>
  static OCT_INLINE void quads(const Panel& panel, const uint8_t* unit, const uint8_t* block,
                               Sum<kIntegers> (&part)[kTiles][kRows],
                               std::integer_sequence<int, j...>) {
    (quad<kFirst + j, kPart>(panel, unit, block + j * 4, part), ...);
  }
  template <int j, int kPart>
  static OCT_INLINE void quad(const Panel& panel, const uint8_t* unit, const uint8_t* activations,
                              Sum<kIntegers> (&part)[kTiles][kRows]) {
    U8 w[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) w[t] = weights<j>(unit + t * panel.tile_bytes);
#pragma GCC unroll 8
    for (int r = kBegin<kPart>; r < kEnd<kPart>; r++) {
      const I32 a = simd::set1_quad(
          reinterpret_cast<const int8_t*>(activations + r * kGroupQuads * 4));
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) part[t][r].add(w[t], a);
    }
  }

  template <int j>
  static OCT_INLINE U8 weights(const uint8_t* unit) {
    const U8 w = quad_of<kBits, j>(unit);
    if constexpr (kTraits.levels != nullptr) return simd::look_up(kTraits.levels, w);
    return w;
  }
  // Quads kFirst and the following of a unit of all tiles.
  template <int kFirst>
  static OCT_INLINE void load_quads(const Panel& panel, const uint8_t* unit,
                                    U8 (&w)[kTiles][kGroupQuads]) {
    load_quads<kFirst>(panel, unit, w, std::make_integer_sequence<int, kGroupQuads>());
  }
  template <int kFirst, int... j>
  static OCT_INLINE void load_quads(const Panel& panel, const uint8_t* unit,
                                    U8 (&w)[kTiles][kGroupQuads],
                                    std::integer_sequence<int, j...>) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      ((w[t][j] = weights<kFirst + j>(unit + t * panel.tile_bytes)), ...);
    }
  }

  // Sums of a group, with the scales of the weights and the rows, onto the outputs so far.
  template <int kPart = 0>
  static OCT_INLINE void finish(const Scales& d, const Scales& m, const uint8_t* scalars,
                                const Dot& dot, Acc& acc) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
#pragma GCC unroll 8
      for (int v = kBegin<kPart>; v < kEnd<kPart>; v++) {
        const int half = Vectors::half(v);
        const F32 step = simd::mul(d[t][half], scalars_of(scalars, 0, v));
        acc[t][v] = simd::fma(simd::to_float(dot[t][v]), step, acc[t][v]);
        if (kMin) acc[t][v] = simd::fma(m[t][half], scalars_of(scalars, 1, v), acc[t][v]);
      }
    }
  }
  template <class T>
  static OCT_INLINE T scalar(const uint8_t* scalars, int which, int row) {
    T value;
    __builtin_memcpy(&value, scalars + (which * kRows + row) * 4, 4);
    return value;
  }
  // Of the rows of a vector.
  static OCT_INLINE F32 scalars_of(const uint8_t* scalars, int which, int v) {
    const float first = scalar<float>(scalars, which, Vectors::row(v));
    if constexpr (kTwo) {
      return simd::set2(first, scalar<float>(scalars, which, Vectors::companion(v)));
    }
    return simd::set1(first);
  }
  // Of 16 outputs, as their sums lie in vectors.
  static OCT_INLINE void spread(F32 x, F32 (&halves)[Vectors::kHalves]) {
    if constexpr (kTwo) {
      halves[0] = simd::zip<0>(x, x);
      halves[1] = simd::zip<1>(x, x);
    } else {
      halves[0] = x;
    }
  }
  static OCT_INLINE F32 half(const uint8_t* halves) {
    return simd::load_f16(reinterpret_cast<const uint16_t*>(halves));
  }

  // A group of a W format: its integers, from quad kFirst on, and scales in the first tile. Returns
  // what follows in the block of activations.
  template <int kFirst = 0, int kPart = 0>
  static OCT_INLINE const uint8_t* group(const Panel& panel, const uint8_t* units,
                                         const uint8_t* halves, const uint8_t* block, Acc& acc) {
    const int count = kGroup != 0 ? 1 : panel.units;
    const uint8_t* scalars = block + static_cast<size_t>(count) * kChunkBytes;
    Dot dot;
    start<kPart>(scalars, dot);
    for (int u = 0; u < count; u++) {
      products<kFirst, kPart>(panel, units + u * kUnitBytes, block + u * kChunkBytes, dot);
    }
    Scales d, m;
    scales(panel, halves, d, m);
    finish<kPart>(d, m, scalars, dot, acc);
    if constexpr (kPart + 1 < kParts) {
      read_anew();
      return group<kFirst, kPart + 1>(panel, units, halves, block, acc);
    }
    return scalars + kScalars * 4 * kRows;
  }
  static OCT_INLINE void scales(const Panel& panel, const uint8_t* halves, Scales& d, Scales& m) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const uint8_t* at = halves + t * panel.tile_bytes;
      spread(half(at), d[t]);
      spread(kMin ? half(at + kLine / 2) : simd::zero(), m[t]);
    }
  }

  static OCT_INLINE int64_t group_bytes(const Panel& panel) {
    return kGroup != 0 ? kUnitBytes / kGroupsOfUnit : int64_t{panel.units} * kUnitBytes;
  }
  // Where the integers of group g of a W format are, and its scales: behind each group, or behind
  // every second one and the last. (Of groups of 16, the integers lie in all of their unit.)
  static OCT_INLINE const uint8_t* group_at(const Panel& panel, int g) {
    return panel.tiles + g * group_bytes(panel) + (kMin ? g : g / 2) * kLine;
  }
  static OCT_INLINE const uint8_t* halves_of(const Panel& panel, int g) {
    const int64_t bytes = group_bytes(panel);
    if (kMin) return group_at(panel, g) + bytes;
    if (g % 2 == 1) return group_at(panel, g) + bytes + kLine / 2;
    return group_at(panel, g) + (g + 1 < panel.steps ? 2 : 1) * bytes;
  }

  static OCT_INLINE void groups(const Panel& panel, const uint8_t* block, Acc& acc,
                                const uint8_t*& next) {
    const int64_t bytes = group_bytes(panel);
    const uint8_t* units = panel.tiles;
    if constexpr (kGroupsOfUnit == 2) {
      for (int g = 0; g < panel.steps; g += 2) {
        look_ahead(panel, next);
        block = group<0>(panel, units, units + kUnitBytes, block, acc);
        look_ahead(panel, next);
        block = group<kQuads - kGroupQuads>(panel, units, units + kUnitBytes + kLine / 2, block, acc);
        units += kUnitBytes + kLine;
      }
      return;
    }
    if (kMin) {
      for (int g = 0; g < panel.steps; g++) {
        look_ahead(panel, next);
        block = group(panel, units, units + bytes, block, acc);
        units += bytes + kLine;
      }
      return;
    }
    int g = 0;
    for (; g + 2 <= panel.steps; g += 2) {  // scales are behind every second group
      look_ahead(panel, next);
      block = group(panel, units, units + 2 * bytes, block, acc);
      look_ahead(panel, next);
      block = group(panel, units + bytes, units + 2 * bytes + kLine / 2, block, acc);
      units += 2 * bytes + kLine;
    }
    if (g < panel.steps) group(panel, units, units + bytes, block, acc);
  }

  // A group of a K format: quads of a unit from kFirst on. `halves` and `scale` in the first tile.
  template <int kFirst, int kPart = 0>
  static OCT_INLINE const uint8_t* nested_group(const Panel& panel, const uint8_t* unit,
                                                const uint8_t* halves, const uint8_t* scale,
                                                const uint8_t* block, Acc& acc) {
    const uint8_t* scalars = block + kChunkBytes;
    Dot dot;
    start<kPart>(scalars, dot);
    products<kFirst, kPart>(panel, unit, block, dot);
    Scales d, m;
    nested_scales(panel, halves, scale, d, m);
    finish<kPart>(d, m, scalars, dot, acc);
    if constexpr (kPart + 1 < kParts) {
      read_anew();
      return nested_group<kFirst, kPart + 1>(panel, unit, halves, scale, block, acc);
    }
    return scalars + kScalars * 4 * kRows;
  }
  static OCT_INLINE void nested_scales(const Panel& panel, const uint8_t* halves,
                                       const uint8_t* scale, Scales& d, Scales& m) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) {
      const uint8_t* from = scale + t * panel.tile_bytes;
      const uint8_t* at = halves + t * panel.tile_bytes;
      I32 steps, mins = simd::zero_i();
      if constexpr (shares_bytes(kTraits)) {
        const I32 both = simd::load_u8(from);
        steps = simd::bits_of(both, 15);
        mins = simd::shift_right<4>(both);
      } else {
        steps = simd::load_s8(from);
        if (kMin) mins = simd::load_s8(from + kTile);
      }
      spread(simd::mul(half(at), simd::to_float(steps)), d[t]);
      spread(kMin ? simd::mul(half(at + kLine / 2), simd::to_float(mins)) : simd::zero(), m[t]);
    }
  }

  static OCT_INLINE void nested_groups(const Panel& panel, const uint8_t* block, Acc& acc,
                                       const uint8_t*& next) {
    constexpr int kScaleBytes = scale_bytes(kTraits);
    const uint8_t* halves = panel.tiles;
    for (int step = 0; step < panel.steps; step += kBlock / kUnit) {
      const uint8_t *scale = halves + kLine, *unit = halves + header_bytes(kTraits);
#pragma GCC unroll 1
      for (int u = 0; u < kBlock / kUnit; u++, unit += kUnitBytes) {
        look_ahead(panel, next);
        block = nested_group<0>(panel, unit, halves, scale, block, acc);
        scale += kScaleBytes;
        if constexpr (kGroupQuads < kQuads) {
          block = nested_group<kGroupQuads>(panel, unit, halves, scale, block, acc);
          scale += kScaleBytes;
        }
      }
      halves += block_bytes(kTraits);
    }
  }

  static OCT_INLINE void look_ahead(const Panel& panel, const uint8_t*& next) {
    for (int i = 0; i < panel.next_lines; i++, next += kLine) simd::prefetch(next);
  }

  static void run(const Panel& panel, const uint8_t* block, float* out) {
    Acc acc;
    for (int t = 0; t < kTiles; t++) {
      for (int v = 0; v < kVectors; v++) acc[t][v] = simd::zero();
    }
    const uint8_t* next = panel.next;
    if constexpr (kTraits.nested) {
      nested_groups(panel, block, acc, next);
    } else {
      groups(panel, block, acc, next);
    }
    for (int t = 0; t < kTiles; t++) {
      for (int r = 0; r < kRows; r++) {
        simd::store(out + (r * kTiles + t) * kTile, Vectors::outputs(acc[t], r));
      }
    }
  }
};

// Products of remainders: group by group, of the rows that have one. They are added to the products
// of the rows, as if their groups came behind all others.
template <int kFormat, int kGroup, int kTiles>
struct RemaindersKernel {
  using One = Int8Kernel<kFormat, kGroup, 1, kTiles>;  // for a row at a time
  static constexpr int kGroupQuads = One::kGroupQuads;
  static constexpr int kGroupsOfUnit = One::kGroupsOfUnit;
  // Whether a group's integers are unpacked once for all rows, and stay in registers or nearly so.
  static constexpr bool kHeld = kGroup != 0 && simd::kNumRegisters >= 8;

  static void run(const Panel& panel, const RemainderList& list, float* out) {
    for (int i = 0; i < list.count; i++) {
      const int g = list.groups[i].group;
      if (kGroupsOfUnit == 2 && g % 2 == 1) {
        add<kQuads - kGroupQuads>(panel, list, list.groups[i], out);
      } else {
        add<0>(panel, list, list.groups[i], out);
      }
    }
  }

  // A group, whose quads of a unit begin with kFirst.
  template <int kFirst>
  static OCT_INLINE void add(const Panel& panel, const RemainderList& list,
                             const ListedGroup& group, float* out) {
    const int g = group.group, units = kGroup != 0 ? 1 : panel.units;
    const uint8_t* unit;
    typename One::Scales d, m;
    if constexpr (One::kTraits.nested) {
      constexpr int kGroups = kBlock / kUnit * kGroupsOfUnit;  // of a block
      const uint8_t* block = panel.tiles + int64_t{g / kGroups} * block_bytes(One::kTraits);
      const int place = g % kGroups;
      unit = block + header_bytes(One::kTraits) + place / kGroupsOfUnit * One::kUnitBytes;
      One::nested_scales(panel, block, block + kLine + place * scale_bytes(One::kTraits), d, m);
    } else {
      unit = One::group_at(panel, g / kGroupsOfUnit * kGroupsOfUnit);
      One::scales(panel, One::halves_of(panel, g), d, m);
    }
    const uint8_t* entry = list.remainders->entry(g, list.first_row);
    const int stride = list.remainders->entry_bytes;
    [[maybe_unused]] U8 w[kTiles][kGroupQuads];
    if constexpr (kHeld) One::template load_quads<kFirst>(panel, unit, w);
    for (uint64_t rows = group.rows; rows != 0; rows &= rows - 1) {
      const int r = __builtin_ctzll(rows);
      const uint8_t* integers = entry + r * stride;
      const uint8_t* scalars = integers + units * kGroupQuads * 4;
      typename One::Dot dot;
      One::start(scalars, dot);
      if constexpr (kHeld) {
        multiply(w, integers, dot);
      } else {
        for (int u = 0; u < units; u++) {
          One::template products<kFirst>(panel, unit + u * One::kUnitBytes,
                                         integers + u * kGroupQuads * 4, dot);
        }
      }
      finish(d, m, scalars, dot, out + r * kTiles * kTile);
    }
  }

  static OCT_INLINE void multiply(const U8 (&w)[kTiles][kGroupQuads], const uint8_t* integers,
                                  typename One::Dot& dot) {
    Sum<One::kIntegers> part[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) part[t].begin(dot[t][0]);
#pragma GCC unroll 8
    for (int j = 0; j < kGroupQuads; j++) {
      const I32 a = simd::set1_quad(reinterpret_cast<const int8_t*>(integers + j * 4));
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; t++) part[t].add(w[t][j], a);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) dot[t][0] = part[t].end(dot[t][0]);
  }

  static OCT_INLINE void finish(const typename One::Scales& d, const typename One::Scales& m,
                                const uint8_t* scalars, const typename One::Dot& dot, float* out) {
    typename One::Acc acc;
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) acc[t][0] = simd::load(out + t * kTile);
    One::finish(d, m, scalars, dot, acc);
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; t++) simd::store(out + t * kTile, acc[t][0]);
  }
};

// The kernels of a format, by rows and tiles.
template <int kFormat, int kGroup, int kRows>
TileKernel with_tiles(int tiles) {
  if constexpr (kRows <= kMaxRows) {
    if (tiles == kMaxTiles) return Int8Kernel<kFormat, kGroup, kRows, kMaxTiles>::run;
  }
  return Int8Kernel<kFormat, kGroup, kRows, 1>::run;
}

template <int kFormat, int kGroup, int kRows = kMaxLoneRows>
TileKernel with_rows(int rows, int tiles) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kFormat, kGroup, kRows - 1>(rows, tiles);
  }
  return with_tiles<kFormat, kGroup, kRows>(tiles);
}

template <int kFormat, int kGroup>
RemainderKernel remainders_with_tiles(int tiles) {
  if (kMaxTiles == 2 && tiles == 2) return RemaindersKernel<kFormat, kGroup, kMaxTiles>::run;
  return RemaindersKernel<kFormat, kGroup, 1>::run;
}

// make(format, group): with std::integral_constant, for the format and groups of a layout.
template <int kFormat, class Make>
auto of_format(const Layout& layout, Make&& make) {
  constexpr std::integral_constant<int, kFormat> format;
  constexpr Traits traits = traits_of(kFormat);
  if constexpr (has_long_groups(kFormat)) {
    if (layout.group != kUnit) return make(format, std::integral_constant<int, 0>());
  }
  if constexpr (has_short_groups(kFormat)) {
    if (layout.group != kUnit) return make(format, std::integral_constant<int, 16>());
  }
  return make(format, std::integral_constant<int, traits.nested ? traits.group : kUnit>());
}

template <class Make>
auto of_layout(const Layout& layout, Make&& make) {
  switch (layout.format) {
    case OCT_W2S: return of_format<OCT_W2S>(layout, make);
    case OCT_W2A: return of_format<OCT_W2A>(layout, make);
    case OCT_W3S: return of_format<OCT_W3S>(layout, make);
    case OCT_W3A: return of_format<OCT_W3A>(layout, make);
    case OCT_W4S: return of_format<OCT_W4S>(layout, make);
    case OCT_W4A: return of_format<OCT_W4A>(layout, make);
    case OCT_W8S: return of_format<OCT_W8S>(layout, make);
    case OCT_W8A: return of_format<OCT_W8A>(layout, make);
    case OCT_W5S: return of_format<OCT_W5S>(layout, make);
    case OCT_W5A: return of_format<OCT_W5A>(layout, make);
    case OCT_W4N: return of_format<OCT_W4N>(layout, make);
    case OCT_W4F: return of_format<OCT_W4F>(layout, make);
    case OCT_K2A: return of_format<OCT_K2A>(layout, make);
    case OCT_K3S: return of_format<OCT_K3S>(layout, make);
    case OCT_K4A: return of_format<OCT_K4A>(layout, make);
    case OCT_K5A: return of_format<OCT_K5A>(layout, make);
    case OCT_K6S: return of_format<OCT_K6S>(layout, make);
    default: return of_format<OCT_K4N>(layout, make);
  }
}

}  // namespace

TileKernel int8_kernel(const Layout& layout, int rows, int tiles) {
  return of_layout(layout, [&](auto format, auto group) {
    return with_rows<format(), group()>(rows, tiles);
  });
}

RemainderKernel remainder_kernel(const Layout& layout, int tiles) {
  return of_layout(layout, [&](auto format, auto group) {
    return remainders_with_tiles<format(), group()>(tiles);
  });
}

}  // namespace octavo
