// Some queries see a tile of keys: two products, with a softmax between them.
//
//                        64 keys: chunk 0  chunk 1  chunk 2  chunk 3
//                    row 0   |    scores |        |        |        |   softmax    D outputs
//     up to 6 rows   row 1   |           |        |        |        |  -------->  |          |
//                    ...     |           |        |        |        |   weights   |   acc    |
//
// Rows are queries: the heads that share a key head, token after token. A vector of keys or values
// is loaded once for all rows of a block, whose sums stay in registers. A row's own operations and
// their order are the same whatever the block, and chunks that it does not see add exact zeros.
#pragma once

#include <limits>

#include "attention.h"
#include "kv_formats.h"
#include "kv_int8.h"
#include "simd.h"

namespace octavo {

// Rows of a block, and vectors of keys (chunks) or values that it goes through at a time: as many
// as leave room in the registers for what they are multiplied with.
constexpr bool kManyRegisters = simd::kNumRegisters >= 32;
template <class Kv>
constexpr int kMaxRows = Kv::kQuantized                            ? (kManyRegisters ? 3 : 2)
                         : !kManyRegisters                          ? 4
                         : std::is_same_v<typename Kv::Lanes, Pair> ? 5
                                                                    : 6;
template <class Kv>
constexpr int max_vectors(int rows) {
  return kManyRegisters ? 4 : rows <= 2 && !Kv::kQuantized ? 2 : 1;
}

// The softmax so far of some rows; scores count in powers of two.
struct Softmax {
  float* top;  // [rows] the largest score
  float* sum;  // [rows][16] of the weights, in 16 parts
  float* acc;  // [rows][D] of the values times their weights
  int rows, head_dim;

  static int64_t floats(int rows, int head_dim) {
    return padded(rows) + int64_t{rows} * (16 + head_dim);
  }
  Softmax(float* memory, int num_rows, int dim)
      : top(memory),
        sum(top + padded(num_rows)),
        acc(sum + int64_t{num_rows} * 16),
        rows(num_rows),
        head_dim(dim) {}
  static int padded(int rows) { return (rows + 15) / 16 * 16; }

  void reset() {
    for (float* p = top; p < sum; p++) *p = -std::numeric_limits<float>::max();
    std::memset(sum, 0, sizeof(float) * rows * (16 + head_dim));
  }
};

// A tile as the queries of an item see it.
struct KeyTile {
  int first_key;
  int begin, end;  // the chunks that some query sees
  const uint8_t* keys[kTileChunks];
  const uint8_t* values[kTileChunks];
  const KeyTile* next;  // that will be attended after this one
};

// What is the same for all rows of a call.
struct Scoring {
  int head_dim;
  int window;       // or 0
  float softcap;    // or 0; in powers of two, and scores come in units of it
};

// 2^x of x <= 0, with a relative error of 2e-7: exactly 1 of 0, exactly 0 below -126, NaN of NaN.
OCT_INLINE simd::F32 exp2(simd::F32 x) {
  using namespace simd;
  const F32 clipped = max(set1(-126.0f), x);   // NaN comes second, and stays
  const F32 magic = set1(12582912.0f);         // 1.5 * 2^23: adding it rounds to an integer
  const F32 n = sub(add(clipped, magic), magic);
  const F32 r = sub(clipped, n);
  F32 p = set1(1.326472707e-3f);
  p = fma(p, r, set1(9.671512649e-3f));
  p = fma(p, r, set1(5.550733744e-2f));
  p = fma(p, r, set1(2.402224209e-1f));
  p = fma(p, r, set1(6.931469776e-1f));
  p = fma(p, r, set1(1.0f));
  p = mul(p, power_of_two(to_int(n)));
  return select(less(x, set1(-126.0f)), zero(), p);
}

// The next tile is fetched while this one is attended: its keys along with these keys, its values
// along with these values, line by line as lanes are loaded. Into the L2 cache, which takes many
// more requests at a time than the L1 cache does.
template <class Kv>
OCT_INLINE void fetch(const uint8_t* p, int line) {
  for (int i = 0; i < Kv::kStepLines; i++) {
    __builtin_prefetch(p + (line * Kv::kStepLines + i) * 64, 0, 2);
  }
}

// The sums of R rows times C vectors, in registers; hence all the unrolled loops. The factors of
// rows are `row` apart, and their parts as many as there are terms.
template <class Kv, int Parts, int R, int C>
struct Sums {
  typename Kv::Sum of[Parts][R][C];

  OCT_INLINE void start(const typename Kv::Factor* factors, int row, int terms) {
#pragma GCC unroll 8
    for (int part = 0; part < Parts; part++) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
          of[part][r][c] = Kv::start(factors + r * row, Parts, terms, part);
        }
      }
    }
  }
  OCT_INLINE void add(const typename Kv::Lanes (&lanes)[C], const typename Kv::Factor* factors,
                      int row, int terms) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int part = 0; part < Parts; part++) {
        const typename Kv::Factor* f = factors + r * row + part * terms;
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
          of[part][r][c] = Kv::multiply_add(of[part][r][c], lanes[c], f);
        }
      }
    }
  }
  OCT_INLINE typename Kv::Sum first(int r, int c) const { return of[0][r][c]; }
  OCT_INLINE typename Kv::Sum last(int r, int c) const { return of[Parts - 1][r][c]; }
};

