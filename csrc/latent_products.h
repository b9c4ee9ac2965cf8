// Products with the matrices of heads: of queries with U, of what was attended with V.
//
// A matrix lies input by input, so that 16 outputs are a vector; an output is summed up from the
// first input to the last. Work is cut by heads and by 64 outputs, all tokens to a piece, so that a
// matrix is read once.
#pragma once

#include "attention_tile.h"
#include "latent.h"

namespace octavo {

OCT_INLINE simd::F32 load_weight(const float* p) { return simd::load(p); }
OCT_INLINE simd::F32 load_weight(const uint16_t* p) { return simd::load_f16(p); }

constexpr int kPiece = 64;  // outputs

inline int num_pieces(int outputs) { return (padded(outputs) + kPiece - 1) / kPiece; }

// Outputs 16 * C from `weights` on, of T inputs: `put(token, vector, sums)`.
template <int T, int C, class Weight, class Put>
OCT_INLINE void multiply_inputs(const float* inputs, int64_t stride, int count,
                                const Weight* weights, int64_t row, const Put& put) {
  simd::F32 sums[T][C];
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[t][c] = simd::zero();
  }
  for (int i = 0; i < count; i++) {
    simd::F32 weight[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) weight[c] = load_weight(weights + i * row + 16 * c);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
      const simd::F32 x = simd::set1(inputs[t * stride + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[t][c] = simd::fma(x, weight[c], sums[t][c]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) put(t, c, sums[t][c]);
  }
}

// A piece of the outputs of a head, for all tokens: `put(token, first output, 16 sums)`.
template <class Weight, class Put>
void multiply_piece(const float* inputs, int64_t stride, int count, int num_tokens,
                    const Weight* weights, int outputs, int piece, const Put& put) {
  constexpr int kTokens = kManyRegisters ? 4 : 1;
  const int row = padded(outputs), first = piece * kPiece;
  const int vectors = std::min(row - first, kPiece) / 16;
  in_steps<kTokens>(0, num_tokens, [&](auto tokens, int token) {
    in_steps<4>(0, vectors, [&](auto columns, int vector) {
      const int from = first + 16 * vector;
      multiply_inputs<tokens.value, columns.value>(
          inputs + token * stride, stride, count, weights + from, row,
          [&](int t, int c, simd::F32 sums) { put(token + t, from + 16 * c, sums); });
    });
  });
}

}  // namespace octavo
