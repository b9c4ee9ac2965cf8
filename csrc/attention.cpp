// Paged attention: attends the items of a step and merges their results.
//
//     prepare         all new queries, keys and values      divided by runs          kv_write.cpp
//     -- barrier --
//     attend shared   keys that sequences have in common,   by ticket          shared_prefix.cpp
//     -- barrier --   if there are any
//     attend          the items                             by ticket         attention_plan.cpp
//     -- barrier --   and
//     merge           the splits of each tile of queries,   by ticket
//                     if items were cut by splits
//
// Shared items store the softmax state of each query after each split; an item of one sequence begins
// by merging these, and continues with its own keys, so that sums have the same order as
// without sharing.
//
// If a sequence ends in a draft tree, the tokens of an item go through the first tiles together, and
// through those from the tree on one by one, each with chunks of its own (draft_tree.h).
//
// In a step of decodes, each item's worker prepares what the item needs, without the first barrier:
// no other worker reads the new key and value.
//
// With a sink window, an item goes through the sinks first, and then through the keys behind
// them, with queries that are rotated for each of both (sink_window.h).
#include <algorithm>
#include <cstdint>

#include "attention_plan.h"
#include "attention_tile.h"
#include "draft_tree.h"
#include "kernels.h"
#include "kv_select.h"
#include "kv_write.h"
#include "shared_prefix.h"

namespace octavo {
namespace {

using simd::F32;

constexpr int kMergedAtOnce = 16;  // splits: a vector

// The work of one worker in a call.
template <class Kv>
class Attention {
  using Factor = typename Kv::Keys::Factor;  // of queries

 public:
  Attention(const oct_attention_args& args, const oct_sequences& seqs,
            const SharedPrefixes& prefixes, const Worker& worker)
      : args_(args),
        seqs_(seqs),
        worker_(worker),
        scoring_{args.head_dim, args.softcap * kLog2E},
        group_(args.num_heads / args.num_kv_heads),
        plan_(args, seqs, prefixes, worker),
        state_floats_(Softmax::floats(plan_.max_rows(), args.head_dim)),
        shared_floats_(Softmax::floats(plan_.max_shared_rows(), args.head_dim)) {}

