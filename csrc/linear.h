// The parts of a linear.
//
//     prologue    rows of activations -> blocks of encoded rows                  activations.cpp
//     products    a block of rows x a panel of 1 or 2 tiles -> float32           linear_int8.cpp
//                 [rows][tiles][16], in a buffer that stays in the L1 cache      linear_float.cpp
//                                                                                linear_coded.cpp
//     remainders  of int8 in some groups of some rows, added to these products   linear_int8.cpp
//     epilogue    bias, residual, gate, softcap and maximum -> memory            linear.cpp
//
// An output is computed by one kernel call from its first input to its last, in one order of
// operations that is the same in all kernels of a format; remainders come after that, in the same
// order. So neither the number of rows and tiles of a call, nor the worker that makes it, changes
// the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo.h"
#include "pack.h"
#include "pool.h"
#include "simd.h"

namespace octavo {

// Rows of a block. A kernel's accumulators are rows x tiles, and have to stay in registers.
constexpr int kMaxRows = simd::kNumRegisters >= 32 ? 6 : simd::kNumRegisters >= 8 ? 4 : 2;
constexpr int kMaxTiles = simd::kNumRegisters >= 32 ? 2 : 1;
// Of a block that is alone, whose weights come from memory, tile by tile: of floats (and codes of
// floats), and of integers, of which few registers take rows in parts, group by group.
constexpr int kMaxLoneFloats = simd::kNumRegisters >= 32 ? 8 : kMaxRows;
constexpr int kMaxLoneRows = simd::kShortSums ? 8 : kMaxLoneFloats;

// Up to so many rows, each worker encodes all of them for itself, and a linear has no barrier in it.
constexpr int kFewRows = 8;

// The encodings of activations; those of int8 are told apart by group as well.
struct Encoding {
  enum Kind { kInt8, kBf16, kF32 } kind;
  int group;  // inputs of a scale, as that of the weights: 16, 32, 64, 128; 0 for kBf16 and kF32
  int padded_k;

  bool operator==(const Encoding& o) const { return kind == o.kind && group == o.group; }
  int num_groups() const { return padded_k / group; }
  size_t block_bytes(int rows) const;  // of a block of so many rows; in proportion to them
};
Encoding encoding_for(const Layout& layout);

// Remainders of int8 activations: where a group of a row has one, an entry as a block of that row
// and group alone would be, and a flag.
struct Remainders {
  uint8_t* entries;  // [groups][rows][entry_bytes]; nothing is written where there is no flag
  uint8_t* flags;    // [groups][rows], 0 or 1; and 8 bytes more, of anything
  int rows;
  int entry_bytes;

  // Bit r: of row `first` + r, for `count` rows, 64 at most.
  uint64_t flagged(int group, int first, int count) const {
    const uint8_t* at = flags + static_cast<size_t>(group) * rows + first;
    uint64_t mask = 0;
    for (int r = 0; r < count; r += 8) {
      uint64_t bytes;
      __builtin_memcpy(&bytes, at + r, 8);
      // The lowest bits of eight bytes, the first lowest, into one: in the highest byte.
      mask |= (bytes & 0x0101010101010101) * 0x0102040810204080 >> 56 << r;
    }
    return count < 64 ? mask & ((uint64_t{1} << count) - 1) : mask;
  }
  uint8_t* entry(int group, int row) const {
    return entries + (static_cast<size_t>(group) * rows + row) * entry_bytes;
  }
};

// A panel of tiles, and the memory to prefetch meanwhile.
struct Panel {
  const uint8_t* tiles;
  int64_t tile_bytes;  // from one tile to the next
  int steps;           // at each of which a kernel looks ahead: groups of W formats and of codes of
                       // floats, units of K formats, 32 B of activations of floats
  int units;           // of a group
  const uint8_t* next; // what will be read next, and
  int next_lines;      // lines of it to fetch at each step
};

// How sums of kRows rows and a tile lie in vectors: a row in each; or two rows in two (kTwo), as
// simd.h has it. An odd row at the end is its own companion.
template <int kRows, bool kTwo>
struct RowVectors {
  static constexpr int kHalves = kTwo ? 2 : 1;  // that the outputs of a tile are cut into
  static constexpr int kCount = (kRows + kHalves - 1) / kHalves * kHalves;

  static constexpr int half(int v) { return v % kHalves; }
  static constexpr int row(int v) { return v - half(v); }
  static constexpr int companion(int v) { return row(v) + 1 < kRows ? row(v) + 1 : row(v); }

  // Those of a row.
  static OCT_INLINE simd::F32 outputs(const simd::F32 (&sums)[kCount], int r) {
    if constexpr (kTwo) {
      const simd::F32 low = sums[r / 2 * 2], high = sums[r / 2 * 2 + 1];
      return r % 2 == 0 ? simd::unzip<0>(low, high) : simd::unzip<1>(low, high);
    }
    return sums[r];
  }
};

// Products of one block of activations and a panel: float32 [rows][tiles][16].
using TileKernel = void (*)(const Panel& panel, const uint8_t* block, float* out);
// `rows` in 1..kMaxRows, of one tile in 1..kMaxLoneRows (floats: kMaxLoneFloats); `tiles` in
// 1..kMaxTiles.
TileKernel int8_kernel(const Layout& layout, int rows, int tiles);
TileKernel float_kernel(const Layout& layout, int rows, int tiles);
TileKernel coded_kernel(const Layout& layout, int rows, int tiles);

// The remainders of up to 64 rows from `first_row` on: of the groups that have any, in their order.
constexpr int kMostListedRows = 64;
struct ListedGroup {
  uint64_t rows;  // bit r: of row first_row + r
  int group;
};
struct RemainderList {
  const Remainders* remainders;
  int first_row, count;
  const ListedGroup* groups;
};
// Adds their products to those that the rows have so far.
using RemainderKernel = void (*)(const Panel& panel, const RemainderList& list, float* out);
RemainderKernel remainder_kernel(const Layout& layout, int tiles);

}  // namespace octavo
