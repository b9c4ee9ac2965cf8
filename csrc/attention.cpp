// Paged attention: a step cut into items, and their results put together.
//
//     prepare         all new queries, keys and values            shared out by runs    kv_write.cpp
//     -- barrier --
//     attend          item = (sequence, key head, tile of queries [, split of keys])    by ticket
//     -- barrier --   and
//     merge           the splits of each tile of queries,         by ticket
//                     but only if items were cut by splits
//
// Items are cut by splits when there would be too few of them for all workers: for one long
// sequence, say. It makes no difference to the results (attention.h says why).
#include <algorithm>
#include <cstdint>

#include "attention_tile.h"
#include "kernels.h"
#include "kv_write.h"

namespace octavo {
namespace {

using simd::F32;

// Rows (queries times heads of a group) that go through the keys together, about: so many that
// loading keys does not count, so few that what they need stays in the L2 cache.
constexpr int kTileRows = 96;
constexpr int kFewRows = 24;        // fewer are not worth it even if workers have nothing to do
constexpr int kItemsPerWorker = 4;  // so that they end at about the same time

// One sequence's part of the plan.
struct SequenceItems {
  int seq;
  int num_tiles;    // of queries
  int first_split;  // that some query of the step sees
  int num_splits;   // 1 if items are not cut by splits
  int first_item;
  int first_tile;  // counted in tiles and heads, over all sequences
};

struct Item {
  int seq, head;
  int first_token, num_tokens;  // rows of the step
  int position;                 // of the first
  int first_key, last_key;      // that some query sees; of one split, if items are cut
};

// How a step is cut: the same for all workers, and worked out by each.
struct Plan {
  int tile_tokens;
  bool cut_by_splits;
  int num_items, num_tiles;
  int max_rows;  // of an item
  SequenceItems* sequences;
  int num_sequences;
};

int num_new(const oct_sequences& seqs, int s) { return seqs.q_start[s + 1] - seqs.q_start[s]; }

Scoring scoring_of(const oct_attention_args& args) {
  return {args.head_dim, args.window, args.softcap * 1.44269504f};
}

// Tokens of a tile of queries: fewer where that gives everybody something to do.
int choose_tile_tokens(const oct_attention_args& args, const oct_sequences& seqs, int num_workers) {
  const int group = args.num_heads / args.num_kv_heads;
  int longest = 1;
  for (int s = 0; s < seqs.num_seqs; s++) longest = std::max(longest, num_new(seqs, s));
  int tokens = std::min(longest, std::max(1, kTileRows / group));
  for (; tokens > 1 && tokens * group > kFewRows; tokens = (tokens + 1) / 2) {
    int64_t items = 0;
    for (int s = 0; s < seqs.num_seqs; s++) {
      items += int64_t{(num_new(seqs, s) + tokens - 1) / tokens} * args.num_kv_heads;
    }
    if (items >= int64_t{kItemsPerWorker} * num_workers) break;
  }
  return tokens;
}

Plan make_plan(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker) {
  const Scoring scoring = scoring_of(args);
  Plan plan;
  plan.tile_tokens = choose_tile_tokens(args, seqs, worker.size);
  plan.sequences =
      static_cast<SequenceItems*>(worker.scratch(0, sizeof(SequenceItems) * (seqs.num_seqs + 1)));
  plan.num_sequences = 0;
  int64_t all_splits = 0;
  int most_splits = 1, longest = 1;
  // Long ones first, so that what is left for the end is in small pieces.
  for (const bool single : {false, true}) {
    for (int s = 0; s < seqs.num_seqs; s++) {
      const int length = num_new(seqs, s), end = seqs.kv_len[s];
      if (length == 0 || (length == 1) != single) continue;
      const int first_split = scoring.first_seen(end - length) / kSplit;
      const int splits = (end - 1) / kSplit - first_split + 1;
      const int tiles = (length + plan.tile_tokens - 1) / plan.tile_tokens;
      plan.sequences[plan.num_sequences++] = {s, tiles, first_split, splits, 0, 0};
      all_splits += int64_t{splits} * tiles * args.num_kv_heads;
      most_splits = std::max(most_splits, splits);
      longest = std::max(longest, length);
    }
  }
  plan.cut_by_splits =
      most_splits > 1 && int64_t{most_splits} * kItemsPerWorker * worker.size > all_splits;
  plan.num_items = plan.num_tiles = 0;
  for (int i = 0; i < plan.num_sequences; i++) {
    SequenceItems& items = plan.sequences[i];
    if (!plan.cut_by_splits) items.num_splits = 1;
    items.first_item = plan.num_items;
    items.first_tile = plan.num_tiles;
    plan.num_tiles += items.num_tiles * args.num_kv_heads;
    plan.num_items += items.num_tiles * args.num_kv_heads * items.num_splits;
  }
  plan.max_rows = std::min(longest, plan.tile_tokens) * (args.num_heads / args.num_kv_heads);
  return plan;
}

// One worker's part in a call.
template <class Kv>
class Attention {
 public:
  Attention(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker)
      : args_(args),
        seqs_(seqs),
        worker_(worker),
        scoring_(scoring_of(args)),
        group_(args.num_heads / args.num_kv_heads),
        plan_(make_plan(args, seqs, worker)),
        state_floats_(Softmax::floats(plan_.max_rows, args.head_dim)) {}

