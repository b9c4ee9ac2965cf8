// Functions that sampling and log-probabilities share: passes over a row, and weights of tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace octavo {
namespace sampling {

using simd::F32;
using simd::I32;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int kMaxVocab = (1 << 19) - 1;  // the sum of so many weights is less than 2^63
constexpr float kWeightOne = 0x1p44f;     // weight of the most likely token
constexpr float kFarthest = 30.5f;        // from here on, weights are 0: 44 ln 2 is 30.499

constexpr int kBlock = 512;  // tokens that are worked on at a time

// Of a worker's scratch: for what is done with a row, one thing after the other.
constexpr int kScratchSlot = 6;

// Calls f(i, vector of x[i .. i + 16], number of them that exist); the others read as `padding`.
template <class F>
OCT_INLINE void by_sixteen(const float* x, int n, float padding, F&& f) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f(i, simd::load(x + i), 16);
  if (i == n) return;
  float rest[16];
  std::fill_n(rest, 16, padding);
  std::memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(float));
  f(i, simd::load(rest), n - i);
}

// The greatest of a row; NaN if there is one in it.
inline float maximum(const float* x, int n) {
  F32 peak[4], nan = simd::zero();
  for (F32& p : peak) p = simd::set1(-kInfinity);
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; j++) {
      const F32 v = simd::load(x + i + 16 * j);
      peak[j] = simd::max(peak[j], v);
      nan = simd::select(simd::is_nan(v), v, nan);
    }
  }
  by_sixteen(x + i, n - i, -kInfinity, [&](int, F32 v, int) {
    peak[0] = simd::max(peak[0], v);
    nan = simd::select(simd::is_nan(v), v, nan);
  });
  if (simd::any(simd::is_nan(nan))) return std::numeric_limits<float>::quiet_NaN();
  return simd::max_of(simd::max(simd::max(peak[0], peak[1]), simd::max(peak[2], peak[3])));
}

// Weights, as floats that are integers once cut off.
struct Likelihood {
  static OCT_INLINE F32 of(F32 distance) {
    // The bound changes no integer, and spares exp() subnormal numbers, which are slow.
    const F32 bounded = simd::min(simd::set1(kFarthest), distance);
    return simd::mul(simd::exp(simd::sub(simd::zero(), bounded)), simd::set1(kWeightOne));
  }
};

}  // namespace sampling
}  // namespace octavo
