// The kernels of recurrent layers: each is run by all workers at once, as those of kernels.h.
#pragma once

#include "octavo.h"
#include "pool.h"

namespace octavo {

// Whether each sequence of a step has slots for its states. Returns an error code if not.
int32_t check_states(const oct_states& states, const oct_sequences& seqs);

// Whether `count` things from `first` on are some of `size`.
inline bool is_part(int32_t first, int32_t count, int32_t size) {
  return first >= 0 && count >= 1 && first <= size - count;
}

int32_t check_conv(const oct_conv_args& args, const oct_sequences& seqs);
void short_conv(const oct_conv_args& args, const oct_sequences& seqs, const Worker& worker);

int32_t check_scan(const oct_scan_args& args, const oct_sequences& seqs);
void selective_scan(const oct_scan_args& args, const oct_sequences& seqs, const Worker& worker);

int32_t check_delta(const oct_delta_args& args, const oct_sequences& seqs);
void delta_rule(const oct_delta_args& args, const oct_sequences& seqs, const Worker& worker);

int32_t check_gated_norm(const oct_gated_norm_args& args);
void gated_norm(const oct_gated_norm_args& args, const oct_sequences& seqs, const Worker& worker);

// The state that sequence s continues from, NULL for a new one; and the place of its new state.
inline const float* source_of(const oct_states& states, const oct_sequences& seqs, int s) {
  const int32_t slot = seqs.state_source[s];
  return slot < 0 ? nullptr : states.data + slot * states.slot_floats;
}
inline float* target_of(const oct_states& states, const oct_sequences& seqs, int s) {
  return states.data + seqs.state_target[s] * states.slot_floats;
}

}  // namespace octavo
