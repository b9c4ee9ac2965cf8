// Attention of some queries over a tile of keys: two products, with a softmax between them.
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

#include <algorithm>
#include <limits>
#include <utility>

#include "attention.h"
#include "kv_select.h"
#include "sink_window.h"
#include "simd.h"

namespace octavo {

// Vectors of keys (chunks) that a block of rows goes through at a time, or of values (16
// dimensions): as many as leave registers for their factors.
template <class Kv>
constexpr int max_vectors(int rows) {
  return kManyRegisters ? 4 : rows <= 2 && !Kv::kScaled ? 2 : 1;
}
template <class Kv>
constexpr int max_value_vectors(int rows) {
  return std::min(max_vectors<Kv>(rows), Kv::Values::kGroup / 16);
}

// The softmax state of some rows; scores are exponents of two.
struct Softmax {
  float* top;  // [rows] the largest score
  float* sum;  // [rows][16] of the weights, in 16 parts
  float* acc;  // [rows][D] of the values times their weights
  int rows, head_dim;

  static int64_t floats(int rows, int head_dim) {
    return padded(rows) + int64_t{rows} * (16 + head_dim);
  }
  Softmax() = default;
  Softmax(float* memory, int num_rows, int dim)
      : top(memory),
        sum(top + padded(num_rows)),
        acc(sum + int64_t{num_rows} * 16),
        rows(num_rows),
        head_dim(dim) {}
  static int padded(int rows) { return (rows + 15) / 16 * 16; }

  // That of some of the rows.
  Softmax part(int first, int count) const {
    Softmax part = *this;
    part.top += first;
    part.sum += int64_t{first} * 16;
    part.acc += int64_t{first} * head_dim;
    part.rows = count;
    return part;
  }
  void copy(const Softmax& other) const {
    std::copy_n(other.top, rows, top);
    std::copy_n(other.sum, rows * 16, sum);
    std::copy_n(other.acc, rows * head_dim, acc);
  }
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

// Parameters of a call, the same for all rows.
struct Scoring {
  int head_dim;
  float softcap;  // or 0; in powers of two, and scores come in units of it
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
// along with these values, line by line. Into the L2 cache, which takes many more requests at a
// time than the L1 cache does.
OCT_INLINE void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// The sums of R rows times C vectors, in registers; hence all the unrolled loops. The factors of
// rows are `row` apart, and their parts as many as there are terms.
template <class Product, int R, int C>
struct Sums {
  using Factor = typename Product::Factor;
  static constexpr int kParts = Product::kParts;
  static constexpr int kLineTerms = Product::kLineSteps * Product::kDepth;

  typename Product::Sum of[kParts][R][C];

  OCT_INLINE void start(const Factor* factors, int row, int terms) {
#pragma GCC unroll 8
    for (int part = 0; part < kParts; part++) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) of[part][r][c] = Product::start(factors + r * row, terms, part);
      }
    }
  }
  OCT_INLINE void add_line(const uint8_t* const (&lines)[C], const Factor* factors, int row,
                           int terms) {
    add_steps(lines, factors, row, terms,
              std::make_integer_sequence<int, Product::kLineSteps>());
  }
  OCT_INLINE typename Product::Sum first(int r, int c) const { return of[0][r][c]; }
  OCT_INLINE typename Product::Sum last(int r, int c) const { return of[kParts - 1][r][c]; }

 private:
  template <int... kStep>
  OCT_INLINE void add_steps(const uint8_t* const (&lines)[C], const Factor* factors, int row,
                            int terms, std::integer_sequence<int, kStep...>) {
    (add<kStep>(lines, factors + kStep * Product::kDepth, row, terms), ...);
  }
  template <int kStep>
  OCT_INLINE void add(const uint8_t* const (&lines)[C], const Factor* factors, int row,
                      int terms) {
    typename Product::Lanes lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) lanes[c] = Product::template lanes<kStep>(lines[c]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int part = 0; part < kParts; part++) {
        const Factor* f = factors + r * row + part * terms;
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
          of[part][r][c] = Product::multiply_add(of[part][r][c], lanes[c], f);
        }
      }
    }
  }
};

