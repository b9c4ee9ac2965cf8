// Paged attention: the items of a step attended, and their results put together.
//
//     prepare         all new queries, keys and values      shared out by runs       kv_write.cpp
//     -- barrier --
//     attend          the items                             by ticket         attention_plan.cpp
//     -- barrier --   and
//     merge           the splits of each tile of queries,   by ticket
//                     if items were cut by splits
//
// Where a sequence ends in a tree, the tokens of an item go through the first tiles together, and
// through those from the tree on one by one, each with chunks of its own (draft_tree.h).
//
// In a step of decodes, each item's worker prepares what the item needs, without the first barrier:
// nobody else reads the new key and value.
#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "attention_tile.h"
#include "draft_tree.h"
#include "kernels.h"
#include "kv_select.h"
#include "kv_write.h"

namespace octavo {
namespace {

using simd::F32;

// One worker's part in a call.
template <class Kv>
class Attention {
  using Factor = typename Kv::Keys::Factor;  // of queries

 public:
  Attention(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker)
      : args_(args),
        seqs_(seqs),
        worker_(worker),
        scoring_{args.head_dim, args.window, args.softcap * kLog2E},
        group_(args.num_heads / args.num_kv_heads),
        plan_(args, seqs, worker),
        state_floats_(Softmax::floats(plan_.max_rows(), args.head_dim)) {}

  void run() {
    const int64_t row_bytes = sizeof(Factor) * query_factors<typename Kv::Keys>(args_.head_dim);
    const int64_t rows = int64_t{seqs_.num_tokens} * args_.num_heads;
    queries_ = static_cast<Factor*>(plan_.single_tokens() ? worker_.scratch(4, group_ * row_bytes)
                                                          : worker_.shared(0, rows * row_bytes));
    if (plan_.cut_by_splits()) {
      parts_ = static_cast<float*>(
          worker_.shared(1, sizeof(float) * state_floats_ * plan_.num_items()));
    }
    total_ = static_cast<float*>(worker_.scratch(1, sizeof(float) * 2 * state_floats_));
    split_ = total_ + state_floats_;
    positions_ = static_cast<int*>(worker_.scratch(2, sizeof(int) * plan_.max_rows()));
    last_values_ = static_cast<uint8_t*>(
        worker_.scratch(3, kv_value_bytes(args_.kv_format, args_.head_dim)));

    if (!plan_.single_tokens()) {
      prepare<Kv>(args_, seqs_, worker_, queries_);
      if (!worker_.barrier()) return;
    }
    int next = worker_.ticket();
    while (next < plan_.num_items()) next = attend(next);
    if (!plan_.cut_by_splits() || !worker_.barrier()) return;
    for (int i = worker_.ticket(); i < plan_.num_tiles(); i = worker_.ticket()) merge_splits(i);
  }

 private:
  // ---- Keys and values of an item

  int num_rows(const Item& item) const { return item.num_tokens * group_; }

  // Chunks that are not seen have the address of one that is: they may be fetched, if not attended.
  void look_up(const Item& item, int index, KeyTile& tile) const {
    const KvHead kv(args_, seqs_, item.seq, item.head);
    tile.first_key = index * kTile;
    tile.begin = std::max(item.first_key - tile.first_key, 0) / kChunk;
    tile.end = std::min(item.last_key - tile.first_key, kTile - 1) / kChunk + 1;
    for (int c = 0; c < kTileChunks; c++) {
      const int seen = std::min(std::max(c, tile.begin), tile.end - 1);
      tile.keys[c] = kv.chunk(index * kTileChunks + seen);
      tile.values[c] = tile.keys[c] + kv.values_offset();
      if constexpr (Kv::kScaled) Kv::fetch_scales(tile.keys[c], tile.values[c], args_.head_dim);
    }
  }

  // The last chunk of a sequence has slots that nobody has written yet. Their keys are masked, but
  // the values of even a weight of 0 count if they are NaN: they are replaced by zeros. Codes are
  // finite whatever they are.
  void hide_unwritten(const Item& item, KeyTile& tile) const {
    if constexpr (!Kv::kScaled) {
      const int last = seqs_.kv_len[item.seq] / kChunk - tile.first_key / kChunk;
      const int written = seqs_.kv_len[item.seq] % kChunk;
      if (written == 0 || last < tile.begin || last >= tile.end) return;
      Kv::copy_first(tile.values[last], args_.head_dim, written, last_values_);
      tile.values[last] = last_values_;
    }
  }

