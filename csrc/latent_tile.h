// Some vectors of queries see the same rows of a tile: two products, with a softmax between them.
//
// A number of a row goes to all lanes, and is multiplied with 16 heads at once. Up to two vectors
// share it.
#pragma once

#include <limits>

#include "attention_tile.h"
#include "latent.h"

namespace octavo {

constexpr int kMaxVectors = kManyRegisters ? 2 : 1;  // that go through a tile together

// Rows that have sums in registers: no more, since each takes an address, too.
constexpr int kRows = kManyRegisters ? 8 : 4;
// Numbers of rows that have, of so many vectors.
constexpr int numbers_at_once(int vectors) { return (kManyRegisters ? 16 : 4) / vectors; }

// The rows of a tile, as far as they are seen, and then others, so that there are kTile of them.
struct RowTile {
  const float* rows[kTile];
  const uint8_t* next[kTile];  // stored rows of the next tile, to be fetched meanwhile; or NULL
  int64_t row_bytes;
};

// The softmax so far of the heads of a vector; scores count in powers of two.
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
  // Add what was seen in a further split.
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

// scores[v][row][16 heads] of the first rows, and of some more.
template <int V>
void score_rows(const RowTile& tile, int num_rows, int width, const float* const (&queries)[V],
                float (&scores)[V][kTile * kHeads]) {
  for (int first = 0; first < num_rows; first += kRows) {
    for (int r = 0; r < kRows && tile.next[0]; r++) {
      const uint8_t* next = tile.next[first + r];
      for (int64_t at = 0; at < tile.row_bytes; at += 64) fetch(next + at);
    }
    const float* rows[kRows];
    simd::F32 sums[V][kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      rows[r] = tile.rows[first + r];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[v][r] = simd::zero();
    }
    for (int d = 0; d < width; d++) {
      simd::F32 query[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) query[v] = simd::load(queries[v] + kHeads * d);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const simd::F32 x = simd::set1(rows[r][d]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[v][r] = simd::fma(x, query[v], sums[v][r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) simd::store(scores[v] + kHeads * (first + r), sums[v][r]);
    }
  }
}

// Scores become weights, relative to the largest so far. Returns by what earlier weights have to be
// multiplied for that. A NaN among the scores makes the lane's sum NaN.
inline simd::F32 weigh_rows(int num_rows, float* scores, const LaneSoftmax& into) {
  const simd::F32 before = simd::load(into.top);
  simd::F32 top = before;
  for (int r = 0; r < num_rows; r++) {
    const simd::F32 score = simd::load(scores + kHeads * r);
    top = simd::select(simd::less(top, score), score, top);
  }
  simd::F32 total = simd::zero();
  for (int r = 0; r < num_rows; r++) {
    const simd::F32 weight = exp2(simd::sub(simd::load(scores + kHeads * r), top));
    simd::store(scores + kHeads * r, weight);
    total = simd::add(total, weight);
  }
  const simd::F32 shrink = exp2(simd::sub(before, top));
  simd::store(into.top, top);
  simd::store(into.sum, simd::fma(simd::load(into.sum), shrink, total));
  return shrink;
}

// acc = acc * shrink + weights * rows, for D numbers of the rows from `first` on.
template <int V, int D>
OCT_INLINE void add_numbers(const RowTile& tile, int num_rows, int first,
                            const float (&weights)[V][kTile * kHeads],
                            const simd::F32 (&shrink)[V], float* const (&acc)[V]) {
  simd::F32 sums[V][D];
#pragma GCC unroll 2
  for (int v = 0; v < V; v++) {
#pragma GCC unroll 16
    for (int d = 0; d < D; d++) sums[v][d] = simd::zero();
  }
  for (int r = 0; r < num_rows; r++) {
    const float* row = tile.rows[r] + first;
    // GCC would keep a register for each of the numbers' places, and has not so many.
    asm("" : "+r"(row));
    simd::F32 weight[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) weight[v] = simd::load(weights[v] + kHeads * r);
#pragma GCC unroll 16
    for (int d = 0; d < D; d++) {
      const simd::F32 x = simd::set1(row[d]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) sums[v][d] = simd::fma(x, weight[v], sums[v][d]);
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

// Vectors that see the first `num_rows` of a tile.
template <int V>
void attend_vectors(const RowTile& tile, int num_rows, int width, const float* const (&queries)[V],
                    const LaneSoftmax* const (&into)[V]) {
  alignas(64) float scores[V][kTile * kHeads];
  score_rows<V>(tile, num_rows, width, queries, scores);
  simd::F32 shrink[V];
  float* acc[V];
  for (int v = 0; v < V; v++) {
    shrink[v] = weigh_rows(num_rows, scores[v], *into[v]);
    acc[v] = into[v]->acc;
  }
  const int rank = into[0]->rank;
  constexpr int kNumbers = numbers_at_once(V);
  int d = 0;
  for (; d + kNumbers <= rank; d += kNumbers) {
    add_numbers<V, kNumbers>(tile, num_rows, d, scores, shrink, acc);
  }
  for (; d < rank; d++) add_numbers<V, 1>(tile, num_rows, d, scores, shrink, acc);
}

}  // namespace octavo