// Scores of R rows and C chunks, out[row][64 keys]: what the dimensions of one group add to them.
template <class Kv, int R, int C>
void multiply_keys(const typename Kv::Keys::Factor* queries, const KeyTile& tile, int chunk,
                   int group, int dim, bool ahead, float* out) {
  using Product = typename Kv::Keys;
  if (kOneGroup<Product>) group = 0;
  using TileSums = Sums<Product, R, C>;
  constexpr int kUnroll = Product::kUnroll;
  const int row = query_factors<Product>(dim), terms = group_dims<Product>(dim);
  const int first = group * terms, last = kOneGroup<Product> ? dim : std::min(first + terms, dim);
  queries += group * Product::row_factors(terms);
  TileSums sums;
  sums.start(queries, row, terms);
  const uint8_t* keys[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) keys[c] = tile.keys[chunk + c];
  const int begin = first / TileSums::kLineTerms, end = last / TileSums::kLineTerms;
  for (int block = begin; block < end; block += kUnroll) {
#pragma GCC unroll 4
    for (int line = block; line < block + kUnroll; line++) {
      const uint8_t* lines[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) lines[c] = keys[c] + line * 64;
      if (ahead) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) fetch(tile.next->keys[chunk + c] + line * 64);
      }
      sums.add_line(lines, queries + (line - begin) * TileSums::kLineTerms, row, terms);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      float* p = out + r * kTile + (chunk + c) * kChunk;
      const simd::F32 score =
          Kv::score(sums.first(r, c), queries + r * row, terms, keys[c], dim, group);
      simd::store(p, group == 0 ? score : simd::add(simd::load(p), score));
    }
  }
}

