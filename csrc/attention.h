// Paged attention: the layout of keys and values, and how the work of a step is cut.
//
//     kv  =  block 0 [ head 0 [chunk | chunk | ...] head 1 [...] ... ]  block 1 [...]  ...
//
// A chunk is 16 tokens of one head, whatever the size of a block, in the order in which products
// read it: one vector is 16 tokens of the keys, or 16 dimensions of the values. D is the head size,
// rounded up to a multiple of 16: missing dimensions of a model's heads are 0 in queries, keys and
// values, which changes none of their products.
//
//             keys                                    values
//     F32     [D][16 tokens]                          [16 tokens][D]
//     BF16    [D / 2][16 tokens][2 dimensions]        [8][D][2 tokens]
//     INT8    [D / 4][16 tokens][4 dimensions]        [4][D][4 tokens]
//     FP8     and a float32 scale [16 tokens]         and a float32 scale [16 tokens]
//     INT4    [D / 8][16 tokens][4 x 2 dimensions]    [2][D][4 x 2 tokens]
//             [D / 32][2][16 tokens], in bfloat16:    [D / 32][2][16 tokens]
//             a scale and a minimum of each group
//
// K8V4 has the keys of INT8 and the values of INT4. The dimensions of keys with scales are those of
// a rotated key: see kv_rotation.h. A byte of INT4 has term i in its low bits, and i + 4 in the
// others.
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
// where blocks lie. Nor on other draft tokens: a row of a tree sees its path as if it were alone
// (draft_tree.h).
#pragma once

#include <cstdint>

#include "octavo.h"

namespace octavo {

constexpr int kChunk = 16;   // tokens
constexpr int kTile = 64;    // keys
constexpr int kSplit = 256;  // keys
constexpr int kTileChunks = kTile / kChunk;
constexpr int kSplitTiles = kSplit / kTile;
constexpr int kMaxHeadDim = 512;
constexpr float kLog2E = 1.44269504f;  // e^x = 2^(x * this): scores count in powers of two

constexpr int kNibbleGroup = 32;  // dimensions that share a scale in INT4

// Bytes of half a chunk: codes of a byte with a float32 scale, or of half a byte with two numbers
// of bfloat16 for each group.
inline int64_t kv_byte_half(int32_t head_dim) { return kChunk * (head_dim + 4); }
inline int64_t kv_nibble_half(int32_t head_dim) {
  return kChunk * (head_dim / 2 + (head_dim + kNibbleGroup - 1) / kNibbleGroup * 4);
}

// Bytes of the keys of a chunk, and of its values; 0 if there is no such format.
inline int64_t kv_key_bytes(int32_t format, int32_t head_dim) {
  switch (format) {
    case OCT_KV_F32: return int64_t{4} * kChunk * head_dim;
    case OCT_KV_BF16: return int64_t{2} * kChunk * head_dim;
    case OCT_KV_INT8:
    case OCT_KV_FP8:
    case OCT_KV_K8V4: return kv_byte_half(head_dim);
    case OCT_KV_INT4: return kv_nibble_half(head_dim);
  }
  return 0;
}
inline int64_t kv_value_bytes(int32_t format, int32_t head_dim) {
  return format == OCT_KV_K8V4 ? kv_nibble_half(head_dim) : kv_key_bytes(format, head_dim);
}
inline int64_t kv_chunk_bytes(int32_t format, int32_t head_dim) {
  return kv_key_bytes(format, head_dim) + kv_value_bytes(format, head_dim);
}

// The first position that a query sees.
inline int first_seen(int window, int position) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// New tokens of a sequence.
inline int num_new(const oct_sequences& seqs, int seq) {
  return seqs.q_start[seq + 1] - seqs.q_start[seq];
}

// The first row of a sequence's tree; the one after its last row if there is no tree.
inline int first_drafted(const oct_sequences& seqs, int seq) {
  int row = seqs.q_start[seq + 1];
  if (!seqs.parents) return row;
  while (row > seqs.q_start[seq] && seqs.parents[row - 1] >= 0) row--;
  return row;
}

// Where a row's key and value are stored.
inline int slot_of(const oct_sequences& seqs, int seq, int row) {
  return seqs.kv_len[seq] - seqs.q_start[seq + 1] + row;
}

// The position of a row: in a tree, after its parent (draft_tree.h).
inline int position_of(const oct_sequences& seqs, int seq, int row) {
  int depth = 0;
  for (; seqs.parents && seqs.parents[row] >= 0; row = seqs.parents[row]) depth++;
  return slot_of(seqs, seq, row) + depth;
}

inline const int32_t* block_table(const oct_attention_args& args, const oct_sequences& seqs,
                                  int seq) {
  return seqs.block_table + args.group * seqs.group_stride + int64_t{seq} * seqs.table_stride;
}

// The chunks of one sequence and head.
class KvHead {
 public:
  KvHead(const oct_attention_args& args, const oct_sequences& seqs, int seq, int head)
      : chunk_bytes_(kv_chunk_bytes(args.kv_format, args.head_dim)),
        key_bytes_(kv_key_bytes(args.kv_format, args.head_dim)),
        chunks_per_block_(seqs.block_size / kChunk),
        block_bytes_(args.kv_block_bytes),
        first_(static_cast<uint8_t*>(args.kv) + head * chunks_per_block_ * chunk_bytes_),
        blocks_(block_table(args, seqs, seq)) {}

  // Keys of the positions from 16 * index on; the values follow.
  uint8_t* chunk(int index) const {
    return first_ + blocks_[index / chunks_per_block_] * block_bytes_ +
           index % chunks_per_block_ * chunk_bytes_;
  }
  int64_t values_offset() const { return key_bytes_; }

 private:
  int64_t chunk_bytes_, key_bytes_;
  int chunks_per_block_;
  int64_t block_bytes_;
  uint8_t* first_;
  const int32_t* blocks_;
};

}  // namespace octavo
