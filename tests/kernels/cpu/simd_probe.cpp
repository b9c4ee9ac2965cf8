// Applies every function of csrc/simd.h to inputs from stdin: test_simd.py compiles this once per
// instruction set, and compares what comes out.
//
//   simd_probe primitives   records "name bytes\n" and then the bytes, for each function
//   simd_probe exp          (or silu, tanh, erf) float32 after float32, to the end of the input
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "simd.h"

using namespace octavo::simd;

namespace {

std::map<std::string, std::string> results;

void put(const char* name, F32 x) {
  float lanes[16];
  store(lanes, x);
  results[name].append(reinterpret_cast<const char*>(lanes), sizeof lanes);
}
void put(const char* name, I32 x) {
  int32_t lanes[16];
  store(lanes, x);
  results[name].append(reinterpret_cast<const char*>(lanes), sizeof lanes);
}
template <class T>
void put_raw(const char* name, const T& x) {
  results[name].append(reinterpret_cast<const char*>(&x), sizeof x);
}
void put(const char* name, Mask m) { put(name, select(m, set1(1), zero_i())); }

// 4 bytes each of 16 outputs and 4 more, times 8 bytes of each of two rows; two bfloat16 and two more,
// times 4. Where there are products of two rows, by these; else row by row.
void apply_to_two_rows(const U8 (&w)[2], const BF16 (&pairs)[2], const uint8_t (&x)[2][8]) {
  F32 bytes[2], bf16[2];
  bool same = true;
#if defined(OCT_TWO_ROWS)
  const TwoRows rows = load_two_rows(x[0], x[1]);
  const I32 low = dot8(set2(5, 7), zip<0>(w[0], w[1]), rows);
  const I32 high = dot8(set2(5, 7), zip<1>(w[0], w[1]), rows);
  const F32 scaled[2] = {mul(to_float(low), set2(2.0f, 3.0f)), mul(to_float(high), set2(2.0f, 3.0f))};
  bytes[0] = unzip<0>(scaled[0], scaled[1]);
  bytes[1] = unzip<1>(scaled[0], scaled[1]);
  const F32 sums[2] = {dot4(zero(), zip<0>(pairs[0], pairs[1]), rows),
                       dot4(zero(), zip<1>(pairs[0], pairs[1]), rows)};
  bf16[0] = unzip<0>(sums[0], sums[1]);
  bf16[1] = unzip<1>(sums[0], sums[1]);
  for (int r = 0; r < 2; r++) {
    float both[2][16];
    store(both[0], bf16[r]);
    store(both[1], dot2(dot2(zero(), pairs[0], set1_pair(x[r])), pairs[1], set1_pair(x[r] + 4)));
    same = same && std::memcmp(both[0], both[1], sizeof both[0]) == 0;
  }
#else
  (void)bf16, (void)pairs;
  for (int r = 0; r < 2; r++) {
    const auto quad = [&](int i) { return set1_quad(reinterpret_cast<const int8_t*>(x[r]) + i); };
    const I32 sum = dot4(dot4(set1(5 + 2 * r), w[0], quad(0)), w[1], quad(4));
    bytes[r] = mul(to_float(sum), set1(2.0f + static_cast<float>(r)));
  }
#endif
  put("two_rows_first", bytes[0]);
  put("two_rows_second", bytes[1]);
  put_raw("two_rows_of_bf16", same);
}

struct Input {
  float a[16], b[16], c[16];  // anything
  float finite[16], integral[16];
  int32_t i[16], j[16], exponent[16];
  uint8_t bytes[64];
  int8_t quad[4];
  uint16_t pairs[32], other_pairs[32];
  int32_t n;
};

void apply(const Input& in) {
  const F32 a = load(in.a), b = load(in.b), c = load(in.c);
  put("load", a);
  put("zero", zero());
  put("set1", set1(in.a[0]));
  put("first", first(in.n));
  put("load_first", load_first(in.a, in.n));
  float partly[16];
  store(partly, b);
  store_first(partly, a, in.n);
  put_raw("store_first", partly);
  put("add", add(a, b));
  put("sub", sub(a, b));
  put("mul", mul(a, b));
  put("div", div(a, b));
  put("fma", fma(a, b, c));
  put("max", max(a, b));
  put("min", min(a, b));
  put("abs", abs(a));
  put("less", less(a, b));
  put("is_nan", is_nan(a));
  put("select", select(less(a, b), a, c));
  put_raw("any", any(less(a, b)));
  put_raw("sum", sum(a));
  put_raw("max_of", max_of(load(in.finite)));

  const I32 i = load(in.i), j = load(in.j);
  put("zero_i", zero_i());
  put("set1_i", set1(in.i[0]));
  put("add_i", add(i, j));
  put("sub_i", sub(i, j));
  put("select_i", select(less(a, b), i, j));
  put("shift_right_1", shift_right<1>(i));
  put("shift_right_7", shift_right<7>(i));
  put("to_float", to_float(i));
  put("to_int", to_int(load(in.integral)));
  put("power_of_two", power_of_two(load(in.exponent)));
  put("load_u8", load_u8(in.bytes));
  put("load_s8", load_s8(in.bytes));
  put("bits_of", bits_of(i, 0x5a));
  int8_t bytes[16];
  store_s8(bytes, i);
  put_raw("store_s8", bytes);

  put("load_f16", load_f16(in.pairs));
  put("load_bf16", load_bf16(in.pairs));
  uint16_t halves[16], one_by_one[16];
  store_bf16(halves, a);
  for (int lane = 0; lane < 16; lane++) one_by_one[lane] = to_bf16(in.a[lane]);
  put_raw("store_bf16", halves);
  put_raw("to_bf16", one_by_one);
  put_raw("from_bf16", from_bf16(in.pairs[0]));
  const BF16 x = load_pairs(in.pairs), y = load_pairs(in.other_pairs);
  put("even", even(x));
  put("odd", odd(x));
  put("set1_pair", even(set1_pair(in.pairs)));
  put("dot2", dot2(a, x, y));

  const U8 w = load_bytes(in.bytes);
  const I32 quad = set1_quad(in.quad);
  put("set1_quad", quad);
  put("dot4", dot4(i, bits_of(w, 127), quad));
  put("low_nibbles", dot4(i, low_nibbles(w), quad));
  put("high_nibbles", dot4(i, high_nibbles(w), quad));
  put("shifted_right", dot4(i, bits_of(shifted<3>(w), 0x1f), quad));
  put("shifted_left", dot4(i, bits_of(shifted<-3>(w), 0x78), quad));
  put("with_bits_of", dot4(i, with_bits_of(low_nibbles(w), shifted<2>(w), 0x30), quad));
  put("look_up", dot4(i, bits_of(look_up(in.bytes, low_nibbles(w)), 127), quad));
  auto sum = begin_nibbles(i);
  for (int step = 0; step < 8; step++) sum = add_nibbles(sum, low_nibbles(w), quad);
  put("add_nibbles", end_nibbles(i, sum));
  const U8 upper = bits_of(shifted<2>(w), 63);
  put("dot4_twice", dot4_twice(i, bits_of(w, 63), quad, upper, quad));
  const int sum_of_quad = in.quad[0] + in.quad[1] + in.quad[2] + in.quad[3];
  put("centred", dot4_centred(set1(centre(sum_of_quad)), w, quad));

  const U8 next = load_bytes(in.pairs);
  uint8_t rows[2][8];
  std::memcpy(rows, in.other_pairs, sizeof rows);
  apply_to_two_rows({bits_of(w, 127), bits_of(next, 127)}, {x, load_pairs(in.bytes)}, rows);

  put("exp", exp(a));
  put("silu", silu(a));
  put("tanh", tanh(a));
  put("erf", erf(a));
  put("gelu_tanh", gelu_tanh(a));
  put("gelu_erf", gelu_erf(a));
}

template <class F>
void map(F f) {
  float lanes[16];
  while (std::fread(lanes, sizeof lanes, 1, stdin) == 1) {
    store(lanes, f(load(lanes)));
    std::fwrite(lanes, sizeof lanes, 1, stdout);
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string what = arguments[1];
  if (what == "exp") map([](F32 x) { return exp(x); });
  if (what == "silu") map([](F32 x) { return silu(x); });
  if (what == "tanh") map([](F32 x) { return tanh(x); });
  if (what == "erf") map([](F32 x) { return erf(x); });
  if (what != "primitives") return 0;
  prefetch(arguments);
  pause();
  Input input;
  while (std::fread(&input, sizeof input, 1, stdin) == 1) apply(input);
  for (const auto& [name, bytes] : results) {
    std::printf("%s %zu\n", name.c_str(), bytes.size());
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  }
}
