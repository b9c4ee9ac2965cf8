// Recurrences, computed token after token as they are defined, so that it makes
// no difference where a prompt was cut.
//
// A piece of work is a head of a sequence. Of its state, 16 columns at a time go through all tokens,
// and stay in the nearest cache meanwhile; what all columns need of a token is computed before.
//
//     state [N, P]      | 16 columns | 16 columns | ...
//                         |  token 0, 1, 2 ...      y = a sum down the columns: no lane needs another
#include <algorithm>
#include <cmath>
#include <cstring>

#include "recurrence.h"
#include "simd.h"

namespace octavo {
namespace {

using namespace simd;

constexpr int kFactorSlot = 0, kStateSlot = 1;  // of scratch
constexpr float kTiny = 1e-6f;                  // of the length of a key or query

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Columns [p, p + n) of a state [rows, columns] into `tile` [rows, 16], and back.
void load_columns(const float* state, int rows, int columns, int p, int n, float* tile) {
  for (int i = 0; i < rows; i++)
    store(tile + i * 16, state ? load_first(state + int64_t{i} * columns + p, n) : zero());
}

// Sums down the columns of a tile, in four parts that do not wait for each other: always the same rows
// in each. add(row, sum) adds a row to its part.
template <class Add>
OCT_INLINE F32 sum_rows(int rows, Add&& add_row) {
  F32 a = zero(), b = zero(), c = zero(), d = zero();
  int i = 0;
  for (; i + 4 <= rows; i += 4) {
    a = add_row(i, a);
    b = add_row(i + 1, b);
    c = add_row(i + 2, c);
    d = add_row(i + 3, d);
  }
  for (; i < rows; i++) a = add_row(i, a);
  return add(add(a, b), add(c, d));
}

void store_columns(const float* tile, int rows, int columns, int p, int n, float* state) {
  for (int i = 0; i < rows; i++) store_first(state + int64_t{i} * columns + p, load(tile + i * 16), n);
}

// -- Mamba 2 ------------------------------------------------------------------------------------

// The step size of each token, and the decay of the state.
struct Step {
  float size, kept;
};

void scan_head(const oct_scan_args& args, const oct_sequences& seqs, int s, int h,
               const Worker& worker) {
  const int begin = seqs.q_start[s], count = seqs.q_start[s + 1] - begin;
  const int width = args.heads * args.head_dim, dim = args.state_dim, size = args.head_dim;
  const int group = h / (args.heads / args.groups);
  auto* steps = static_cast<Step*>(worker.scratch(kFactorSlot, count * sizeof(Step)));
  auto* tile = static_cast<float*>(worker.scratch(kStateSlot, dim * 16 * sizeof(float)));
  for (int t = 0; t < count; t++) {
    const float raw = args.steps[(begin + t) * args.ldsteps + h] * args.step_scale + args.step_bias[h];
    // In this order, a NaN stays one.
    const float step = std::min(args.step_max, std::max(args.step_min, softplus(raw)));
    steps[t] = {raw == raw ? step : raw, std::exp(step * args.decay[h])};
  }
  const int64_t part = int64_t{h - args.first} * dim * size;
  const float* source = source_of(args.states, seqs, s);
  float* target = target_of(args.states, seqs, s) + part;
  for (int p = 0; p < size; p += 16) {
    const int n = std::min(16, size - p);
    load_columns(source ? source + part : nullptr, dim, size, p, n, tile);
    for (int t = 0; t < count; t++) {
      const float* row = args.x + (begin + t) * args.ldx;
      const float* b = row + width + int64_t{group} * dim;
      const float* c = b + int64_t{args.groups} * dim;
      const F32 x = load_first(row + int64_t{h} * size + p, n);
      const F32 written = mul(set1(steps[t].size), x), kept = set1(steps[t].kept);
      F32 y = sum_rows(dim, [&](int i, F32 sum) {
        const F32 state = fma(set1(b[i]), written, mul(load(tile + i * 16), kept));
        store(tile + i * 16, state);
        return fma(state, set1(c[i]), sum);
      });
      y = fma(set1(args.skip[h]), x, y);
      store_first(args.out + int64_t{begin + t} * width + int64_t{h} * size + p, y, n);
    }
    store_columns(tile, dim, size, p, n, target);
  }
}

// -- The gated delta rule -----------------------------------------------------------------------

// Factors of query and key, the decay of the state, and the write strength.
struct Delta {
  float query, key, kept, written;
};

float inverse_length(const float* x, int n) {
  F32 squares = zero();
  for (int i = 0; i < n; i += 16) {
    const F32 v = load_first(x + i, std::min(16, n - i));
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) + kTiny);
}

void delta_head(const oct_delta_args& args, const oct_sequences& seqs, int s, int h,
                const Worker& worker) {
  const int begin = seqs.q_start[s], count = seqs.q_start[s + 1] - begin;
  const int keys = args.key_heads * args.key_dim, dim = args.key_dim, size = args.value_dim;
  const int64_t key_head = int64_t{h / (args.value_heads / args.key_heads)} * dim;
  auto* factors = static_cast<Delta*>(worker.scratch(kFactorSlot, count * sizeof(Delta)));
  auto* tile = static_cast<float*>(worker.scratch(kStateSlot, dim * 16 * sizeof(float)));
  for (int t = 0; t < count; t++) {
    const float* q = args.x + (begin + t) * args.ldx + key_head;
    const float* gates = args.gates + (begin + t) * args.ldgates;
    const float step = softplus(gates[args.value_heads + h] + args.step_bias[h]);
    factors[t] = {inverse_length(q, dim) / std::sqrt(static_cast<float>(dim)),
                  inverse_length(q + keys, dim), std::exp(args.decay[h] * step),
                  1.0f / (1.0f + std::exp(-gates[h]))};
  }
  const int64_t part = int64_t{h - args.first} * dim * size;
  const float* source = source_of(args.states, seqs, s);
  float* target = target_of(args.states, seqs, s) + part;
  for (int p = 0; p < size; p += 16) {
    const int n = std::min(16, size - p);
    load_columns(source ? source + part : nullptr, dim, size, p, n, tile);
    for (int t = 0; t < count; t++) {
      const float* q = args.x + (begin + t) * args.ldx + key_head;
      const float* k = q + keys;
      const F32 kept = set1(factors[t].kept);
      const F32 known = sum_rows(dim, [&](int i, F32 sum) {
        const F32 state = mul(load(tile + i * 16), kept);
        store(tile + i * 16, state);
        return fma(state, set1(k[i] * factors[t].key), sum);
      });
      const float* v = args.x + (begin + t) * args.ldx + 2 * keys + int64_t{h} * size + p;
      const F32 written = mul(sub(load_first(v, n), known), set1(factors[t].written));
      const F32 y = sum_rows(dim, [&](int i, F32 sum) {
        const F32 state = fma(set1(k[i] * factors[t].key), written, load(tile + i * 16));
        store(tile + i * 16, state);
        return fma(state, set1(q[i] * factors[t].query), sum);
      });
      const int64_t at = (int64_t{begin + t} * args.value_heads + h) * size + p;
      store_first(args.out + at, y, n);
    }
    store_columns(tile, dim, size, p, n, target);
  }
}

}  // namespace

