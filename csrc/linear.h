// How a linear is put together.
//
//     prologue    rows of activations -> blocks of encoded rows                  activations.cpp
//     products    a block of rows x a panel of 1 or 2 tiles -> float32           linear_int8.cpp
//                 [tiles][rows][16], in a buffer that stays in the L1 cache      linear_float.cpp
//     epilogue    bias, residual, gate, softcap and maximum -> memory            linear.cpp
//
// An output is computed by one kernel call from its first input to its last, in one order of
// operations that is the same in all kernels of a format. So neither the number of rows and tiles
// of a call, nor which worker makes it, can be seen in the result.
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

// The encodings of activations; those of int8 are told apart by group as well.
struct Encoding {
  enum Kind { kInt8, kBf16, kF32 } kind;
  int group;  // inputs of a scale, as that of the weights: 16, 32, 64, 128; 0 for kBf16 and kF32
  int parts;  // rows that a row becomes: 1, or 2 of int8, whose products are added up
  int padded_k;

  bool operator==(const Encoding& o) const { return kind == o.kind && group == o.group; }
  size_t block_bytes(int rows) const;  // of a block of so many rows; in proportion to them
};
Encoding encoding_for(const Layout& layout, int parts);

// A panel of tiles, and where to look ahead meanwhile.
struct Panel {
  const uint8_t* tiles;
  int64_t tile_bytes;  // from one tile to the next
  int steps;           // at each of which a kernel looks ahead: groups of W formats, units of K
                       // formats, 32 B of activations of floats
  int units;           // of a group of W formats
  const uint8_t* next; // what will be read next, and
  int next_lines;      // lines of it to fetch at each step
};

// Products of one block of activations and a panel: float32 [tiles][rows][16].
using TileKernel = void (*)(const Panel& panel, const uint8_t* block, float* out);
// `rows` in 1..kMaxRows; `tiles` in 1..kMaxTiles.
TileKernel int8_kernel(const Layout& layout, int rows, int tiles);
TileKernel float_kernel(const Layout& layout, int rows, int tiles);

}  // namespace octavo