  void run() {
    const int64_t row_bytes = sizeof(Factor) * query_factors<typename Kv::Keys>(args_.head_dim);
    const int64_t rows = int64_t{seqs_.num_tokens} * args_.num_heads;
    queries_ = static_cast<Factor*>(plan_.prepares_ahead() ? worker_.shared(0, rows * row_bytes)
                                                           : worker_.scratch(4, group_ * row_bytes));
    if (plan_.cut_by_splits()) {
      parts_ = static_cast<float*>(
          worker_.shared(1, sizeof(float) * state_floats_ * plan_.num_items()));
    }
    total_ = static_cast<float*>(worker_.scratch(1, sizeof(float) * 2 * state_floats_));
    split_ = total_ + state_floats_;
    const int most_rows = std::max(plan_.max_rows(), plan_.max_shared_rows());
    seen_ = static_cast<Seen*>(worker_.scratch(2, sizeof(Seen) * most_rows));
    last_values_ = static_cast<uint8_t*>(
        worker_.scratch(3, kv_value_bytes(args_.kv_format, args_.head_dim)));
    if (seqs_.sink_windows) {
      angles_ = static_cast<int*>(worker_.scratch(7, sizeof(int) * plan_.max_rows()));
      rotated_ = plan_.prepares_ahead() ? static_cast<Factor*>(worker_.scratch(
                                              4, plan_.max_rows() * row_bytes))
                                        : queries_;
    }

    if (plan_.prepares_ahead()) {
      prepare<Kv>(args_, seqs_, plan_.first_rows(), worker_, queries_);
      if (!worker_.barrier()) return;
    }
    if (plan_.num_shared_items() > 0) {
      const int items = plan_.num_shared_items();
      shared_ = static_cast<float*>(worker_.shared(2, sizeof(float) * shared_floats_ * items));
      for (int i = worker_.ticket(); i < items; i = worker_.ticket()) attend_shared(i);
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

  // Chunks that are not seen have the address of a visible one, since they may be prefetched.
  template <class AnyItem>
  void look_up(const AnyItem& item, int index, KeyTile& tile) const {
    look_up(item, Seen{item.first_key, item.last_key}, index, tile);
  }
  template <class AnyItem>
  void look_up(const AnyItem& item, const Seen& keys, int index, KeyTile& tile) const {
    const KvHead kv(args_, seqs_, item.seq, item.head);
    tile.first_key = index * kTile;
    tile.begin = std::max(keys.first - tile.first_key, 0) / kChunk;
    tile.end = std::min(keys.last - tile.first_key, kTile - 1) / kChunk + 1;
    for (int c = 0; c < kTileChunks; c++) {
      const int seen = std::min(std::max(c, tile.begin), tile.end - 1);
      tile.keys[c] = kv.chunk(index * kTileChunks + seen);
      tile.values[c] = tile.keys[c] + kv.values_offset();
      if constexpr (Kv::kScaled) Kv::fetch_scales(tile.keys[c], tile.values[c], args_.head_dim);
    }
  }

  // The last chunk of a sequence has slots that are not written yet. Their keys are masked, but
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

  // The first tile of an item, if the item exists and sees keys besides sinks.
  bool look_up_first(int index, KeyTile& tile) const {
    if (index >= plan_.num_items()) return false;
    const Item item = plan_.item(index);
    if (item.first_key > item.last_key) return false;
    look_up(item, item.first_key / kTile, tile);
    return true;
  }

  // ---- Attend

  const Factor* queries_of(const Item& item) const {
    if (plan_.prepares_ahead()) return prepared(item.head, item.first_row);
    const bool sees_new_key = item.last_key == item.position || item.sinks.last == item.position;
    prepare_token<Kv>(args_, seqs_, item.seq, item.head, sees_new_key, queries_);
    return queries_;
  }
  const Factor* prepared(int head, int first_row) const {
    const int64_t row = (int64_t{head} * seqs_.num_tokens + first_row) * group_;
    return queries_ + row * query_factors<typename Kv::Keys>(args_.head_dim);
  }

  // Attend one item; returns the next one. It is known while the last tile of this one is
  // attended, so that its keys can be fetched.
  int attend(int index) {
    const Item item = plan_.item(index);
    if (item.sees_nothing()) return worker_.ticket();
    Softmax total(plan_.cut_by_splits() ? part(index) : total_, num_rows(item), args_.head_dim);
    total.reset();
    const SinkWindow sink_window(args_, seqs_, item.seq);
    if (sink_window.has_sinks()) {
      attend_apart(item, sink_window, total);
      if (!plan_.cut_by_splits()) finish(item, total);
      return worker_.ticket();
    }
    const int first = item.first_key / kTile, last = item.last_key / kTile;
    int following = 0;
    for (int r = 0; r < num_rows(item); r++) {
      seen_[r] = sink_window.behind_sinks(position_of(seqs_, item.seq, item.first_token + r / group_));
    }
    const Factor* queries = queries_of(item);
    PathChunks<Kv> paths(args_, seqs_, item, worker_);
    Softmax split(split_, num_rows(item), args_.head_dim);
    if (item.run >= 0) go_on_from(item.run, item, total, split);
    const int first_split = item.run >= 0 ? 0 : first / kSplitTiles;

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
      const bool in_first_split = t / kSplitTiles == first_split;
      Softmax& into = in_first_split ? total : split;
      if (!in_first_split && t % kSplitTiles == 0) split.reset();
      if (t < paths.first_tile()) {
        hide_unwritten(item, tile);
        attend_tile<Kv>(scoring_, tile, seen_, queries, into);
      } else {
        attend_paths(item, paths, tile, queries, into);
      }
      if (!in_first_split && (t == last || (t + 1) % kSplitTiles == 0)) merge(total, &split, 1);
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
      attend_tile<Kv>(scoring_, tile, seen_ + row,
                      queries + row * query_factors<typename Kv::Keys>(args_.head_dim),
                      softmax.part(row, group_));
    }
  }

  // ---- Shared keys

  Softmax states_of(int shared_item) const {
    return Softmax(shared_ + shared_item * shared_floats_, plan_.max_shared_rows(), args_.head_dim);
  }

  // Queries of several sequences see a split of keys, or the shared part of it.
  void attend_shared(int index) const {
    const SharedItem item = plan_.shared_item(index);
    const int first = item.first_key / kTile, last = item.last_key / kTile;
    const int rows = item.num_rows * group_;
    std::fill_n(seen_, rows, Seen{0, item.last_key});  // or behind it: they see all of it
    Softmax states = states_of(index);
    states.reset();
    const Softmax into = states.part(0, rows);
    KeyTile tiles[2];
    look_up(item, first, tiles[first % 2]);
    for (int t = first; t <= last; t++) {
      KeyTile &tile = tiles[t % 2], &next = tiles[(t + 1) % 2];
      tile.next = t < last ? &next : &tile;
      if (t < last) look_up(item, t + 1, next);
      attend_tile<Kv>(scoring_, tile, seen_, prepared(item.head, item.first_row), into);
    }
  }

  // Softmax states of an item's queries up to the end of a run: in `total` those of whole splits,
  // or of the first one, and in `split` that of the split in which the run ends.
  void go_on_from(int index, const Item& item, const Softmax& total, const Softmax& split) const {
    const PrefixRun& run = plan_.run(index);
    if (run.before >= 0) go_on_from(run.before, item, total, split);
    const int whole_splits = run.end_key / kSplit;
    for (int i = 0; i < item.num_tokens; i++) {
      const auto seen_in = [&](int split) {
        const SharedState at = plan_.shared_state(index, item.head, split, item.first_row + i);
        return states_of(at.item).part(at.row * group_, group_);
      };
      const Softmax mine = total.part(i * group_, group_);
      int first = run.first_key / kSplit;
      if (first == 0) mine.copy(seen_in(first++));
      merge_all(mine, first, whole_splits, seen_in);
      if (whole_splits > 0 && run.end_key % kSplit != 0) {
        split.part(i * group_, group_).copy(seen_in(whole_splits));
      }
    }
  }

  // ---- Attend sinks, and the keys behind them

  // Split by split, each with queries of its own; the first goes into `total`, which is empty.
  void attend_apart(const Item& item, const SinkWindow& sink_window, const Softmax& total) {
    if (!plan_.prepares_ahead()) queries_of(item);  // for the new key, which it stores
    bool is_first = true;
    const auto attend = [&](const Seen& keys, int split) {
      prepare_queries<Kv>(args_, item, angles_, rotated_);
      if (is_first) {
        attend_split(item, keys, split, total);
      } else {
        Softmax further(split_, total.rows, args_.head_dim);
        further.reset();
        attend_split(item, keys, split, further);
        merge(total, &further, 1);
      }
      is_first = false;
    };
    const Seen keys = {item.first_key, item.last_key};
    for (int s = first_split(item.sinks); s < end_split(item.sinks); s++) {
      for_each_token(item, [&](int slot, int& angle, Seen& seen) {
        angle = sink_window.angle_for_sinks(slot);
        seen = sink_window.of_sinks(slot);
      });
      attend(item.sinks, s);
    }
    for (int s = first_split(keys); s < end_split(keys); s++) {
      for_each_token(item, [&](int slot, int& angle, Seen& seen) {
        angle = sink_window.angle_for_split(slot, s);
        seen = sink_window.behind_sinks(slot);
      });
      attend(keys, s);
    }
  }

  // Set for each token the angle that its queries are rotated by, and the keys that they see.
  template <class Say>
  void for_each_token(const Item& item, const Say& say) const {
    for (int i = 0; i < item.num_tokens; i++) {
      Seen* seen = seen_ + i * group_;
      say(slot_of(seqs_, item.seq, item.first_token + i), angles_[i], *seen);
      std::fill_n(seen + 1, group_ - 1, *seen);
    }
  }

  // The part of some keys that is in one split.
  void attend_split(const Item& item, const Seen& keys, int split, const Softmax& into) const {
    constexpr int kTiles = kSplit / kTile;
    const int last = std::min(keys.last / kTile, (split + 1) * kTiles - 1);
    KeyTile tile;
    tile.next = &tile;
    for (int t = std::max(keys.first / kTile, split * kTiles); t <= last; t++) {
      look_up(item, keys, t, tile);
      hide_unwritten(item, tile);
      attend_tile<Kv>(scoring_, tile, seen_, rotated_, into);
    }
  }

  // ---- Merge

  static int first_split(const Seen& keys) { return keys.first / kSplit; }
  static int end_split(const Seen& keys) {
    return keys.is_empty() ? first_split(keys) : keys.last / kSplit + 1;
  }

  float* part(int index) const { return parts_ + index * state_floats_; }

  // Merge the states of further splits, in order: at most `kMergedAtOnce`.
  void merge(const Softmax& total, const Softmax* splits, int count) const {
    alignas(64) float keep[kMergedAtOnce] = {}, take[kMergedAtOnce] = {};
    for (int r = 0; r < total.rows; r++) {
      for (int s = 0; s < count; s++) {
        const float top = std::max(total.top[r], splits[s].top[r]);
        keep[s] = total.top[r] - top;
        take[s] = splits[s].top[r] - top;
        total.top[r] = top;
      }
      simd::store(keep, exp2(simd::load(keep)));
      simd::store(take, exp2(simd::load(take)));
      const auto add = [&](float* Softmax::* part, int64_t at) {
        F32 sum = simd::load(total.*part + at);
        for (int s = 0; s < count; s++) {
          const F32 kept = simd::mul(sum, simd::set1(keep[s]));
          sum = simd::fma(simd::load(splits[s].*part + at), simd::set1(take[s]), kept);
        }
        simd::store(total.*part + at, sum);
      };
      add(&Softmax::sum, 16 * r);
      for (int d = 0; d < args_.head_dim; d += 16) add(&Softmax::acc, r * args_.head_dim + d);
    }
  }

  // Of splits, by their numbers.
  template <class SeenIn>
  void merge_all(const Softmax& total, int first, int end, const SeenIn& seen_in) const {
    Softmax splits[kMergedAtOnce];
    for (; first < end; first += kMergedAtOnce) {
      const int count = std::min(end - first, kMergedAtOnce);
      for (int i = 0; i < count; i++) splits[i] = seen_in(first + i);
      merge(total, splits, count);
    }
  }

  void merge_splits(int tile) {
    const Item all = plan_.tile(tile);
    const Seen keys = {all.first_key, all.last_key};
    const int sinks = first_split(all.sinks), num_sinks = end_split(all.sinks) - sinks;
    const int own = first_split(keys), num_splits = num_sinks + end_split(keys) - own;
    const auto seen_in = [&](int i) {
      const int item = i < num_sinks ? plan_.item_of_sinks(tile, sinks + i)
                                     : plan_.item_of_split(tile, own + i - num_sinks);
      return Softmax(part(item), num_rows(all), args_.head_dim);
    };
    const Softmax total = seen_in(0);
    merge_all(total, 1, num_splits, seen_in);
    finish(all, total);
  }

  // Divide by the sum, which includes the head's sink.
  void finish(const Item& item, const Softmax& total) const {
    const int dim = args_.head_dim, size = args_.head_size, whole = size / 16 * 16;
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
      float* out = args_.out + token * args_.ldo + int64_t{head} * size;
      for (int d = 0; d < whole; d += 16) {
        simd::store(out + d, simd::mul(simd::load(total.acc + r * dim + d), factor));
      }
      if (whole == size) continue;
      const F32 last = simd::mul(simd::load(total.acc + r * dim + whole), factor);
      simd::store_first(out + whole, last, size - whole);
    }
  }

