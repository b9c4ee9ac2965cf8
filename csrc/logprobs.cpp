// Log-probability and rank of a token in a row of logits, and the tokens of the first ranks.
//
//   log p = logit - (maximum + log(sum of weights / 2^44))
//
// The weights are the integers of sample.cpp, hence their sum the same in any order. Tokens are
// compared by keys, integers that hold the logit above the id, so that no two are equal:
//
//   63               32 31                0
//   |  logit, ordered  |  ~id             |     the greatest key has rank 1
//
// The first ranks are found without sorting: a list takes in candidates, and whenever
// it is full, loses its lesser half. The least key that is left is a bound for all that follow,
// candidates, which few exceed.
#include <cmath>
#include <functional>

#include "kernels.h"
#include "sampling.h"

namespace octavo {
namespace {

using namespace sampling;

// NaN is ordered too: beyond infinity, on the side of its sign.
uint64_t key_of(float logit, int32_t id) {
  const float positive_zero = logit + 0.0f;  // of -0.0
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, 4);
  bits ^= bits >> 31 ? UINT32_MAX : UINT32_C(1) << 31;
  return uint64_t{bits} << 32 | ~static_cast<uint32_t>(id);
}
int32_t id_of(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// The keys of the first `count` ranks, in their order, to the front of a list that has room for
// twice as many. `is_ordered`: no logit is NaN.
void first_ranks(const float* x, int n, int count, bool is_ordered, uint64_t* list) {
  const auto cut = [&](int held) {
    std::nth_element(list, list + count - 1, list + held, std::greater<>());
    return list[count - 1];
  };
  int held = 0;
  uint64_t least = 0;        // those with a lesser key are not among the first; 0: none is known yet
  F32 least_logit = simd::zero();
  by_sixteen(x, n, 0.0f, [&](int i, F32 v, int some) {
    // Of equal logits the first one has been seen.
    if (least && is_ordered && !simd::any(simd::less(least_logit, v))) return;
    for (int id = i; id < i + some; id++) {
      const uint64_t key = key_of(x[id], id);
      if (key < least) continue;
      list[held++] = key;
      if (held < 2 * count) continue;
      least = cut(held);
      least_logit = simd::set1(x[id_of(least)]);
      held = count;
    }
  });
  cut(held);
  std::sort(list, list + count, std::greater<>());
}

int64_t sum_of_weights(const float* x, int n, float peak) {
  float weight[kBlock];
  int64_t total = 0;
  for (int start = 0; start < n; start += kBlock) {
    const int num = std::min(n - start, kBlock);
    by_sixteen(x + start, num, -kInfinity, [&](int i, F32 v, int) {
      simd::store(weight + i, Likelihood::of(simd::sub(simd::set1(peak), v)));
    });
    for (int i = 0; i < num; i++) total += static_cast<int64_t>(weight[i]);
  }
  return total;
}

int32_t num_greater(const float* x, int n, float logit) {
  F32 count = simd::zero();
  const F32 own = simd::set1(logit), one = simd::set1(1.0f);
  by_sixteen(x, n, -kInfinity, [&](int, F32 v, int) {
    count = simd::add(count, simd::select(simd::less(own, v), one, simd::zero()));
  });
  return static_cast<int32_t>(simd::sum(count));
}

}  // namespace

void logprobs_of_row(const float* logits, int32_t vocab, int32_t token, oct_logprobs& out,
                     const Worker& worker) {
  const float peak = maximum(logits, vocab);
  double norm = std::numeric_limits<double>::quiet_NaN();
  if (std::isfinite(peak)) {
    const auto total = static_cast<double>(sum_of_weights(logits, vocab, peak));
    norm = static_cast<double>(peak) + std::log(total / static_cast<double>(kWeightOne));
  }
  out.logprob = static_cast<double>(logits[token]) - norm;
  out.rank = num_greater(logits, vocab, logits[token]) + 1;
  if (out.num_top == 0) return;
  auto* list = static_cast<uint64_t*>(
      worker.scratch(kScratchSlot, 2 * sizeof(uint64_t) * static_cast<size_t>(out.num_top)));
  first_ranks(logits, vocab, out.num_top, !std::isnan(peak), list);
  for (int32_t i = 0; i < out.num_top; i++) {
    out.top_ids[i] = id_of(list[i]);
    out.top[i] = static_cast<double>(logits[out.top_ids[i]]) - norm;
  }
}

int32_t check_logprobs(const oct_logprobs& row, int32_t vocab, int32_t r) {
  if (row.num_top > vocab || (row.num_top > 0 && (!row.top_ids || !row.top)))
    return fail(OCT_ERR_ARGUMENT,
                "row %d asks for the first %d of %d tokens, or has no room for them", r, row.num_top,
                vocab);
  return OCT_OK;
}

}  // namespace octavo

int32_t oct_logprob_rows(oct_pool* pool, int32_t num_rows, int32_t vocab,
                         const float* const* logits, const int32_t* tokens,
                         oct_logprobs* logprobs) {
  using namespace octavo;
  if (!pool || num_rows < 0 || (num_rows && (!logits || !tokens || !logprobs)))
    return fail(OCT_ERR_ARGUMENT, "oct_logprob_rows: the pool or an array is NULL");
  if (vocab < 1 || vocab > sampling::kMaxVocab)
    return fail(OCT_ERR_ARGUMENT, "oct_logprob_rows: a vocabulary of %d is not in 1 .. %d", vocab,
                sampling::kMaxVocab);
  for (int r = 0; r < num_rows; r++) {
    if (tokens[r] < 0 || tokens[r] >= vocab)
      return fail(OCT_ERR_ARGUMENT, "oct_logprob_rows: row %d has the token %d of a vocabulary of %d",
                  r, tokens[r], vocab);
    const int32_t code = check_logprobs(logprobs[r], vocab, r);
    if (code != OCT_OK) return code;
  }
  return run(pool, [&](const Worker& worker) {
    for (int r = worker.ticket(); r < num_rows; r = worker.ticket()) {
      if (logprobs[r].num_top >= 0)
        logprobs_of_row(logits[r], vocab, tokens[r], logprobs[r], worker);
    }
  });
}