int32_t check_scan(const oct_scan_args& args, const oct_sequences& seqs) {
  if (args.groups < 1 || args.heads % args.groups || args.head_dim < 1 || args.state_dim < 1 ||
      !is_part(args.first, args.count, args.heads))
    return fail(OCT_ERR_ARGUMENT, "%d heads of %d values in %d groups with states of %d", args.heads,
                args.head_dim, args.groups, args.state_dim);
  return check_states(args.states, seqs);
}

void selective_scan(const oct_scan_args& args, const oct_sequences& seqs, const Worker& worker) {
  const int pieces = seqs.num_seqs * args.count;
  for (int i = worker.ticket(); i < pieces; i = worker.ticket())
    scan_head(args, seqs, i / args.count, args.first + i % args.count, worker);
}

int32_t check_delta(const oct_delta_args& args, const oct_sequences& seqs) {
  if (args.key_heads < 1 || args.value_heads % args.key_heads || args.key_dim < 1 ||
      args.value_dim < 1 || !is_part(args.first, args.count, args.value_heads))
    return fail(OCT_ERR_ARGUMENT, "%d heads of %d values for %d of keys with %d", args.value_heads,
                args.value_dim, args.key_heads, args.key_dim);
  return check_states(args.states, seqs);
}

void delta_rule(const oct_delta_args& args, const oct_sequences& seqs, const Worker& worker) {
  const int pieces = seqs.num_seqs * args.count;
  for (int i = worker.ticket(); i < pieces; i = worker.ticket())
    delta_head(args, seqs, i / args.count, args.first + i % args.count, worker);
}

}  // namespace octavo
