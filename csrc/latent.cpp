// Latent attention: stores rows, absorbs queries, attends, and expands the outputs.
//
//     store       norm, rotation and writing of the step's rows       by tokens
//     for each group of tokens, as queries take much memory:
//         absorb      queries times U, and rotated                    by ticket, latent_heads.h
//         -- barrier --
//         attend      the items                                       by ticket, attention_plan.cpp
//         -- barrier --   and
//         merge       the splits of each vector, by ticket, if items were cut by splits
//         -- barrier --
//         expand      attended latents times V                        by ticket, latent_heads.h
//         -- barrier --
#include "latent.h"

#include <algorithm>
#include <climits>

#include "attention_plan.h"
#include "kernels.h"
#include "latent_formats.h"
#include "latent_heads.h"
#include "latent_products.h"
#include "latent_tile.h"
#include "rope.h"
#include "rows.h"

namespace octavo {
namespace {

using simd::F32;

// ---- Rows

// A value that is not finite makes the whole row NaN: a score of -inf would hide it.
void mark_if_damaged(float* x, int count) {
  F32 zeros = simd::zero();
  for (int i = 0; i < count; i += 16) {
    // Scaled up first: values that bfloat16 rounds to infinity count as infinite.
    const F32 larger = simd::mul(simd::load(x + i), simd::set1(1.01f));
    zeros = simd::fma(larger, simd::zero(), zeros);
  }
  if (simd::any(simd::is_nan(zeros))) {
    std::fill_n(x, count, std::numeric_limits<float>::quiet_NaN());
  }
}

template <class Rows>
void store_rows(const oct_latent_args& args, const oct_sequences& seqs, const Worker& worker) {
  const int rank = padded(args.rank), count = rank + padded(args.rope_dim);
  float* x = static_cast<float*>(worker.scratch(1, sizeof(float) * count));
  const Range mine = share(seqs.num_tokens, worker.rank, worker.size);
  for (int s = 0; s < seqs.num_seqs; s++) {
    const LatentRows rows(args, seqs, s, Rows::bytes(latent_width(args)));
    const int end = std::min(seqs.q_start[s + 1], mine.end);
    for (int t = std::max(seqs.q_start[s], mine.begin); t < end; t++) {
      const float* ckv = args.ckv + t * args.ldckv;
      std::fill_n(x, count, 0.0f);
      norm_row(ckv, args.norm, args.eps, args.rank, x);
      std::copy_n(ckv + args.rank, args.rope_dim, x + rank);
      turn(args.cos_sin, position_of(seqs, s, t), args.rope_dim, args.rope_interleaved, x + rank);
      mark_if_damaged(x, count);
      Rows::write(rows.row(slot_of(seqs, s, t)), x, args);
    }
  }
}

// ---- The work of one worker in a call

// `Rows` as in latent_formats.h.
template <class Rows>
class Latent {
  using Product = typename Rows::Product;
  using Factor = typename Product::Factor;  // of rows, and of queries

 public:
  Latent(const oct_latent_args& args, const oct_sequences& seqs,
         const LatentQueries<Product>& queries, const LatentHeads& heads, const Worker& worker)
      : args_(args),
        seqs_(seqs),
        queries_(queries),
        heads_(heads),
        worker_(worker),
        vectors_(queries.vectors),
        width_(queries.width),
        column_(Product::kDepth * padded(args.rank) + 32),
        state_floats_(LaneSoftmax::floats(args.rank)) {}

  void run() {
    store_rows<Rows>(args_, seqs_, worker_);
    const int tokens = queries_.num_tokens;
    for (int begin = 0; begin < seqs_.num_tokens; begin += tokens) {
      if (!run_tokens(SubStep(seqs_, begin, std::min(begin + tokens, seqs_.num_tokens), worker_)))
        return;
    }
  }

 private:
  // False if the call was aborted.
  bool run_tokens(const SubStep& step) {
    heads_.absorb(step);
    if (!worker_.barrier()) return false;
    const oct_attention_args shape = as_attention(args_);
    const SharedPrefixes none;
    const Plan plan(shape, step.seqs, none, worker_);
    attend_items(step, plan);
    if (!worker_.barrier()) return false;
    if (plan.cut_by_splits()) {
      merge_items(step, plan);
      if (!worker_.barrier()) return false;
    }
    heads_.expand(step);
    return worker_.barrier();
  }

  // ---- Attend

