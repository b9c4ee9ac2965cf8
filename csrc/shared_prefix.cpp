#include "shared_prefix.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "attention.h"
#include "pool.h"

namespace octavo {
namespace {

// With more new tokens, the tiles of a sequence's queries are large anyway.
constexpr int kFewTokens = 16;
// Keys that are not read again; for less, what a run costs would be more.
constexpr int kLeastSaved = kSplit;

// The tables of a group of layers, as far as blocks are older than the step's tokens.
struct OldBlocks {
  const oct_sequences& seqs;
  const int32_t* tables;

  const int32_t* of(int seq) const { return tables + int64_t{seq} * seqs.table_stride; }
  int count(int seq) const { return (seqs.kv_len[seq] - num_new(seqs, seq)) / seqs.block_size; }

  // Any order in which tables with a common prefix are next to each other.
  bool less(int a, int b) const {
    const int blocks = std::min(count(a), count(b));
    const int order = std::memcmp(of(a), of(b), sizeof(int32_t) * blocks);
    return order != 0 ? order < 0 : count(a) < count(b);
  }
  // Keys in whole tiles.
  int in_common(int a, int b) const {
    const int blocks = std::min(count(a), count(b));
    const auto differ = std::mismatch(of(a), of(a) + blocks, of(b));
    return static_cast<int>(differ.first - of(a)) * seqs.block_size / kTile * kTile;
  }
};

}  // namespace

// Places that share more keys than those of the run `before`, up to `first_key`.
struct SharedPrefixes::Stretch {
  int first, last;  // places
  int first_key, before;

  int num_places() const { return last - first + 1; }
  // Keys that are not read again, if all up to this one are read for all places at once.
  int64_t saved(int end_key) const { return (last - first) * int64_t{end_key - first_key}; }
};

bool SharedPrefixes::find(const oct_sequences& seqs, int group) {
  num_runs_ = 0;
  if (!seqs.share_prefixes || seqs.num_seqs < 2) return true;
  if (!allocate(seqs.num_seqs)) return false;
  sort(seqs, group);
  if (num_candidates_ < 2) return true;
  make_runs({0, num_candidates_ - 1, 0, -1});
  if (num_runs_ > 0) number_rows(seqs);
  return true;
}

bool SharedPrefixes::allocate(int num_seqs) {
  memory_.reset(new (std::nothrow) int32_t[4 * static_cast<size_t>(num_seqs)]);
  // Each run of several places parts them, or is all there is: there are fewer than places.
  runs_.reset(new (std::nothrow) PrefixRun[num_seqs]);
  if (!memory_ || !runs_) return false;
  order_ = memory_.get();
  shared_keys_ = order_ + num_seqs;
  last_runs_ = shared_keys_ + num_seqs;
  first_rows_ = last_runs_ + num_seqs;
  return true;
}

// Candidates by their tables, then the others. A sequence with a sink window of its own is none: it
// does not see all that is in its table, and not as the others do.
void SharedPrefixes::sort(const oct_sequences& seqs, int group) {
  const OldBlocks blocks = {seqs, seqs.block_table + group * seqs.group_stride};
  std::iota(order_, order_ + seqs.num_seqs, 0);
  std::fill_n(last_runs_, seqs.num_seqs, -1);
  const auto is_candidate = [&](int s) {
    const int length = num_new(seqs, s);
    if (seqs.sink_windows && seqs.sink_windows[s].window > 0) return false;
    return length > 0 && length <= kFewTokens && blocks.count(s) * seqs.block_size >= kTile;
  };
  int32_t* end = std::partition(order_, order_ + seqs.num_seqs, is_candidate);
  num_candidates_ = static_cast<int>(end - order_);
  std::sort(order_, end, [&](int a, int b) { return blocks.less(a, b); });
  for (int place = 1; place < num_candidates_; place++) {
    shared_keys_[place] = blocks.in_common(order_[place - 1], order_[place]);
  }
}

// What all places of a stretch share becomes a run. Runs of what some of them share beyond that can
// only begin with a split: if they save more, it ends there.
void SharedPrefixes::make_runs(const Stretch& places) {
  const int shared = shared_by_all(places), whole_splits = shared / kSplit * kSplit;
  int64_t further = 0;
  for_each_stretch(places, shared, [&](Stretch part) {
    part.first_key = std::max(places.first_key, whole_splits);
    const int64_t saved = part.saved(shared_by_all(part));
    if (saved >= kLeastSaved) further += saved;
  });
  const bool goes_on = further > places.saved(shared) - places.saved(whole_splits);
  const int end = goes_on ? whole_splits : shared;
  int first_key = places.first_key, run = places.before;
  if (places.saved(end) >= kLeastSaved) {
    run = num_runs_++;
    runs_[run] = {places.first, places.num_places(), 0, 0, first_key, end, places.before};
    for (int place = places.first; place <= places.last; place++) last_runs_[order_[place]] = run;
    first_key = end;
  }
  if (first_key % kSplit != 0) return;
  for_each_stretch(places, shared, [&](Stretch part) {
    part.first_key = first_key;
    part.before = run;
    make_runs(part);
  });
}

// Calls `use` with the parts of a stretch in which neighbours share keys beyond `end_key`.
template <class Use>
void SharedPrefixes::for_each_stretch(const Stretch& places, int end_key, const Use& use) const {
  for (int first = places.first; first < places.last; first++) {
    int last = first;
    while (last < places.last && shared_keys_[last + 1] > end_key) last++;
    if (last > first) use(Stretch{first, last, 0, -1});
    first = last;
  }
}

int SharedPrefixes::shared_by_all(const Stretch& places) const {
  return *std::min_element(shared_keys_ + places.first + 1, shared_keys_ + places.last + 1);
}

void SharedPrefixes::number_rows(const oct_sequences& seqs) {
  for (int place = 0, row = 0; place < seqs.num_seqs; place++) {
    first_rows_[order_[place]] = row;
    row += num_new(seqs, order_[place]);
  }
  for (int i = 0; i < num_runs_; i++) {
    PrefixRun& run = runs_[i];
    const int last = order_[run.first_place + run.num_places - 1];
    run.first_row = first_rows_[order_[run.first_place]];
    run.num_rows = first_rows_[last] + num_new(seqs, last) - run.first_row;
  }
}

}  // namespace octavo

int64_t oct_shared_keys(const oct_sequences* seqs, int32_t group) {
  using namespace octavo;
  SharedPrefixes prefixes;
  if (!prefixes.find(*seqs, group)) return fail(OCT_ERR_MEMORY, "no memory for prefixes");
  int64_t keys = 0;
  for (int i = 0; i < prefixes.num_runs(); i++) {
    const PrefixRun& run = prefixes.run(i);
    keys += (run.num_places - 1) * int64_t{run.end_key - run.first_key};
  }
  return keys;
}
