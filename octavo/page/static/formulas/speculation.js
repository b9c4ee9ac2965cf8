// The speedup of speculative decoding: octavo/speculation/analysis.py (Leviathan et al., ICML 2023).

/** Expected tokens of a step with `length` draft tokens, each accepted with probability `alpha` if all
 * before it were; the token after them is counted. */
export function expectedTokens(alpha, length) {
  return alpha === 1 ? length + 1 : (1 - alpha ** (length + 1)) / (1 - alpha);
}

/** Speed-up of a single request if further rows of a step are free and a draft token costs `costRatio`
 * of a step. */
export function speedup(tokens, length, costRatio) {
  return tokens / (1 + length * costRatio);
}

/** Speed-up of `batch` requests that each draft `length` tokens. `stepCost(batch, rows of each)`:
 * seconds; `draftCost(batch)`: those of drafting one token for each. */
export function batchedSpeedup(tokens, length, batch, stepCost, draftCost = () => 0) {
  const withDrafts = stepCost(batch, length + 1) + length * draftCost(batch);
  return (tokens * stepCost(batch, 1)) / withDrafts;
}

/** Rejection sampling of a draft token, with probabilities `p` of the target and `q` of the drafter by
 * token. `accept` is min(1, p/q), `rest` max(0, p − q) normalized to a sum of 1, and `acceptance` the
 * probability that a draft token is accepted, Σ min(p, q). */
export function acceptance(p, q) {
  const more = p.map((each, token) => Math.max(0, each - q[token]));
  const total = more.reduce((sum, each) => sum + each, 0);
  return {
    accept: p.map((each, token) => (q[token] > 0 ? Math.min(1, each / q[token]) : 1)),
    rest: more.map((each) => (total > 0 ? each / total : 0)),
    acceptance: p.reduce((sum, each, token) => sum + Math.min(each, q[token]), 0),
  };
}
