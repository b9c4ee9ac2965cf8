// Packs GGUF blocks: the same integers and scales in another order, so without any rounding.
//
// Each reader below takes one block and fills the integers and scales of its values. The
// layouts are described in octavo/quantization/gguf_formats.py.
#include <cstring>

#include "half.h"
#include "pack.h"
#include "pool.h"
#include "simd.h"

namespace octavo {
namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

// 32 nibbles: the low ones of 16 bytes, then the high ones.
void read_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < 16; i++) {
    q[i] = bytes[i] & 15;
    q[i + 16] = bytes[i] >> 4;
  }
}

// The same, with a fifth bit for each from 32 consecutive bits.
void read_five_bits(const uint8_t* bits, const uint8_t* bytes, uint8_t* q) {
  read_nibbles(bytes, q);
  for (int i = 0; i < 32; i++) {
    q[i] = static_cast<uint8_t>(q[i] | ((bits[i / 8] >> (i % 8)) & 1) << 4);
  }
}

void read_q4_0(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  read_nibbles(from + 2, to.q);
}

void read_q4_1(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  to.m[0] = half_at(from + 2);
  read_nibbles(from + 4, to.q);
}

void read_q5_0(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  read_five_bits(from + 2, from + 6, to.q);
}

void read_q5_1(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  to.m[0] = half_at(from + 2);
  read_five_bits(from + 4, from + 8, to.q);
}

void read_q8_0(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  for (int i = 0; i < 32; i++) to.q[i] = from[2 + i] ^ 0x80;  // int8 + 128
}

void read_iq4_nl(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  read_nibbles(from + 2, to.q);
}

// Of K-quants, whose integers come in runs of 32: those of a run have their bits at one place of 32
// bytes, and the upper ones of them at another. (A loop for each run, as compilers make vectors of it.)
void read_run(const uint8_t* bytes, int shift, int mask, uint8_t* q) {
  for (int i = 0; i < 32; i++) q[i] = static_cast<uint8_t>((bytes[i] >> shift) & mask);
}
void add_run(const uint8_t* bytes, int shift, int mask, int place, uint8_t* q) {
  for (int i = 0; i < 32; i++) {
    q[i] = static_cast<uint8_t>(q[i] | ((bytes[i] >> shift) & mask) << place);
  }
}

// A float16 with the other sign: mins of K-quants are subtracted.
uint16_t negative(uint16_t half) { return half ^ 0x8000; }

void read_q2_k(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from + 80);
  to.m[0] = negative(half_at(from + 82));
  for (int g = 0; g < 16; g++) {
    to.scales[g] = static_cast<int8_t>(from[g] & 15);
    to.mins[g] = static_cast<int8_t>(from[g] >> 4);
  }
  for (int r = 0; r < 8; r++) read_run(from + 16 + r / 4 * 32, r % 4 * 2, 3, to.q + 32 * r);
}

void read_q3_k(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from + 108);
  for (int g = 0; g < 16; g++) {
    const int low = (from[96 + g % 8] >> (g / 8 * 4)) & 15;
    const int high = (from[104 + g % 4] >> (g / 4 * 2)) & 3;
    to.scales[g] = static_cast<int8_t>((low | high << 4) - 32);
  }
  for (int r = 0; r < 8; r++) {
    read_run(from + 32 + r / 4 * 32, r % 4 * 2, 3, to.q + 32 * r);
    add_run(from, r, 1, 2, to.q + 32 * r);
  }
}

// Scales and mins of the 8 groups of Q4_K and Q5_K, six bits each.
void read_k_scales(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  to.m[0] = negative(half_at(from + 2));
  const uint8_t* packed = from + 4;
  for (int g = 0; g < 8; g++) {
    int s, t;
    if (g < 4) {
      s = packed[g] & 63;
      t = packed[g + 4] & 63;
    } else {
      s = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
      t = (packed[g + 4] >> 4) | (packed[g] >> 6) << 4;
    }
    to.scales[g] = static_cast<int8_t>(s);
    to.mins[g] = static_cast<int8_t>(t);
  }
}

