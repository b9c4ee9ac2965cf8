// Peak rates of the processor with the kernels' instructions: products from registers,
// and reads of memory in one stream per worker. Rooflines are made of both.
#include <type_traits>

#include "linear.h"

namespace octavo {
namespace {

using simd::BF16;
using simd::F32;
using simd::I32;
using simd::U8;

constexpr int kRepeats = 4;  // uses of what a round loads

// A value that a compiler can neither predict nor remove.
OCT_INLINE void touch(void* memory) { asm volatile("" : : "r"(memory) : "memory"); }
OCT_INLINE void touch_lanes(I32 x) {
  int32_t memory[kTile];
  simd::store(memory, x);
  touch(memory);
}
OCT_INLINE void touch_lanes(F32 x) {
  float memory[kTile];
  simd::store(memory, x);
  touch(memory);
}

// Weights and activations of any format. Each sum has a pair of its own, as in the kernels of
// linears: of equal sums, a compiler would make one. Quads of activations add up to 0.
struct Operands {
  alignas(kLine) uint8_t weights[kMaxTiles][kLine];
  uint8_t activations[kMaxRows][16];
};

// How a format multiplies: kInputs of each of 16 columns in one add().
template <int kFormat>
struct Product {  // 8 bits
  static constexpr int kInputs = 4;
  using Sum = I32;
  static OCT_INLINE U8 weights(const uint8_t* from) { return simd::load_bytes(from); }
  static OCT_INLINE I32 activations(const uint8_t* from) {
    return simd::set1_quad(reinterpret_cast<const int8_t*>(from));
  }
  static OCT_INLINE Sum begin() { return simd::zero_i(); }
  static OCT_INLINE Sum add(Sum sum, U8 w, I32 x) { return simd::dot4_centred(sum, w, x); }
  static OCT_INLINE void keep(Sum sum) { touch_lanes(sum); }
};

template <>
struct Product<OCT_W4S> : Product<OCT_W8S> {
  using Sum = simd::NibbleSum;
  static OCT_INLINE Sum begin() { return simd::begin_nibbles(simd::zero_i()); }
  static OCT_INLINE Sum add(Sum sum, U8 w, I32 x) { return simd::add_nibbles(sum, w, x); }
  static OCT_INLINE void keep(Sum sum) {
    touch_lanes(simd::end_nibbles(simd::zero_i(), sum));
  }
};

template <>
struct Product<OCT_F32> {
  static constexpr int kInputs = 1;
  using Sum = F32;
  static OCT_INLINE F32 weights(const uint8_t* from) {
    return simd::load(reinterpret_cast<const float*>(from));
  }
  static OCT_INLINE F32 activations(const uint8_t* from) {
    return simd::set1(static_cast<float>(from[0]));
  }
  static OCT_INLINE Sum begin() { return simd::zero(); }
  static OCT_INLINE Sum add(Sum sum, F32 w, F32 x) { return simd::fma(w, x, sum); }
  static OCT_INLINE void keep(Sum sum) { touch_lanes(sum); }
};

template <>
struct Product<OCT_BF16> {
  static constexpr int kInputs = 2;
  using Sum = F32;
  static OCT_INLINE BF16 weights(const uint8_t* from) { return simd::load_pairs(from); }
  static OCT_INLINE BF16 activations(const uint8_t* from) { return simd::set1_pair(from); }
  static OCT_INLINE Sum begin() { return simd::zero(); }
  static OCT_INLINE Sum add(Sum sum, BF16 w, BF16 x) { return simd::dot2(sum, w, x); }
  static OCT_INLINE void keep(Sum sum) { touch_lanes(sum); }
};

// The same for two rows at once: 8 outputs of both are a vector.
template <class OneRow>
struct TwoRowsProduct : OneRow {
  static constexpr int kInputs = 2 * OneRow::kInputs;
  static OCT_INLINE simd::TwoRows activations(const uint8_t* from) {
    return simd::load_two_rows(from, from + 8);
  }
  static OCT_INLINE I32 add(I32 sum, U8 w, simd::TwoRows x) { return simd::dot8(sum, w, x); }
  static OCT_INLINE F32 add(F32 sum, BF16 w, simd::TwoRows x) { return simd::dot4(sum, w, x); }
};

template <int kFormat>
int64_t multiply(int64_t rounds) {
  using One = Product<kFormat>;
  using P = std::conditional_t<simd::kTwoRows && kFormat != OCT_F32, TwoRowsProduct<One>, One>;
  Operands operands = {};
  for (auto& tile : operands.weights) {
    for (uint8_t& byte : tile) byte = 1;
  }
  for (auto& row : operands.activations) {
    for (int i = 0; i < 8; i++) row[i] = i % 2 == 0 ? 1 : 0xff;
  }
  typename P::Sum sums[kMaxRows][kMaxTiles];
#pragma GCC unroll 8
  for (auto& row : sums) {
#pragma GCC unroll 2
    for (auto& sum : row) sum = P::begin();
  }
  for (int64_t round = 0; round < rounds; round++) {
    touch(&operands);
    decltype(P::weights(nullptr)) w[kMaxTiles];
#pragma GCC unroll 2
    for (int tile = 0; tile < kMaxTiles; tile++) w[tile] = P::weights(operands.weights[tile]);
#pragma GCC unroll 8
    for (int row = 0; row < kMaxRows; row++) {
      const auto x = P::activations(operands.activations[row]);
#pragma GCC unroll 4
      for (int i = 0; i < kRepeats; i++) {
#pragma GCC unroll 2
        for (int tile = 0; tile < kMaxTiles; tile++) {
          sums[row][tile] = P::add(sums[row][tile], w[tile], x);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (auto& row : sums) {
#pragma GCC unroll 2
    for (auto& sum : row) P::keep(sum);
  }
  return rounds * kRepeats * kMaxRows * kMaxTiles * kTile * P::kInputs * 2;
}

// Whether integers are multiplied as they are: no more than 4 bits.
bool is_small(int format) {
  const Traits traits = traits_of(format);
  return traits.bits <= 4 && traits.levels == nullptr;
}

void read(const uint8_t* lines, int64_t begin, int64_t end) {
  constexpr int kAtOnce = 8;
  I32 sums[kAtOnce];
#pragma GCC unroll 8
  for (I32& sum : sums) sum = simd::zero_i();
  for (int64_t line = begin; line + kAtOnce <= end; line += kAtOnce) {
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; i++) {
      const uint8_t* at = lines + (line + i) * kLine;
      sums[i] = simd::add(sums[i], simd::load(reinterpret_cast<const int32_t*>(at)));
    }
  }
#pragma GCC unroll 8
  for (I32& sum : sums) touch_lanes(sum);
}

}  // namespace
}  // namespace octavo

int64_t oct_probe_products(oct_pool* pool, int32_t format, int64_t rounds) {
  using namespace octavo;
  int64_t (*kernel)(int64_t) = nullptr;
  switch (format) {
    case OCT_BF16: kernel = multiply<OCT_BF16>; break;
    case OCT_F16: case OCT_F32: case OCT_NF4: case OCT_FP4: case OCT_E4M3:
      kernel = multiply<OCT_F32>; break;
    default:
      if (format < 0 || format > OCT_F32) {
        return fail(OCT_ERR_ARGUMENT, "there is no weight format %d", format);
      }
      kernel = is_small(format) ? multiply<OCT_W4S> : multiply<OCT_W8S>;
  }
  if (rounds < 0) return fail(OCT_ERR_ARGUMENT, "%lld rounds", static_cast<long long>(rounds));
  int64_t operations = 0;  // written by one worker
  const int32_t code = run(pool, [&](const Worker& worker) {
    const int64_t done = kernel(rounds);
    if (worker.rank == 0) operations = done * worker.size;
  });
  return code != OCT_OK ? code : operations;
}

int32_t oct_probe_read(oct_pool* pool, const void* data, int64_t num_bytes) {
  using namespace octavo;
  if (data == nullptr || num_bytes < 0) return fail(OCT_ERR_ARGUMENT, "data is NULL, or num_bytes is negative");
  const uint8_t* lines = static_cast<const uint8_t*>(data);
  const int64_t count = num_bytes / kLine;
  return run(pool, [&](const Worker& worker) {
    read(lines, count * worker.rank / worker.size, count * (worker.rank + 1) / worker.size);
  });
}
