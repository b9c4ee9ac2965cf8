#include "rows.h"

#include <algorithm>
#include <cmath>

#include "lora.h"
#include "pack.h"
#include "positions.h"
#include "simd.h"

namespace octavo {
namespace {

using namespace simd;

constexpr int kPositionSlot = 0;  // of scratch: a row of a table of positions

// Call f(index of the first, number of lanes) for all of n values, 16 at a time.
template <class F>
OCT_INLINE void for_lanes(int n, F&& f) {
  int i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, n - i);
}

// In two passes, so that a large mean costs no digits of a small variance.
void layernorm_row(const float* x, const oct_rows_args& args, float* out) {
  const int width = args.width;
  F32 total = zero();
  for_lanes(width, [&](int i, int n) { total = add(total, load_first(x + i, n)); });
  const F32 mean = set1(sum(total) / static_cast<float>(width));
  F32 squares = zero();
  for_lanes(width, [&](int i, int n) {
    alignas(64) float centred[16] = {};  // zeros beyond the end
    store_first(centred, sub(load_first(x + i, n), mean), n);
    const F32 v = load(centred);
    squares = fma(v, v, squares);
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + args.eps);
  for_lanes(width, [&](int i, int n) {
    F32 v = mul(sub(load_first(x + i, n), mean), set1(scale));
    v = mul(v, load_first(args.b + i, n));
    store_first(out + i, args.bias ? add(v, load_first(args.bias + i, n)) : v, n);
  });
}

template <class F>
void each(const oct_rows_args& args, int64_t begin, int64_t end, F&& f) {
  for (int64_t i = begin; i < end; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, end - i));
    store_first(args.out + i, f(load_first(args.a + i, n)), n);
  }
}

// A NaN is not less, and stays.
OCT_INLINE F32 relu(F32 x) { return select(less(x, zero()), zero(), x); }

template <class F>
void elementwise(const oct_rows_args& args, int64_t begin, int64_t end, F&& f) {
  for (int64_t i = begin; i < end; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, end - i));
    store_first(args.out + i, f(load_first(args.a + i, n), load_first(args.b + i, n)), n);
  }
}

// Rows of `width` values, each with one number that scales it.
void scale_rows(const oct_rows_args& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += args.width) {
    const F32 gate = set1(args.b[i / args.width]);
    const F32 scale = div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), gate))));
    for_lanes(args.width, [&](int j, int n) {
      store_first(args.out + i + j, mul(load_first(args.a + i + j, n), scale), n);
    });
  }
}

// Add the learned position of row t of a step.
void add_position(const oct_embed_args& args, const oct_sequences& seqs, int t,
                  const Worker& worker, float* x) {
  const int width = args.positions.k;
  float* row = static_cast<float*>(worker.scratch(kPositionSlot, sizeof(float) * width));
  unpack_row(args.positions, position_of_row(seqs, t) + args.position_offset, row);
  for_lanes(width, [&](int i, int n) {
    store_first(x + i, add(load_first(x + i, n), load_first(row + i, n)), n);
  });
}

// Add the row of the type of token t.
void add_type(const oct_embed_args& args, const oct_batch& batch, int t, float* x) {
  const int64_t type = batch.token_types ? batch.token_types[t] : 0;
  const float* row = args.types + type * args.table.k;
  for_lanes(args.table.k, [&](int i, int n) {
    store_first(x + i, add(load_first(x + i, n), load_first(row + i, n)), n);
  });
}

}  // namespace

void norm_row(const float* x, const float* weight, float eps, int width, float* out) {
  F32 squares = zero();
  for_lanes(width, [&](int i, int n) {
    const F32 v = load_first(x + i, n);
    squares = fma(v, v, squares);
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
  for_lanes(width, [&](int i, int n) {
    const F32 v = mul(load_first(x + i, n), set1(scale));
    store_first(out + i, mul(v, load_first(weight + i, n)), n);
  });
}

void embed(const oct_embed_args& args, const oct_batch& batch, const StepLoras* loras, int site,
           const Worker& worker) {
  const int width = args.table.k;
  const Range mine = share(batch.seqs.num_tokens, worker.rank, worker.size);
  for (int t = mine.begin; t < mine.end; t++) {
    float* x = args.out + static_cast<int64_t>(t) * width;
    unpack_row(args.table, batch.token_ids[t], x);
    if (args.scale != 1.0f) {
      for_lanes(width, [&](int i, int n) {
        store_first(x + i, mul(load_first(x + i, n), set1(args.scale)), n);
      });
    }
    if (const int lora = loras ? loras->rows().lora_of(t) : -1; lora >= 0)
      add_embedding(loras->lora(lora), site, batch.token_ids[t], args.scale, width, x);
    if (args.positions.data) add_position(args, batch.seqs, t, worker, x);
    if (args.types) add_type(args, batch, t, x);
  }
}

void rows(const oct_rows_args& args, const oct_batch& batch, const Worker& worker) {
  const Range mine = share(batch.seqs.num_tokens, worker.rank, worker.size);
  const int64_t token = static_cast<int64_t>(args.width) * args.per_token;
  const int64_t begin = mine.begin * token, end = mine.end * token;
  switch (args.kind) {
    case OCT_ROWS_NORM:
      for (int64_t i = begin; i < end; i += args.width) {
        norm_row(args.a + i, args.b, args.eps, args.width, args.out + i);
      }
      return;
    case OCT_ROWS_ADD:
      return elementwise(args, begin, end, [](F32 a, F32 b) { return add(a, b); });
    case OCT_ROWS_SILU_MUL:
      return elementwise(args, begin, end, [](F32 a, F32 b) { return mul(silu(a), b); });
    case OCT_ROWS_GELU_TANH_MUL:
      return elementwise(args, begin, end, [](F32 a, F32 b) { return mul(gelu_tanh(a), b); });
    case OCT_ROWS_GELU_ERF_MUL:
      return elementwise(args, begin, end, [](F32 a, F32 b) { return mul(gelu_erf(a), b); });
    case OCT_ROWS_LAYERNORM:
      for (int64_t i = begin; i < end; i += args.width) {
        layernorm_row(args.a + i, args, args.out + i);
      }
      return;
    case OCT_ROWS_SCALE:
      return each(args, begin, end, [&](F32 a) { return mul(a, set1(args.factor)); });
    case OCT_ROWS_SILU:
      return each(args, begin, end, [](F32 a) { return silu(a); });
    case OCT_ROWS_GELU_TANH:
      return each(args, begin, end, [](F32 a) { return gelu_tanh(a); });
    case OCT_ROWS_GELU_ERF:
      return each(args, begin, end, [](F32 a) { return gelu_erf(a); });
    case OCT_ROWS_RELU:
      return each(args, begin, end, [](F32 a) { return relu(a); });
    case OCT_ROWS_SIGMOID_MUL:
      if (args.width > 1) return scale_rows(args, begin, end);
      return elementwise(args, begin, end, [](F32 a, F32 b) {
        return div(a, add(set1(1.0f), exp(sub(zero(), b))));
      });
  }
}

void check(const oct_check_args& args, const oct_batch& batch, const Worker& worker) {
  const Range mine = share(batch.seqs.num_tokens, worker.rank, worker.size);
  for (int t = mine.begin; t < mine.end; t++) {
    const float* x = args.x + static_cast<int64_t>(t) * args.width;
    // A finite number times 0 is 0; infinity and NaN are not.
    F32 total = zero();
    for_lanes(args.width, [&](int i, int n) { total = fma(load_first(x + i, n), zero(), total); });
    batch.row_finite[t] = sum(total) == 0.0f;
  }
}

}  // namespace octavo
