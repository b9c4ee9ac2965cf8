// Norm, rotation, and the writing of keys and values.
//
// The work is cut into runs: the tokens of a sequence that fall into one chunk, for one key head
// and the query heads that share it. A chunk belongs to one run, so only one worker writes to it.
//
//     slots       0 .. 15   16 .. 31   32 .. 47
//     new         .....|xx  xxxxxxxx   xxx|....      3 runs a head
#include "kv_write.h"

#include <algorithm>
#include <cmath>

#include "kv_select.h"
#include "rope.h"

namespace octavo {
namespace {

using simd::F32;

// x / sqrt(mean(x^2) + eps) * weight.
void norm_head(const float* x, const float* weight, float eps, int size, float* out) {
  const int whole = size / 16 * 16, rest = size - whole;
  F32 squares = simd::zero();
  for (int d = 0; d < whole; d += 16) {
    const F32 v = simd::load(x + d);
    squares = simd::fma(v, v, squares);
  }
  const F32 last = rest > 0 ? simd::load_first(x + whole, rest) : simd::zero();
  if (rest > 0) squares = simd::fma(last, last, squares);
  const float mean = simd::sum(squares) / static_cast<float>(size);
  const F32 scale = simd::set1(1.0f / std::sqrt(mean + eps));
  for (int d = 0; d < whole; d += 16) {
    const F32 normed = simd::mul(simd::mul(simd::load(x + d), scale), simd::load(weight + d));
    simd::store(out + d, normed);
  }
  if (rest == 0) return;
  const F32 weights = simd::load_first(weight + whole, rest);
  simd::store_first(out + whole, simd::mul(simd::mul(last, scale), weights), rest);
}

// Zeros behind a head, up to its dimensions in the KV memory.
void pad_head(const oct_attention_args& args, float* out) {
  std::fill(out + args.head_size, out + args.head_dim, 0.0f);
}

// A head of a query or a key as attention sees it, `norm` NULL for none.
void prepare_head(const oct_attention_args& args, const float* x, const float* norm, int angle,
                  float* out) {
  const int size = args.head_size;
  if (norm) {
    norm_head(x, norm, args.qk_norm_eps, size, out);
  } else {
    std::copy_n(x, size, out);
  }
  pad_head(args, out);
  if (args.rotary_dim == 0) return;
  turn(args.cos_sin, angle, args.rotary_dim, args.rope_interleaved, out);
}

// A value that is not finite would spoil even the queries that do not see it, as 0 * NaN is NaN; a
// key might do nothing to those that do, with a score of -inf. Both become a key of NaN with a
// value of 0: queries that see it become NaN, and all others are unaffected.
void mark_if_damaged(int dim, float* key, float* value) {
  F32 zeros = simd::zero();  // 0 times all; NaN if one is not finite
  for (int d = 0; d < dim; d += 16) {
    // Scaled up first: values that bfloat16 rounds to infinity count as infinite.
    const F32 a = simd::mul(simd::load(key + d), simd::set1(1.01f));
    const F32 b = simd::mul(simd::load(value + d), simd::set1(1.01f));
    zeros = simd::fma(a, simd::zero(), simd::fma(b, simd::zero(), zeros));
  }
  if (!simd::any(simd::is_nan(zeros))) return;
  std::fill_n(key, dim, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(value, dim, 0.0f);
}

struct Run {
  int seq, head;
  int token;  // the first, as a row of the step
  int slot;   // of that token
  int count;
};

// Prefetch: the rows of q, k and v are too far apart for the hardware prefetcher.
void fetch(const float* x, int n) {
  for (int i = 0; i < n; i += 16) simd::prefetch(x + i);
}

// The query heads of a token that share a key head, to [G][D].
template <class Kv>
void prepare_group(const oct_attention_args& args, const float* q, int angle,
                   typename Kv::Keys::Factor* queries) {
  const int dim = args.head_dim, group = args.num_heads / args.num_kv_heads;
  const F32 factor = simd::set1(query_factor(args));
  alignas(64) float query[kMaxHeadDim];
  for (int g = 0; g < group; g++) {
    prepare_head(args, q + g * args.head_size, args.q_norm, angle, query);
    Kv::store_query(query, factor, dim, queries + g * query_factors<typename Kv::Keys>(dim));
  }
}

// Queries to [tokens][G][D]; keys and values only if they are to be stored.
template <class Kv>
void prepare_run(const oct_attention_args& args, const oct_sequences& seqs, const Run& run,
                 bool store, typename Kv::Keys::Factor* queries) {
  const int dim = args.head_dim, group = args.num_heads / args.num_kv_heads;
  alignas(64) float keys[kChunk * kMaxHeadDim], values[kChunk * kMaxHeadDim];
  const SinkWindow sink_window(args, seqs, run.seq);
  const int size = args.head_size;
  const float* q = args.q + run.token * args.ldq + int64_t{run.head} * group * size;
  const float* k = args.k + run.token * args.ldk + int64_t{run.head} * size;
  const float* v = args.v + run.token * args.ldv + int64_t{run.head} * size;
  const int token_factors = group * query_factors<typename Kv::Keys>(dim);
  for (int i = 0; i < run.count; i++) {
    constexpr int kAhead = 2;  // tokens
    if (i + kAhead < run.count) {
      fetch(q + (i + kAhead) * args.ldq, group * size);
      fetch(k + (i + kAhead) * args.ldk, size);
      fetch(v + (i + kAhead) * args.ldv, size);
    }
    const int angle = sink_window.angle_of_key(position_of(seqs, run.seq, run.token + i));
    if (store) {
      prepare_head(args, k + i * args.ldk, args.k_norm, angle, keys + i * dim);
      std::copy_n(v + i * args.ldv, size, values + i * dim);
      pad_head(args, values + i * dim);
      mark_if_damaged(dim, keys + i * dim, values + i * dim);
    }
    prepare_group<Kv>(args, q + i * args.ldq, angle, queries + i * token_factors);
  }
  if (!store) return;
  uint8_t* chunk = KvHead(args, seqs, run.seq, run.head).chunk(run.slot / kChunk);
  Kv::write(args, chunk, run.slot % kChunk, run.count, keys, values);
}

int num_runs(int first, int end) {
  return end > first ? (end - 1) / kChunk - first / kChunk + 1 : 0;
}

template <class Kv>
void read(const oct_attention_args& args, const oct_sequences& seqs, int seq, float* keys,
          float* values) {
  const int64_t heads = args.num_kv_heads, dim = args.head_dim;
  for (int head = 0; head < heads; head++) {
    const KvHead kv(args, seqs, seq, head);
    for (int p = 0; p < seqs.kv_len[seq]; p++) {
      const int64_t at = (p * heads + head) * dim;
      Kv::read(args, kv.chunk(p / kChunk), p % kChunk, keys + at, values + at);
    }
  }
}

}  // namespace

float query_factor(const oct_attention_args& args) {
  return args.softcap > 0 ? args.scale / args.softcap : args.scale * kLog2E;
}

template <class Kv>
void prepare(const oct_attention_args& args, const oct_sequences& seqs, const int32_t* first_rows,
             const Worker& worker, typename Kv::Keys::Factor* queries) {
  int total = 0;
  for (int s = 0; s < seqs.num_seqs; s++) {
    const int length = seqs.q_start[s + 1] - seqs.q_start[s];
    total += num_runs(seqs.kv_len[s] - length, seqs.kv_len[s]) * args.num_kv_heads;
  }
  const Range mine = share(total, worker.rank, worker.size);
  const int64_t token_factors =
      int64_t{args.num_heads / args.num_kv_heads} * query_factors<typename Kv::Keys>(args.head_dim);
  int index = 0;
  for (int s = 0; s < seqs.num_seqs && index < mine.end; s++) {
    int token = seqs.q_start[s], row = first_rows[s];
    const int end = seqs.kv_len[s];
    for (int slot = end - (seqs.q_start[s + 1] - token); slot < end;) {
      const int count = std::min(kChunk - slot % kChunk, end - slot);
      for (int head = 0; head < args.num_kv_heads; head++, index++) {
        if (index < mine.begin || index >= mine.end) continue;
        prepare_run<Kv>(args, seqs, {s, head, token, slot, count}, true,
                        queries + (int64_t{head} * seqs.num_tokens + row) * token_factors);
      }
      token += count;
      row += count;
      slot += count;
    }
  }
}

template <class Kv>
void prepare_token(const oct_attention_args& args, const oct_sequences& seqs, int seq, int head,
                   bool store, typename Kv::Keys::Factor* queries) {
  const Run run = {seq, head, seqs.q_start[seq], seqs.kv_len[seq] - 1, 1};
  prepare_run<Kv>(args, seqs, run, store, queries);
}

template <class Kv>
void prepare_queries(const oct_attention_args& args, const Item& item, const int* angles,
                     typename Kv::Keys::Factor* queries) {
  const int dim = args.head_dim, group = args.num_heads / args.num_kv_heads;
  const float* q =
      args.q + item.first_token * args.ldq + int64_t{item.head} * group * args.head_size;
  const int token_factors = group * query_factors<typename Kv::Keys>(dim);
  for (int i = 0; i < item.num_tokens; i++) {
    prepare_group<Kv>(args, q + i * args.ldq, angles[i], queries + i * token_factors);
  }
}

#define INSTANTIATE(Kv)                                                                          \
  template void prepare<Kv>(const oct_attention_args&, const oct_sequences&, const int32_t*,     \
                            const Worker&, Kv::Keys::Factor*);                                   \
  template void prepare_token<Kv>(const oct_attention_args&, const oct_sequences&, int, int, bool, \
                                  Kv::Keys::Factor*);                                            \
  template void prepare_queries<Kv>(const oct_attention_args&, const Item&, const int*,          \
                                    Kv::Keys::Factor*);
INSTANTIATE(F32Kv)
INSTANTIATE(Bf16Kv)
INSTANTIATE(Int8Kv)
INSTANTIATE(Fp8Kv)
INSTANTIATE(Int4Kv)
INSTANTIATE(K8V4Kv)
#undef INSTANTIATE

}  // namespace octavo

int32_t oct_kv_read(const oct_attention_args* args, const oct_sequences* seqs, int32_t seq,
                    float* keys, float* values) {
  using namespace octavo;
  if (seq < 0 || seq >= seqs->num_seqs) {
    return fail(OCT_ERR_ARGUMENT, "there is no sequence %d in a step of %d", seq, seqs->num_seqs);
  }
  const bool is_known = with_kv_format(args->kv_format, [&](auto kv) {
    read<decltype(kv)>(*args, *seqs, seq, keys, values);
  });
  if (is_known) return OCT_OK;
  return fail(OCT_ERR_ARGUMENT, "there is no KV format %d", args->kv_format);
}