  void attend_items(const SubStep& step, const Plan& plan) {
    const int64_t item_floats = plan.max_rows() / kHeads * state_floats_;
    if (plan.cut_by_splits()) {
      parts_ = static_cast<float*>(
          worker_.shared(2, sizeof(float) * item_floats * plan.num_items()));
    }
    float* total = static_cast<float*>(worker_.scratch(3, sizeof(float) * 2 * item_floats));
    split_ = total + item_floats;
    // Decoded rows, each with room behind it for stores of 16 values.
    decoded_ = static_cast<Factor*>(worker_.scratch(4, sizeof(Factor) * kTile * (width_ + 16)));
    columns_ = static_cast<Factor*>(worker_.scratch(6, sizeof(Factor) * kTile * column_));
    for (int i = worker_.ticket(); i < plan.num_items(); i = worker_.ticket()) {
      const Item item = plan.item(i);
      float* into = plan.cut_by_splits() ? parts_ + i * item_floats : total;
      attend(step, item, into);
      if (!plan.cut_by_splits()) finish_item(step, item, into);
    }
  }

  void attend(const SubStep& step, const Item& item, float* into) {
    const int count = item.num_tokens * vectors_;
    for (int v = 0; v < count; v++) state(into, v).reset();
    if (item.sees_nothing()) return;
    const int first = item.first_key / kTile, last = item.last_key / kTile;
    const int drafted = first_drafted_position(step.seqs, item);
    for (int t = first; t <= last; t++) {
      const bool in_first_split = t / (kSplit / kTile) == first / (kSplit / kTile);
      float* state_at = in_first_split ? into : split_;
      if (!in_first_split && t % (kSplit / kTile) == 0) {
        for (int v = 0; v < count; v++) state(split_, v).reset();
      }
      const int end = std::min((t + 1) * kTile, item.last_key + 1);
      if (end <= drafted) {
        attend_tile(step, item, t * kTile, end, 0, item.num_tokens, state_at);
      } else {
        for (int i = 0; i < item.num_tokens; i++) {
          attend_tile(step, item, t * kTile, end, i, i + 1, state_at);
        }
      }
      if (!in_first_split && (t == last || (t + 1) % (kSplit / kTile) == 0)) {
        for (int v = 0; v < count; v++) state(into, v).merge(state(split_, v));
      }
    }
  }

  // The first position whose slot depends on the row that sees it, as draft tokens are a tree.
  static int first_drafted_position(const oct_sequences& seqs, const Item& item) {
    const int last = item.first_token + item.num_tokens - 1;
    if (!seqs.parents || seqs.parents[last] < 0) return INT_MAX;
    int root = last;
    while (seqs.parents[root] >= 0) root = seqs.parents[root];
    return slot_of(seqs, item.seq, root) + 1;
  }

  // Positions first to end of a tile, for the tokens from_token to to_token of an item.
  void attend_tile(const SubStep& step, const Item& item, int first, int end, int from_token,
                   int to_token, float* into) {
    RowTile<Product> tile;
    const int row = item.first_token + to_token - 1;
    end = std::min(end, highest_position(step.seqs, item, from_token, to_token) + 1);
    if (end <= first) return;
    read_tile(step.seqs, item, row, first, end, tile);
    fetch_next(step.seqs, item, end, tile);
    const int last = to_token * vectors_;
    for (int v = from_token * vectors_; v < last;) {
      const int seen = rows_seen(step.seqs, item, v, first, end);
      const bool pairs = kMaxVectors > 1 && v + 1 < last && seen > 0 &&
                         rows_seen(step.seqs, item, v + 1, first, end) == seen;
      if (pairs) {
        attend_together<kMaxVectors>(step, item, tile, v, seen, into);
      } else if (seen > 0) {
        attend_together<1>(step, item, tile, v, seen, into);
      }
      if (seen > 0) tile.next[0] = nullptr;  // fetched
      v += pairs ? kMaxVectors : 1;
    }
  }

  int highest_position(const oct_sequences& seqs, const Item& item, int from, int to) const {
    int highest = -1;
    for (int i = from; i < to; i++) {
      highest = std::max(highest, position_of(seqs, item.seq, item.first_token + i));
    }
    return highest;
  }

  int rows_seen(const oct_sequences& seqs, const Item& item, int v, int first, int end) const {
    const int position = position_of(seqs, item.seq, item.first_token + v / vectors_);
    return std::clamp(position + 1 - first, 0, end - first);
  }

