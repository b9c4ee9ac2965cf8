// Matrices into tiles (pack.h), and back.
#include "pack.h"

#include <cstring>

#include "half.h"
#include "pool.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int kSlot = 0;  // of scratch: the rows of a tile

// Where input k of a tile's output 0 is, in bytes from the start of the group.
int64_t byte_of(int format, int k) {
  if (is_nibbles(format)) return k / 8 * kLine + k % 4;
  return k / 4 * kLine + k % 4;
}

void write_integers(const Layout& layout, const uint8_t* rows, uint8_t* tile) {
  const bool nibbles = is_nibbles(layout.format);
  for (int g = 0; g < layout.num_groups; g++) {
    uint8_t* line = tile + layout.quants(g);
    const uint8_t* group = rows + static_cast<int64_t>(g) * layout.group;
    for (int k = 0; k < layout.group; k += nibbles ? 8 : 4, line += kLine) {
      for (int column = 0; column < kTile; column++) {
        const uint8_t* q = group + static_cast<int64_t>(column) * layout.padded_k + k;
        uint8_t* to = line + column * 4;
        for (int i = 0; i < 4; i++) {
          to[i] = nibbles ? static_cast<uint8_t>((q[i] & 15) | (q[i + 4] << 4)) : q[i];
        }
      }
    }
  }
}

void write_scales(const Layout& layout, const uint16_t* d, const uint16_t* m, uint8_t* tile) {
  for (int g = 0; g < layout.num_groups; g++) {
    uint16_t line[2 * kTile] = {};
    for (int column = 0; column < kTile; column++) {
      const int64_t at = static_cast<int64_t>(column) * layout.num_groups + g;
      line[column] = d[at];
      line[kTile + column] = has_min(layout.format) ? m[at] : 0;
    }
    // Of two symmetric groups the second overwrites the zeros behind the scales of the first.
    std::memcpy(tile + layout.scales(g), line, g % 2 == 1 && !has_min(layout.format) ? 32 : 64);
  }
}

void write_values(const Layout& layout, const uint8_t* rows, uint8_t* tile) {
  const int64_t row_bytes = layout.tile_bytes / kTile;
  for (int64_t at = 0; at < row_bytes; at += 4, tile += kLine) {
    for (int column = 0; column < kTile; column++) {
      std::memcpy(tile + column * 4, rows + column * row_bytes + at, 4);
    }
  }
}

// A row as oct_pack is handed it.
struct PlainRows : RowSource {
  const Layout& layout;
  const uint8_t* q;
  const uint16_t *d, *m;

  PlainRows(const Layout& l, const void* integers, const uint16_t* scales, const uint16_t* mins)
      : layout(l), q(static_cast<const uint8_t*>(integers)), d(scales), m(mins) {}

  void read(int32_t row, const Row& into) const override {
    if (!is_quantized(layout.format)) {
      const size_t bytes = static_cast<size_t>(layout.k) * (layout.format == OCT_BF16 ? 2 : 4);
      std::memcpy(into.values, q + row * bytes, bytes);
      return;
    }
    const size_t groups = static_cast<size_t>(layout.num_groups) * sizeof(uint16_t);
    const int64_t first = static_cast<int64_t>(row) * layout.num_groups;
    std::memcpy(into.q, q + static_cast<int64_t>(row) * layout.k, static_cast<size_t>(layout.k));
    std::memcpy(into.d, d + first, groups);
    if (has_min(layout.format)) std::memcpy(into.m, m + first, groups);
  }
};

}  // namespace

int32_t make_layout(int32_t format, int32_t n, int32_t k, int32_t group, Layout* layout) {
  if (format < OCT_W4S || format > OCT_F32) {
    return fail(OCT_ERR_ARGUMENT, "a weight has the unknown format %d", format);
  }
  // So that no size below overflows.
  constexpr int kMost = 1 << 30;
  if (n < 1 || k < 1 || n > kMost || k > kMost) {
    return fail(OCT_ERR_ARGUMENT, "a weight is [%d, %d]: both must be 1 to 2^30", n, k);
  }
  const bool grouped = is_quantized(format);
  const bool known = grouped ? group == 32 || group == 64 || group == 128 ||
                                   (group == 16 && !is_nibbles(format))
                             : group == 0;
  if (!known) {
    return fail(OCT_ERR_ARGUMENT,
                "a weight of format %d has groups of %d: 32, 64 or 128 are possible, 16 also with "
                "8 bits, and 0 for BF16 and F32",
                format, group);
  }
  *layout = {format, n, k, group, (n + kTile - 1) / kTile, 0, 0, 0, 0};
  if (grouped) {
    layout->num_groups = (k + group - 1) / group;
    layout->padded_k = layout->num_groups * group;
    layout->group_bytes = static_cast<int64_t>(group) * kTile / (is_nibbles(format) ? 2 : 1);
    const int lines = has_min(format) ? layout->num_groups : (layout->num_groups + 1) / 2;
    layout->tile_bytes = layout->num_groups * layout->group_bytes + int64_t{lines} * kLine;
  } else {
    const int unit = format == OCT_BF16 ? 16 : 8;
    layout->padded_k = (k + unit - 1) / unit * unit;
    layout->tile_bytes = int64_t{layout->padded_k} * kTile * (format == OCT_BF16 ? 2 : 4);
  }
  return OCT_OK;
}

