// Moves tokens within the KV cache, as for accepted tokens of a draft tree.
#include "attention.h"
#include "kv_select.h"
#include "pool.h"

namespace octavo {
namespace {

int32_t check_memory(const oct_kv_memory& memory) {
  const int64_t chunk = oct_kv_chunk_bytes(memory.kv_format, memory.head_dim);
  if (chunk < 0) return static_cast<int32_t>(chunk);
  if (memory.block_size < kChunk || memory.block_size % kChunk != 0) {
    return fail(OCT_ERR_ARGUMENT, "KV: blocks of %d tokens; possible are multiples of %d",
                memory.block_size, kChunk);
  }
  const int64_t layer = chunk * (memory.block_size / kChunk) * memory.num_kv_heads;
  if (!memory.kv || memory.num_kv_heads < 1 || memory.num_layers < 0 ||
      memory.layer_bytes < layer || memory.block_bytes < layer) {
    return fail(OCT_ERR_ARGUMENT,
                "KV: %d layers of %d heads, %lld bytes each, %lld in a block: a layer has %lld",
                memory.num_layers, memory.num_kv_heads,
                static_cast<long long>(memory.layer_bytes),
                static_cast<long long>(memory.block_bytes), static_cast<long long>(layer));
  }
  return OCT_OK;
}

int32_t check_slot(const oct_kv_memory& memory, const int32_t* table, int32_t table_size,
                   int64_t slot) {
  if (slot < 0 || slot >= int64_t{table_size} * memory.block_size) {
    return fail(OCT_ERR_ARGUMENT, "KV: there is no slot %lld in a table of %d blocks of %d",
                static_cast<long long>(slot), table_size, memory.block_size);
  }
  const int32_t block = table[slot / memory.block_size];
  if (block < 0 || block >= memory.num_blocks) {
    return fail(OCT_ERR_ARGUMENT,
                "KV: slot %lld is in block %d, which does not exist: there are %d",
                static_cast<long long>(slot), block, memory.num_blocks);
  }
  return OCT_OK;
}

int32_t check_move(const oct_kv_memory& memory, const int32_t* table, int32_t table_size,
                   const int32_t* sources, int32_t count, int32_t target) {
  int32_t code = check_memory(memory);
  for (int32_t i = 0; i < count && code == OCT_OK; i++) {
    if (sources[i] < int64_t{target} + i || (i > 0 && sources[i] <= sources[i - 1])) {
      return fail(OCT_ERR_ARGUMENT, "KV: slot %d cannot move to %lld after %d did", sources[i],
                  static_cast<long long>(int64_t{target} + i), i > 0 ? sources[i - 1] : -1);
    }
    code = check_slot(memory, table, table_size, sources[i]);
    if (code == OCT_OK) code = check_slot(memory, table, table_size, int64_t{target} + i);
  }
  return code;
}

template <class Kv>
void move(const oct_kv_memory& memory, const int32_t* table, const int32_t* sources, int32_t count,
          int32_t target) {
  oct_sequences seqs{};
  seqs.num_seqs = 1;
  seqs.block_table = table;
  seqs.block_size = memory.block_size;
  oct_attention_args args{};
  args.num_kv_heads = memory.num_kv_heads;
  args.head_dim = memory.head_dim;
  args.kv_format = memory.kv_format;
  args.kv_block_bytes = memory.block_bytes;
  for (int layer = 0; layer < memory.num_layers; layer++) {
    args.kv = static_cast<uint8_t*>(memory.kv) + layer * memory.layer_bytes;
    for (int head = 0; head < memory.num_kv_heads; head++) {
      const KvHead kv(args, seqs, 0, head);
      for (int i = 0; i < count; i++) {
        const int from = sources[i], to = target + i;
        if (from == to) continue;
        Kv::copy_token(memory.head_dim, kv.chunk(from / kChunk), from % kChunk,
                       kv.chunk(to / kChunk), to % kChunk);
      }
    }
  }
}

}  // namespace
}  // namespace octavo

int32_t oct_kv_move(const oct_kv_memory* memory, const int32_t* block_table, int32_t table_size,
                    const int32_t* sources, int32_t count, int32_t target) {
  using namespace octavo;
  const int32_t code = check_move(*memory, block_table, table_size, sources, count, target);
  if (code != OCT_OK) return code;
  with_kv_format(memory->kv_format, [&](auto kv) {
    move<decltype(kv)>(*memory, block_table, sources, count, target);
  });
  return OCT_OK;
}