void read_q4_k(const uint8_t* from, const Row& to) {
  read_k_scales(from, to);
  for (int r = 0; r < 8; r++) read_run(from + 16 + r / 2 * 32, r % 2 * 4, 15, to.q + 32 * r);
}

void read_q5_k(const uint8_t* from, const Row& to) {
  read_k_scales(from, to);
  for (int r = 0; r < 8; r++) {
    read_run(from + 48 + r / 2 * 32, r % 2 * 4, 15, to.q + 32 * r);
    add_run(from + 16, r, 1, 4, to.q + 32 * r);
  }
}

void read_q6_k(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from + 208);
  for (int g = 0; g < 16; g++) to.scales[g] = static_cast<int8_t>(from[192 + g]);
  for (int r = 0; r < 8; r++) {
    read_run(from + r / 4 * 64 + r % 2 * 32, r % 4 / 2 * 4, 15, to.q + 32 * r);
    add_run(from + 128 + r / 4 * 32, r % 4 * 2, 3, 4, to.q + 32 * r);
  }
}

void read_iq4_xs(const uint8_t* from, const Row& to) {
  to.d[0] = half_at(from);
  const int high_bits = half_at(from + 2);
  for (int g = 0; g < 8; g++) {
    const int low = (from[4 + g / 2] >> (g % 2 * 4)) & 15, high = (high_bits >> (2 * g)) & 3;
    to.scales[g] = static_cast<int8_t>((low | high << 4) - 32);
    read_nibbles(from + 8 + 16 * g, to.q + 32 * g);
  }
}

struct Type {
  int32_t id;
  const char* name;
  int32_t values, bytes;  // of a block
  int32_t format, group;  // what it becomes
  void (*read)(const uint8_t*, const Row&);
};

constexpr Type kTypes[] = {
    {0, "F32", 1, 4, OCT_F32, 0, nullptr},
    {1, "F16", 1, 2, OCT_F16, 0, nullptr},
    {2, "Q4_0", 32, 18, OCT_W4S, 32, read_q4_0},
    {3, "Q4_1", 32, 20, OCT_W4A, 32, read_q4_1},
    {6, "Q5_0", 32, 22, OCT_W5S, 32, read_q5_0},
    {7, "Q5_1", 32, 24, OCT_W5A, 32, read_q5_1},
    {8, "Q8_0", 32, 34, OCT_W8S, 32, read_q8_0},
    {10, "Q2_K", 256, 84, OCT_K2A, 16, read_q2_k},
    {11, "Q3_K", 256, 110, OCT_K3S, 16, read_q3_k},
    {12, "Q4_K", 256, 144, OCT_K4A, 32, read_q4_k},
    {13, "Q5_K", 256, 176, OCT_K5A, 32, read_q5_k},
    {14, "Q6_K", 256, 210, OCT_K6S, 16, read_q6_k},
    {20, "IQ4_NL", 32, 18, OCT_W4N, 32, read_iq4_nl},
    {23, "IQ4_XS", 256, 136, OCT_K4N, 32, read_iq4_xs},
    {30, "BF16", 1, 2, OCT_BF16, 0, nullptr},
};

const Type* find_type(int32_t id) {
  for (const Type& type : kTypes) {
    if (type.id == id) return &type;
  }
  fail(OCT_ERR_ARGUMENT, "there is no packed format for GGUF type %d", id);
  return nullptr;
}

int32_t fail_values(const Type& type, int32_t k) {
  return fail(OCT_ERR_ARGUMENT, "rows of %s hold a multiple of %d values, not %d", type.name,
              type.values, k);
}

struct GgufRows : RowSource {
  const Type& type;
  const uint8_t* rows;
  int32_t blocks;  // of a row

  GgufRows(const Type& t, const void* data, int32_t k)
      : type(t), rows(static_cast<const uint8_t*>(data)), blocks(k / t.values) {}