  // The first tile of an item, if there is such an item and it sees something.
  bool look_up_first(int index, KeyTile& tile) const {
    if (index >= plan_.num_items()) return false;
    const Item item = plan_.item(index);
    if (item.sees_nothing()) return false;
    look_up(item, item.first_key / kTile, tile);
    return true;
  }

  // ---- Attend

  const Factor* queries_of(const Item& item) const {
    if (plan_.single_tokens()) {
      const bool sees_new_key = item.last_key == item.position;
      prepare_token<Kv>(args_, seqs_, item.seq, item.head, sees_new_key, queries_);
      return queries_;
    }
    const int64_t row = (int64_t{item.head} * seqs_.num_tokens + item.first_token) * group_;
    return queries_ + row * query_factors<typename Kv::Keys>(args_.head_dim);
  }

  // Attend one item; returns the next one to do. That is known while the last tile of this one is
  // attended, so that its keys can be fetched.
  int attend(int index) {
    const Item item = plan_.item(index);
    if (item.sees_nothing()) return worker_.ticket();
    const int first = item.first_key / kTile, last = item.last_key / kTile;
    int following = 0;
    for (int r = 0; r < num_rows(item); r++) {
      positions_[r] = position_of(seqs_, item.seq, item.first_token + r / group_);
    }
    const Factor* queries = queries_of(item);
    PathChunks<Kv> paths(args_, seqs_, item, worker_);
    Softmax total(plan_.cut_by_splits() ? part(index) : total_, num_rows(item), args_.head_dim);
    Softmax split(split_, num_rows(item), args_.head_dim);
    total.reset();

    KeyTile tiles[2];
    look_up(item, first, tiles[first % 2]);
    for (int t = first; t <= last; t++) {
      KeyTile &tile = tiles[t % 2], &next = tiles[(t + 1) % 2];
      tile.next = &next;
      if (t < last) {
        look_up(item, t + 1, next);
      } else {
        following = worker_.ticket();
        if (!look_up_first(following, next)) tile.next = &tile;
      }
      const bool in_first_split = t / (kSplit / kTile) == first / (kSplit / kTile);
      Softmax& into = in_first_split ? total : split;
      if (!in_first_split && t % (kSplit / kTile) == 0) split.reset();
      if (t < paths.first_tile()) {
        hide_unwritten(item, tile);
        attend_tile<Kv>(scoring_, tile, positions_, queries, into);
      } else {
        attend_paths(item, paths, tile, queries, into);
      }
      if (!in_first_split && (t == last || (t + 1) % (kSplit / kTile) == 0)) merge(total, split);
    }
    if (!plan_.cut_by_splits()) finish(item, total);
    return following;
  }

  // A tile in which each token of an item sees chunks of its own.
  void attend_paths(const Item& item, PathChunks<Kv>& paths, KeyTile& tile, const Factor* queries,
                    const Softmax& softmax) const {
    paths.put_into(tile);
    for (int i = 0; i < item.num_tokens; i++) {
      const int row = i * group_;
      paths.show(item.first_token + i);
      attend_tile<Kv>(scoring_, tile, positions_ + row,
                      queries + row * query_factors<typename Kv::Keys>(args_.head_dim),
                      softmax.part(row, group_));
    }
  }

  // ---- Put together

  float* part(int index) const { return parts_ + index * state_floats_; }

  // Add what was seen in a further split.
  void merge(Softmax& total, const Softmax& split) const {
    const int dim = args_.head_dim;
    for (int r = 0; r < total.rows; r++) {
      const float top = std::max(total.top[r], split.top[r]);
      const F32 keep = exp2(simd::set1(total.top[r] - top));
      const F32 take = exp2(simd::set1(split.top[r] - top));
      const auto add = [&](float* a, const float* b) {
        simd::store(a, simd::fma(simd::load(b), take, simd::mul(simd::load(a), keep)));
      };
      total.top[r] = top;
      add(total.sum + 16 * r, split.sum + 16 * r);
      for (int d = 0; d < dim; d += 16) add(total.acc + r * dim + d, split.acc + r * dim + d);
    }
  }

