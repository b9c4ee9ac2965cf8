// Rotary position embeddings: pairs of numbers, rotated by angles that depend on the position.
#pragma once

#include <cstdint>

#include "simd.h"

namespace octavo {

// Rotate the pairs (x[i], x[i + half]) by angles with the given cosines and sines.
inline void turn_halves(const float* cos, const float* sin, int half, float* x) {
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    const simd::F32 c = simd::load_first(cos + i, n), s = simd::load_first(sin + i, n);
    const simd::F32 a = simd::load_first(x + i, n), b = simd::load_first(x + half + i, n);
    simd::store_first(x + i, simd::sub(simd::mul(a, c), simd::mul(b, s)), n);
    simd::store_first(x + half + i, simd::add(simd::mul(b, c), simd::mul(a, s)), n);
  }
}

// The same for pairs (x[2i], x[2i + 1]).
inline void turn_neighbours(const float* cos, const float* sin, int half, float* x) {
  for (int i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// The first `rotary_dim` numbers of x, of a row at `position`; the table is that of
// oct_attention_args.
inline void turn(const float* cos_sin, int position, int rotary_dim, bool interleaved, float* x) {
  const int half = rotary_dim / 2;
  const float* cos = cos_sin + int64_t{position} * rotary_dim;
  if (interleaved) {
    turn_neighbours(cos, cos + half, half, x);
  } else {
    turn_halves(cos, cos + half, half, x);
  }
}

}  // namespace octavo
