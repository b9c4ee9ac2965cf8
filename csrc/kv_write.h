// The first half of attention: prepares queries, keys and values for the second half.
#pragma once

#include "attention.h"
#include "attention_plan.h"
#include "pool.h"

namespace octavo {

// Norm, rotate and scale all queries of the step: out[Hk][T][G][D] in the factors of the format, G
// query heads to a key head; those of sequence s are first_rows[s] and the next ones of the T. Norm
// and rotate the keys; store keys and values. By all workers, each its share.
template <class Kv>
void prepare(const oct_attention_args& args, const oct_sequences& seqs, const int32_t* first_rows,
             const Worker& worker, typename Kv::Keys::Factor* queries);

// The same for the only new token of a sequence and one key head, by one worker: queries to [G][D];
// its key and value only if they are to be stored.
template <class Kv>
void prepare_token(const oct_attention_args& args, const oct_sequences& seqs, int seq, int head,
                   bool store, typename Kv::Keys::Factor* queries);

// The queries of an item alone, to [tokens][G][D], each rotated by an angle that is given.
template <class Kv>
void prepare_queries(const oct_attention_args& args, const Item& item, const int* angles,
                     typename Kv::Keys::Factor* queries);

// The factor of queries besides the norm: scores come out as exponents of two, or, if they
// are capped, in units of the cap.
float query_factor(const oct_attention_args& args);

}  // namespace octavo
