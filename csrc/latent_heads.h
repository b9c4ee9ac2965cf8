// Work of each head in latent attention: absorbed queries, and outputs expanded from
// attended latents.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_tile.h"
#include "kernels.h"
#include "latent.h"
#include "latent_products.h"
#include "latent_tile.h"
#include "rope.h"

namespace octavo {

constexpr int64_t kQueryNumbers = 4 << 20;  // that queries may have, about
constexpr int kFewTokens = 16;

// The tokens of a step from `begin` to `end`, as a step of its own.
class SubStep {
 public:
  // Lives in scratch memory of the worker, slot 2.
  SubStep(const oct_sequences& all, int begin, int end, const Worker& worker)
      : begin(begin), end(end), seqs(all) {
    const size_t count = static_cast<size_t>(all.num_seqs);
    int32_t* q_start =
        static_cast<int32_t*>(worker.scratch(2, sizeof(int32_t) * (2 * count + 1)));
    int32_t* kv_len = q_start + count + 1;
    for (size_t s = 0; s <= count; s++) q_start[s] = std::clamp(all.q_start[s], begin, end);
    for (size_t s = 0; s < count; s++) {
      kv_len[s] = all.kv_len[s] - (all.q_start[s + 1] - q_start[s + 1]);
    }
    seqs.q_start = q_start;
    seqs.kv_len = kv_len;
  }

  const int begin, end;
  oct_sequences seqs;
};

// Room for the queries of a sub-step, as latent.h says, for all workers.
template <class Product>
class LatentQueries {
 public:
  using Factor = typename Product::Factor;
  const int vectors;     // of a token
  const int rank_place;  // numbers before the rotated part of a row, as products take it
  const int width;       // and of a whole row
  const int num_tokens;  // of a sub-step, at most

  LatentQueries(const oct_latent_args& args, int all_tokens, const Worker& worker)
      : vectors(num_vectors(args)),
        rank_place(filled_up<Product>(args.rank)),
        width(rank_place + args.rope_dim),
        num_tokens(std::min(most(), all_tokens)),
        first_(static_cast<Factor*>(worker.shared(0, sizeof(Factor) * num_tokens * numbers()))) {}

  Factor* of(int token, int vector) const {
    return first_ + (int64_t{token} * vectors + vector) * kHeads * width;
  }

 private:
  int64_t numbers() const { return int64_t{vectors} * kHeads * width; }  // of a token
  int most() const {
    return std::max<int>(kFewTokens, static_cast<int>(kQueryNumbers / numbers()));
  }

  Factor* const first_;
};

// One worker's part, however rows and matrices are kept.
class LatentHeads {
 public:
  // Queries of all heads, times U, and rotated.
  virtual void absorb(const SubStep& step) const = 0;
  // The attended latents of a token's vector, divided by the sum: inputs of V.
  virtual void take(int token, int vector, const LaneSoftmax& total) const = 0;
  // Attended latents times V.
  virtual void expand(const SubStep& step) const = 0;

 protected:
  ~LatentHeads() = default;
};

// `Product` is that of the rows, `Matrix` as in latent_products.h.
template <class Product, class Matrix>
class MatrixHeads final : public LatentHeads {
  using Factor = typename Product::Factor;  // of queries
  using Input = typename Matrix::Factor;    // of U and V
  static constexpr int kQueryLanes = kHeads * Product::kDepth;  // factors of a term
  static constexpr int kInputLanes = kHeads * Matrix::kDepth;

 public:
  MatrixHeads(const oct_latent_args& args, const LatentQueries<Product>& queries,
              const Worker& worker)
      : args_(args),
        queries_(queries),
        worker_(worker),
        attended_(static_cast<Input*>(worker.shared(
            1, sizeof(Input) * queries.num_tokens * queries.vectors * kHeads *
                   filled_up<Matrix>(args.rank)))) {}

  void absorb(const SubStep& step) const override {
    const ProductUnits units(step.end - step.begin, args_.num_heads, num_pieces(args_.rank),
                             worker_.size);
    const uint8_t* up = static_cast<const uint8_t*>(args_.key_up);
    const simd::F32 factor = simd::set1(args_.scale * kLog2E);
    for (int i = worker_.ticket(); i < units.count(); i = worker_.ticket()) {
      const ProductUnit unit = units[i];
      for (int head = unit.first_head; head < unit.end_head; head++) {
        const Inputs<Matrix> inputs = inputs_of(step, unit, head);
        for (int piece = unit.first_piece; piece < unit.end_piece; piece++) {
          multiply_piece(inputs, unit.end_token - unit.first_token,
                         up + head * matrix_bytes<Matrix>(args_.nope_dim, args_.rank), args_.rank,
                         piece, [&](int token, int first, simd::F32 sums) {
                           put_query(unit.first_token + token, head, first, queries_.rank_place,
                                     simd::mul(sums, factor));
                         });
        }
        if (unit.first_piece > 0) continue;
        rotate_queries(step, unit, head, factor);
        if (head == args_.num_heads - 1) clear_lanes(unit);
      }
    }
  }

  void take(int token, int vector, const LaneSoftmax& total) const override {
    Input* out = attended_of(token, vector);
    const simd::F32 factor = simd::div(simd::set1(1.0f), simd::load(total.sum));
    const auto mean = [&](int d) { return simd::mul(simd::load(total.acc + kHeads * d), factor); };
    for (int d = 0; d < args_.rank; d += Matrix::kDepth, out += kInputLanes) {
      if constexpr (Matrix::kDepth == 1) {
        simd::store(out, mean(d));
      } else {
        simd::store_bf16_pairs(out, mean(d), d + 1 < args_.rank ? mean(d + 1) : simd::zero());
      }
    }
  }

