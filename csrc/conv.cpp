// Short causal depthwise convolutions, and the gated norms that follow recurrences.
//
// A worker has some channels, 16 at a time, and goes through all tokens of all sequences with the
// last inputs of these channels in registers: so it reads a state before it writes it, and where a
// prompt was cut makes no difference.
#include <algorithm>
#include <cmath>

#include "recurrence.h"
#include "simd.h"

namespace octavo {
namespace {

using namespace simd;

constexpr int kMaxKernel = 16;

// Inputs of 16 channels or less, from channel c on.
struct Channels {
  const oct_conv_args& args;
  int c, n;

  F32 input(int t) const {
    const float* row = args.x + t * args.ldx + c;
    const F32 x = load_first(row, n);
    return args.gated ? mul(x, load_first(row + int64_t{2} * args.channels, n)) : x;
  }

  F32 output(int t, F32 sum) const {
    if (!args.gated) return silu(sum);
    return mul(load_first(args.x + t * args.ldx + args.channels + c, n), sum);
  }
};

void convolve(const Channels& channels, const oct_sequences& seqs, int s) {
  const oct_conv_args& args = channels.args;
  const int c = channels.c, n = channels.n, past = args.kernel - 1;
  const int64_t kept = args.count;  // from a position of the state to the next
  const float* source = source_of(args.states, seqs, s);
  float* target = target_of(args.states, seqs, s) + (c - args.first);
  F32 taps[kMaxKernel], last[kMaxKernel];
  for (int j = 0; j <= past; j++) taps[j] = load_first(args.weight + int64_t{j} * args.channels + c, n);
  for (int j = 0; j < past; j++)
    last[j] = source ? load_first(source + j * kept + (c - args.first), n) : zero();
  const F32 bias = args.bias ? load_first(args.bias + c, n) : zero();
  for (int t = seqs.q_start[s]; t < seqs.q_start[s + 1]; t++) {
    last[past] = channels.input(t);
    F32 sum = bias;
    for (int j = 0; j <= past; j++) sum = fma(taps[j], last[j], sum);
    store_first(args.out + int64_t{t} * args.channels + c, channels.output(t, sum), n);
    for (int j = 0; j < past; j++) last[j] = last[j + 1];
  }
  for (int j = 0; j < past; j++) store_first(target + j * kept, last[j], n);
}

// The factors of a gate of n values.
F32 opened(const oct_gated_norm_args& args, const float* gate, int n) {
  return silu(mul(load_first(gate, n), set1(args.gate_scale)));
}

// One group of a row: x, gated.
void gate_group(const oct_gated_norm_args& args, const float* x, const float* gate, float* out) {
  for (int i = 0; i < args.group; i += 16) {
    const int n = std::min(16, args.group - i);
    store_first(out + i, mul(load_first(x + i, n), opened(args, gate + i, n)), n);
  }
}

// One group of a row: x, normed and gated.
void norm_group(const oct_gated_norm_args& args, const float* x, const float* gate,
                const float* weight, float* out) {
  F32 squares = zero();
  for (int i = 0; i < args.group; i += 16) {
    const int n = std::min(16, args.group - i);
    F32 v = load_first(x + i, n);
    if (args.gate_first) v = mul(v, opened(args, gate + i, n));
    store_first(out + i, v, n);
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(args.group) + args.eps);
  for (int i = 0; i < args.group; i += 16) {
    const int n = std::min(16, args.group - i);
    F32 v = mul(mul(load_first(out + i, n), set1(scale)), load_first(weight + i, n));
    if (!args.gate_first) v = mul(v, opened(args, gate + i, n));
    store_first(out + i, v, n);
  }
}

}  // namespace

int32_t check_states(const oct_states& states, const oct_sequences& seqs) {
  if (!seqs.state_source || !seqs.state_target)
    return fail(OCT_ERR_ARGUMENT, "a layer has states, but the step has no state slots");
  for (int s = 0; s < seqs.num_seqs; s++) {
    const int32_t source = seqs.state_source[s], target = seqs.state_target[s];
    if (source < -1 || source >= states.num_slots || target < 0 || target >= states.num_slots)
      return fail(OCT_ERR_ARGUMENT, "sequence %d reads slot %d and writes slot %d of %d", s, source,
                  target, states.num_slots);
  }
  return OCT_OK;
}

int32_t check_conv(const oct_conv_args& args, const oct_sequences& seqs) {
  if (!is_part(args.first, args.count, args.channels))
    return fail(OCT_ERR_ARGUMENT, "channels %d to %d of %d", args.first, args.first + args.count,
                args.channels);
  if (args.kernel < 2 || args.kernel > kMaxKernel)
    return fail(OCT_ERR_ARGUMENT, "a convolution of %d channels over %d positions: 2 to %d are possible",
                args.channels, args.kernel, kMaxKernel);
  return check_states(args.states, seqs);
}

void short_conv(const oct_conv_args& args, const oct_sequences& seqs, const Worker& worker) {
  const Range mine = share((args.count + 15) / 16, worker.rank, worker.size);
  for (int s = 0; s < seqs.num_seqs; s++) {
    for (int tile = mine.begin; tile < mine.end; tile++) {
      const int done = tile * 16;
      convolve({args, args.first + done, std::min(16, args.count - done)}, seqs, s);
    }
  }
}

int32_t check_gated_norm(const oct_gated_norm_args& args) {
  const int group = args.group;
  if (group < 1 || args.width % group || args.first % group || args.count % group ||
      !is_part(args.first, args.count, args.width))
    return fail(OCT_ERR_ARGUMENT, "groups of %d from value %d to %d of %d", group, args.first,
                args.first + args.count, args.width);
  return OCT_OK;
}

void gated_norm(const oct_gated_norm_args& args, const oct_sequences& seqs, const Worker& worker) {
  const int groups = args.count / args.group;
  const Range mine = share(seqs.num_tokens * groups, worker.rank, worker.size);
  for (int i = mine.begin; i < mine.end; i++) {
    const int64_t t = i / groups, first = args.first + int64_t{i % groups} * args.group;
    const float* x = args.x + t * args.width + first;
    const float* gate = args.gate + t * args.ldgate + first;
    float* out = args.out + t * args.width + first;
    if (args.weight)
      norm_group(args, x, gate, args.weight + (args.gate_first ? first : 0), out);
    else
      gate_group(args, x, gate, out);
  }
}

}  // namespace octavo
