// The work of a linear on rows of activations before its products: add, norm, encode.
//
// Encoded rows lie in blocks of up to kMaxRows, one per kernel call. R rows of a block:
//
//     int8    per group   | 32 B of row 0 | ... | 32 B of row R-1 |  (group / 32 times; 16 B if 16)
//                         | R scales | R (scale * sum) | R sums |    4 B each
//     bf16,   per 32 B    | 32 B of row 0 | ... | 32 B of row R-1 |
//     f32
//
// so that a kernel reads a block from its first byte to its last, and finds the rows at offsets that
// are known when it is compiled. int8 values are x * 127 / max |x| of the group (of 32 inputs, where
// weights have groups of 16), rounded to even; the scale is max |x| / 127. Sums are those of the
// int8 values. A group that is smaller than 1e-30 everywhere becomes zeros. A row with any number
// that is not finite becomes zeros with scales of NaN, so that all of its outputs are NaN.
//
// A remainder is a second code for the rest, x - int8 * scale, which is at most half a scale:
// rounded to multiples of scale / 254. Where one number of a group is large, the others lose most;
// so a group has a remainder if its largest is above a limit.
#pragma once

#include "linear.h"

namespace octavo {

// Fills `x` (padded to a multiple of 128, with zeros) with row r after add and norm. The sum goes to
// x_out too, if `store_sum`.
void prepare_row(const oct_linear_args& args, int r, bool store_sum, float* x);

// The limit above which groups of a prepared row have remainders: `above` times its root mean
// square. Infinite or NaN if that is not finite.
float remainder_limit(const float* x, int k, float above);

// A prepared row in the order of a weight's columns: out[i] = x[columns[i]], padded likewise.
void gather_inputs(const float* x, const int32_t* columns, int k, float* out);

// Write a prepared row as row `r` of a block of `rows` rows.
void encode_row(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block);
// The same of int8, with remainders as those of row `row` of all.
void encode_row(const Encoding& encoding, const float* x, int r, int rows, uint8_t* block,
                float limit, const Remainders& remainders, int row);

}  // namespace octavo