  void expand(const SubStep& step) const override {
    const ProductUnits units(step.end - step.begin, args_.num_heads, num_pieces(args_.value_dim),
                             worker_.size);
    const int64_t out_row = args_.ldo;
    const uint8_t* up = static_cast<const uint8_t*>(args_.value_up);
    for (int i = worker_.ticket(); i < units.count(); i = worker_.ticket()) {
      const ProductUnit unit = units[i];
      for (int head = unit.first_head; head < unit.end_head; head++) {
        const Inputs<Matrix> inputs = inputs_of_values(unit, head);
        float* out = args_.out + (step.begin + unit.first_token) * out_row +
                     int64_t{head} * args_.value_dim;
        for (int piece = unit.first_piece; piece < unit.end_piece; piece++) {
          multiply_piece(inputs, unit.end_token - unit.first_token,
                         up + head * matrix_bytes<Matrix>(args_.rank, args_.value_dim),
                         args_.value_dim, piece, [&](int token, int first, simd::F32 sums) {
                           simd::store_first(out + token * out_row + first, sums,
                                             args_.value_dim - first);
                         });
        }
      }
    }
  }

 private:
  // ---- Queries

  // A head's queries, but for what is rotated.
  Inputs<Matrix> inputs_of(const SubStep& step, const ProductUnit& unit, int head) const {
    const int count = args_.nope_dim, terms = num_terms<Matrix>(count);
    const float* q = args_.q + (step.begin + unit.first_token) * args_.ldq +
                     int64_t{head} * (count + args_.rope_dim);
    if constexpr (Matrix::kDepth == 1) {
      return {q, args_.ldq, terms};
    } else {
      const int row = padded(count), tokens = unit.end_token - unit.first_token;
      Input* rounded = static_cast<Input*>(worker_.scratch(5, sizeof(Input) * tokens * row));
      for (int t = 0; t < tokens; t++) {
        for (int i = 0; i < count; i += 16) {
          Matrix::store_factors(rounded + t * row + i,
                                simd::load_first(q + t * args_.ldq + i, count - i));
        }
      }
      return {rounded, row, terms};
    }
  }

  // Numbers of a query, from `first` on and before `end`, to its lane.
  void put_query(int token, int head, int first, int end, simd::F32 numbers) const {
    constexpr int kDepth = Product::kDepth;
    alignas(64) Factor of[16];
    Product::store_factors(of, numbers);
    Factor* to = queries_.of(token, head / kHeads) + int64_t{first} * kHeads +
                 head % kHeads * kDepth;
    const int count = std::min(16, end - first);
    for (int i = 0; i < count; i += kDepth) {
      std::memcpy(to + i * kHeads, of + i, sizeof(Factor) * kDepth);
    }
  }

  void rotate_queries(const SubStep& step, const ProductUnit& unit, int head,
                      simd::F32 factor) const {
    const int query = args_.nope_dim + args_.rope_dim;
    float* x = static_cast<float*>(worker_.scratch(1, sizeof(float) * padded(args_.rope_dim)));
    const int begin = step.begin + unit.first_token, end = step.begin + unit.end_token;
    for (int s = 0; s < step.seqs.num_seqs; s++) {
      const int last = std::min(step.seqs.q_start[s + 1], end);
      for (int t = std::max(step.seqs.q_start[s], begin); t < last; t++) {
        std::copy_n(args_.q + t * args_.ldq + int64_t{head} * query + args_.nope_dim,
                    args_.rope_dim, x);
        turn(args_.cos_sin, position_of(step.seqs, s, t), args_.rope_dim, args_.rope_interleaved,
             x);
        for (int i = 0; i < args_.rope_dim; i += 16) {
          put_query(t - step.begin, head, queries_.rank_place + i, queries_.width,
                    simd::mul(simd::load_first(x + i, args_.rope_dim - i), factor));
        }
      }
    }
  }

  // Lanes without a head.
  void clear_lanes(const ProductUnit& unit) const {
    const int first = args_.num_heads % kHeads * Product::kDepth;
    if (first == 0) return;
    for (int t = unit.first_token; t < unit.end_token; t++) {
      Factor* to = queries_.of(t, queries_.vectors - 1);
      for (int d = 0; d < num_terms<Product>(queries_.width); d++, to += kQueryLanes) {
        std::fill(to + first, to + kQueryLanes, Factor{0});
      }
    }
  }

  // ---- Outputs

  // Lanes are heads still, and terms those of V.
  Input* attended_of(int token, int vector) const {
    const int64_t index = int64_t{token} * queries_.vectors + vector;
    return attended_ + index * kInputLanes * num_terms<Matrix>(args_.rank);
  }

  // The lane of a head.
  Inputs<Matrix> inputs_of_values(const ProductUnit& unit, int head) const {
    constexpr int kDepth = Matrix::kDepth;
    const int terms = num_terms<Matrix>(args_.rank), tokens = unit.end_token - unit.first_token;
    const size_t size = sizeof(Input) * tokens * terms * kDepth;
    Input* inputs = static_cast<Input*>(worker_.scratch(5, size));
    Input* to = inputs;
    for (int t = unit.first_token; t < unit.end_token; t++) {
      const Input* lane = attended_of(t, head / kHeads) + head % kHeads * kDepth;
      for (int i = 0; i < terms; i++, lane += kInputLanes, to += kDepth) {
        std::memcpy(to, lane, sizeof(Input) * kDepth);
      }
    }
    return {inputs, terms * kDepth, terms};
  }

  const oct_latent_args& args_;
  const LatentQueries<Product>& queries_;
  const Worker& worker_;
  Input* const attended_;  // [token][vector][rank][16 heads]; of all workers
};

}  // namespace octavo
