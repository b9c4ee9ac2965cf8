// How the attention of a step is cut into items of work.
//
//     item  =  sequence  x  key head  x  tile of queries  [ x  split of keys ]
//
// Items have splits of their own when there would be too few of them for all workers: for one long
// sequence, say. Nothing of this makes a difference to the results.
#pragma once

#include <cstdint>

#include "octavo.h"
#include "pool.h"
#include "sight.h"

namespace octavo {

// Some queries of a sequence, all heads that share a key head, and the keys that they see.
struct Item {
  int seq, head;
  int first_token, num_tokens;  // rows of the step
  int position;                 // of the first; in a tree others may have lower ones
  int first_key, last_key;      // that some query sees; in one split, if items are cut by splits
  Seen sinks;                   // the same of keys that are apart (sight.h)

  bool sees_nothing() const { return first_key > last_key && sinks.is_empty(); }
};

// The same for all workers, and worked out by each.
class Plan {
 public:
  // Lives in scratch memory of the worker, slot 0.
  Plan(const oct_attention_args& args, const oct_sequences& seqs, const Worker& worker);

  int num_items() const { return num_items_; }
  int num_tiles() const { return num_tiles_; }  // of queries, for each key head
  int max_rows() const { return max_rows_; }    // queries of an item: tokens times heads
  bool cut_by_splits() const { return cut_by_splits_; }
  // No sequence has more than one new token: a step of decodes.
  bool single_tokens() const { return single_tokens_; }

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

  int choose_tile_tokens(int num_workers) const;
  void add(int seq);
  template <class Before>
  const Sequence& find(Before before) const;
  int nth_item(const Sequence& of, int tile, int split) const;
  Item make_item(const Sequence& of, int tile, int head) const;

  const oct_attention_args& args_;
  const oct_sequences& seqs_;
  Sequence* sequences_;
  int num_sequences_ = 0;
  int tile_tokens_ = 1;
  bool cut_by_splits_ = false, single_tokens_ = true;
  int num_items_ = 0, num_tiles_ = 0, max_rows_ = 0;
};

}  // namespace octavo