  void run() {
    using Factor = typename Kv::Factor;
    const int64_t rows = int64_t{seqs_.num_tokens} * args_.num_heads;
    const int64_t row_bytes = sizeof(Factor) * Kv::row_factors(args_.head_dim);
    queries_ = static_cast<Factor*>(worker_.shared(0, rows * row_bytes));
    if (plan_.cut_by_splits) {
      parts_ = static_cast<float*>(
          worker_.shared(1, sizeof(float) * state_floats_ * plan_.num_items));
    }
    float* memory = static_cast<float*>(worker_.scratch(1, sizeof(float) * 2 * state_floats_));
    total_ = memory;
    split_ = memory + state_floats_;
    positions_ = static_cast<int*>(worker_.scratch(2, sizeof(int) * plan_.max_rows));
    last_values_ = static_cast<uint8_t*>(
        worker_.scratch(3, kv_chunk_bytes(args_.kv_format, args_.head_dim) / 2));

    prepare<Kv>(args_, seqs_, worker_, queries_);
    if (!worker_.barrier()) return;
    int next = worker_.ticket();
    while (next < plan_.num_items) next = attend(next);
    if (!plan_.cut_by_splits || !worker_.barrier()) return;
    for (int i = worker_.ticket(); i < plan_.num_tiles; i = worker_.ticket()) merge_splits(i);
  }

 private:
  // ---- Which queries and keys

  // The queries of a tile, and all keys that they see.
  Item tile_item(const SequenceItems& of, int tile, int head) const {
    const int length = num_new(seqs_, of.seq);
    Item item;
    item.seq = of.seq;
    item.head = head;
    const int first = tile * plan_.tile_tokens;
    item.num_tokens = std::min(plan_.tile_tokens, length - first);
    item.first_token = seqs_.q_start[of.seq] + first;
    item.position = seqs_.kv_len[of.seq] - length + first;
    item.first_key = scoring_.first_seen(item.position);
    item.last_key = item.position + item.num_tokens - 1;
    return item;
  }

  // Sequence by sequence; in one, split by split, the last tiles first, and heads innermost.
  Item item(int index) const {
    const SequenceItems& of = *(std::upper_bound(plan_.sequences,
                                                 plan_.sequences + plan_.num_sequences, index,
                                                 [](int i, const SequenceItems& items) {
                                                   return i < items.first_item;
                                                 }) -
                                1);
    index -= of.first_item;
    const int head = index % args_.num_kv_heads;
    const int tile = index / args_.num_kv_heads % of.num_tiles;
    Item item = tile_item(of, of.num_tiles - 1 - tile, head);
    if (plan_.cut_by_splits) {
      const int split = of.first_split + index / args_.num_kv_heads / of.num_tiles;
      item.first_key = std::max(item.first_key, split * kSplit);
      item.last_key = std::min(item.last_key, split * kSplit + kSplit - 1);
    }
    return item;
  }

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
      if constexpr (Kv::kQuantized) {
        Kv::fetch_scales(tile.keys[c], args_.head_dim);
        Kv::fetch_scales(tile.values[c], args_.head_dim);
      }
    }
  }

