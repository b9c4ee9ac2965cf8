// Packs matrices into tiles (pack.h), and unpacks them.
#include "pack.h"

#include <cmath>
#include <cstring>

#include "half.h"
#include "pool.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int kSlot = 0;  // of scratch: the rows of a tile

uint32_t quad_at(const uint8_t* q) {
  uint32_t quad;
  std::memcpy(&quad, q, 4);
  return quad;
}

// A plane of `bits` bits, which are from bit `place` of the integers: as many lines, each with fields
// of 8 / bits quads. An output's part of it.
void write_plane(const uint8_t* q, int bits, int place, uint8_t* out) {
  const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  for (int line = 0; line < bits; line++, out += kLine) {
    uint32_t word = 0;
    for (int shift = 0; shift < 8; shift += bits, q += 4) {
      word |= ((quad_at(q) >> place) & mask) << shift;
    }
    std::memcpy(out, &word, 4);
  }
}

// A unit of one output.
void write_unit(const uint8_t* q, int bits, uint8_t* out) {
  int place = 0;
  for (int plane = 8; plane >= 1; plane /= 2) {
    if ((bits & plane) == 0) continue;
    write_plane(q, plane, place, out);
    out += plane * kLine;
    place += plane;
  }
}

// Integer of input k of a unit of one output: the other direction.
int read_unit(const uint8_t* unit, int bits, int k) {
  const int quad = k / 4;
  int value = 0, place = 0;
  for (int plane = 8; plane >= 1; plane /= 2) {
    if ((bits & plane) == 0) continue;
    const int quads = 8 / plane;  // in a line
    const int byte = unit[quad / quads * kLine + k % 4];
    value |= ((byte >> (quad % quads * plane)) & ((1 << plane) - 1)) << place;
    unit += plane * kLine;
    place += plane;
  }
  return value;
}

void write_integers(const Layout& layout, const uint8_t* rows, size_t stride, uint8_t* tile) {
  const int bits = traits_of(layout.format).bits;
  for (int u = 0; u < layout.padded_k / kUnit; u++) {
    uint8_t* unit = tile + layout.unit(u);
    const uint8_t* q = rows + static_cast<int64_t>(u) * kUnit;
    for (int column = 0; column < kTile; column++, q += stride) {
      write_unit(q, bits, unit + column * 4);
    }
  }
}

void write_halves(const Layout& layout, const uint16_t* d, const uint16_t* m, uint8_t* tile) {
  const Traits traits = traits_of(layout.format);
  const int count = layout.num_scales();
  for (int i = 0; i < count; i++) {
    uint16_t line[2 * kTile] = {};
    for (int column = 0; column < kTile; column++) {
      const int64_t at = static_cast<int64_t>(column) * count + i;
      line[column] = d[at];
      line[kTile + column] = traits.has_min ? m[at] : 0;
    }
    // Of two groups that share a line the second overwrites the zeros behind the scales of the first.
    const bool is_half = !traits.has_min && !traits.nested && i % 2 == 1;
    std::memcpy(tile + layout.scales(i), line, is_half ? 32 : 64);
  }
}

// Scales (and mins) of the groups of K formats.
void write_scales(const Layout& layout, const int8_t* scales, const int8_t* mins, uint8_t* tile) {
  const Traits traits = traits_of(layout.format);
  const int of_block = kBlock / layout.group, count = layout.num_groups();
  for (int g = 0; g < count; g++) {
    uint8_t* to = tile + layout.scales(g / of_block) + kLine + g % of_block * scale_bytes(traits);
    for (int column = 0; column < kTile; column++) {
      const int64_t at = static_cast<int64_t>(column) * count + g;
      to[column] = static_cast<uint8_t>(scales[at]);
      if (!traits.has_min) continue;
      if (shares_bytes(traits)) {
        to[column] = static_cast<uint8_t>(to[column] | mins[at] << 4);
      } else {
        to[kTile + column] = static_cast<uint8_t>(mins[at]);
      }
    }
  }
}

// Scales of the groups of codes of floats.
void write_factors(const Layout& layout, const float* factors, uint8_t* tile) {
  const int count = layout.num_groups();
  for (int g = 0; g < count; g++) {
    float line[kTile];
    for (int column = 0; column < kTile; column++) {
      line[column] = factors[static_cast<int64_t>(column) * count + g];
    }
    std::memcpy(tile + layout.scales(g), line, kLine);
  }
}