  void merge_splits(int tile) {
    const Item all = plan_.tile(tile);
    const auto seen_in = [&](int split) {
      return Softmax(part(plan_.item_of_split(tile, split)), num_rows(all), args_.head_dim);
    };
    int split = all.first_key / kSplit;
    Softmax total = seen_in(split);
    while (++split <= all.last_key / kSplit) merge(total, seen_in(split));
    finish(all, total);
  }

  // Divide by the sum, in which a head's sink has its part.
  void finish(const Item& item, const Softmax& total) const {
    const int dim = args_.head_dim;
    for (int r = 0; r < total.rows; r++) {
      const int head = item.head * group_ + r % group_;
      float sum = simd::sum(simd::load(total.sum + 16 * r)), keep = 1.0f;
      if (args_.sinks) {
        const float sink = args_.sinks[head] * kLog2E;
        const float top = std::max(total.top[r], sink);
        alignas(64) float powers[16] = {total.top[r] - top, sink - top};
        simd::store(powers, exp2(simd::load(powers)));
        keep = powers[0];
        sum = sum * keep + powers[1];
      }
      const F32 factor = simd::set1(keep / sum);
      const int64_t token = item.first_token + r / group_;
      float* out = args_.out + (token * args_.num_heads + head) * dim;
      for (int d = 0; d < dim; d += 16) {
        simd::store(out + d, simd::mul(simd::load(total.acc + r * dim + d), factor));
      }
    }
  }

  const oct_attention_args& args_;
  const oct_sequences& seqs_;
  const Worker& worker_;
  const Scoring scoring_;
  const int group_;
  const Plan plan_;
  const int64_t state_floats_;
  Factor* queries_ = nullptr;  // [Hk][T][G][D] of all workers, or [G][D] of one
  float* parts_ = nullptr;                  // an item's Softmax each, of all workers
  float* total_ = nullptr;
  float* split_ = nullptr;
  int* positions_ = nullptr;
  uint8_t* last_values_ = nullptr;
};

int32_t check_sequence(const oct_attention_args& args, const oct_sequences& seqs, int s) {
  const int length = num_new(seqs, s), end = seqs.kv_len[s];
  if (length < 0 || seqs.q_start[s] < 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: sequence %d has the tokens %d to %d of the step", s,
                seqs.q_start[s], seqs.q_start[s + 1]);
  }
  if (end < length) {
    return fail(OCT_ERR_ARGUMENT, "attention: sequence %d has %d new tokens, but %d in all", s,
                length, end);
  }
  return check_blocks(args, seqs, s, end);
}

// Whether only the last rows of each sequence have parents, and these are among them or the row
// before.
int32_t check_trees(const oct_sequences& seqs) {
  for (int s = 0; s < seqs.num_seqs; s++) {
    const int first = seqs.q_start[s], drafted = first_drafted(seqs, s);
    for (int t = first; t < seqs.q_start[s + 1]; t++) {
      const int parent = seqs.parents[t];
      const int earliest = std::max(drafted - 1, first);
      if (t < drafted ? parent == -1 : parent >= earliest && parent < t) continue;
      return fail(OCT_ERR_ARGUMENT, "attention: sequence %d has the rows %d to %d of the step, "
                  "of which %d cannot follow %d", s, first, seqs.q_start[s + 1] - 1, t, parent);
    }
  }
  return OCT_OK;
}

}  // namespace

int32_t check_blocks(const oct_attention_args& args, const oct_sequences& seqs, int s, int end) {
  if (end > int64_t{seqs.table_stride} * seqs.block_size) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: sequence %d has %d positions, but its table is %d blocks of %d", s, end,
                seqs.table_stride, seqs.block_size);
  }
  const int length = num_new(seqs, s);
  if (length == 0) return OCT_OK;
  const int32_t* blocks = block_table(args, seqs, s);
  const int first = first_seen(args.window, end - length) / seqs.block_size;
  const int last = (end - 1) / seqs.block_size;
  int32_t lowest = 0, highest = 0;
  for (int i = first; i <= last; i++) {
    lowest = std::min(lowest, blocks[i]);
    highest = std::max(highest, blocks[i]);
  }
  if (lowest < 0 || highest >= args.num_blocks) {
    return fail(OCT_ERR_ARGUMENT, "attention: sequence %d needs block %d, which does not exist: "
                "there are %d", s, lowest < 0 ? lowest : highest, args.num_blocks);
  }
  return OCT_OK;
}

