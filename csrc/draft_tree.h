// Draft trees: the positions of their tokens, and the keys that each of them sees.
//
//     row         0    1    2    3    4       of the step; 0 is the last known token
//     parent     -1    0    0    1    3
//     slot        9   10   11   12   13       where key and value are stored
//     position    9   10   10   11   12
//
// The sum over keys has to be the one that a row would have if its path were the whole draft, with the
// same keys at the same places. So a row sees chunks in which the tokens of its path are at their
// positions; those are assembled from the stored ones for each row:
//
//     stored         ... 8 9 | 1 2 3 4 .      row 4 sees     ... 8 9 | 1 3 4 . .
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>

#include "attention_plan.h"
#include "attention_tile.h"
#include "pool.h"

namespace octavo {

// The chunks of an item's sequence from its tree on, up to the last key of the item, as one row of
// the sequence sees them at a time.
template <class Kv>
class PathChunks {
 public:
  PathChunks(const oct_attention_args& args, const oct_sequences& seqs, const Item& item,
             const Worker& worker)
      : seqs_(seqs), seq_(item.seq), dim_(args.head_dim), kv_(args, seqs, item.seq, item.head) {
    const int drafted = first_drafted(seqs, seq_);
    if (drafted == seqs.q_start[seq_ + 1]) return;
    const int num_known = slot_of(seqs, seq_, drafted);
    first_ = std::max(num_known, item.first_key) / kChunk;
    count_ = std::max(item.last_key / kChunk - first_ + 1, 0);
    bytes_ = kv_chunk_bytes(args.kv_format, dim_);
    chunks_ = static_cast<uint8_t*>(worker.scratch(5, count_ * bytes_));
    placed_ = static_cast<int*>(worker.scratch(6, sizeof(int) * count_ * kChunk));
    std::memset(chunks_, 0, count_ * bytes_);
    std::fill_n(placed_, count_ * kChunk, -1);
    if (count_ > 0 && first_ == num_known / kChunk) copy_known(num_known % kChunk);
  }

  // Tiles from this one on have chunks of a path.
  int first_tile() const { return first_ / kTileChunks; }

  // Assemble the chunks that a row sees. Keys that it does not see are present, or 0.
  void show(int row) {
    int position = position_of(seqs_, seq_, row);
    for (; seqs_.parents[row] >= 0; row = seqs_.parents[row], position--) {
      const int at = position - first_ * kChunk;
      if (at < 0 || at >= count_ * kChunk || placed_[at] == row) continue;
      const int slot = slot_of(seqs_, seq_, row);
      Kv::copy_token(dim_, kv_.chunk(slot / kChunk), slot % kChunk,
                     chunks_ + at / kChunk * bytes_, at % kChunk);
      placed_[at] = row;
    }
  }

  // Put the chunks into a tile where they belong.
  void put_into(KeyTile& tile) const {
    for (int c = tile.begin; c < tile.end; c++) {
      const int at = tile.first_key / kChunk + c - first_;
      if (at < 0) continue;
      tile.keys[c] = chunks_ + at * bytes_;
      tile.values[c] = tile.keys[c] + kv_.values_offset();
    }
  }

 private:
  // The tokens before the tree that share a chunk with it. Values of others may be anything there.
  void copy_known(int count) {
    if (count == 0) return;
    const uint8_t* chunk = kv_.chunk(first_);
    const int64_t values = kv_.values_offset();
    if constexpr (Kv::kScaled) {
      std::memcpy(chunks_, chunk, bytes_);
    } else {
      std::memcpy(chunks_, chunk, values);
      Kv::copy_first(chunk + values, dim_, count, chunks_ + values);
    }
  }

  const oct_sequences& seqs_;
  const int seq_, dim_;
  const KvHead kv_;
  int first_ = INT_MAX, count_ = 0;  // chunks
  int64_t bytes_ = 0;                // of each
  uint8_t* chunks_ = nullptr;
  int* placed_ = nullptr;  // the row at each position of the chunks, -1 for none
};

}  // namespace octavo
