// Paged attention: where keys and values lie, and how the work of a step is cut.
//
//     kv  =  block 0 [ head 0 [chunk | chunk | ...] head 1 [...] ... ]  block 1 [...]  ...
//
// A chunk is 16 tokens of one head, whatever the size of a block, in the order in which products
// read it: one vector is 16 tokens of the keys, or 16 dimensions of the values. D is the head size.
//
//             keys                                    values
//     F32     [D][16 tokens]                          [16 tokens][D]
//     BF16    [D / 2][16 tokens][2 dimensions]        [8][D][2 tokens]
//     INT8    [D / 4][16 tokens][4 dimensions]        [4][D][4 tokens]
//             and a float32 scale [16 tokens]         and a float32 scale [16 tokens]
//
// (The dimensions of INT8 keys are those of a rotated key: see kv_int8.h.)
//
// A query sees keys in *tiles* of 64 and *splits* of 256, both at absolute positions:
//
//     position   0       64      128     192     256     320     384
//     tiles      |-------|-------|-------|-------|-------|-------|----
//     splits     |---------- (top, sum, acc) ----|---------- (top, sum, acc) ----
//
// Softmax is online: over the tiles of a split, from the first to the last, with `top` the largest
// score so far, `sum` of the exp(score - top), and `acc` the values weighted by them; then over the
// splits, from the first to the last. A tile or a split in which a query sees nothing leaves all
// three as they are, to the bit. So it does not matter which other queries go along, whether some
// worker skips the tile, or whether splits are attended by different workers and merged later:
// results do not depend on the batch, on the cutting of a prompt, on the number of threads, nor on
// where blocks lie.
#pragma once

#include <cstdint>

#include "octavo.h"

namespace octavo {

constexpr int kChunk = 16;   // tokens
constexpr int kTile = 64;    // keys
constexpr int kSplit = 256;  // keys
constexpr int kTileChunks = kTile / kChunk;
constexpr int kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504f;  // e^x = 2^(x * this): scores count in powers of two

// Bytes of a chunk; 0 if there is no such format.
inline int64_t kv_chunk_bytes(int32_t format, int32_t head_dim) {
  const int64_t values = int64_t{2} * kChunk * head_dim;
  if (format == OCT_KV_F32) return 4 * values;
  if (format == OCT_KV_BF16) return 2 * values;
  if (format == OCT_KV_INT8) return values + 2 * kChunk * 4;
  return 0;
}

// The first position that a query sees.
inline int first_seen(int window, int position) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// New tokens of a sequence.
inline int num_new(const oct_sequences& seqs, int seq) {
  return seqs.q_start[seq + 1] - seqs.q_start[seq];
}

// The chunks of one sequence and head.
class KvHead {
 public:
  KvHead(const oct_attention_args& args, const oct_sequences& seqs, int seq, int head)
      : chunk_bytes_(kv_chunk_bytes(args.kv_format, args.head_dim)),
        chunks_per_block_(seqs.block_size / kChunk),
        block_bytes_(args.kv_block_bytes),
        first_(static_cast<uint8_t*>(args.kv) + head * chunks_per_block_ * chunk_bytes_),
        blocks_(seqs.block_table + int64_t{seq} * seqs.table_stride) {}

  // Keys of the positions from 16 * index on; the values follow, half a chunk later.
  uint8_t* chunk(int index) const {
    return first_ + blocks_[index / chunks_per_block_] * block_bytes_ +
           index % chunks_per_block_ * chunk_bytes_;
  }
  int64_t values_offset() const { return chunk_bytes_ / 2; }

 private:
  int64_t chunk_bytes_;
  int chunks_per_block_;
  int64_t block_bytes_;
  uint8_t* first_;
  const int32_t* blocks_;
};

}  // namespace octavo
