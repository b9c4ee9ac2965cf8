// Keys that the queries of a sequence see: all, a layer's window, or sinks and a window of its own
// (oct_sink_window). Keys are known by their slots, which are positions but for the tokens left out:
//
//     position   0 1 2 3  (4 ...)  521 ... 1024      sinks 4, window 504: what the query at 1024 sees
//     slot       0 1 2 3           265 ...  768      256 tokens are left out
//     as seen    0 1 2 3             4 ...  507      by the sinks: they stand before the window
//
// Positions within the cache are what StreamingLLM has (Xiao et al. 2023, arXiv 2309.17453). Only the
// distance of a query to a key counts in a rotation, so keys are rotated once, as they are stored,
// and queries in different ways for different keys: for the sinks, and for the keys of each *turn*,
// since angles begin anew after so many positions, lest they grow without end.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace octavo {

// Some keys in a row, by their slots; none if the last comes before the first.
struct Seen {
  int first, last;
  bool is_empty() const { return first > last; }
};

class SinkWindow {
 public:
  SinkWindow(const oct_attention_args& args, const oct_sequences& seqs, int seq)
      : layer_window_(args.window),
        last_ahead_(args.bidirectional ? seqs.kv_len[seq] - 1 : -1),
        of_(own_window(seqs, seq)) {}

  // Whether the sinks are apart from the other keys: the sequence has a sink window of its own.
  bool has_sinks() const { return of_ != nullptr; }
  int num_sinks() const { return of_ ? of_->sinks : 0; }

  // Keys that the query in a slot sees among the sinks, and behind them.
  Seen of_sinks(int slot) const { return {0, std::min(num_sinks() - 1, slot)}; }
  Seen behind_sinks(int slot) const {
    if (!of_) return {first_seen(layer_window_, slot), last_seen(slot)};
    return {static_cast<int>(first_position(position(slot)) - of_->left_out), slot};
  }

  // Angles by which a key, and a query for the sinks, are rotated.
  int angle_of_key(int slot) const {
    return of_ ? static_cast<int>(position(slot) % of_->turn) : slot;
  }
  int angle_for_sinks(int slot) const {
    const int64_t at = position(slot);
    return static_cast<int>(at - (first_position(at) - of_->sinks));
  }
  // And a query for the keys of a split: those of one turn. A query that sees none of them gets some
  // angle that there is.
  int angle_for_split(int slot, int split) const {
    const int64_t angle = position(slot) - first_of_turn(split);
    const int64_t most = int64_t{of_->turn} + of_->window - 1;
    return static_cast<int>(std::min(std::max<int64_t>(angle, 0), most));
  }
  // The position at which the turn of a split begins.
  int64_t first_of_turn(int split) const {
    return position(split * kSplit) / of_->turn * of_->turn;
  }

 private:
  static const oct_sink_window* own_window(const oct_sequences& seqs, int seq) {
    const oct_sink_window* all = seqs.sink_windows;
    return all && all[seq].window > 0 ? &all[seq] : nullptr;
  }

  // The last key that a query sees where it has no sinks.
  int last_seen(int slot) const {
    if (last_ahead_ < 0) return slot;
    return layer_window_ > 0 ? std::min(slot + layer_window_ - 1, last_ahead_) : last_ahead_;
  }

  int64_t position(int slot) const { return slot + of_->left_out; }
  int64_t first_position(int64_t at) const {
    const int64_t beyond = at + 1 - of_->sinks - of_->window;
    if (beyond <= 0) return of_->sinks;
    return of_->sinks + (beyond + of_->stride - 1) / of_->stride * of_->stride;
  }

  const int layer_window_;
  const int last_ahead_;  // the last key of the sequence, where queries see those after them; or -1
  const oct_sink_window* of_;
};

}  // namespace octavo