// acc = acc * shrink + weights * values, for R rows and 16 * C dimensions from `column` on, which
// are of one group.
template <class Kv, int R, int C>
void multiply_values(const typename Kv::Values::Factor* weights, const KeyTile& tile, int begin,
                     int end, int dim, int column, bool ahead, const float* shrink, float* out) {
  using Product = typename Kv::Values;
  using TileSums = Sums<Product, R, C>;
  constexpr int kLines = kChunk / TileSums::kLineTerms, kUnroll = Product::kUnroll;
  const int row = weight_factors<Product>(dim);
  weights += group_of<Product>(column) * Product::row_factors(kTile);
  TileSums sums;
  sums.start(weights, row, kTile);
  for (int chunk = begin; chunk < end; chunk++) {
    const uint8_t* values = tile.values[chunk];
    for (int block = 0; block < kLines; block += kUnroll) {
#pragma GCC unroll 4
      for (int line = block; line < block + kUnroll; line++) {
        const int at = (line * dim + column) * 4;
        const uint8_t* lines[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) lines[c] = values + at + c * 64;
        if (ahead) {
#pragma GCC unroll 8
          for (int c = 0; c < C; c++) fetch(tile.next->values[chunk] + at + c * 64);
        }
        sums.add_line(lines, weights + (chunk * kLines + line) * TileSums::kLineTerms, row, kTile);
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
                         const Seen& seen, float* scores) {
  const int first = seen.first - tile.first_key;
  const int last = seen.last - tile.first_key;
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
           const Seen* seen, float* scores, float* top, float* sum, float* shrink,
           typename Kv::Values::Factor* weights) {
  alignas(64) float larger[16] = {};
  for (int r = 0; r < num_rows; r++) {
    const float x = mask_scores(scoring, tile, begin, end, seen[r], scores + r * kTile);
    larger[r] = x > top[r] ? x : top[r];
  }
  const simd::F32 before = simd::load_first(top, num_rows);
  simd::store(shrink, exp2(simd::sub(before, simd::load_first(larger, num_rows))));
  for (int r = 0; r < num_rows; r++) {
    const simd::F32 most = simd::set1(larger[r]);
    simd::F32 total = simd::zero();
    typename Kv::Values::Factor* row =
        weights + r * weight_factors<typename Kv::Values>(scoring.head_dim);
    for (int c = begin * kChunk; c < end * kChunk; c += kChunk) {
      const simd::F32 weight = exp2(simd::sub(simd::load(scores + r * kTile + c), most));
      total = simd::add(total, weight);
      if constexpr (Kv::kScaled) {
        simd::store(scores + r * kTile + c, weight);
      } else {
        Kv::Values::store_factors(row + c, weight);
      }
    }
    if constexpr (Kv::kScaled) {
      Kv::store_weights(scores + r * kTile, tile.values, begin, end, scoring.head_dim, row);
    }
    float* p = sum + 16 * r;
    simd::store(p, simd::fma(simd::load(p), simd::set1(shrink[r]), total));
    top[r] = larger[r];
  }
}

// From begin to end, kMost at a time while there are so many, then two or one.
template <int kMost, class Multiply>
OCT_INLINE void in_steps(int begin, int end, const Multiply& multiply) {
  for (int at = begin; at < end;) {
    if (kMost >= 4 && end - at >= 4) {
      multiply(std::integral_constant<int, kMost >= 4 ? 4 : 1>(), at);
      at += 4;
    } else if (kMost >= 2 && end - at >= 2) {
      multiply(std::integral_constant<int, kMost >= 2 ? 2 : 1>(), at);
      at += 2;
    } else {
      multiply(std::integral_constant<int, 1>(), at);
      at += 1;
    }
  }
}

// Rows first .. first + R of an item and a tile. `seen` is what each row of the item sees.
template <class Kv, int R>
void attend_rows(const Scoring& scoring, const KeyTile& tile, int first, const Seen* seen,
                 const typename Kv::Keys::Factor* queries, const Softmax& softmax) {
  const int dim = scoring.head_dim;
  seen += first;
  // Rows ascend, but for those in trees; and these lie behind all tiles that tokens share.
  int lowest = seen[0].first;
  for (int r = 1; r < R; r++) lowest = std::min(lowest, seen[r].first);
  const int first_key = lowest - tile.first_key;
  const int last_key = seen[R - 1].last - tile.first_key;
  const int begin = first_key > tile.begin * kChunk ? first_key / kChunk : tile.begin;
  const int end = last_key < tile.end * kChunk ? last_key / kChunk + 1 : tile.end;
  if (last_key < 0 || begin >= end) return;

  alignas(64) float scores[R * kTile];
  constexpr int kWeights = R * weight_factors<typename Kv::Values>(kMaxHeadDim);
  alignas(64) typename Kv::Values::Factor weights[kWeights];
  alignas(64) float shrink[16];
  const bool ahead = first == 0;
  queries += int64_t{first} * query_factors<typename Kv::Keys>(dim);
  for (int group = 0; group < num_groups<typename Kv::Keys>(dim); group++) {
    const auto multiply = [&](auto count, int chunk) {
      multiply_keys<Kv, R, count.value>(queries, tile, chunk, group, dim, ahead, scores);
    };
    in_steps<max_vectors<Kv>(R)>(begin, end, multiply);
  }
  weigh<Kv>(scoring, tile, begin, end, R, seen, scores, softmax.top + first,
            softmax.sum + int64_t{first} * 16, shrink, weights);
  float* acc = softmax.acc + int64_t{first} * dim;
  const auto multiply = [&](auto count, int vector) {
    multiply_values<Kv, R, count.value>(weights, tile, begin, end, dim, 16 * vector, ahead, shrink,
                                        acc);
  };
  in_steps<max_value_vectors<Kv>(R)>(0, dim / 16, multiply);
}

// All rows of an item and a tile, in blocks of about the same size.
template <class Kv>
void attend_tile(const Scoring& scoring, const KeyTile& tile, const Seen* seen,
                 const typename Kv::Keys::Factor* queries, const Softmax& softmax) {
  constexpr int kRows = Kv::kMaxRows;
  const int rows = softmax.rows, blocks = (rows + kRows - 1) / kRows;
  for (int b = 0; b < blocks; b++) {
    const int first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
    const auto attend = [&](auto block) {
      if constexpr (block.value <= kRows) {
        attend_rows<Kv, block.value>(scoring, tile, first, seen, queries, softmax);
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