  void read(int32_t row, const Row& into) const override {
    const uint8_t* from = rows + static_cast<int64_t>(row) * blocks * type.bytes;
    if (type.group == 0) {  // floats, which are packed as they are
      std::memcpy(into.values, from, static_cast<size_t>(blocks) * type.bytes);
      return;
    }
    const int groups = type.values / type.group;
    Row block = into;
    for (int32_t b = 0; b < blocks; b++, from += type.bytes) {
      type.read(from, block);
      block.q += type.values;
      block.d += 1;  // blocks have one pair of float16 scales each
      block.m += 1;
      block.scales += groups;
      block.mins += groups;
    }
  }
};

// A block of integers, as floats: read as for packing, so that it is the same numbers.
void unpack_block(const Type& type, const uint8_t* from, float* out) {
  const Traits traits = traits_of(type.format);
  uint8_t q[kBlock];
  uint16_t d, m = 0;
  int8_t scales[kBlock / 16] = {}, mins[kBlock / 16] = {};
  type.read(from, {q, &d, &m, scales, mins, nullptr});
  for (int g = 0; g < type.values / type.group; g++) {
    const Step step = Step::make(traits, d, m, scales[g], mins[g]);
    for (int i = g * type.group; i < (g + 1) * type.group; i++) out[i] = step.value(traits, q[i]);
  }
}

void unpack_floats(int format, const uint8_t* from, int count, float* out) {
  if (format == OCT_F32) {
    std::memcpy(out, from, static_cast<size_t>(count) * 4);
    return;
  }
  for (int i = 0; i < count; i++) {
    const uint16_t value = half_at(from + 2 * i);
    out[i] = format == OCT_F16 ? from_half(value) : simd::from_bf16(value);
  }
}

}  // namespace

int32_t make_stored_layout(int32_t ggml_type, int32_t n, int32_t k, Layout* layout) {
  const Type* type = find_type(ggml_type);
  if (type == nullptr) return OCT_ERR_ARGUMENT;
  const int32_t code = make_layout(type->format, n, k, type->group, layout);
  if (code != OCT_OK) return code;
  if (k % type->values != 0) return fail_values(*type, k);
  layout->stored_row_bytes = int64_t{k / type->values} * type->bytes;
  return OCT_OK;
}

void unpack_stored_row(const oct_weight& weight, int32_t row, float* out) {
  const Type& type = *find_type(weight.format - OCT_STORED);
  const int blocks = weight.k / type.values;
  const uint8_t* from =
      static_cast<const uint8_t*>(weight.data) + int64_t{row} * blocks * type.bytes;
  if (type.group == 0) return unpack_floats(type.format, from, weight.k, out);
  for (int b = 0; b < blocks; b++) {
    unpack_block(type, from + int64_t{b} * type.bytes, out + int64_t{b} * type.values);
  }
}

}  // namespace octavo

using namespace octavo;

int32_t oct_gguf_format(int32_t ggml_type, int32_t* format, int32_t* group) {
  const Type* type = find_type(ggml_type);
  if (type == nullptr) return OCT_ERR_ARGUMENT;
  *format = type->format;
  *group = type->group;
  return OCT_OK;
}

int32_t oct_pack_gguf(oct_pool* pool, const oct_weight* weight, int32_t ggml_type, const void* rows,
                      void* out) {
  const Type* type = find_type(ggml_type);
  if (type == nullptr) return OCT_ERR_ARGUMENT;
  Layout layout = {};
  const int32_t code = make_layout(weight->format, weight->n, weight->k, weight->group, &layout);
  if (code != OCT_OK) return code;
  if (weight->format != type->format || weight->group != type->group) {
    return fail(OCT_ERR_ARGUMENT, "%s becomes format %d with groups of %d, not %d with %d",
                type->name, type->format, type->group, weight->format, weight->group);
  }
  if (weight->k % type->values != 0) return fail_values(*type, weight->k);
  if (!rows || !out) return fail(OCT_ERR_ARGUMENT, "an array to pack from or into is NULL");
  return pack_rows(pool, *weight, GgufRows(*type, rows, weight->k), out);
}
