// How the attention of a step is cut into items of work.
//
//     item  =  sequence  x  key head  x  tile of queries  [ x  split of keys ]
//
// Items have splits of their own when there would be too few of them for all workers: for one long
// sequence, say. None of this changes the results.
//
// Where sequences share a prefix, there are items of a first kind, whose queries are of several:
//
//     shared item  =  run of sequences  x  key head  x  split of keys  x  tile of queries
//
// The items of a sequence then go on from there, with the first key that is only its own.
#pragma once

#include <cstdint>

#include "octavo.h"
#include "pool.h"
#include "shared_prefix.h"
#include "sink_window.h"

namespace octavo {

// Some queries of a sequence, all heads that share a key head, and the keys that they see.
struct Item {
  int seq, head;
  int first_token, num_tokens;  // rows of the step
  int position;                 // of the first; in a tree others may have lower ones
  int first_key, last_key;      // that some query sees; in one split, if items are cut by splits
  int first_row;                // of the queries, where they are prepared in the order of places
  int run;                      // that the item goes on from, -1: none
  Seen sinks;                   // the same of keys that are apart (sink_window.h)

  bool sees_nothing() const { return first_key > last_key && sinks.is_empty(); }
};

// Several queries of the sequences of a run, all heads that share a key head, and a split of keys.
struct SharedItem {
  int seq, head;  // the keys are this sequence's, and as well those of the others
  int first_row, num_rows;  // tokens, in the order of places
  int first_key, last_key;  // all are seen
};

// Place of a token's state after a split that a run has seen: in the states of a shared item.
struct SharedState {
  int item, row;  // the first of its rows is `row` times the heads of a group
};

// The same for all workers, and computed by each.
class Plan {
 public:
  // Lives in scratch memory of the worker, slot 0.
  Plan(const oct_attention_args& args, const oct_sequences& seqs, const SharedPrefixes& prefixes,
       const Worker& worker);

  int num_items() const { return num_items_; }
  int num_tiles() const { return num_tiles_; }  // of queries, for each key head
  int max_rows() const { return max_rows_; }    // queries of an item: tokens times heads
  bool cut_by_splits() const { return cut_by_splits_; }
  // False if all sequences have one new token, and none shares: then items are independent.
  bool prepares_ahead() const { return !single_tokens_ || prefixes_; }
  // Where the queries of each sequence go.
  const int32_t* first_rows() const { return prefixes_ ? prefixes_->first_rows() : seqs_.q_start; }
  // None of a layer whose window hides a part of what is shared.
  int num_shared_items() const { return num_shared_items_; }
  int max_shared_rows() const { return max_shared_rows_; }  // queries: tokens times heads
  SharedItem shared_item(int index) const;
  const PrefixRun& run(int index) const { return prefixes_->run(index); }
  SharedState shared_state(int run, int head, int split, int row) const;

  // Long sequences first, so that small pieces are left for the end; in one, split by split, the
  // last tiles first, heads innermost.
  Item item(int index) const;
  // All keys of a tile of queries, and which item sees those of a split.
  Item tile(int index) const;
  int item_of_split(int tile, int split) const;
  int item_of_sinks(int tile, int split) const;

 private:
  struct Sequence {
    int seq;
    int num_tiles;
    int first_split, num_splits;  // behind the sinks; one if items are not cut by splits
    int sink_splits;              // before those; none if items are not cut
    int first_item, first_tile;
  };

  // How the queries of a run are cut.
  struct Shared {
    int num_tiles, tile_tokens;
    int first_item;
  };

  void share(int num_workers);
  void cut_runs(int tile_tokens);
  int choose_tile_tokens(int num_workers) const;
  int first_key(int seq, const SinkWindow& sink_window, int position) const;
  void add(int seq);
  template <class Before>
  const Sequence& find(Before before) const;
  int nth_item(const Sequence& of, int tile, int split) const;
  Item make_item(const Sequence& of, int tile, int head) const;

  const oct_attention_args& args_;
  const oct_sequences& seqs_;
  const SharedPrefixes* prefixes_;  // NULL if there are none
  Sequence* sequences_;
  Shared* shared_;  // by run
  int num_sequences_ = 0;
  int tile_tokens_ = 1;
  bool cut_by_splits_ = false, single_tokens_ = true;
  int num_items_ = 0, num_tiles_ = 0, max_rows_ = 0;
  int num_shared_items_ = 0, max_shared_rows_ = 0;
};

}  // namespace octavo
