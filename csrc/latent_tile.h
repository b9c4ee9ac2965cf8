// Attention of some vectors of queries over the rows of a tile: two products and a softmax.
//
// A number of a row goes to all lanes, and is multiplied with 16 heads at once. Up to two vectors
// share it.
#pragma once

#include <limits>

#include "attention_tile.h"
#include "latent.h"

namespace octavo {

constexpr int kMaxVectors = kManyRegisters ? 2 : 1;  // that go through a tile together

// A score is the sum of two: of the even terms, and of the odd ones. So a processor is kept busy,
// which begins many products before the first of them has ended.
constexpr int kChains = 2;
// Rows that have sums in registers, of so many vectors: no more, since each takes an address, too.
constexpr int rows_at_once(int vectors) { return (kManyRegisters ? 8 : 2) / vectors; }
// Numbers of rows that have, of so many vectors.
constexpr int numbers_at_once(int vectors) { return (kManyRegisters ? 16 : 4) / vectors; }

// The rows of a tile, as far as they are seen, and then others, so that there are kTile of them.
template <class Product>
struct RowTile {
  using Factor = typename Product::Factor;
  static constexpr int kColumns = kTile / Product::kDepth;

  const Factor* rows[kTile];        // as scores take them: terms are of a row
  const Factor* columns[kColumns];  // as outputs do: terms are of as many rows as a product takes
  const uint8_t* next[kTile];       // stored, of the next tile, to be fetched meanwhile; or NULL
  int64_t row_bytes;

  void fetch_next(int row) const {
    if (!next[0]) return;
    for (int64_t at = 0; at < row_bytes; at += 64) fetch(next[row] + at);
  }
};

// Factors of two rows, number by number; of one, beside zeros.
inline void pair_rows(const uint16_t* __restrict a, const uint16_t* __restrict b, int count,
                      uint16_t* __restrict out) {
  for (int d = 0; d < count; d++) {
    out[2 * d] = a[d];
    out[2 * d + 1] = b[d];
  }
}
inline void pair_row(const uint16_t* __restrict row, int count, uint16_t* __restrict out) {
  for (int d = 0; d < count; d++) {
    out[2 * d] = row[d];
    out[2 * d + 1] = 0;
  }
}

// Of lanes [term][16 heads], those of a term.
template <class Product>
OCT_INLINE typename Product::Lanes lanes_at(const typename Product::Factor* lanes, int term) {
  return Product::template lanes<0>(
      reinterpret_cast<const uint8_t*>(lanes + term * kHeads * Product::kDepth));
}

// The softmax state of the heads of a vector; scores are exponents of two.
struct LaneSoftmax {
  float* top;  // [16]
  float* sum;  // [16]
  float* acc;  // [rank][16]
  int rank;

  static int64_t floats(int rank) { return int64_t{kHeads} * (rank + 2); }
  LaneSoftmax(float* memory, int rank)
      : top(memory), sum(top + kHeads), acc(sum + kHeads), rank(rank) {}

  void reset() const {
    simd::store(top, simd::set1(-std::numeric_limits<float>::max()));
    std::memset(sum, 0, sizeof(float) * kHeads * (rank + 1));
  }
  // Merge the state of a further split.
  void merge(const LaneSoftmax& other) const {
    const simd::F32 before = simd::load(top), after = simd::load(other.top);
    const simd::F32 most = simd::max(before, after);
    const simd::F32 keep = exp2(simd::sub(before, most)), take = exp2(simd::sub(after, most));
    simd::store(top, most);
    for (int i = 0; i <= rank; i++) {  // the sum, and then acc
      float* p = sum + kHeads * i;
      simd::store(p, simd::fma(simd::load(other.sum + kHeads * i), take,
                               simd::mul(simd::load(p), keep)));
    }
  }
};

// Two sums of some rows, for V vectors.
template <class Product, int V>
struct RowScores {
  static constexpr int kRows = rows_at_once(V);

  simd::F32 sums[kChains][V][kRows];
  const typename Product::Factor* rows[kRows];

  OCT_INLINE void start(const typename Product::Factor* const* first) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      rows[r] = first[r];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[0][v][r] = sums[1][v][r] = simd::zero();
    }
  }
  template <int kChain>
  OCT_INLINE void add_term(const typename Product::Factor* const (&queries)[V], int term) {
    typename Product::Lanes query[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) query[v] = lanes_at<Product>(queries[v], term);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        simd::F32& sum = sums[kChain][v][r];
        sum = Product::multiply_add(sum, query[v], rows[r] + Product::kDepth * term);
      }
    }
  }
  OCT_INLINE simd::F32 score(int v, int r) const { return simd::add(sums[0][v][r], sums[1][v][r]); }
};

// scores[v][row][16 heads] of the first rows, and of some more.
template <class Product, int V>
void score_rows(const RowTile<Product>& tile, int num_rows, int terms,
                const typename Product::Factor* const (&queries)[V],
                float (&scores)[V][kTile * kHeads]) {
  constexpr int kRows = RowScores<Product, V>::kRows;
  for (int first = 0; first < num_rows; first += kRows) {
    RowScores<Product, V> of;
    of.start(tile.rows + first);
    int term = 0;
    for (int r = 0; r < kRows; r++) {  // of the next tile, that the lines are not asked for at once
      tile.fetch_next(first + r);
      for (const int end = terms * (r + 1) / kRows; term + kChains <= end; term += kChains) {
        of.template add_term<0>(queries, term);
        of.template add_term<1>(queries, term + 1);
      }
    }
    if (term < terms) of.template add_term<0>(queries, term);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) simd::store(scores[v] + kHeads * (first + r), of.score(v, r));
    }
  }
}

