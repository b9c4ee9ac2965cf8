// The Hadamard rotation of keys, and of the queries that they are multiplied by.
//
// A few dimensions of a model's keys are many times as large as the others, and one scale for all
// leaves these little. So keys are rotated before they are stored, by a Hadamard matrix, which
// spreads each dimension evenly over all; queries are rotated alike, and their products stay
// unchanged.
#pragma once

#include "simd.h"

namespace octavo {

// A Hadamard matrix of 16: signs by the number of ones that the bits of row and column share.
struct HadamardSigns {
  float of[16][16];
  constexpr HadamardSigns() : of() {
    for (int i = 0; i < 16; i++) {
      for (int j = 0; j < 16; j++) {
        const int both = i & j, ones = both ^ both >> 1 ^ both >> 2 ^ both >> 3;
        of[i][j] = ones & 1 ? -1.0f : 1.0f;
      }
    }
  }
};
alignas(64) inline constexpr HadamardSigns kHadamardSigns;

// Dimensions that are rotated together: the largest power of two that divides those of a head.
inline int rotated_together(int dim) { return dim & -dim; }

// In place and not normalized: applied twice, it multiplies x by rotated_together(dim).
inline void rotate(float* x, int dim) {
  for (int d = 0; d < dim; d += 16) {
    simd::F32 sum = simd::zero();
    for (int i = 0; i < 16; i++) {
      sum = simd::fma(simd::set1(x[d + i]), simd::load(kHadamardSigns.of[i]), sum);
    }
    simd::store(x + d, sum);
  }
  for (int apart = 16; apart < rotated_together(dim); apart *= 2) {
    for (int d = 0; d < dim; d += 16) {
      if (d & apart) continue;
      const simd::F32 a = simd::load(x + d), b = simd::load(x + d + apart);
      simd::store(x + d, simd::add(a, b));
      simd::store(x + d + apart, simd::sub(a, b));
    }
  }
}

// A query times `factor`, rotated as keys are. Query and key are rotated without the factor that
// would keep their lengths: here are both, a power of two.
inline void rotate_query(const float* query, simd::F32 factor, int dim, float* out) {
  const float both = 1.0f / static_cast<float>(rotated_together(dim));
  const simd::F32 scale = simd::mul(factor, simd::set1(both));
  for (int d = 0; d < dim; d += 16) {
    simd::store(out + d, simd::mul(simd::load(query + d), scale));
  }
  rotate(out, dim);
}

// The inverse of `rotate` for a key.
inline void rotate_back(float* key, int dim) {
  rotate(key, dim);
  const float factor = 1.0f / static_cast<float>(rotated_together(dim));
  for (int d = 0; d < dim; d++) key[d] *= factor;
}

}  // namespace octavo