  template <int V>
  void attend_together(const SubStep& step, const Item& item, const RowTile<Product>& tile,
                       int first, int num_rows, float* into) const {
    const Factor* queries[V];
    const LaneSoftmax softmax[] = {state(into, first), state(into, first + V - 1)};
    const LaneSoftmax* of[V];
    for (int v = 0; v < V; v++) {
      queries[v] = queries_.of(item.first_token - step.begin, first + v);
      of[v] = &softmax[v];
    }
    attend_vectors<Product, V>(tile, num_rows, num_terms<Product>(width_), queries, of);
  }

  // Rows of the positions first to end, as a row of the step sees them.
  void read_tile(const oct_sequences& seqs, const Item& item, int row, int first, int end,
                 RowTile<Product>& tile) const {
    int slots[kTile];
    for (int i = 0; i < end - first; i++) slots[i] = first + i;
    for (int position = position_of(seqs, item.seq, row); seqs.parents && seqs.parents[row] >= 0;
         row = seqs.parents[row], position--) {
      if (position < first || position >= end) continue;
      slots[position - first] = slot_of(seqs, item.seq, row);
    }
    const LatentRows rows(args_, seqs, item.seq, Rows::bytes(latent_width(args_)));
    for (int i = 0; i < end - first; i++) {
      tile.rows[i] = read_factors<Rows>(rows.row(slots[i]), args_, decoded_ + i * (width_ + 16));
    }
    for (int i = end - first; i < kTile; i++) tile.rows[i] = tile.rows[0];
    make_columns((end - first + Product::kDepth - 1) / Product::kDepth, tile);
  }

  void make_columns(int count, RowTile<Product>& tile) const {
    for (int i = 0; i < count; i++) {
      if constexpr (Product::kDepth == 1) {
        tile.columns[i] = tile.rows[i];
      } else {
        tile.columns[i] = columns_ + i * column_;
        pair_rows(tile.rows[2 * i], tile.rows[2 * i + 1], args_.rank, columns_ + i * column_);
      }
    }
  }

  // The tile after this one, if the item sees it.
  void fetch_next(const oct_sequences& seqs, const Item& item, int first,
                  RowTile<Product>& tile) const {
    tile.row_bytes = Rows::bytes(latent_width(args_));
    tile.next[0] = nullptr;
    if (first % kTile != 0 || first > item.last_key) return;
    const LatentRows rows(args_, seqs, item.seq, tile.row_bytes);
    for (int i = 0; i < kTile; i++) tile.next[i] = rows.row(std::min(first + i, item.last_key));
  }

  // ---- Merge

  LaneSoftmax state(float* of_item, int vector) const {
    return LaneSoftmax(of_item + vector * state_floats_, args_.rank);
  }

  void merge_items(const SubStep& step, const Plan& plan) {
    const int most = plan.max_rows() / kHeads;
    const int64_t item_floats = most * state_floats_;
    for (int i = worker_.ticket(); i < plan.num_tiles() * most; i = worker_.ticket()) {
      const int tile = i / most, vector = i % most;
      const Item all = plan.tile(tile);
      if (vector >= all.num_tokens * vectors_) continue;
      const auto seen_in = [&](int split) {
        return state(parts_ + plan.item_of_split(tile, split) * item_floats, vector);
      };
      int split = all.first_key / kSplit;
      const LaneSoftmax total = seen_in(split);
      while (++split <= all.last_key / kSplit) total.merge(seen_in(split));
      finish(step, all, vector, total);
    }
  }

  void finish_item(const SubStep& step, const Item& item, float* of_item) const {
    for (int v = 0; v < item.num_tokens * vectors_; v++) finish(step, item, v, state(of_item, v));
  }

  void finish(const SubStep& step, const Item& item, int vector, const LaneSoftmax& total) const {
    heads_.take(item.first_token - step.begin + vector / vectors_, vector % vectors_, total);
  }