// Scores of R rows and C chunks: out[row][64 keys].
template <class Kv, int R, int C>
void multiply_keys(const typename Kv::Factor* queries, const KeyTile& tile, int chunk, int dim,
                   bool ahead, float* out) {
  const int row = Kv::row_factors(Kv::kQueryParts, dim);
  Sums<Kv, Kv::kQueryParts, R, C> sums;
  sums.start(queries, row, dim);
  const uint8_t* keys[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) keys[c] = tile.keys[chunk + c];
  for (int block = 0; block < dim / Kv::kDepth; block += Kv::kBlock) {
#pragma GCC unroll 4
    for (int step = block; step < block + Kv::kBlock; step++) {
      typename Kv::Lanes lanes[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) lanes[c] = Kv::keys(keys[c], step);
      if (ahead) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) fetch<Kv>(tile.next->keys[chunk + c], step);
      }
      sums.add(lanes, queries + step * Kv::kDepth, row, dim);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      simd::store(out + r * kTile + (chunk + c) * kChunk,
                  Kv::score(sums.first(r, c), queries + r * row, dim, keys[c]));
    }
  }
}

// acc = acc * shrink + weights * values, for R rows and 16 * C dimensions from `column` on.
template <class Kv, int R, int C>
void multiply_values(const typename Kv::Factor* weights, const KeyTile& tile, int begin, int end,
                     int dim, int column, bool ahead, const float* shrink, float* out) {
  constexpr int kSteps = kChunk / Kv::kDepth;
  const int row = Kv::row_factors(Kv::kWeightParts, kTile);
  Sums<Kv, Kv::kWeightParts, R, C> sums;
  sums.start(weights, row, kTile);
  for (int chunk = begin; chunk < end; chunk++) {
    const uint8_t* values = tile.values[chunk];
    for (int block = 0; block < kSteps; block += Kv::kBlock) {
#pragma GCC unroll 4
      for (int step = block; step < block + Kv::kBlock; step++) {
        typename Kv::Lanes lanes[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) lanes[c] = Kv::values(values, dim, step, column + 16 * c);
        if (ahead) {
          const int line = (step * dim + column) / 16;
#pragma GCC unroll 8
          for (int c = 0; c < C; c++) fetch<Kv>(tile.next->values[chunk], line + c);
        }
        sums.add(lanes, weights + (chunk * kSteps + step) * Kv::kDepth, row, kTile);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      float* p = out + r * dim + column + 16 * c;
      const simd::F32 seen = Kv::output(sums.first(r, c), sums.last(r, c), weights + r * row);
      simd::store(p, simd::fma(simd::load(p), simd::set1(shrink[r]), seen));
    }
  }
}

// 0, 1, 2, ...: the keys of a tile.
struct KeyNumbers {
  float of[kTile];
  constexpr KeyNumbers() : of() {
    for (int i = 0; i < kTile; i++) of[i] = static_cast<float>(i);
  }
};
alignas(64) inline constexpr KeyNumbers kKeyNumbers;

// Scores of a row, capped and masked, in chunks begin to end of a tile. Returns the largest.
inline float mask_scores(const Scoring& scoring, const KeyTile& tile, int begin, int end,
                         int position, float* scores) {
  const int first = first_seen(scoring.window, position) - tile.first_key;
  const int last = position - tile.first_key;
  const bool partly = first > begin * kChunk || last < end * kChunk - 1;
  const simd::F32 none = simd::set1(-std::numeric_limits<float>::infinity());
  simd::F32 top = none;
  for (int c = begin; c < end; c++) {
    simd::F32 x = simd::load(scores + c * kChunk);
    if (scoring.softcap > 0) x = simd::mul(simd::tanh(x), simd::set1(scoring.softcap));
    if (partly) {
      const simd::F32 key = simd::load(kKeyNumbers.of + c * kChunk);
      x = simd::select(simd::less(key, simd::set1(static_cast<float>(first))), none, x);
      x = simd::select(simd::less(simd::set1(static_cast<float>(last)), key), none, x);
    }
    if (scoring.softcap > 0 || partly) simd::store(scores + c * kChunk, x);
    top = simd::max(top, x);
  }
  return simd::max_of(top);
}

// Scores become weights, relative to the largest score so far; `shrink` is by what earlier weights
// have to be multiplied for that. A NaN among the scores makes the row's sum NaN.
template <class Kv>
void weigh(const Scoring& scoring, const KeyTile& tile, int begin, int end, int num_rows,
           const int* positions, float* scores, float* top, float* sum, float* shrink,
           typename Kv::Factor* weights) {
  alignas(64) float larger[16] = {};
  for (int r = 0; r < num_rows; r++) {
    const float x =
        mask_scores(scoring, tile, begin, end, positions[r], scores + r * kTile);
    larger[r] = x > top[r] ? x : top[r];
  }
  const simd::F32 before = simd::load_first(top, num_rows);
  simd::store(shrink, exp2(simd::sub(before, simd::load_first(larger, num_rows))));
  for (int r = 0; r < num_rows; r++) {
    const simd::F32 most = simd::set1(larger[r]);
    simd::F32 total = simd::zero();
    typename Kv::Factor* row = weights + r * Kv::row_factors(Kv::kWeightParts, kTile);
    for (int c = begin * kChunk; c < end * kChunk; c += kChunk) {
      const simd::F32 weight = exp2(simd::sub(simd::load(scores + r * kTile + c), most));
      total = simd::add(total, weight);
      if constexpr (Kv::kQuantized) {
        simd::store(scores + r * kTile + c, weight);
      } else {
        Kv::store_factors(row + c, weight);
      }
    }
    if constexpr (Kv::kQuantized) {
      Kv::store_weights(scores + r * kTile, tile.values, begin, end, scoring.head_dim, row);
    }
    float* p = sum + 16 * r;
    simd::store(p, simd::fma(simd::load(p), simd::set1(shrink[r]), total));
    top[r] = larger[r];
  }
}

// Rows first .. first + R of an item and a tile. `positions` are those of all rows of the item.
template <class Kv, int R>
void attend_rows(const Scoring& scoring, const KeyTile& tile, int first, const int* positions,
                 const typename Kv::Factor* queries, const Softmax& softmax) {
  const int dim = scoring.head_dim;
  positions += first;
  const int first_key = first_seen(scoring.window, positions[0]) - tile.first_key;
  const int last_key = positions[R - 1] - tile.first_key;
  const int begin = first_key > tile.begin * kChunk ? first_key / kChunk : tile.begin;
  const int end = last_key < tile.end * kChunk ? last_key / kChunk + 1 : tile.end;
  if (last_key < 0 || begin >= end) return;

  alignas(64) float scores[R * kTile];
  alignas(64) typename Kv::Factor weights[R * Kv::row_factors(Kv::kWeightParts, kTile)];
  alignas(64) float shrink[16];
  const bool ahead = first == 0;
  constexpr int kVectors = max_vectors<Kv>(R);
  queries += int64_t{first} * Kv::row_factors(Kv::kQueryParts, dim);
  for (int chunk = begin; chunk < end;) {
    const int left = end - chunk;
    if (kVectors >= 4 && left >= 4) {
      multiply_keys<Kv, R, kVectors >= 4 ? 4 : 1>(queries, tile, chunk, dim, ahead, scores);
      chunk += 4;
    } else if (kVectors >= 2 && left >= 2) {
      multiply_keys<Kv, R, kVectors >= 2 ? 2 : 1>(queries, tile, chunk, dim, ahead, scores);
      chunk += 2;
    } else {
      multiply_keys<Kv, R, 1>(queries, tile, chunk, dim, ahead, scores);
      chunk += 1;
    }
  }
  weigh<Kv>(scoring, tile, begin, end, R, positions, scores, softmax.top + first,
            softmax.sum + int64_t{first} * 16, shrink, weights);
  float* acc = softmax.acc + int64_t{first} * dim;
  for (int column = 0; column < dim;) {
    const int left = dim - column;
    if (kVectors >= 4 && left >= 64) {
      multiply_values<Kv, R, kVectors >= 4 ? 4 : 1>(weights, tile, begin, end, dim, column, ahead,
                                                    shrink, acc);
      column += 64;
    } else if (kVectors >= 2 && left >= 32) {
      multiply_values<Kv, R, kVectors >= 2 ? 2 : 1>(weights, tile, begin, end, dim, column, ahead,
                                                    shrink, acc);
      column += 32;
    } else {
      multiply_values<Kv, R, 1>(weights, tile, begin, end, dim, column, ahead, shrink, acc);
      column += 16;
    }
  }
}

// All rows of an item and a tile, in blocks of about the same size.
template <class Kv>
void attend_tile(const Scoring& scoring, const KeyTile& tile, const int* positions,
                 const typename Kv::Factor* queries, const Softmax& softmax) {
  constexpr int kRows = kMaxRows<Kv>;
  const int rows = softmax.rows, blocks = (rows + kRows - 1) / kRows;
  for (int b = 0; b < blocks; b++) {
    const int first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
    const auto attend = [&](auto block) {
      if constexpr (block.value <= kRows) {
        attend_rows<Kv, block.value>(scoring, tile, first, positions, queries, softmax);
      }
    };
    switch (count) {
      case 1: attend(std::integral_constant<int, 1>{}); break;
      case 2: attend(std::integral_constant<int, 2>{}); break;
      case 3: attend(std::integral_constant<int, 3>{}); break;
      case 4: attend(std::integral_constant<int, 4>{}); break;
      case 5: attend(std::integral_constant<int, 5>{}); break;
      case 6: attend(std::integral_constant<int, 6>{}); break;
    }
  }
}

}  // namespace octavo
