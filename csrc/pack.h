// Packed weights: the order in which the kernels read a matrix.
//
// A matrix [n, k] is cut into tiles of 16 rows, which are 16 outputs and so the 16 lanes of a
// register. A tile lies in one piece, and is read from its first byte to its last:
//
//     lines of 64 bytes |  4 B of output 0  |  4 B of output 1  |  ...  |  4 B of output 15  |
//
// So one broadcast of 4 bytes of activations is multiplied with 16 outputs in one instruction.
//
// Floats are stored unchanged: 4 B of an output are 1 float32, or 2 bfloat16. (float16 are converted
// when they are read: a line is 16 outputs of one input, and 16 of the next.)
//
// Quantized integers come in units of 32 inputs, 8 quads of 4. A unit has as many lines as an integer
// has bits. 8 bits are a line for each quad. Fewer are split into planes, of which the bits of
// their number tell: 6 = 4 + 2 has a plane of 4 bits and one of 2.
//
//     4 lines, if 4 is in it     line j: the low bits of quad 2j, and above them those of 2j + 1
//     2 lines, if 2 is in it     line j: the next 2 bits of quads 4j, 4j + 1, 4j + 2, 4j + 3
//     1 line,  if 1 is in it             the last bit of all quads
//
// Scales are whole lines, behind the integers of W formats: (float16 d and, if asymmetric, m)
//
//     asymmetric     | group 0 | d0 m0 | group 1 | d1 m1 | ...
//     others         | group 0 | group 1 | d0 d1 | group 2 | group 3 | d2 d3 | ...
//                    (an odd last group has a line of scales for itself: | d  0 |)
//     groups of 16   | unit 0 | d0 d1 | unit 1 | d2 d3 | ...
//
// and before those of K formats, where a block of 256 inputs is
//
//     | d m | 16 B of scales for each group | 8 units |
//
// with 16 B of mins behind the scales of each group if it is asymmetric; K2A has both in a byte.
//
// Codes of floats, NF4, FP4 and E4M3, come in the same units, with a line of float32 behind each group:
//
//     | group 0 | d0 | group 1 | d1 | ...
//
// So the bytes of a weight are those of its GGUF type, or 1 to 5 % more.
//
// Rows beyond n are zeros. Inputs beyond k, up to a whole group (8 float32, 16 of 2 bytes), are zeros
// too, and meet activations of zero. All instruction sets share this order.
#pragma once

#include "octavo.h"

