/* The C interface of octavo's native CPU kernels.
 *
 * One library per instruction set, all with these functions; octavo/kernels/cpu/ chooses one, loads
 * it with ctypes, and mirrors the structs below field by field (abi.py). Plain C types only.
 *
 * Shapes: T tokens of a step, S sequences, R rows of logits, H query heads, Hk key and value heads,
 * D head size, N output and K input features, V vocabulary. Activations between ops are float32,
 * row-major, a row per token. Every function that can fail returns a negative code; the thread's
 * own oct_last_error() then says what was wrong.
 *
 * Results are bitwise independent of the number of threads, of the other rows of a step, and of how
 * a prompt was cut into steps: no reduction is split by anything but fixed sizes.
 */
#ifndef OCTAVO_H
#define OCTAVO_H

#include <stdint.h>

#define OCT_ABI_VERSION 20

#if defined(__cplusplus)
extern "C" {
#endif
#pragma GCC visibility push(default) /* all else is hidden: -fvisibility=hidden */

enum {
  OCT_OK = 0,
  OCT_ERR_ARGUMENT = -1,
  OCT_ERR_MEMORY = -2,
  OCT_ERR_ABORTED = -3,
  OCT_ERR_PEER = -4 /* another rank of the group has ended */
};

int32_t oct_abi_version(void);
const char* oct_isa(void);        /* "scalar", "avx2", "avxvnni", ..., "neoni8mm": of the level */
const char* oct_last_error(void); /* of the calling thread; valid until its next failing call */
/* sizeof of each struct below, in the order of declaration, and their number: the loader of a
 * library compares them with its own, as a library of another build would read past its structs. */
int32_t oct_struct_sizes(const int32_t** sizes);
/* From now on, a SIGBUS reports on standard error the mapped file that has lost its contents, before
 * the previous handler is called, or the process ends. */
void oct_report_bus_errors(void);

/* ---- Threads ------------------------------------------------------------------------------- */

/* A pool of num_threads - 1 threads besides the caller, which works too. Between two calls they spin
 * for spin_us microseconds and then sleep. A pool runs one call at a time (callers wait), survives
 * a fork (the child starts its own threads at its first call), and pins no thread. */
typedef struct oct_pool oct_pool;
oct_pool* oct_pool_new(int32_t num_threads, int32_t spin_us); /* NULL on failure */
void oct_pool_free(oct_pool* pool);
int32_t oct_pool_size(const oct_pool* pool);
/* Nanoseconds per barrier, from `rounds` of them in a row. */
double oct_pool_barrier_ns(oct_pool* pool, int32_t rounds);
/* Makes the call that is running, if any, return OCT_ERR_ABORTED at its next barrier. */
void oct_abort(oct_pool* pool);

/* A number that one thread adds to, and that others wait for: see oct_batch.masks_made. */
typedef struct oct_counter oct_counter;
oct_counter* oct_counter_new(void); /* at 0; NULL on failure */
void oct_counter_free(oct_counter* counter);
/* What this thread wrote before is seen by those that have waited for the new number. */
void oct_counter_add(oct_counter* counter, uint32_t amount);
/* Back to 0: not while any thread waits. */
void oct_counter_reset(oct_counter* counter);

/* ---- Groups -------------------------------------------------------------------------------- */

/* The ranks of a tensor-parallel group are processes on one machine that map the same memory
 * (MAP_SHARED); only on Linux. Rank 0, the home rank, sends messages to the others, its followers. All
 * ranks meet. What waits spins, yields, and in the end sleeps; it ends when the group is aborted, with
 * OCT_ERR_PEER as all that follows. A rank makes its calls from one thread at a time, but for
 * oct_group_abort and oct_group_counts. */
typedef struct oct_group oct_group;
/* Bytes at the start of the memory that belong to the group; or an error. */
int64_t oct_group_bytes(int32_t size);
/* Attach to memory that was zero when the first rank came. `is_crowded`: there are more threads than
 * cores, so waiting goes to sleep sooner. NULL on failure. */
oct_group* oct_group_open(void* memory, int32_t rank, int32_t size, int32_t is_crowded);
void oct_group_close(oct_group* group);
/* Home: send a message of one word or more to each follower. Waits while there is no room. */
int32_t oct_group_send(oct_group* group, const int32_t* words, int32_t count);
/* Follower: wait for the next message. Returns its number of words; OCT_ERR_ARGUMENT if that exceeds the
 * capacity, or cannot be: then no further message can be received. */
int32_t oct_group_receive(oct_group* group, int32_t* words, int32_t capacity);
/* End all waiting in all ranks, now and from now on. From any thread. */
void oct_group_abort(oct_group* group);
/* Wait for all ranks. Returns 1 in all of them if any said `stop`, 0, or OCT_ERR_PEER. */
int32_t oct_group_meet(oct_group* group, int32_t stop);
/* Nanoseconds per meeting, and per barrier of the threads of all ranks, from `rounds` of them in a row:
 * to be called by all ranks. */
double oct_group_meet_ns(oct_group* group, int32_t rounds);
double oct_group_barrier_ns(oct_group* group, oct_pool* pool, int32_t rounds);
/* What this rank has done so far: meetings, and messages that it has sent or received, with their
 * bytes. */
void oct_group_counts(const oct_group* group, int64_t* meetings, int64_t* messages, int64_t* bytes);

/* ---- Weights ------------------------------------------------------------------------------- */

/* Packed formats: 16 output columns to a tile, in the order in which kernels read them (pack.h). The
 * number in a quantized format's name is the bits of an integer q, and the last letter its value:
 *
 *     S  symmetric    d * (q - 2^(bits - 1))
 *     A  asymmetric   d * q + m
 *     N  nonlinear    d * level[q], of the 16 levels of IQ4_NL
 *     F  floats       d * level[q], of the 16 levels of FP4 (E2M1), doubled so that they are whole
 *
 * W formats have a float16 d (and m) for each group of 32 inputs; S and A of 2, 3, 4 and 8 bits also
 * of 64 or 128, W4F also of 16. K formats have int8 scales (and mins) for each group, and a float16 d
 * (and m) for each block of 256 inputs by which these are multiplied. NF4, FP4 (that of bitsandbytes)
 * and E4M3 are codes of floats, with a float32 scale for each group of 64, 64, or 128 inputs. */
enum {
  OCT_W2S = 0,
  OCT_W2A = 1,
  OCT_W3S = 2,
  OCT_W3A = 3,
  OCT_W4S = 4,
  OCT_W4A = 5,
  OCT_W8S = 6,
  OCT_W8A = 7,
  OCT_W5S = 8,
  OCT_W5A = 9,
  OCT_W4N = 10,
  OCT_W4F = 11,
  OCT_K2A = 12, /* groups of 16; scales and mins of 4 bits */
  OCT_K3S = 13, /* groups of 16 */
  OCT_K4A = 14, /* groups of 32 */
  OCT_K5A = 15, /* groups of 32 */
  OCT_K6S = 16, /* groups of 16 */
  OCT_K4N = 17, /* groups of 32 */
  OCT_BF16 = 18,
  OCT_F16 = 19,
  OCT_F32 = 20,
  OCT_NF4 = 21,
  OCT_FP4 = 22,
  OCT_E4M3 = 23,
  OCT_STORED = 64 /* + a GGUF type: not packed, but rows as a model's file stores them, see below */
};

typedef struct oct_weight {
  int32_t format;
  int32_t n, k;    /* rows (outputs) and columns (inputs) of the matrix */
  int32_t group;   /* inputs that share a scale, see above; 0 for floats */
  const void* data; /* 64-byte aligned, oct_packed_bytes() of them; if stored, at any address */
  /* [k], each input once, or NULL: packed column i is that of input columns[i]. So inputs that share a
   * scale can be adjacent, wherever they come from. NULL if stored. */
  const int32_t* columns;
} oct_weight;

int64_t oct_packed_bytes(int32_t format, int32_t n, int32_t k, int32_t group); /* or an error */

/* A stored weight has the `group` 0. Its rows can be gathered (oct_embed_args) and unpacked, for every
 * type that can be packed, with the same results. */

/* Pack rows of q (uint8 [n, k], one value each), scales and mins (float16 [n, k / group], mins NULL
 * except for A) into a W format; codes in `q` with scales (float32 [n, k / group]) into NF4, FP4 or
 * E4M3, without its two codes of NaN; or values of BF16, F16 or F32 in `q`, without scales. All
 * columns are in the order in which they are packed. */
int32_t oct_pack(oct_pool* pool, const oct_weight* weight, const void* q, const void* scales,
                 const void* mins, void* out);
/* Pack n rows of a GGUF tensor (row-major blocks of ggml_type). oct_gguf_format returns the packed
 * form of a type: format and group, or an error for types that have none. */
int32_t oct_gguf_format(int32_t ggml_type, int32_t* format, int32_t* group);
int32_t oct_pack_gguf(oct_pool* pool, const oct_weight* weight, int32_t ggml_type, const void* rows,
                      void* out);
/* Unpack a weight to float32 [n, k], in the order of inputs. */
int32_t oct_unpack(oct_pool* pool, const oct_weight* weight, float* out);

/* ---- Linear -------------------------------------------------------------------------------- */

enum {
  OCT_EPI_NONE = 0,     /* y[s] = x w[s]^T + bias[s], each segment s into its own y */
  OCT_EPI_RESIDUAL = 1, /* y = residual + scale (x w^T + bias); y may be residual */
  OCT_EPI_SILU_MUL = 2, /* y = silu(x w[0]^T) * (x w[1]^T); two segments of equal n */
  OCT_EPI_GELU_TANH_MUL = 3,
  OCT_EPI_GELU_ERF_MUL = 4,
  OCT_EPI_HEAD = 5,     /* y are logits, times scale, then softcap * tanh(y / softcap) if softcap > 0;
                           see oct_head */
  /* y = g * sigmoid(1.702 g) * (u + 1), with g = min(x w[0]^T, 7) and u = x w[1]^T within +-7: the
   * gate of gpt-oss */
  OCT_EPI_CLAMPED_SWIGLU = 6,
  OCT_EPI_SILU = 7,     /* y = silu(x w^T + bias), and so on: activations without a product */
  OCT_EPI_GELU_TANH = 8,
  OCT_EPI_GELU_ERF = 9,
  OCT_EPI_RELU = 10
};

#define OCT_MAX_SEGMENTS 4

typedef struct oct_segment {
  oct_weight weight;
  const float* bias; /* [n] or NULL */
  float* y;          /* [rows, n] with ldy floats from row to row */
  int64_t ldy;
} oct_segment;

/* The most likely token of each row while the head is computed, without writing its logits. */
typedef struct oct_head {
  float* const* logits; /* per row: [n] to write, or NULL if they are not needed */
  float* best_logit;    /* per row: maximum; NaN if any logit is NaN */
  int32_t* best_id;     /* per row: the lowest id that has it */
  float softcap;        /* 0: none */
  int32_t first_id;     /* of the rows that the weight has: greater than 0 in a rank of a group alone */
} oct_head;

/* A linear; before its products, row by row:
 *     x   = in                                   (row row_index[r] of it if row_index)
 *     x   = x + add, or x + rmsnorm(add) * add_norm   if add        -> written to x_out
 *     x   = rmsnorm(x) * norm                    if norm
 * and then x in the order of the weights' columns, and in their encoding: int8 with a scale per group,
 * bf16, or float32.
 * An int8 may have a remainder, a second int8 for the rest: then a number has 15 bits. Groups have one
 * if their largest magnitude is above `remainder_above` times the root mean square of x. */
typedef struct oct_linear_args {
  int32_t rows, k;
  const float* in; /* [rows, k], ldin floats from row to row */
  int64_t ldin;
  const int32_t* row_index; /* NULL: row r is row r */
  const float* add;         /* NULL or [rows, k], leading dimension ldin */
  const float* add_norm;    /* NULL or [k] */
  float* x_out;             /* with add: [rows, k], leading dimension ldin; not in nor add */
  const float* norm;        /* NULL or [k] */
  float eps, add_eps;
  float remainder_above; /* 0: all groups have remainders; INFINITY: none */
  int32_t epilogue, num_segments;
  oct_segment segments[OCT_MAX_SEGMENTS];
  const float* residual; /* leading dimension ldy of segment 0 */
  const oct_head* head;
  float scale; /* of products that are added to a residual, or logits; 0: none */
} oct_linear_args;

int32_t oct_linear(oct_pool* pool, const oct_linear_args* args);

/* ---- Paged attention ----------------------------------------------------------------------- */

/* KV of one layer: num_blocks blocks, kv_block_bytes from one to the next, which may hold other
 * layers between. A block: [Hk][block_size / 16] chunks of 16 tokens, a chunk holding its keys and
 * then its values (attention.h has the order inside). oct_kv_chunk_bytes() per chunk. */
enum {
  OCT_KV_F32 = 0,
  OCT_KV_BF16 = 1,
  OCT_KV_INT8 = 2,
  OCT_KV_FP8 = 3,  /* e4m3 */
  OCT_KV_INT4 = 4,
  OCT_KV_K8V4 = 5  /* keys as INT8 has them, values as INT4 */
};
int64_t oct_kv_chunk_bytes(int32_t kv_format, int32_t head_dim); /* or an error */

/* Attention sinks and a sliding window of one sequence: its rows see the first tokens and the last
 * ones, as if there had been no tokens between them (sink_window.h). */
typedef struct oct_sink_window {
  int32_t sinks;    /* the first tokens, which all rows see; 0: none */
  int32_t window;   /* a row sees this many of the other tokens, itself included; 0: all */
  int32_t stride;   /* a full window drops so many tokens at once: 1 or more */
  int32_t turn;     /* positions after which angles begin anew: a multiple of 256, and at least sinks
                     * plus window. Tables have turn + window rows */
  int64_t left_out; /* tokens without slots, a multiple of 256: behind the sinks, the slot of a
                     * token is its position minus these. No row sees any of them */
} oct_sink_window;

/* The sequences of a step: sequence s has the rows q_start[s] .. q_start[s + 1] of the step's
 * tokens, the last ones of its kv_len[s] slots, and the blocks block_table[s * stride + i]. Sequences
 * must not read slots that another one stores in this step, which happens in any order.
 *
 * Groups of layers may have tables of their own: those of group g begin g * group_stride entries
 * further on. Only entries of blocks that some row sees or writes are read.
 *
 * With share_prefixes, keys and values in a common prefix of block tables are read once for all
 * sequences that share it. That changes no bit of the results.
 *
 * A row is at the position of its slot, and sees all before it. Or the last rows of a sequence are a
 * tree of draft tokens: then parents[t] is the row that row t follows, an earlier one of the tree, or
 * the last one before the tree. Row t is at the position after its parent, and sees itself and its
 * ancestors; its slot is still the next one in order. */
typedef struct oct_sequences {
  int32_t num_seqs, num_tokens;
  const int32_t* q_start;     /* [S + 1] */
  const int32_t* kv_len;      /* [S] */
  const int32_t* block_table; /* [S, table_stride] */
  int32_t table_stride;
  int32_t block_size; /* a multiple of 16 */
  const int32_t* parents; /* [T], -1 for rows of no tree; NULL: there is none */
  int64_t group_stride;
  int32_t share_prefixes; /* 0 or 1 */
  /* [S], for layers without windows and sequences without trees; NULL */
  const oct_sink_window* sink_windows;
  /* For layers with states: the slot that each sequence continues from, -1 for a new one, and the slot
   * that it writes, which no other sequence reads or writes. [S] each; NULL without such layers. */
  const int32_t* state_source;
  const int32_t* state_target;
} oct_sequences;

/* D is head_size. The KV memory has head_dim values of a head: the next multiple of 16, at most
 * 512, of which those behind the first D are 0. */
typedef struct oct_attention_args {
  int32_t num_heads, num_kv_heads, head_dim, head_size;
  int32_t kv_format;
  int32_t window;           /* a query sees this many positions, itself included; 0: all */
  int32_t rotary_dim;       /* 0: no rope */
  int32_t rope_interleaved; /* pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2) */
  float scale, softcap;     /* softcap 0: none */
  float qk_norm_eps;
  const float* q_norm; /* [D] or NULL: rmsnorm of each head, before rope */
  const float* k_norm;
  const float* sinks;  /* [H] or NULL: a logit in each softmax that no value belongs to */
  const float* cos_sin; /* [positions, rotary_dim]: cosines, then sines */
  const float* q;      /* [T, H, D], ldq floats from token to token */
  const float* k;      /* [T, Hk, D] */
  const float* v;
  int64_t ldq, ldk, ldv;
  void* kv;            /* this layer's part of the first block */
  int64_t kv_block_bytes;
  float* out;          /* [T, H, D], ldo floats from token to token; may not overlap q */
  int64_t ldo;
  int32_t num_blocks;  /* of the KV memory: ids in block tables are less */
  int32_t group;       /* whose block tables are this layer's */
  int32_t bidirectional; /* a query sees positions after its own too: window - 1 of them, or all. All
                          * tokens of a sequence are then in one step, which has no trees or sinks */
} oct_attention_args;

/* Norm and rotate q and k, store k and v in their slots, and attend. */
int32_t oct_attention(oct_pool* pool, const oct_attention_args* args, const oct_sequences* seqs);
/* Number of keys, each Hk times D, that layers of a group do not read in a step thanks to
 * share_prefixes, since they are read for another sequence; or an error. */
int64_t oct_shared_keys(const oct_sequences* seqs, int32_t group);
/* Keys and values as float32 [kv_len, Hk, head_dim] each, of one sequence, slot by slot: for
 * tests. */
int32_t oct_kv_read(const oct_attention_args* args, const oct_sequences* seqs, int32_t seq,
                    float* keys, float* values);

/* KV of all layers: layer l of block b begins at kv + b * block_bytes + l * layer_bytes. */
typedef struct oct_kv_memory {
  int32_t kv_format, num_kv_heads, head_dim;
  int32_t num_layers, num_blocks;
  int32_t block_size; /* a multiple of 16 */
  int64_t layer_bytes, block_bytes;
  void* kv;
} oct_kv_memory;

/* Copy the KV of a sequence of table_size blocks from the slots sources[i] to the slots target + i, in
 * all layers, as if it had been written there. Sources ascend, and none lies before its target. */
int32_t oct_kv_move(const oct_kv_memory* memory, const int32_t* block_table, int32_t table_size,
                    const int32_t* sources, int32_t count, int32_t target);

/* ---- Latent attention ---------------------------------------------------------------------- */

/* Attention of heads that share one row of a token: a latent vector c of `rank` numbers, which each
 * head expands to its own key and value, and a rotated part k of `rope_dim` (latent.h). A block of
 * the KV memory has a layer's rows one after the other, of oct_latent_row_bytes() each: the numbers
 * of c and k in the type of the format; codes have two float32 scales behind them. There are rows
 * of F32, BF16, INT8 and FP8. */
typedef struct oct_latent_args {
  int32_t num_heads, rank, rope_dim;
  int32_t nope_dim, value_dim; /* of a head: its query without rope_dim, and its output */
  int32_t kv_format;
  int32_t rope_interleaved;
  int32_t weight_format; /* of key_up and value_up: OCT_F32, OCT_F16 or OCT_BF16 */
  float scale, eps;
  const float* norm;    /* [rank]: rmsnorm of c */
  const float* cos_sin; /* [positions, rope_dim]: cosines, then sines */
  /* The matrices that expand c to keys and values: [H, nope_dim, rank] and, transposed,
   * [H, rank, value_dim], the last dimension padded with zeros to a multiple of 16. In BF16 inputs are
   * in pairs, an odd last one with a zero: [H, (nope_dim + 1) / 2, rank, 2], and so on. */
  const void* key_up;
  const void* value_up;
  const float* q;  /* [T, H, nope_dim + rope_dim], ldq floats from token to token */
  const float* ckv; /* [T, rank + rope_dim]: c and k before norm and rotation */
  int64_t ldq, ldckv;
  void* kv;        /* this layer's part of the first block */
  int64_t kv_block_bytes;
  float* out;      /* [T, H, value_dim], ldo floats from token to token; may not overlap q */
  int64_t ldo;
  int32_t num_blocks, group; /* as in oct_attention_args */
} oct_latent_args;

int64_t oct_latent_row_bytes(int32_t kv_format, int32_t rank, int32_t rope_dim); /* or an error */
/* Norm and rotate, store, and attend. */
int32_t oct_latent(oct_pool* pool, const oct_latent_args* args, const oct_sequences* seqs);
/* Rows as float32 [kv_len, rank + rope_dim], of one sequence, slot by slot: for tests. */
int32_t oct_latent_read(const oct_latent_args* args, const oct_sequences* seqs, int32_t seq,
                        float* rows);

/* ---- Sampling ------------------------------------------------------------------------------ */

enum {
  OCT_TOKEN_OK = 0,
  OCT_TOKEN_BAD_LOGITS = 1,
  OCT_TOKEN_OVERFLOW = 2,
  OCT_TOKEN_NONE = 3,  /* the step was not run, see oct_batch */
  OCT_TOKEN_NO_CHOICE = 4 /* the mask leaves no token */
};

/* Sampling parameters of a row of logits; octavo/runtime/sampler.py is the oracle. temperature 0 is
 * greedy. The mask comes first, then biases, then penalties, which count tokens of prompt_ids and
 * output_ids; ids outside of [0, V) are ignored. A row has no bias for one id twice.
 * The random number of a row is the function of seed, sample_index and position (the number of tokens
 * generated before) in octavo/runtime/random.py. */
typedef struct oct_sample {
  float temperature;
  float repetition_penalty, frequency_penalty, presence_penalty; /* 1, 0, 0: off */
  double top_p, min_p, typical_p;                                /* 1, 0, 1: off */
  double top_n_sigma, xtc_probability, xtc_threshold;            /* 0, 0: off */
  int32_t top_k;                                                 /* 0: off */
  int32_t num_prompt_ids, num_output_ids;
  uint32_t sample_index;
  const int32_t* prompt_ids;
  const int32_t* output_ids;
  uint64_t seed;
  uint64_t position;
  const uint32_t* mask;    /* a bit for each token, the lowest first, 1: allowed; NULL: all are */
  int64_t mask_turn;       /* 0; or, in a step, `mask` is not read before masks_made has come to this */
  const int32_t* bias_ids; /* [num_biases] */
  const float* biases;     /* [num_biases], added to logits */
  int64_t num_biases;
} oct_sample;

/* Sample tokens from rows of float32 logits (logits[r], V each; overwritten). status[r] as above.
 * probabilities[r], if neither is NULL, gets the probability with which each token (V) is drawn: 0 for
 * tokens that the mask, top_k, top_p and the like exclude. Nothing is written for a row that is greedy
 * or has no token. */
int32_t oct_sample_rows(oct_pool* pool, int32_t num_rows, int32_t vocab, float* const* logits,
                        const oct_sample* params, int32_t* tokens, int32_t* status,
                        float* const* probabilities);

/* Log-probability and rank of a token by the original logits of a row, and the tokens of the first
 * num_top ranks; compute_logprobs of octavo/runtime/sampler.py is the oracle. The rank is
 * one more than the number of tokens with a greater logit; of equals, top_ids has the lowest id
 * first. A row with NaN or +inf, or nothing but -inf, has logprobs of NaN. */
typedef struct oct_logprobs {
  int32_t num_top; /* at most V; -1: no log-probabilities for this row */
  int32_t rank;
  double logprob;
  int32_t* top_ids; /* [num_top] */
  double* top;      /* [num_top] */
} oct_logprobs;

/* Compute log-probabilities of tokens[r] in rows of float32 logits (logits[r], V each). */
int32_t oct_logprob_rows(oct_pool* pool, int32_t num_rows, int32_t vocab,
                         const float* const* logits, const int32_t* tokens,
                         oct_logprobs* logprobs);

/* ---- A whole step -------------------------------------------------------------------------- */

/* x = row ids[t] of a table [V, width], packed or stored, times scale; plus row position +
 * position_offset of the table of learned positions, unless that has no data; plus row
 * token_types[t] of types, unless that is NULL. */
typedef struct oct_embed_args {
  oct_weight table;
  float scale;
  float* out; /* [T, width] */
  oct_weight positions;
  int32_t position_offset;
  int32_t num_types;
  const float* types; /* [num_types, width] or NULL */
} oct_embed_args;

/* Element-wise ops and norms that are not fused with a linear. */
enum {
  OCT_ROWS_NORM = 0, /* rmsnorm over each `width` values, times weight */
  OCT_ROWS_ADD = 1,
  OCT_ROWS_SILU_MUL = 2, /* silu(a) * b */
  OCT_ROWS_GELU_TANH_MUL = 3,
  OCT_ROWS_GELU_ERF_MUL = 4,
  OCT_ROWS_LAYERNORM = 5, /* (a - mean) / sqrt(variance + eps) * weight, plus bias if there is one */
  OCT_ROWS_SCALE = 6,     /* a * factor */
  OCT_ROWS_SILU = 7,      /* silu(a) */
  OCT_ROWS_GELU_TANH = 8,
  OCT_ROWS_GELU_ERF = 9,
  OCT_ROWS_RELU = 10,
  OCT_ROWS_SIGMOID_MUL = 11 /* a * sigmoid(b), where each `width` values of a have one of b */
};
typedef struct oct_rows_args {
  int32_t kind, width; /* values of a row */
  int32_t per_token;   /* such rows of a token: 1, or the heads of a norm per head */
  float eps;
  const float* a;
  const float* b;      /* the second operand, or the norm's weight [width] */
  float* out;          /* [T, per_token, width]; may be a or b */
  const float* bias;   /* [width] or NULL */
  float factor;
} oct_rows_args;

/* ---- Recurrent layers ----------------------------------------------------------------------- */

/* Memory of a layer's states, float32 of a fixed size for each slot. */
typedef struct oct_states {
  float* data;         /* this layer's part of the first slot */
  int64_t slot_floats; /* from one slot to the next */
  int32_t num_slots;
} oct_states;

/* A causal depthwise convolution over the last `kernel` positions, then silu. Gated,
 * its input is x[c] * x[2 C + c], and its output is multiplied with x[C + c], of C channels.
 * `count` of them are computed, from `first` on. The state: the inputs of the last positions,
 * [kernel - 1, count]. */
typedef struct oct_conv_args {
  int32_t channels, first, count, kernel, gated;
  const float* x; /* [T, ...], ldx floats from token to token */
  int64_t ldx;
  const float* weight; /* [kernel, C], that of the last position last */
  const float* bias;   /* [C] or NULL */
  float* out;          /* [T, C], contiguous */
  oct_states states;
} oct_conv_args;

/* The recurrence of Mamba 2, of H heads of P values in G groups, with N numbers of state for a value:
 *     step = softplus(steps[h] + step_bias[h]) within [step_min, step_max]
 *     S    = S * exp(step * decay[h]) + B * (step * x);   y = C S + skip[h] * x
 * A row of x: x [H, P], B [G, N], C [G, N]. `count` heads are computed, from `first` on. The state:
 * [count, N, P]. */
typedef struct oct_scan_args {
  int32_t heads, first, count, head_dim, groups, state_dim;
  float step_min, step_max;
  float step_scale;   /* of `steps`, before the bias */
  const float* x;     /* [T, H P + 2 G N], ldx floats from token to token */
  const float* steps; /* [T, H], ldsteps floats from token to token */
  int64_t ldx, ldsteps;
  const float* decay; /* [H], negative */
  const float* skip;  /* [H] */
  const float* step_bias;
  float* out;         /* [T, H P], contiguous */
  oct_states states;
} oct_scan_args;

/* The gated delta rule, of Hk heads of keys with K values and Hv of values with V, q and k of length 1:
 *     S = S * exp(decay[h] * softplus(gates[Hv + h] + step_bias[h]))
 *     S = S + k * sigmoid(gates[h]) * (v - k S);   y = q S / sqrt(K)
 * A row of x: q [Hk, K], k [Hk, K], v [Hv, V]. `count` heads of values are computed, from `first` on.
 * The state: [count, K, V]. */
typedef struct oct_delta_args {
  int32_t key_heads, key_dim, value_heads, first, count, value_dim;
  const float* x;     /* [T, 2 Hk K + Hv V], ldx floats from token to token */
  const float* gates; /* [T, 2 Hv], ldgates floats from token to token */
  int64_t ldx, ldgates;
  const float* decay; /* [Hv], negative */
  const float* step_bias;
  float* out;         /* [T, Hv V], contiguous */
  oct_states states;
} oct_delta_args;

/* rmsnorm over each `group` values of x * silu(gate), times weight [width]; or, unless gate_first, of
 * x, times weight [group] and then silu(gate). With no weight, x * silu(gate) alone. Of a row, `count`
 * values are computed, from `first` on: whole groups. */
typedef struct oct_gated_norm_args {
  int32_t width, first, count, group, gate_first;
  float eps;
  float gate_scale;  /* of `gate`, before its silu */
  const float* x;    /* [T, width], contiguous */
  const float* gate; /* [T, width], ldgate floats from token to token */
  int64_t ldgate;
  const float* weight;
  float* out; /* [T, width], contiguous */
} oct_gated_norm_args;

/* Whether all of a token's activations are finite numbers: 1 or 0 into the step's row_finite. */
typedef struct oct_check_args {
  const float* x; /* [T, width] */
  int32_t width;
} oct_check_args;

enum {
  OCT_OP_EMBED = 0,
  OCT_OP_LINEAR = 1,    /* over all tokens */
  OCT_OP_ATTENTION = 2,
  OCT_OP_ROWS = 3,
  OCT_OP_CHECK = 4,
  OCT_OP_HEAD = 5,      /* a linear with the epilogue HEAD, over the rows that the step asks for */
  OCT_OP_EXPERTS = 6,   /* over all tokens */
  OCT_OP_LATENT = 7,
  OCT_OP_CONV = 20,
  OCT_OP_SCAN = 21,
  OCT_OP_DELTA = 22,
  OCT_OP_GATED_NORM = 23
};

/* Routing of a token to experts by their logits; octavo/kernels/routing.py defines it. */
enum { OCT_SCORE_SOFTMAX = 0, OCT_SCORE_SIGMOID = 1 };
typedef struct oct_routing {
  int32_t num_experts, top_k;
  int32_t scoring, normalize;
  int32_t num_groups, top_groups, group_top; /* 1, 1, 1: no groups */
  float scale;
  const float* correction; /* [E] or NULL */
} oct_routing;

typedef struct oct_expert {
  oct_weight gate, up, down; /* [inner, hidden], [inner, hidden], [hidden, inner] */
  const float* gate_bias;    /* [inner] or NULL */
  const float* up_bias;
  const float* down_bias;    /* [hidden] or NULL */
} oct_expert;

/* Which ranks of a group have which experts: e is with ranks[begin[e]] to ranks[begin[e + 1] - 1], which
 * ascend. All ranks have the same places. */
typedef struct oct_expert_places {
  int32_t rank, num_ranks;
  const int32_t* begin; /* [E + 1] */
  const int32_t* ranks;
  /* NULL, or [num_ranks + 1]: the rows that each rank computes are added, and to the last entry those of
   * the rank that has most, for which the others wait. */
  int64_t* rows;
} oct_expert_places;

/* out = residual + the weighted sum of the outputs of a token's experts for x = rmsnorm(in) * norm, the
 * best expert first. Only experts that some token is routed to are read.
 *
 * A rank of a group makes the columns of `out` from first_hidden on. With places.begin, it has whole
 * experts, and all ranks write what these make of their rows to `output_rows`; experts of other ranks
 * are not read. Else it has some outputs of each matrix, those of gate and up from first_inner on; where
 * these are not all, ranks write the rows between the matrices to `inner_rows`. Both are memory that
 * all ranks share, of oct_experts_bytes(); what is not used is NULL. */
typedef struct oct_experts_args {
  int32_t hidden, inner;
  int32_t first_hidden, num_hidden, first_inner;
  int32_t epilogue;        /* of gate and up: one that multiplies the two */
  float eps;
  float remainder_above;   /* of x, as in oct_linear_args */
  float inner_remainder_above; /* of the input of `down` */
  oct_routing routing;
  const oct_expert* experts; /* [E] */
  const float* in;           /* [T, hidden] */
  const float* norm;         /* NULL or [hidden] */
  const float* logits;       /* [T, E] */
  const float* residual;     /* NULL or [T, hidden] */
  float* out;                /* [T, hidden]; may be residual, not in */
  int64_t* loads;            /* NULL, or [E]: the tokens of each expert are added */
  float* inner_rows;
  float* output_rows;
  oct_expert_places places;
} oct_experts_args;

/* Check these arguments, with the weights of all experts: once in advance, as steps read only the
 * experts that they need, and do not check them. */
int32_t oct_check_experts(const oct_experts_args* args);
/* Maximal bytes that a step of `rows` rows keeps between the products of its experts, in one layer at
 * a time; longer steps are cut into chunks. */
int64_t oct_experts_bytes(int32_t hidden, int32_t inner, int32_t top_k, int32_t rows);
/* Experts of `rows` rows, outside of a step. */
int32_t oct_experts(oct_pool* pool, const oct_experts_args* args, int32_t rows);

/* ---- Adapters ------------------------------------------------------------------------------ */

/* What an adapter of low rank adds to some outputs of a node: B times `rank` of the sums of its site,
 * from `first` on. */
typedef struct oct_lora_segment {
  const void* b; /* [n / 16 tiles][rank][16]: tiles of the outputs that the node has; NULL: nothing */
  int32_t rank, first;
} oct_lora_segment;

/* An adapter's change of one node, a LINEAR, HEAD or EMBED:
 *     y[s] = x w[s]^T + b[s] (scales * (a x)), before bias, gate and residual; x as in oct_linear_args
 *     y    = (row id of the table + b[0] (scales * row id of a)) * scale    of an embedding
 * so that segments of one node share a, whose rows are those of all of them. */
typedef struct oct_lora_site {
  const void* a; /* [rows / 16 tiles][k][16]; of an embedding [V, rows]; NULL: the node stays as it is */
  int64_t a_bytes; /* of a, which is fetched during the node before */
  int32_t rows;  /* of a: a multiple of 16, but for an embedding */
  const float* scales; /* [rows] */
  oct_lora_segment segments[OCT_MAX_SEGMENTS];
} oct_lora_site;

/* An adapter, with matrices in BF16 or F32. */
typedef struct oct_lora {
  int32_t format, num_sites;
  const oct_lora_site* sites; /* by the number that nodes have */
} oct_lora;

/* One fused op of a step: all workers do their part of it, and meet before the next. `args` is the
 * struct of the op; its `rows`, `row_index` and `head`, and the sequences, are those of the step. It
 * is read at every step, so that a pointer to a table can be replaced between two steps. */
typedef struct oct_node {
  int32_t op;
  int32_t meets; /* whether all ranks of the group meet before the next op */
  int32_t own_rows; /* LINEAR and LATENT: of the rank's own sequences alone (oct_batch), maybe none */
  int32_t lora_site; /* what adapters call it; -1: they cannot change it */
  const void* args;
} oct_node;

/* Memory that the ranks of a group share, besides activations: of the head, and of the tokens that it
 * draws in rank 0. `padded` is vocab rounded up to a multiple of 16. */
typedef struct oct_shared_head {
  float* logits;       /* [max_tokens, padded] */
  float* best_logits;  /* [ranks, max_tokens]: maximum of each row in the part of each rank */
  int32_t* best_ids;   /* [ranks, max_tokens] */
  int32_t* drawn;      /* [1 + max_tokens]: 1 if further steps of the call are not run, else 0; tokens */
} oct_shared_head;

/* With a group, every rank runs the same steps with a program of its part of each op. Rank 0 samples;
 * of others, `samples` is NULL, and they have no logits, tokens, probabilities or statuses. */
typedef struct oct_program {
  const oct_node* nodes;
  int32_t num_nodes;
  int32_t num_head_nodes; /* number of last nodes that a step with head_only runs */
  int32_t vocab;
  int32_t max_tokens; /* rows of the activation buffers */
  oct_group* group;   /* NULL: one rank */
  oct_shared_head shared_head;
} oct_program;

/* Arguments that differ from step to step. Row r of the head is token out_rows[r] of the step, with
 *     logits          written to logits[r], if that is not NULL
 *     a token         in tokens[r], its status in status[r]; sampled by samples[r]
 *     probabilities   written to probabilities[r], as oct_sample_rows does
 * A row whose logits are written is not sampled: its token is the most likely one.
 *
 * With num_multi_steps of N, the step is followed by N - 1 decode steps, each with the tokens of the
 * one before. Then every sequence has one token, which is row s of the head, and is sampled without
 * penalties or a mask, as these differ from token to token, and its block table reaches to
 * kv_len + N - 1. Probabilities are NULL. Steps after one in which a row failed are not run. */
typedef struct oct_batch {
  oct_sequences seqs;
  const int32_t* token_ids; /* [T] */
  int32_t num_multi_steps;
  int32_t num_out;
  int32_t head_only; /* only the head, over the activations that the last step left */
  const int32_t* out_rows;
  float* const* logits;      /* [num_out] */
  const oct_sample* samples; /* [num_out] */
  oct_logprobs* logprobs;    /* [N, num_out], of the sampled tokens; or NULL */
  float* const* probabilities; /* [num_out] or NULL */
  int32_t* tokens;           /* [N, num_out] */
  int32_t* status;           /* [N, num_out] */
  uint8_t* row_finite;       /* [N, T] */
  /* NULL, unless masks are still being made: what counts them, in the order of their turns. Other
   * threads write them, and the `mask` of their rows, while the step runs. They must not fail to. */
  oct_counter* masks_made;
  const uint8_t* needs_logits; /* [num_out]: which rows need more than their maximum; without samples */
  /* The rank's own sequences, for nodes with own_rows: they are next to each other. Blocks of others are
   * not looked at. */
  int32_t first_own_seq, num_own_seqs;
  /* Adapters: of sequence s loras[lora_of_seq[s]], or none, -1. NULL: no sequence has any. */
  const int32_t* lora_of_seq; /* [S] */
  const oct_lora* const* loras; /* [num_loras] */
  int32_t num_loras;
  const int32_t* token_types; /* [T], for oct_embed_args; NULL: all are 0 */
} oct_batch;

/* Set, for each row of the head, whether its logits are needed, and not their maximum alone: 0 or 1. */
void oct_needed_logits(const oct_batch* batch, uint8_t* needed);

/* Run a step. A program is only arguments; it may be freed when no step runs. */
int32_t oct_step(oct_pool* pool, const oct_program* program, const oct_batch* batch);

/* ---- Peak rates ---------------------------------------------------------------------------- */

/* Products as in the kernels of a weight format, but from registers: each worker does the same
 * number. Returns all operations, two for a product and its sum; or an error. */
int64_t oct_probe_products(oct_pool* pool, int32_t format, int64_t rounds);
/* Read memory, each worker a part of its own from the beginning to the end. */
int32_t oct_probe_read(oct_pool* pool, const void* data, int64_t num_bytes);

#pragma GCC visibility pop
#if defined(__cplusplus)
}
#endif
#endif
