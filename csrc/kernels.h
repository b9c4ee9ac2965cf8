// Kernels of a step: each is run by all workers at once.
//
// On entry the inputs are complete (a barrier lies before); on return a worker's own part of the
// outputs is, so that the caller needs a barrier before they are read. Arguments have been checked.
#pragma once

#include "octavo.h"
#include "pool.h"

namespace octavo {

class LoraSums;        // lora.h
class SharedPrefixes;  // shared_prefix.h

// Returns an error code if the arguments make no sense.
int32_t check_linear(const oct_linear_args& args);
// `loras`: what adapters add to its products; NULL: nothing.
void linear(const oct_linear_args& args, const Worker& worker, const LoraSums* loras = nullptr);
// Several independent linears as one: no heads, and each with rows.
void linears(const oct_linear_args* args, int count, const Worker& worker);

// Of `tokens` rows. Weights have been checked by oct_check_experts().
void experts(const oct_experts_args& args, int32_t tokens, const Worker& worker, Group* group);

int32_t check_attention(const oct_attention_args& args, const oct_sequences& seqs);
// Whether the blocks are there that a sequence needs up to position `end`.
int32_t check_blocks(const oct_attention_args& args, const oct_sequences& seqs, int s, int end);
// Whether the sequences of a step are some, with blocks that are there.
int32_t check_sequences(const oct_attention_args& args, const oct_sequences& seqs);
void attention(const oct_attention_args& args, const oct_sequences& seqs,
               const SharedPrefixes& prefixes, const Worker& worker);

int32_t check_latent(const oct_latent_args& args, const oct_sequences& seqs);
void latent(const oct_latent_args& args, const oct_sequences& seqs, const Worker& worker);

// Whether sampling changes a row's logits, by the tokens before it or in other ways.
bool has_penalties(const oct_sample& params);
bool changes_logits(const oct_sample& params);
// One row of logits to a token, by one worker; if it is drawn, and they are asked for (not NULL), the
// probabilities of all tokens too.
int32_t sample_row(float* logits, int32_t vocab, const oct_sample& params, const Worker& worker,
                   int32_t* token, float* probabilities);

// Log-probabilities of a token in a row of logits, which stays unchanged: into `out`, by one worker.
void logprobs_of_row(const float* logits, int32_t vocab, int32_t token, oct_logprobs& out,
                     const Worker& worker);
int32_t check_logprobs(const oct_logprobs& row, int32_t vocab, int32_t r);

}  // namespace octavo
