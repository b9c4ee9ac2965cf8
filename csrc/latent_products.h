// Products with the matrices of heads: of queries with U, of attended latents with V.
//
// A matrix lies input by input, or pair of inputs by pair, so that 16 outputs are a vector; an
// output is summed up from the first input to the last.
#pragma once

#include "attention_tile.h"
#include "latent.h"

namespace octavo {

// How U and V are kept: products of kv_formats.h, whose lanes are outputs and whose factors are
// inputs. kLine is the bytes of 16 lanes. Inputs of bfloat16 are rounded, as in linear_float.cpp.
struct F32Matrix : F32Product {
  static constexpr int kLine = 64;
};
struct F16Matrix : WideProduct {
  static constexpr int kLine = 32;
  template <int>
  static OCT_INLINE Lanes lanes(const uint8_t* line) {
    return simd::load_f16(reinterpret_cast<const uint16_t*>(line));
  }
};
struct Bf16Matrix : PairedBf16Product {
  static constexpr int kLine = 64;
};

// Calls `use` with an object of the type of a format; false if there are no such matrices.
template <class Use>
bool with_matrices(int32_t format, const Use& use) {
  switch (format) {
    case OCT_F32: return use(F32Matrix()), true;
    case OCT_F16: return use(F16Matrix()), true;
    case OCT_BF16: return use(Bf16Matrix()), true;
  }
  return false;
}

// Inputs of tokens: factors of a matrix, the last term filled up with zeros.
template <class Matrix>
struct Inputs {
  const typename Matrix::Factor* first;
  int64_t stride;  // from token to token
  int num_terms;
};

constexpr int kPiece = 64;  // outputs

inline int num_pieces(int outputs) { return (padded(outputs) + kPiece - 1) / kPiece; }

// A part of the products of some tokens with all matrices.
struct ProductUnit {
  int first_token, end_token;
  int first_head, end_head;
  int first_piece, end_piece;  // of the outputs of a head
};

// Many tokens are cut into blocks, and heads into vectors, so that what their heads leave side by
// side stays in the L2 cache. With few there would be too little to do: these go together through
// each piece of each head, and each matrix is read once.
class ProductUnits {
 public:
  ProductUnits(int num_tokens, int num_heads, int num_pieces, int num_workers)
      : tokens_(num_tokens), heads_(num_heads), pieces_(num_pieces) {
    const int blocks = (num_tokens + kBlock - 1) / kBlock;
    vectors_ = (num_heads + kHeads - 1) / kHeads;
    by_blocks_ = blocks * vectors_ >= kUnitsPerWorker * num_workers;
    count_ = by_blocks_ ? blocks * vectors_ : num_heads * num_pieces;
  }
  int count() const { return count_; }
  ProductUnit operator[](int index) const {
    if (!by_blocks_) {
      const int head = index / pieces_, piece = index % pieces_;
      return {0, tokens_, head, head + 1, piece, piece + 1};
    }
    const int token = index / vectors_ * kBlock, head = index % vectors_ * kHeads;
    return {token, std::min(token + kBlock, tokens_), head, std::min(head + kHeads, heads_),
            0,     pieces_};
  }

 private:
  static constexpr int kBlock = 32, kUnitsPerWorker = 4;

  int tokens_, heads_, pieces_, vectors_, count_;
  bool by_blocks_;
};
template <class Matrix>
int64_t row_bytes(int outputs) {
  return int64_t{padded(outputs)} / 16 * Matrix::kLine;
}
template <class Matrix>
int64_t matrix_bytes(int inputs, int outputs) {
  return num_terms<Matrix>(inputs) * row_bytes<Matrix>(outputs);
}

// Outputs 16 * C from `lines` on, of T tokens: `put(token, vector, sums)`.
template <class Matrix, int T, int C, class Put>
OCT_INLINE void multiply_inputs(const Inputs<Matrix>& inputs, int token, const uint8_t* lines,
                                int64_t row, const Put& put) {
  simd::F32 sums[T][C];
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[t][c] = simd::zero();
  }
  const int64_t stride = inputs.stride;
  const typename Matrix::Factor* of = inputs.first + token * stride;
  for (int i = 0; i < inputs.num_terms; i++, lines += row, of += Matrix::kDepth) {
    typename Matrix::Lanes weight[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) weight[c] = Matrix::template lanes<0>(lines + c * Matrix::kLine);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        sums[t][c] = Matrix::multiply_add(sums[t][c], weight[c], of + t * stride);
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) put(token + t, c, sums[t][c]);
  }
}

// A piece of the outputs of a head's matrix, for all tokens: `put(token, first output, 16 sums)`.
template <class Matrix, class Put>
void multiply_piece(const Inputs<Matrix>& inputs, int num_tokens, const uint8_t* matrix,
                    int outputs, int piece, const Put& put) {
  constexpr int kTokens = kManyRegisters ? 4 : 1;
  const int first = piece * kPiece, vectors = std::min(padded(outputs) - first, kPiece) / 16;
  const int64_t row = row_bytes<Matrix>(outputs);
  in_steps<kTokens>(0, num_tokens, [&](auto tokens, int token) {
    in_steps<4>(0, vectors, [&](auto columns, int vector) {
      const int from = first + 16 * vector;
      multiply_inputs<Matrix, tokens.value, columns.value>(
          inputs, token, matrix + from / 16 * Matrix::kLine, row,
          [&](int t, int c, simd::F32 sums) { put(t, from + 16 * c, sums); });
    });
  });
}

}  // namespace octavo