  const oct_attention_args& args_;
  const oct_sequences& seqs_;
  const Worker& worker_;
  const Scoring scoring_;
  const int group_;
  const Plan plan_;
  const int64_t state_floats_, shared_floats_;
  Factor* queries_ = nullptr;  // [Hk][T][G][D] of all workers, or [G][D] of one
  float* parts_ = nullptr;                  // an item's Softmax each, of all workers
  float* shared_ = nullptr;                 // a shared item's each
  float* total_ = nullptr;
  float* split_ = nullptr;
  Seen* seen_ = nullptr;       // by each row of an item
  int* angles_ = nullptr;      // of its tokens, where there are sinks
  Factor* rotated_ = nullptr;  // its queries by these
  uint8_t* last_values_ = nullptr;
};

int32_t check_sink_window(const oct_attention_args& args, const oct_sequences& seqs, int s) {
  const oct_sink_window& of = seqs.sink_windows[s];
  if (of.window == 0) return OCT_OK;
  const int64_t kept = int64_t{of.sinks} + of.window;
  const bool is_one = of.sinks >= 0 && of.window > 0 && of.stride > 0 && of.stride <= of.window &&
                      of.turn >= kept && of.turn % kSplit == 0 && of.left_out >= 0 &&
                      of.left_out % kSplit == 0;
  const bool has_tree = first_drafted(seqs, s) < seqs.q_start[s + 1];
  if (!is_one || args.window > 0 || has_tree) {
    return fail(OCT_ERR_ARGUMENT, "attention: sequence %d cannot have %d sinks and a window of %d, "
                "with turns of %d and %lld tokens left out", s, of.sinks, of.window, of.turn,
                static_cast<long long>(of.left_out));
  }
  return OCT_OK;
}

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
  const int32_t code = seqs.sink_windows ? check_sink_window(args, seqs, s) : OCT_OK;
  return code == OCT_OK ? check_blocks(args, seqs, s, end) : code;
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
  const SinkWindow sink_window(args, seqs, s);
  int32_t lowest = 0, highest = 0;
  const auto look = [&](const Seen& keys) {
    for (int i = keys.first / seqs.block_size; i <= keys.last / seqs.block_size; i++) {
      lowest = std::min(lowest, blocks[i]);
      highest = std::max(highest, blocks[i]);
    }
  };
  if (!sink_window.of_sinks(end - 1).is_empty()) look(sink_window.of_sinks(end - 1));
  look({std::min(sink_window.behind_sinks(end - length).first, end - length), end - 1});
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
  const int size = args.head_size;
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: %d query heads cannot share %d key heads evenly",
                heads, kv_heads);
  }
  if (dim < 16 || dim > kMaxHeadDim || dim % 16 != 0) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: the head size is %d; possible are multiples of 16 to %d", dim,
                kMaxHeadDim);
  }
  if (size < 1 || size > dim || size <= dim - 16) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: heads of %d values do not belong to a KV memory of %d: the next "
                "multiple of 16 does", size, dim);
  }
  if (kv_chunk_bytes(args.kv_format, dim) == 0) {
    return fail(OCT_ERR_ARGUMENT, "attention: there is no KV format %d", args.kv_format);
  }
  if (args.rotary_dim < 0 || args.rotary_dim > size || args.rotary_dim % 2 != 0) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: %d of %d dimensions cannot be rotated: an even number can",
                args.rotary_dim, size);
  }
  if (args.bidirectional && (seqs.parents || seqs.sink_windows)) {
    return fail(OCT_ERR_ARGUMENT, "attention: queries that see what comes after them, in a step with "
                "trees or sinks");
  }
  if (args.window < 0 || !(args.softcap >= 0)) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: window %d and softcap %g: give 0 for none, and nothing below",
                args.window, static_cast<double>(args.softcap));
  }
  if (args.ldq < int64_t{heads} * size || args.ldk < int64_t{kv_heads} * size ||
      args.ldv < int64_t{kv_heads} * size) {
    return fail(OCT_ERR_ARGUMENT,
                "attention: rows of q, k and v are %lld, %lld and %lld floats apart, too few: "
                "q has %d in a row, k and v have %d",
                static_cast<long long>(args.ldq), static_cast<long long>(args.ldk),
                static_cast<long long>(args.ldv), heads * size, kv_heads * size);
  }
  if (args.ldo < int64_t{heads} * size) {
    return fail(OCT_ERR_ARGUMENT, "attention: rows of out are %lld floats apart, and have %d",
                static_cast<long long>(args.ldo), heads * size);
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

void attention(const oct_attention_args& args, const oct_sequences& seqs,
               const SharedPrefixes& prefixes, const Worker& worker) {
  with_kv_format(args.kv_format, [&](auto kv) {
    Attention<decltype(kv)>(args, seqs, prefixes, worker).run();
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
  SharedPrefixes prefixes;
  if (!prefixes.find(*seqs, args->group)) return fail(OCT_ERR_MEMORY, "no memory for prefixes");
  return run(pool, [&](const Worker& worker) { attention(*args, *seqs, prefixes, worker); });
}
