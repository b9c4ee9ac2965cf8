#include "attention_plan.h"

#include <algorithm>

#include "attention.h"

namespace octavo {
namespace {

// Approximate queries (tokens times heads) that go through keys together: so many that loading keys
// is cheap, so few that their data stays in the L2 cache.
constexpr int kTileRows = 96;
constexpr int kFewRows = 24;        // shorter splits are not worth it even if workers are idle
constexpr int kItemsPerWorker = 4;  // so that all end at about the same time

constexpr Seen kNothing = {0, -1};

// The part of some keys that is in one split.
Seen within(const Seen& keys, int split) {
  return {std::max(keys.first, split * kSplit), std::min(keys.last, (split + 1) * kSplit - 1)};
}

// Whether no window of the layer hides keys that are in runs.
bool sees_runs(const oct_sequences& seqs, const SharedPrefixes& prefixes, int window) {
  if (window == 0) return true;
  for (int s = 0; s < seqs.num_seqs; s++) {
    if (prefixes.last_run(s) >= 0 && seqs.kv_len[s] > window) return false;
  }
  return true;
}

}  // namespace

Plan::Plan(const oct_attention_args& args, const oct_sequences& seqs,
           const SharedPrefixes& prefixes, const Worker& worker)
    : args_(args),
      seqs_(seqs),
      prefixes_(prefixes.num_runs() > 0 && sees_runs(seqs, prefixes, args.window) ? &prefixes
                                                                                  : nullptr) {
  const size_t size = static_cast<size_t>(seqs.num_seqs) + 1;
  sequences_ = static_cast<Sequence*>(worker.scratch(0, (sizeof *sequences_ + sizeof *shared_) * size));
  shared_ = reinterpret_cast<Shared*>(sequences_ + size);
  if (prefixes_) share(worker.size);
  tile_tokens_ = choose_tile_tokens(worker.size);
  for (int s = 0; s < seqs.num_seqs; s++) {
    if (num_new(seqs, s) > 1) add(s);
  }
  single_tokens_ = num_sequences_ == 0;
  for (int s = 0; s < seqs.num_seqs; s++) {
    if (num_new(seqs, s) == 1) add(s);
  }
  int64_t all_splits = 0, most_splits = 1;
  int most_tokens = 0;
  for (int i = 0; i < num_sequences_; i++) {
    const Sequence& of = sequences_[i];
    const int splits = of.sink_splits + of.num_splits;
    all_splits += int64_t{splits} * of.num_tiles * args.num_kv_heads;
    most_splits = std::max<int64_t>(most_splits, splits);
    most_tokens = std::max(most_tokens, std::min(num_new(seqs, of.seq), tile_tokens_));
  }
  cut_by_splits_ =
      most_splits > 1 && most_splits * kItemsPerWorker * worker.size > all_splits;
  max_rows_ = most_tokens * (args.num_heads / args.num_kv_heads);
  for (int i = 0; i < num_sequences_; i++) {
    Sequence& of = sequences_[i];
    if (!cut_by_splits_) of.num_splits = 1, of.sink_splits = 0;
    of.first_item = num_items_;
    of.first_tile = num_tiles_;
    num_tiles_ += of.num_tiles * args.num_kv_heads;
    num_items_ += of.num_tiles * args.num_kv_heads * (of.sink_splits + of.num_splits);
  }
}

void Plan::add(int seq) {
  const int length = num_new(seqs_, seq), end = seqs_.kv_len[seq];
  const SinkWindow sink_window(args_, seqs_, seq);
  const int first_split = first_key(seq, sink_window, end - length) / kSplit;
  const int num_splits = std::max((end - 1) / kSplit - first_split + 1, 0);
  const int sink_splits = (std::min(sink_window.num_sinks(), end) + kSplit - 1) / kSplit;
  const int num_tiles = (length + tile_tokens_ - 1) / tile_tokens_;
  sequences_[num_sequences_++] = {seq, num_tiles, first_split, num_splits, sink_splits, 0, 0};
}

// The first key of its own, behind sinks, that a query of a sequence sees.
int Plan::first_key(int seq, const SinkWindow& sink_window, int position) const {
  return std::max(sink_window.behind_sinks(position).first, prefixes_ ? prefixes_->end_key(seq) : 0);
}

// Fewer tokens to a tile if that gives work to all workers.
int Plan::choose_tile_tokens(int num_workers) const {
  const int group = args_.num_heads / args_.num_kv_heads;
  int longest = 1;
  for (int s = 0; s < seqs_.num_seqs; s++) longest = std::max(longest, num_new(seqs_, s));
  int tokens = std::min(longest, std::max(1, kTileRows / group));
  for (; tokens > 1 && tokens * group > kFewRows; tokens = (tokens + 1) / 2) {
    int64_t items = 0;
    for (int s = 0; s < seqs_.num_seqs; s++) {
      items += int64_t{(num_new(seqs_, s) + tokens - 1) / tokens} * args_.num_kv_heads;
    }
    if (items >= int64_t{kItemsPerWorker} * num_workers) break;
  }
  return tokens;
}

// The last sequence that does not begin after the given item.
template <class Before>
const Plan::Sequence& Plan::find(Before before) const {
  return *(std::partition_point(sequences_, sequences_ + num_sequences_, before) - 1);
}

Item Plan::make_item(const Sequence& of, int tile, int head) const {
  const int length = num_new(seqs_, of.seq);
  const int first = (of.num_tiles - 1 - tile) * tile_tokens_;
  Item item;
  item.seq = of.seq;
  item.head = head;
  item.num_tokens = std::min(tile_tokens_, length - first);
  item.first_token = seqs_.q_start[of.seq] + first;
  item.position = position_of(seqs_, of.seq, item.first_token);
  int lowest = item.position, highest = item.position + item.num_tokens - 1;
  if (seqs_.parents) {
    highest = lowest;
    for (int row = item.first_token + 1; row < item.first_token + item.num_tokens; row++) {
      const int position = position_of(seqs_, of.seq, row);
      lowest = std::min(lowest, position);
      highest = std::max(highest, position);
    }
  }
  const SinkWindow sink_window(args_, seqs_, of.seq);
  item.first_key = first_key(of.seq, sink_window, lowest);
  item.last_key = sink_window.behind_sinks(highest).last;
  item.sinks = sink_window.of_sinks(highest);
  item.first_row = first_rows()[of.seq] + first;
  item.run = prefixes_ ? prefixes_->last_run(of.seq) : -1;
  return item;
}

Item Plan::tile(int index) const {
  const Sequence& of = find([=](const Sequence& s) { return s.first_tile <= index; });
  const int heads = args_.num_kv_heads;
  return make_item(of, (index - of.first_tile) / heads, (index - of.first_tile) % heads);
}

Item Plan::item(int index) const {
  const Sequence& of = find([=](const Sequence& s) { return s.first_item <= index; });
  const int heads = args_.num_kv_heads;
  index -= of.first_item;
  Item item = make_item(of, index / heads % of.num_tiles, index % heads);
  if (!cut_by_splits_) return item;
  const int split = index / heads / of.num_tiles;
  if (split < of.sink_splits) {
    item.sinks = within(item.sinks, split);
    item.first_key = kNothing.first, item.last_key = kNothing.last;
  } else {
    const Seen keys = within({item.first_key, item.last_key},
                             split - of.sink_splits + of.first_split);
    if (keys.first > item.first_key) item.run = -1;
    item.first_key = keys.first, item.last_key = keys.last;
    item.sinks = kNothing;
  }
  return item;
}

int Plan::nth_item(const Sequence& of, int tile, int split) const {
  return of.first_item + split * of.num_tiles * args_.num_kv_heads + tile - of.first_tile;
}

int Plan::item_of_split(int tile, int split) const {
  const Sequence& of = find([=](const Sequence& s) { return s.first_tile <= tile; });
  return nth_item(of, tile, of.sink_splits + split - of.first_split);
}

int Plan::item_of_sinks(int tile, int split) const {
  return nth_item(find([=](const Sequence& s) { return s.first_tile <= tile; }), tile, split);
}

// ---- Shared items: split by split, tiles of queries innermost, as they see the same keys.

// As `choose_tile_tokens`, for all runs alike.
void Plan::share(int num_workers) {
  const int group = args_.num_heads / args_.num_kv_heads;
  int tokens = std::max(1, kTileRows / group);
  for (cut_runs(tokens); tokens > 1 && tokens * group > kFewRows; cut_runs(tokens)) {
    if (num_shared_items_ >= kItemsPerWorker * num_workers) break;
    tokens = (tokens + 1) / 2;
  }
}

void Plan::cut_runs(int tile_tokens) {
  const int group = args_.num_heads / args_.num_kv_heads;
  num_shared_items_ = max_shared_rows_ = 0;
  for (int i = 0; i < prefixes_->num_runs(); i++) {
    const PrefixRun& run = prefixes_->run(i);
    Shared& cut = shared_[i];
    cut.num_tiles = (run.num_rows + tile_tokens - 1) / tile_tokens;
    cut.tile_tokens = (run.num_rows + cut.num_tiles - 1) / cut.num_tiles;
    cut.first_item = num_shared_items_;
    const int num_splits = (run.end_key - 1) / kSplit - run.first_key / kSplit + 1;
    num_shared_items_ += num_splits * args_.num_kv_heads * cut.num_tiles;
    max_shared_rows_ = std::max(max_shared_rows_, cut.tile_tokens * group);
  }
}

SharedItem Plan::shared_item(int index) const {
  const auto is_before = [=](const Shared& cut) { return cut.first_item <= index; };
  const Shared& cut =
      *(std::partition_point(shared_, shared_ + prefixes_->num_runs(), is_before) - 1);
  const PrefixRun& run = prefixes_->run(static_cast<int>(&cut - shared_));
  index -= cut.first_item;
  const int tile = index % cut.num_tiles * cut.tile_tokens;
  index /= cut.num_tiles;
  const int first_key = run.first_key + index / args_.num_kv_heads * kSplit;
  return {prefixes_->sequence_of(run),
          index % args_.num_kv_heads,
          run.first_row + tile,
          std::min(cut.tile_tokens, run.num_rows - tile),
          first_key,
          std::min(first_key + kSplit, run.end_key) - 1};
}

SharedState Plan::shared_state(int run, int head, int split, int row) const {
  const PrefixRun& of = prefixes_->run(run);
  const Shared& cut = shared_[run];
  const int index = (split - of.first_key / kSplit) * args_.num_kv_heads + head;
  row -= of.first_row;
  return {cut.first_item + index * cut.num_tiles + row / cut.tile_tokens, row % cut.tile_tokens};
}

}  // namespace octavo