// The value of a code of a float, without its scale.
float level_of(int format, int code) {
  if (format != OCT_E4M3) return float_levels(format)[code];
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Scale and min of group g of a column.
Step step_of(const Layout& layout, const uint8_t* tile, int column, int g) {
  const Traits traits = traits_of(layout.format);
  const int of_scale = traits.nested ? kBlock / layout.group : 1;
  const uint8_t* halves = tile + layout.scales(g / of_scale);
  uint16_t d, m = 0;
  std::memcpy(&d, halves + column * 2, 2);
  if (traits.has_min) std::memcpy(&m, halves + 32 + column * 2, 2);
  if (!traits.nested) return Step::make(traits, d, m, 0, 0);
  const uint8_t* scale = halves + kLine + g % of_scale * scale_bytes(traits) + column;
  if (shares_bytes(traits)) return Step::make(traits, d, m, *scale & 15, *scale >> 4);
  const int min = traits.has_min ? static_cast<int8_t>(scale[kTile]) : 0;
  return Step::make(traits, d, m, static_cast<int8_t>(scale[0]), min);
}

void write_values(const Layout& layout, const uint8_t* rows, size_t stride, uint8_t* tile) {
  const size_t row_bytes = static_cast<size_t>(layout.tile_bytes / kTile);
  if (layout.format == OCT_F16) {  // by inputs
    for (size_t at = 0; at < row_bytes; at += 2, tile += kLine / 2) {
      for (size_t column = 0; column < kTile; column++) {
        std::memcpy(tile + column * 2, rows + column * stride + at, 2);
      }
    }
    return;
  }
  for (size_t at = 0; at < row_bytes; at += 4, tile += kLine) {
    for (size_t column = 0; column < kTile; column++) {
      std::memcpy(tile + column * 4, rows + column * stride + at, 4);
    }
  }
}

// A row as oct_pack takes it.
struct PlainRows : RowSource {
  const Layout& layout;
  const uint8_t* q;
  const void *scales, *mins;

  PlainRows(const Layout& l, const void* integers, const void* d, const void* m)
      : layout(l), q(static_cast<const uint8_t*>(integers)), scales(d), mins(m) {}

  void read(int32_t row, const Row& into) const override {
    if (!has_units(layout.format)) {
      const size_t bytes = static_cast<size_t>(layout.k) * (layout.format == OCT_F32 ? 4 : 2);
      std::memcpy(into.values, q + row * bytes, bytes);
      return;
    }
    // Of groups of 16, the last one of the unit may be behind the end of the row.
    const size_t groups = static_cast<size_t>((layout.k + layout.group - 1) / layout.group);
    const size_t first = static_cast<size_t>(row) * groups;
    std::memcpy(into.q, q + static_cast<int64_t>(row) * layout.k, static_cast<size_t>(layout.k));
    if (is_coded(layout.format)) {
      std::memcpy(into.factors, static_cast<const float*>(scales) + first, groups * 4);
      return;
    }
    std::memcpy(into.d, static_cast<const uint16_t*>(scales) + first, groups * 2);
    if (mins) std::memcpy(into.m, static_cast<const uint16_t*>(mins) + first, groups * 2);
  }
};

bool is_group_of(int format, int group) {
  if (!has_units(format)) return group == 0;
  if (is_coded(format)) return group == traits_of(format).group;
  if (has_long_groups(format) && (group == 64 || group == 128)) return true;
  if (has_short_groups(format) && group == 16) return true;
  const Traits traits = traits_of(format);
  return group == (traits.nested ? traits.group : kUnit);
}

}  // namespace

Step Step::make(const Traits& traits, uint16_t d, uint16_t m, int scale, int min) {
  Step step = {from_half(d), traits.has_min ? from_half(m) : 0.0f};
  if (!traits.nested) return step;
  step.d *= static_cast<float>(scale);
  step.m *= static_cast<float>(min);
  return step;
}

float Step::value(const Traits& traits, int q) const {
  const int level = (traits.levels != nullptr ? traits.levels[q] : q) - traits.zero;
  // The product is exact, so it does not matter whether it is fused with the addition.
  const float product = d * static_cast<float>(level);
  return traits.has_min ? product + m : product;
}