  // The last chunk of a sequence has slots that nobody has written yet. Their keys are masked, but
  // the values of even a weight of 0 count if they are NaN: they are replaced by zeros.
  // Bytes are finite whatever they are.
  void hide_unwritten(const Item& item, KeyTile& tile) const {
    if constexpr (!Kv::kQuantized) {
      const int last = seqs_.kv_len[item.seq] / kChunk - tile.first_key / kChunk;
      const int written = seqs_.kv_len[item.seq] % kChunk;
      if (written == 0 || last < tile.begin || last >= tile.end) return;
      Kv::copy_first(tile.values[last], args_.head_dim, written, last_values_);
      tile.values[last] = last_values_;
    }
  }

  // The first tile of an item, if there is such an item and it sees something.
  bool look_up_first(int index, KeyTile& tile) const {
    if (index >= plan_.num_items) return false;
    const Item item = this->item(index);
    if (item.first_key > item.last_key) return false;
    look_up(item, item.first_key / kTile, tile);
    return true;
  }

  // ---- Attend

  // Attend one item; returns the next one to do. That is known while the last tile is attended, so
  // that its keys can be fetched.
  int attend(int index) {
    const Item item = this->item(index);
    const int first = item.first_key / kTile, last = item.last_key / kTile;
    int following = plan_.num_items;
    if (item.first_key > item.last_key) return worker_.ticket();
    for (int r = 0; r < num_rows(item); r++) positions_[r] = item.position + r / group_;
    const typename Kv::Factor* queries =
        queries_ + (int64_t{item.head} * seqs_.num_tokens + item.first_token) * group_ *
                       Kv::row_factors(args_.head_dim);
    Softmax total(plan_.cut_by_splits ? part(index) : total_, num_rows(item), args_.head_dim);
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
      hide_unwritten(item, tile);
      const bool in_first_split = t / (kSplit / kTile) == first / (kSplit / kTile);
      Softmax& into = in_first_split ? total : split;
      if (!in_first_split && t % (kSplit / kTile) == 0) split.reset();
      attend_tile<Kv>(scoring_, tile, positions_, queries, into);
      if (!in_first_split && (t == last || (t + 1) % (kSplit / kTile) == 0)) merge(total, split);
    }
    if (!plan_.cut_by_splits) finish(item, total);
    return following;
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

  void merge_splits(int index) {
    const SequenceItems& of =
        *(std::upper_bound(plan_.sequences, plan_.sequences + plan_.num_sequences, index,
                           [](int i, const SequenceItems& items) { return i < items.first_tile; }) -
          1);
    const int head = (index - of.first_tile) % args_.num_kv_heads;
    const int tile = (index - of.first_tile) / args_.num_kv_heads;
    const Item all = tile_item(of, of.num_tiles - 1 - tile, head);
    const int stride = of.num_tiles * args_.num_kv_heads;
    const auto split_part = [&](int split) {
      const int at = of.first_item + (split - of.first_split) * stride + index - of.first_tile;
      return Softmax(part(at), num_rows(all), args_.head_dim);
    };
    Softmax total = split_part(all.first_key / kSplit);
    for (int split = all.first_key / kSplit + 1; split <= all.last_key / kSplit; split++) {
      merge(total, split_part(split));
    }
    finish(all, total);
  }