namespace octavo {

constexpr int kTile = 16;    // outputs of a tile
constexpr int kLine = 64;    // bytes
constexpr int kUnit = 32;    // inputs whose integers lie together
constexpr int kBlock = 256;  // inputs of a block of K formats

// Integers; codes of floats; either.
inline constexpr bool is_quantized(int format) { return format < OCT_BF16; }
inline constexpr bool is_coded(int format) { return format >= OCT_NF4 && format <= OCT_E4M3; }
inline constexpr bool has_units(int format) { return is_quantized(format) || is_coded(format); }

// The levels of IQ4_NL, plus 128.
constexpr uint8_t kNonlinear[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                    129, 141, 153, 166, 181, 197, 217, 241};
// The same of FP4 (E2M1), doubled: sign, two bits of exponent, one of mantissa.
constexpr uint8_t kFloats4[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                  128, 127, 126, 125, 124, 122, 120, 116};

// Properties of a quantized format.
struct Traits {
  int bits;               // of an integer
  bool has_min;           // d * q + m
  bool nested;            // scales of scales: K formats
  const uint8_t* levels;  // lookup table of integers, if there is one
  int zero;               // subtracted from the table's values
  int group;              // inputs of a group of K formats, and of codes of floats
};

constexpr Traits traits_of(int format) {
  switch (format) {
    case OCT_W2S: return {2, false, false, nullptr, 2, 0};
    case OCT_W2A: return {2, true, false, nullptr, 0, 0};
    case OCT_W3S: return {3, false, false, nullptr, 4, 0};
    case OCT_W3A: return {3, true, false, nullptr, 0, 0};
    case OCT_W4S: return {4, false, false, nullptr, 8, 0};
    case OCT_W4A: return {4, true, false, nullptr, 0, 0};
    case OCT_W8S: return {8, false, false, nullptr, 128, 0};
    case OCT_W8A: return {8, true, false, nullptr, 0, 0};
    case OCT_W5S: return {5, false, false, nullptr, 16, 0};
    case OCT_W5A: return {5, true, false, nullptr, 0, 0};
    case OCT_W4N: return {4, false, false, kNonlinear, 128, 0};
    case OCT_W4F: return {4, false, false, kFloats4, 128, 0};
    case OCT_K2A: return {2, true, true, nullptr, 0, 16};
    case OCT_K3S: return {3, false, true, nullptr, 4, 16};
    case OCT_K4A: return {4, true, true, nullptr, 0, 32};
    case OCT_K5A: return {5, true, true, nullptr, 0, 32};
    case OCT_K6S: return {6, false, true, nullptr, 32, 16};
    case OCT_K4N: return {4, false, true, kNonlinear, 128, 32};
    // A line of scales behind each group, as if it were halves of scales and of mins.
    case OCT_NF4: return {4, true, false, nullptr, 0, 64};
    case OCT_FP4: return {4, true, false, nullptr, 0, 64};
    case OCT_E4M3: return {8, true, false, nullptr, 0, 128};
    default: return {};
  }
}

// Whether groups may be of 64 and 128 inputs, and not only of 32; or of 16.
constexpr bool has_long_groups(int format) { return format <= OCT_W8A; }
constexpr bool has_short_groups(int format) { return format == OCT_W4F; }

// The levels of NF4 (QLoRA, arXiv 2305.14314, appendix E).
alignas(kLine) constexpr float kNormalFloats[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
// The levels of bitsandbytes' FP4 (its functional.py, create_fp4_map).
alignas(kLine) constexpr float kBlockFloats[16] = {
    0.0f,  0.005208333333333333f,  0.6666666666666666f,  1.0f,
    0.3333333333333333f,  0.5f,  0.16666666666666666f,  0.25f,
    0.0f,  -0.005208333333333333f, -0.6666666666666666f, -1.0f,
    -0.3333333333333333f, -0.5f, -0.16666666666666666f, -0.25f,
};
// The levels of a format whose codes of 4 bits stand for floats.
constexpr const float* float_levels(int format) {
  return format == OCT_NF4 ? kNormalFloats : kBlockFloats;
}

// Whether a byte is a scale and, above it, a min: of 4 bits each.
constexpr bool shares_bytes(const Traits& traits) { return traits.has_min && traits.bits == 2; }

// Bytes of a group's scales (and mins) of a K format, and of all that is before its integers.
constexpr int scale_bytes(const Traits& traits) {
  return traits.has_min && !shares_bytes(traits) ? 2 * kTile : kTile;
}
constexpr int header_bytes(const Traits& traits) {
  return kLine + kBlock / traits.group * scale_bytes(traits);
}
constexpr int block_bytes(const Traits& traits) {
  return header_bytes(traits) + kBlock / kUnit * traits.bits * kLine;
}

// The layout of a packed matrix.
struct Layout {
  int format, n, k, group;
  int num_tiles;
  int padded_k;         // inputs, with the padding
  int64_t tile_bytes;
  int64_t stored_row_bytes;  // of a matrix that is not packed, for what it would be; else 0

  bool is_stored() const { return stored_row_bytes != 0; }
  int num_groups() const { return group == 0 ? 0 : padded_k / group; }
  // Of float16 scales: one for a group, or for a block.
  int num_scales() const {
    return traits_of(format).nested ? padded_k / kBlock : num_groups();
  }
  // Of W formats and of codes of floats: the groups that share a line of scales, and their units.
  int line_groups() const { return traits_of(format).has_min ? 1 : 2; }
  int line_units() const { return line_groups() * group / kUnit; }
  // Byte of the integers of a unit, and of the float16 scales `i`, from the start of a tile.
  int64_t unit(int u) const {
    const Traits traits = traits_of(format);
    const int64_t bytes = int64_t{traits.bits} * kLine;
    if (traits.nested) {
      return u / 8 * int64_t{block_bytes(traits)} + header_bytes(traits) + u % 8 * bytes;
    }
    return u * bytes + int64_t{u / line_units()} * kLine;
  }
  int64_t scales(int i) const {
    const Traits traits = traits_of(format);
    if (traits.nested) return i * int64_t{block_bytes(traits)};
    const int line = i / line_groups(), units = padded_k / kUnit;
    const int behind = (line + 1) * line_units() < units ? (line + 1) * line_units() : units;
    const int64_t lines = int64_t{behind} * traits.bits + line;
    return lines * kLine + i % line_groups() * (kLine / 2);
  }
};

// The layout of a matrix, or an error with the reason why there is none.
int32_t make_layout(int32_t format, int32_t n, int32_t k, int32_t group, Layout* layout);
// For a matrix stored in a GGUF type: the layout that it would be packed into.
int32_t make_stored_layout(int32_t ggml_type, int32_t n, int32_t k, Layout* layout);
// The layout of a weight whose arguments have been checked.
Layout layout_of(const oct_weight& weight);

// The value of integer q of a quantized format, with the scale and the min of its group.
struct Step {
  float d, m;

  // `scale` and `min` are those of a group of K formats.
  static Step make(const Traits& traits, uint16_t d, uint16_t m, int scale, int min);
  float value(const Traits& traits, int q) const;
};

// float32 [k] that row `row` of a matrix stands for.
void unpack_row(const oct_weight& weight, int32_t row, float* out);
void unpack_stored_row(const oct_weight& weight, int32_t row, float* out);

// One row to be packed into a tile. It consists of zeros at first.
struct Row {
  uint8_t* q;      // quantized formats: padded_k integers
  uint16_t *d, *m;  // num_scales() float16 each
  int8_t *scales, *mins;  // K formats: num_groups() each
  void* values;    // floats: padded_k values
  float* factors = nullptr;  // codes of floats: num_groups() scales
};

// A source of the rows of a matrix, called by many threads.
struct RowSource {
  virtual ~RowSource() = default;
  virtual void read(int32_t row, const Row& into) const = 0;
};
int32_t pack_rows(oct_pool* pool, const oct_weight& weight, const RowSource& source, void* out);

}  // namespace octavo