  const oct_latent_args& args_;
  const oct_sequences& seqs_;
  const LatentQueries<Product>& queries_;
  const LatentHeads& heads_;
  const Worker& worker_;
  const int vectors_;  // of a token
  const int width_;    // numbers of a row, as products take it
  // Factors from column to column: not a power of two, which would map them to a few cache sets.
  const int64_t column_;
  const int64_t state_floats_;
  float* parts_ = nullptr;  // a state for each vector of each item; of all workers
  float* split_ = nullptr;
  Factor* decoded_ = nullptr;
  Factor* columns_ = nullptr;
};

int32_t check_sizes(const oct_latent_args& args) {
  const int width = latent_width(args);
  if (args.num_heads < 1 || args.rank < 1 || args.rope_dim < 2 || args.rope_dim % 2 != 0 ||
      args.nope_dim < 1 || args.value_dim < 1 ||
      padded(args.rank) + padded(args.rope_dim) > kMaxLatent) {
    return fail(OCT_ERR_ARGUMENT,
                "latent attention: %d heads of %d + %d and %d numbers, rows of %d", args.num_heads,
                args.nope_dim, args.rope_dim, args.value_dim, width);
  }
  if (latent_row_bytes(args.kv_format, width) == 0) {
    return fail(OCT_ERR_ARGUMENT, "latent attention: there are no rows of KV format %d",
                args.kv_format);
  }
  return OCT_OK;
}

template <class Rows>
void read_rows(const oct_latent_args& args, const oct_sequences& seqs, int seq, float* out) {
  const int width = latent_width(args);
  const LatentRows rows(args, seqs, seq, Rows::bytes(width));
  for (int slot = 0; slot < seqs.kv_len[seq]; slot++, out += width) {
    const float* row = Rows::read(rows.row(slot), args, out);
    if (row != out) std::copy_n(row, width, out);
  }
}

}  // namespace

int32_t check_latent(const oct_latent_args& args, const oct_sequences& seqs) {
  const int32_t code = check_sizes(args);
  if (code != OCT_OK) return code;
  if (!with_matrices(args.weight_format, [](auto) {})) {
    return fail(OCT_ERR_ARGUMENT, "latent attention: key_up and value_up are of format %d",
                args.weight_format);
  }
  if (!args.norm || !args.cos_sin || !args.key_up || !args.value_up || !args.q || !args.ckv ||
      !args.kv || !args.out) {
    return fail(OCT_ERR_ARGUMENT, "latent attention: an address is NULL");
  }
  if (args.ldq < int64_t{args.num_heads} * (args.nope_dim + args.rope_dim) ||
      args.ldckv < latent_width(args) || args.ldo < int64_t{args.num_heads} * args.value_dim) {
    return fail(OCT_ERR_ARGUMENT, "latent attention: rows of q, ckv and out are %lld, %lld and %lld "
                "floats apart, too few", static_cast<long long>(args.ldq),
                static_cast<long long>(args.ldckv), static_cast<long long>(args.ldo));
  }
  const int64_t block = seqs.block_size * latent_row_bytes(args.kv_format, latent_width(args));
  if (args.kv_block_bytes < block) {
    return fail(OCT_ERR_ARGUMENT, "latent attention: %lld bytes from block to block, each has %lld",
                static_cast<long long>(args.kv_block_bytes), static_cast<long long>(block));
  }
  return check_sequences(as_attention(args), seqs);
}

void latent(const oct_latent_args& args, const oct_sequences& seqs, const Worker& worker) {
  with_row_format(args.kv_format, [&](auto rows) {
    using Product = typename decltype(rows)::Product;
    const LatentQueries<Product> queries(args, seqs.num_tokens, worker);
    with_matrices(args.weight_format, [&](auto matrix) {
      const MatrixHeads<Product, decltype(matrix)> heads(args, queries, worker);
      Latent<decltype(rows)>(args, seqs, queries, heads, worker).run();
    });
  });
}

}  // namespace octavo

int64_t oct_latent_row_bytes(int32_t kv_format, int32_t rank, int32_t rope_dim) {
  using namespace octavo;
  const int64_t bytes = rank > 0 && rope_dim > 0 ? latent_row_bytes(kv_format, rank + rope_dim) : 0;
  if (bytes > 0 && padded(rank) + padded(rope_dim) <= kMaxLatent) return bytes;
  return fail(OCT_ERR_ARGUMENT, "there are no latent rows of format %d and %d + %d numbers",
              kv_format, rank, rope_dim);
}

int32_t oct_latent(oct_pool* pool, const oct_latent_args* args, const oct_sequences* seqs) {
  using namespace octavo;
  const int32_t code = check_latent(*args, *seqs);
  if (code != OCT_OK) return code;
  return run(pool, [&](const Worker& worker) { latent(*args, *seqs, worker); });
}

int32_t oct_latent_read(const oct_latent_args* args, const oct_sequences* seqs, int32_t seq,
                        float* rows) {
  using namespace octavo;
  if (seq < 0 || seq >= seqs->num_seqs) {
    return fail(OCT_ERR_ARGUMENT, "there is no sequence %d in a step of %d", seq, seqs->num_seqs);
  }
  const int32_t code = check_sizes(*args);
  if (code != OCT_OK) return code;
  with_row_format(args->kv_format,
                  [&](auto format) { read_rows<decltype(format)>(*args, *seqs, seq, rows); });
  return OCT_OK;
}