  // Divide by the sum, in which a head's sink has its part.
  void finish(const Item& item, const Softmax& total) const {
    const int dim = args_.head_dim;
    for (int r = 0; r < total.rows; r++) {
      const int head = item.head * group_ + r % group_;
      float sum = simd::sum(simd::load(total.sum + 16 * r)), keep = 1.0f;
      if (args_.sinks) {
        const float sink = args_.sinks[head] * 1.44269504f;
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
  typename Kv::Factor* queries_ = nullptr;  // [Hk][T][G][D], of all workers
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
  if (end > int64_t{seqs.table_stride} * seqs.block_size) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: sequence %d has %d positions, but its table is %d blocks of %d", s, end,
                seqs.table_stride, seqs.block_size);
  }
  if (length == 0) return OCT_OK;
  const int32_t* blocks = seqs.block_table + int64_t{s} * seqs.table_stride;
  const int first = scoring_of(args).first_seen(end - length) / seqs.block_size;
  const int last = (end - 1) / seqs.block_size;
  int32_t lowest = 0;
  for (int i = first; i <= last; i++) lowest = std::min(lowest, blocks[i]);
  if (lowest < 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: sequence %d needs block %d, which does not exist", s,
                lowest);
  }
  return OCT_OK;
}

}  // namespace

int32_t check_attention(const oct_attention_args& args, const oct_sequences& seqs) {
  const int heads = args.num_heads, kv_heads = args.num_kv_heads, dim = args.head_dim;
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: %d query heads cannot share %d key heads evenly",
                heads, kv_heads);
  }
  if (dim < 16 || dim > kMaxHeadDim || dim % 16 != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: the head size is %d; possible are multiples of 16 to %d",
                dim, kMaxHeadDim);
  }
  if (kv_chunk_bytes(args.kv_format, dim) == 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: there is no KV format %d", args.kv_format);
  }
  if (args.rotary_dim < 0 || args.rotary_dim > dim || args.rotary_dim % 2 != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: %d of %d dimensions cannot be rotated: an even number can",
                args.rotary_dim, dim);
  }
  if (args.window < 0 || !(args.softcap >= 0)) {
    return fail(OCT_ERR_ARGUMENT, "attention: window %d and softcap %g; 0 means none, less than 0 nothing",
                args.window, static_cast<double>(args.softcap));
  }
  if (args.ldq < int64_t{heads} * dim || args.ldk < int64_t{kv_heads} * dim ||
      args.ldv < int64_t{kv_heads} * dim) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: rows of q, k and v are %lld, %lld and %lld floats apart; %d and %d are in one",
                static_cast<long long>(args.ldq), static_cast<long long>(args.ldk),
                static_cast<long long>(args.ldv), heads * dim, kv_heads * dim);
  }
  if (!args.q || !args.k || !args.v || !args.kv || !args.out ||
      (args.rotary_dim > 0 && !args.cos_sin)) {
    return fail(OCT_ERR_ARGUMENT, "attention: q, k, v, kv, out or cos_sin is NULL");
  }
  if (seqs.block_size < kChunk || seqs.block_size % kChunk != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: blocks of %d tokens; possible are multiples of %d",
                seqs.block_size, kChunk);
  }
  if (seqs.num_seqs < 0 || seqs.num_tokens < 0 || !seqs.q_start || !seqs.kv_len ||
      !seqs.block_table) {
    return fail(OCT_ERR_ARGUMENT, "attention: q_start, kv_len or block_table is NULL, or its size negative");
  }
  for (int s = 0; s < seqs.num_seqs; s++) {
    const int32_t code = check_sequence(args, seqs, s);
    if (code != OCT_OK) return code;
  }
  if (seqs.q_start[seqs.num_seqs] > seqs.num_tokens) {
    return fail(OCT_ERR_ARGUMENT, "attention: the sequences have %d tokens, the step has %d",
                seqs.q_start[seqs.num_seqs], seqs.num_tokens);
  }
  return OCT_OK;
}

void attention(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker) {
  switch (args.kv_format) {
    case OCT_KV_F32: return Attention<F32Kv>(args, seqs, worker).run();
    case OCT_KV_BF16: return Attention<Bf16Kv>(args, seqs, worker).run();
    case OCT_KV_INT8: return Attention<Int8Kv>(args, seqs, worker).run();
  }
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