int32_t make_layout(int32_t format, int32_t n, int32_t k, int32_t group, Layout* layout) {
  if (format >= OCT_STORED && group == 0) {
    return make_stored_layout(format - OCT_STORED, n, k, layout);
  }
  if (format < OCT_W2S || format > OCT_E4M3) {
    return fail(OCT_ERR_ARGUMENT, "a weight has the unknown format %d", format);
  }
  // So that no size below overflows.
  constexpr int kMost = 1 << 30;
  if (n < 1 || k < 1 || n > kMost || k > kMost) {
    return fail(OCT_ERR_ARGUMENT, "a weight is [%d, %d]: both must be 1 to 2^30", n, k);
  }
  if (!is_group_of(format, group)) {
    return fail(OCT_ERR_ARGUMENT,
                "a weight of format %d has groups of %d: K2A, K3S and K6S have 16, other quantized "
                "formats 32, W formats S and A of 2, 3, 4 and 8 bits also 64 or 128, W4F also 16, "
                "NF4 and FP4 64, E4M3 128, and floats 0",
                format, group);
  }
  *layout = {format, n, k, group, (n + kTile - 1) / kTile, 0, 0, 0};
  if (!has_units(format)) {
    const int unit = format == OCT_F32 ? 8 : 16;
    layout->padded_k = (k + unit - 1) / unit * unit;
    layout->tile_bytes = int64_t{layout->padded_k} * kTile * (format == OCT_F32 ? 4 : 2);
    return OCT_OK;
  }
  const Traits traits = traits_of(format);
  const int whole = traits.nested ? kBlock : group < kUnit ? kUnit : group;
  layout->padded_k = (k + whole - 1) / whole * whole;
  if (traits.nested) {
    layout->tile_bytes = layout->padded_k / kBlock * int64_t{block_bytes(traits)};
  } else {
    const int each = layout->line_groups(), lines = (layout->num_groups() + each - 1) / each;
    layout->tile_bytes = int64_t{layout->padded_k / kUnit * traits.bits + lines} * kLine;
  }
  return OCT_OK;
}

Layout layout_of(const oct_weight& weight) {
  Layout layout = {};
  make_layout(weight.format, weight.n, weight.k, weight.group, &layout);
  return layout;
}

void unpack_row(const oct_weight& weight, int32_t row, float* out) {
  if (weight.format >= OCT_STORED) return unpack_stored_row(weight, row, out);
  const Layout layout = layout_of(weight);
  const int column = row % kTile;
  const uint8_t* tile =
      static_cast<const uint8_t*>(weight.data) + row / kTile * layout.tile_bytes;
  const auto value = [&](int k) -> float& {  // of the input that column k is of
    return out[weight.columns != nullptr ? weight.columns[k] : k];
  };
  if (weight.format == OCT_F32) {
    for (int k = 0; k < weight.k; k++) std::memcpy(&value(k), tile + k * kLine + column * 4, 4);
    return;
  }
  if (weight.format == OCT_BF16) {
    for (int k = 0; k < weight.k; k++) {
      uint16_t bits;
      std::memcpy(&bits, tile + k / 2 * kLine + column * 4 + k % 2 * 2, 2);
      value(k) = simd::from_bf16(bits);
    }
    return;
  }
  if (weight.format == OCT_F16) {
    for (int k = 0; k < weight.k; k++) {
      uint16_t bits;
      std::memcpy(&bits, tile + k / 2 * kLine + k % 2 * 32 + column * 2, 2);
      value(k) = from_half(bits);
    }
    return;
  }
  const Traits traits = traits_of(weight.format);
  if (is_coded(weight.format)) {
    for (int k = 0; k < weight.k; k++) {
      float d;
      std::memcpy(&d, tile + layout.scales(k / weight.group) + column * 4, 4);
      const uint8_t* unit = tile + layout.unit(k / kUnit) + column * 4;
      value(k) = d * level_of(weight.format, read_unit(unit, traits.bits, k % kUnit));
    }
    return;
  }
  for (int first = 0; first < weight.k; first += weight.group) {
    const Step step = step_of(layout, tile, column, first / weight.group);
    const int end = weight.k - first < weight.group ? weight.k : first + weight.group;
    for (int k = first; k < end; k++) {
      const uint8_t* unit = tile + layout.unit(k / kUnit) + column * 4;
      value(k) = step.value(traits, read_unit(unit, traits.bits, k % kUnit));
    }
  }
}

