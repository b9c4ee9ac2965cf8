// Packed weights: the order in which the kernels read a matrix.
//
// A matrix [n, k] is cut into tiles of 16 rows, which are 16 outputs and so the 16 lanes of a
// register. A tile lies in one piece, and is read from its first byte to its last:
//
//     lines of 64 bytes |  4 B of output 0  |  4 B of output 1  |  ...  |  4 B of output 15  |
//
//     4 B are       1 float32, 2 bfloat16, 4 bytes, or 8 nibbles: consecutive inputs of an output.
//     of nibbles    a line's low ones are 4 inputs, its high ones the 4 that follow.
//
// So one broadcast of 4 bytes of activations meets 16 outputs in one instruction. Quantized formats
// have the inputs of a group together, and the scales (float16 d, and m of asymmetric formats)
// behind them, so that scales always are one line:
//
//     W4A, W8A      | group 0 | d0 m0 | group 1 | d1 m1 | ...
//     W4S, W8S      | group 0 | group 1 | d0 d1 | group 2 | group 3 | d2 d3 | ...
//                   (an odd last group has a line of scales for itself: | d  0 |)
//
// Rows beyond n are zeros. Inputs beyond k, up to a whole group (8 float32, 16 bfloat16), are zeros
// too, and meet activations of zero. All instruction sets share this order.
#pragma once

#include "octavo.h"

namespace octavo {

constexpr int kTile = 16;   // outputs of a tile
constexpr int kLine = 64;   // bytes

inline bool is_quantized(int format) { return format <= OCT_W8A; }
inline bool is_nibbles(int format) { return format == OCT_W4S || format == OCT_W4A; }
inline bool has_min(int format) { return format == OCT_W4A || format == OCT_W8A; }

// Where things are in a packed matrix.
struct Layout {
  int format, n, k, group;
  int num_tiles;
  int num_groups;       // of a row; 0 for BF16 and F32
  int padded_k;         // inputs, with the padding
  int64_t group_bytes;  // integers of a group, in a tile; 0 for BF16 and F32
  int64_t tile_bytes;

  // Byte of the integers of a group, and of its scales, from the start of a tile.
  int64_t quants(int g) const {
    if (has_min(format)) return g * (group_bytes + kLine);
    return g / 2 * (2 * group_bytes + kLine) + g % 2 * group_bytes;
  }
  int64_t scales(int g) const {
    if (has_min(format)) return quants(g) + group_bytes;
    if (g % 2 == 1) return quants(g) + group_bytes + kLine / 2;
    return quants(g) + (g + 1 < num_groups ? 2 : 1) * group_bytes;
  }
};

// The layout of a matrix, or an error that says why there is none.
int32_t make_layout(int32_t format, int32_t n, int32_t k, int32_t group, Layout* layout);
// The layout of a weight whose arguments have been checked.
Layout layout_of(const oct_weight& weight);

// float32 [k] that row `row` of a packed matrix stands for.
void unpack_row(const oct_weight& weight, int32_t row, float* out);

// One row on its way into a tile. Zeros when it is handed out.
struct Row {
  uint8_t* q;   // quantized formats: padded_k integers
  uint16_t* d;  // num_groups float16 each
  uint16_t* m;
  void* values;  // BF16, F32: padded_k values
};

// Something that can tell the rows of a matrix, called by many threads.
struct RowSource {
  virtual ~RowSource() = default;
  virtual void read(int32_t row, const Row& into) const = 0;
};
int32_t pack_rows(oct_pool* pool, const oct_weight& weight, const RowSource& source, void* out);

}  // namespace octavo
