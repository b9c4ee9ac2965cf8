// Latent attention: one vector of a token gives the keys and values of all heads.
//
//     a row of the cache     c[rank] | k[rope]           of one token, in all heads
//     key of head h          U[h] c, k                   U [nope, rank], V [value, rank]: kv_b
//     value of head h        V[h] c
//
// A query q = (n, r) and the key (U c, k) have the score n U c + r k = (U^T n) c + r k. So queries
// are mapped to the space of the rows, once, instead of the keys to that of the queries, for every
// token that they see; and of rows weighted by scores, V makes the output at the end:
//
//     a = (U^T n, r)     scores = a (c, k)     output = V (weights c)
//
// All heads read the same rows, and read them once. Lanes are heads, 16 of one token to a *vector*:
//
//     queries   [token][vector][rank + rope][16 heads]     a row's numbers go to all lanes
//     sums      [token][vector][rank][16 heads]
//
// where a product takes pairs of numbers, [(rank + rope) / 2][16 heads][2]: see kv_formats.h.
//
// so that a vector stands at one position, sees the first n rows of a tile, and no others are
// touched. As in attention.h, tiles of 64 rows and splits of 256 lie at absolute positions, sums of
// a lane go from the first row to the last, and splits are merged in their order: nothing but a
// sequence itself makes a difference to its results.
#pragma once

#include "attention.h"

namespace octavo {

constexpr int kHeads = 16;          // of a vector
constexpr int kMaxLatent = 1 << 12;  // numbers of a row

inline int latent_width(const oct_latent_args& args) { return args.rank + args.rope_dim; }
inline int num_vectors(const oct_latent_args& args) {
  return (args.num_heads + kHeads - 1) / kHeads;
}

// Numbers of a row, and of an output of V, as their weights have them: the rest are zeros.
inline int padded(int n) { return (n + 15) / 16 * 16; }

// Of so many numbers, the terms of a product: the last one is filled up with zeros.
template <class Product>
constexpr int num_terms(int numbers) {
  return (numbers + Product::kDepth - 1) / Product::kDepth;
}
template <class Product>
constexpr int filled_up(int numbers) {
  return num_terms<Product>(numbers) * Product::kDepth;
}

// Arguments for attention.h and attention_plan.h: the one row of a token has as many queries as
// there are lanes.
inline oct_attention_args as_attention(const oct_latent_args& args) {
  oct_attention_args same{};
  same.num_heads = num_vectors(args) * kHeads;
  same.num_kv_heads = 1;
  same.num_blocks = args.num_blocks;
  same.group = args.group;
  return same;
}

// The rows of one sequence: a block has them one after the other.
class LatentRows {
 public:
  LatentRows(const oct_latent_args& args, const oct_sequences& seqs, int seq, int64_t row_bytes)
      : row_bytes_(row_bytes),
        block_size_(seqs.block_size),
        block_bytes_(args.kv_block_bytes),
        first_(static_cast<uint8_t*>(args.kv)),
        blocks_(block_table(as_attention(args), seqs, seq)) {}

  uint8_t* row(int slot) const {
    return first_ + blocks_[slot / block_size_] * block_bytes_ + slot % block_size_ * row_bytes_;
  }

 private:
  int64_t row_bytes_;
  int block_size_;
  int64_t block_bytes_;
  uint8_t* first_;
  const int32_t* blocks_;
};

}  // namespace octavo