int32_t pack_rows(oct_pool* pool, const oct_weight& weight, const RowSource& source, void* out) {
  const Layout layout = layout_of(weight);
  const bool grouped = has_units(layout.format);
  const size_t row_bytes = static_cast<size_t>(layout.padded_k) *
                           (grouped ? 1 : layout.format == OCT_F32 ? 4 : 2);
  // One line more, as rows of powers of two would map to the same sets of the L1 cache.
  const size_t stride = row_bytes + kLine;
  const size_t halves = static_cast<size_t>(layout.num_scales());
  const size_t groups = static_cast<size_t>(layout.num_groups());
  const size_t bytes = kTile * (stride + 2 * halves * sizeof(uint16_t) + 2 * groups);
  return run(pool, [&](const Worker& worker) {
    uint8_t* rows = static_cast<uint8_t*>(worker.scratch(kSlot, bytes));
    uint16_t* d = reinterpret_cast<uint16_t*>(rows + kTile * stride);
    uint16_t* m = d + kTile * halves;
    float* factors = reinterpret_cast<float*>(d);  // in place of both
    int8_t* scales = reinterpret_cast<int8_t*>(m + kTile * halves);
    int8_t* mins = scales + kTile * groups;
    const Range mine = share(layout.num_tiles, worker.rank, worker.size);
    for (int tile = mine.begin; tile < mine.end; tile++) {
      std::memset(rows, 0, bytes);
      for (int r = 0; r < kTile && tile * kTile + r < layout.n; r++) {
        const size_t at = static_cast<size_t>(r);
        const Row row = {rows + at * stride,   d + at * halves,    m + at * halves,
                         scales + at * groups, mins + at * groups, rows + at * stride,
                         factors + at * halves};
        source.read(tile * kTile + r, row);
      }
      uint8_t* to = static_cast<uint8_t*>(out) + tile * layout.tile_bytes;
      if (grouped) {
        write_integers(layout, rows, stride, to);
        if (is_coded(layout.format)) {
          write_factors(layout, factors, to);
        } else {
          write_halves(layout, d, m, to);
        }
        if (traits_of(layout.format).nested) write_scales(layout, scales, mins, to);
      } else {
        write_values(layout, rows, stride, to);
      }
    }
  });
}

}  // namespace octavo

using namespace octavo;

int64_t oct_packed_bytes(int32_t format, int32_t n, int32_t k, int32_t group) {
  Layout layout = {};
  const int32_t code = make_layout(format, n, k, group, &layout);
  if (code != OCT_OK) return code;
  return layout.is_stored() ? n * layout.stored_row_bytes : layout.num_tiles * layout.tile_bytes;
}

int32_t oct_pack(oct_pool* pool, const oct_weight* weight, const void* q, const void* scales,
                 const void* mins, void* out) {
  Layout layout = {};
  const int32_t code =
      make_layout(weight->format, weight->n, weight->k, weight->group, &layout);
  if (code != OCT_OK) return code;
  if (layout.is_stored()) return fail(OCT_ERR_ARGUMENT, "a stored weight has no packed format: give the format to pack into");
  if (!q || !out) return fail(OCT_ERR_ARGUMENT, "an array to pack from or into is NULL");
  const Traits traits = traits_of(layout.format);
  if (traits.nested) {
    return fail(OCT_ERR_ARGUMENT, "format %d is packed from rows of a GGUF file only",
                layout.format);
  }
  const bool has_mins = traits.has_min && !is_coded(layout.format);
  if (has_units(layout.format) && (!scales || has_mins != (mins != nullptr))) {
    return fail(OCT_ERR_ARGUMENT, "format %d is packed with %s", layout.format,
                has_mins ? "scales and mins" : "scales, and without mins");
  }
  return pack_rows(pool, *weight, PlainRows(layout, q, scales, mins), out);
}

int32_t oct_unpack(oct_pool* pool, const oct_weight* weight, float* out) {
  Layout layout = {};
  const int32_t code =
      make_layout(weight->format, weight->n, weight->k, weight->group, &layout);
  if (code != OCT_OK) return code;
  if (!weight->data || !out) return fail(OCT_ERR_ARGUMENT, "an array to unpack from or into is NULL");
  return run(pool, [&](const Worker& worker) {
    const Range mine = share(weight->n, worker.rank, worker.size);
    for (int row = mine.begin; row < mine.end; row++) {
      unpack_row(*weight, row, out + static_cast<int64_t>(row) * weight->k);
    }
  });
}