int32_t check_sequences(const oct_attention_args& args, const oct_sequences& seqs) {
  if (seqs.block_size < kChunk || seqs.block_size % kChunk != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: blocks of %d tokens; possible are multiples of %d",
                seqs.block_size, kChunk);
  }
  if (seqs.num_seqs < 0 || seqs.num_tokens < 0 || !seqs.q_start || !seqs.kv_len ||
      !seqs.block_table) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: q_start, kv_len or block_table is NULL, or its size negative");
  }
  for (int s = 0; s < seqs.num_seqs; s++) {
    const int32_t code = check_sequence(args, seqs, s);
    if (code != OCT_OK) return code;
  }
  if (seqs.q_start[seqs.num_seqs] > seqs.num_tokens) {
    return fail(OCT_ERR_ARGUMENT, "attention: the sequences have %d tokens, the step has %d",
                seqs.q_start[seqs.num_seqs], seqs.num_tokens);
  }
  return seqs.parents ? check_trees(seqs) : OCT_OK;
}

int32_t check_attention(const oct_attention_args& args, const oct_sequences& seqs) {
  const int heads = args.num_heads, kv_heads = args.num_kv_heads, dim = args.head_dim;
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: %d query heads cannot share %d key heads evenly",
                heads, kv_heads);
  }
  if (dim < 16 || dim > kMaxHeadDim || dim % 16 != 0) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: the head size is %d; possible are multiples of 16 to %d", dim,
                kMaxHeadDim);
  }
  if (kv_chunk_bytes(args.kv_format, dim) == 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: there is no KV format %d", args.kv_format);
  }
  if (args.rotary_dim < 0 || args.rotary_dim > dim || args.rotary_dim % 2 != 0) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: %d of %d dimensions cannot be rotated: an even number can",
                args.rotary_dim, dim);
  }
  if (args.window < 0 || !(args.softcap >= 0)) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: window %d and softcap %g: give 0 for none, and nothing below",
                args.window, static_cast<double>(args.softcap));
  }
  if (args.ldq < int64_t{heads} * dim || args.ldk < int64_t{kv_heads} * dim ||
      args.ldv < int64_t{kv_heads} * dim) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: rows of q, k and v are %lld, %lld and %lld floats apart, too few: "
                "q has %d in a row, k and v have %d",
                static_cast<long long>(args.ldq), static_cast<long long>(args.ldk),
                static_cast<long long>(args.ldv), heads * dim, kv_heads * dim);
  }
  if (!args.q || !args.k || !args.v || !args.kv || !args.out ||
      (args.rotary_dim > 0 && !args.cos_sin)) {
    return fail(OCT_ERR_ARGUMENT, "attention: q, k, v, kv, out or cos_sin is NULL");
  }
  const int64_t block =
      kv_chunk_bytes(args.kv_format, dim) * (seqs.block_size / kChunk) * kv_heads;
  if (args.kv_block_bytes < block) {
    return fail(OCT_ERR_ARGUMENT, "attention: %lld bytes from block to block, each has %lld",
                static_cast<long long>(args.kv_block_bytes), static_cast<long long>(block));
  }
  return check_sequences(args, seqs);
}

void attention(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker) {
  with_kv_format(args.kv_format, [&](auto kv) {
    Attention<decltype(kv)>(args, seqs, worker).run();
  });
}

}  // namespace octavo

int64_t oct_kv_chunk_bytes(int32_t kv_format, int32_t head_dim) {
  using namespace octavo;
  const int64_t bytes = kv_chunk_bytes(kv_format, head_dim);
  if (bytes > 0 && head_dim >= 16 && head_dim <= kMaxHeadDim && head_dim % 16 == 0) return bytes;
  return fail(OCT_ERR_ARGUMENT,
              "there are no KV chunks of format %d and head size %d: a multiple of 16 to %d",
              kv_format, head_dim, kMaxHeadDim);
}

int32_t oct_attention(oct_pool* pool, const oct_attention_args* args, const oct_sequences* seqs) {
  using namespace octavo;
  const int32_t code = check_attention(*args, *seqs);
  if (code != OCT_OK) return code;
  return run(pool, [&](const Worker& worker) { attention(*args, *seqs, worker); });
}