// Scores become weights, relative to the largest so far. Returns by what earlier weights have to be
// multiplied for that. A NaN among the scores makes the lane's sum NaN.
template <class Product>
simd::F32 weigh_rows(int num_rows, const float* scores, const LaneSoftmax& into,
                     typename Product::Factor* weights) {
  const simd::F32 before = simd::load(into.top);
  simd::F32 top = before;
  for (int r = 0; r < num_rows; r++) {
    const simd::F32 score = simd::load(scores + kHeads * r);
    top = simd::select(simd::less(top, score), score, top);
  }
  simd::F32 total = simd::zero();
  const auto weight_of = [&](int row) {
    const simd::F32 weight = exp2(simd::sub(simd::load(scores + kHeads * row), top));
    total = simd::add(total, weight);
    return weight;
  };
  for (int r = 0; r < num_rows; r += Product::kDepth) {
    if constexpr (Product::kDepth == 1) {
      simd::store(weights + kHeads * r, weight_of(r));
    } else {
      const simd::F32 weight = weight_of(r);
      const simd::F32 second = r + 1 < num_rows ? weight_of(r + 1) : simd::zero();
      simd::store_bf16_pairs(weights + kHeads * r, weight, second);
    }
  }
  const simd::F32 shrink = exp2(simd::sub(before, top));
  simd::store(into.top, top);
  simd::store(into.sum, simd::fma(simd::load(into.sum), shrink, total));
  return shrink;
}

// acc = acc * shrink + weights * rows, for D numbers of the rows from `first` on.
template <class Product, int V, int D>
OCT_INLINE void add_numbers(const typename Product::Factor* const* columns, int num_columns,
                            int first,
                            const typename Product::Factor (&weights)[V][kTile * kHeads],
                            const simd::F32 (&shrink)[V], float* const (&acc)[V]) {
  constexpr int kDepth = Product::kDepth;
  simd::F32 sums[V][D];
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
#pragma GCC unroll 16
    for (int d = 0; d < D; d++) sums[v][d] = simd::zero();
  }
  for (int r = 0; r < num_columns; r++) {
    const typename Product::Factor* column = columns[r] + kDepth * first;
    // GCC would keep a register for each of the numbers' addresses, and runs out of them.
    asm("" : "+r"(column));
    typename Product::Lanes weight[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) weight[v] = lanes_at<Product>(weights[v], r);
#pragma GCC unroll 16
    for (int d = 0; d < D; d++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        sums[v][d] = Product::multiply_add(sums[v][d], weight[v], column + kDepth * d);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
#pragma GCC unroll 16
    for (int d = 0; d < D; d++) {
      float* p = acc[v] + kHeads * (first + d);
      simd::store(p, simd::fma(simd::load(p), shrink[v], sums[v][d]));
    }
  }
}

// The first `num_rows` of a tile as columns. The last row is in one by itself if they are odd: the
// one after it is not seen, and might be anything.
template <class Product>
struct Columns {
  using Factor = typename Product::Factor;

  const Factor* of[RowTile<Product>::kColumns];
  int count;
  alignas(64) Factor last[Product::kDepth > 1 ? Product::kDepth * kMaxLatent : 1];

  Columns(const RowTile<Product>& tile, int num_rows, int rank) {
    count = (num_rows + Product::kDepth - 1) / Product::kDepth;
    std::copy_n(tile.columns, count, of);
    if constexpr (Product::kDepth == 2) {
      if (num_rows % 2 == 0) return;
      pair_row(tile.rows[num_rows - 1], rank, last);
      of[count - 1] = last;
    }
  }
};

// Vectors that see the first `num_rows` of a tile, whose rows have so many terms.
template <class Product, int V>
void attend_vectors(const RowTile<Product>& tile, int num_rows, int terms,
                    const typename Product::Factor* const (&queries)[V],
                    const LaneSoftmax* const (&into)[V]) {
  alignas(64) float scores[V][kTile * kHeads];
  alignas(64) typename Product::Factor weights[V][kTile * kHeads];
  score_rows<Product, V>(tile, num_rows, terms, queries, scores);
  simd::F32 shrink[V];
  float* acc[V];
  for (int v = 0; v < V; v++) {
    shrink[v] = weigh_rows<Product>(num_rows, scores[v], *into[v], weights[v]);
    acc[v] = into[v]->acc;
  }
  const int rank = into[0]->rank;
  const Columns<Product> columns(tile, num_rows, rank);
  constexpr int kNumbers = numbers_at_once(V);
  int d = 0;
  for (; d + kNumbers <= rank; d += kNumbers) {
    add_numbers<Product, V, kNumbers>(columns.of, columns.count, d, weights, shrink, acc);
  }
  for (; d < rank; d++) {
    add_numbers<Product, V, 1>(columns.of, columns.count, d, weights, shrink, acc);
  }
}

}  // namespace octavo