Layout layout_of(const oct_weight& weight) {
  Layout layout = {};
  make_layout(weight.format, weight.n, weight.k, weight.group, &layout);
  return layout;
}

void unpack_row(const oct_weight& weight, int32_t row, float* out) {
  const Layout layout = layout_of(weight);
  const int column = row % kTile;
  const uint8_t* tile =
      static_cast<const uint8_t*>(weight.data) + row / kTile * layout.tile_bytes;
  if (weight.format == OCT_F32) {
    for (int k = 0; k < weight.k; k++) std::memcpy(out + k, tile + k * kLine + column * 4, 4);
    return;
  }
  if (weight.format == OCT_BF16) {
    for (int k = 0; k < weight.k; k++) {
      uint16_t value;
      std::memcpy(&value, tile + k / 2 * kLine + column * 4 + k % 2 * 2, 2);
      out[k] = simd::from_bf16(value);
    }
    return;
  }
  const int zero = weight.format == OCT_W4S ? 8 : weight.format == OCT_W8S ? 128 : 0;
  for (int g = 0; g < layout.num_groups; g++) {
    uint16_t d, m = 0;
    std::memcpy(&d, tile + layout.scales(g) + column * 2, 2);
    if (has_min(weight.format)) std::memcpy(&m, tile + layout.scales(g) + 32 + column * 2, 2);
    const float step = from_half(d), offset = from_half(m);
    const uint8_t* quants = tile + layout.quants(g) + column * 4;
    const int first = g * weight.group;
    const int count = weight.k - first < weight.group ? weight.k - first : weight.group;
    for (int k = 0; k < count; k++) {
      int q = quants[byte_of(weight.format, k)];
      if (is_nibbles(weight.format)) q = k % 8 < 4 ? q & 15 : q >> 4;
      // The product is exact, so it does not matter whether it is fused with the addition.
      const float product = step * static_cast<float>(q - zero);
      out[first + k] = has_min(weight.format) ? product + offset : product;
    }
  }
}

int32_t pack_rows(oct_pool* pool, const oct_weight& weight, const RowSource& source, void* out) {
  const Layout layout = layout_of(weight);
  const bool grouped = is_quantized(layout.format);
  const size_t row_bytes = static_cast<size_t>(layout.padded_k) *
                           (grouped ? 1 : layout.format == OCT_BF16 ? 2 : 4);
  const size_t groups = static_cast<size_t>(layout.num_groups);
  const size_t bytes = kTile * (row_bytes + 2 * groups * sizeof(uint16_t));
  return run(pool, [&](const Worker& worker) {
    uint8_t* rows = static_cast<uint8_t*>(worker.scratch(kSlot, bytes));
    uint16_t* d = reinterpret_cast<uint16_t*>(rows + kTile * row_bytes);
    uint16_t* m = d + kTile * groups;
    const Range mine = share(layout.num_tiles, worker.rank, worker.size);
    for (int tile = mine.begin; tile < mine.end; tile++) {
      std::memset(rows, 0, bytes);
      for (int r = 0; r < kTile && tile * kTile + r < layout.n; r++) {
        const size_t at = static_cast<size_t>(r);
        const Row row = {rows + at * row_bytes, d + at * groups, m + at * groups,
                         rows + at * row_bytes};
        source.read(tile * kTile + r, row);
      }
      uint8_t* to = static_cast<uint8_t*>(out) + tile * layout.tile_bytes;
      if (grouped) {
        write_integers(layout, rows, to);
        write_scales(layout, d, m, to);
      } else {
        write_values(layout, rows, to);
      }
    }
  });
}

}  // namespace octavo

using namespace octavo;

int64_t oct_packed_bytes(int32_t format, int32_t n, int32_t k, int32_t group) {
  Layout layout = {};
  const int32_t code = make_layout(format, n, k, group, &layout);
  return code == OCT_OK ? layout.num_tiles * layout.tile_bytes : code;
}

int32_t oct_pack(oct_pool* pool, const oct_weight* weight, const void* q, const uint16_t* scales,
                 const uint16_t* mins, void* out) {
  Layout layout = {};
  const int32_t code =
      make_layout(weight->format, weight->n, weight->k, weight->group, &layout);
  if (code != OCT_OK) return code;
  if (!q || !out) return fail(OCT_ERR_ARGUMENT, "there is nothing to pack, or nowhere to");
  if (is_quantized(layout.format) && (!scales || has_min(layout.format) != (mins != nullptr))) {
    return fail(OCT_ERR_ARGUMENT,
                "format %d is packed with %s", layout.format,
                has_min(layout.format) ? "scales and mins" : "scales, and without mins");
  }
  return pack_rows(pool, *weight, PlainRows(layout, q, scales, mins), out);
}

int32_t oct_unpack(oct_pool* pool, const oct_weight* weight, float* out) {
  Layout layout = {};
  const int32_t code =
      make_layout(weight->format, weight->n, weight->k, weight->group, &layout);
  if (code != OCT_OK) return code;
  if (!weight->data || !out) return fail(OCT_ERR_ARGUMENT, "there is nothing to unpack, or nowhere to");
  return run(pool, [&](const Worker& worker) {
    const Range mine = share(weight->n, worker.rank, worker.size);
    for (int row = mine.begin; row < mine.end; row++) {
      unpack_row(*weight, row, out + static_cast<int64_t>(row) * weight->k);
    }
  });
}
