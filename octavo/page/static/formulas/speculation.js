// What guessing is worth: octavo/speculation/analysis.py (Leviathan et al., ICML 2023).

/** Tokens of a step with `length` drafted ones, each right with probability `alpha`: those that are
 * right, and the one that follows. */
export function expectedTokens(alpha, length) {
  return alpha === 1 ? length + 1 : (1 - alpha ** (length + 1)) / (1 - alpha);
}

/** The same, where position i is right with probability `rates[i]` if all before it were. */
export function expectedTokensByRates(rates) {
  let [right, tokens] = [1, 1];
  for (const rate of rates) {
    right *= rate;
    tokens += right;
  }
  return tokens;
}

/** Of a lone request, where further rows of a step are free and a drafted token costs `costRatio` of
 * a step. */
export function speedup(tokens, length, costRatio) {
  return tokens / (1 + length * costRatio);
}

/** How many times the operations of plain decoding a token takes (their Theorem 3.11). */
export function operationsFactor(tokens, length, operationsRatio = 0) {
  return (length * operationsRatio + length + 1) / tokens;
}

/** The fastest length of a lone request's drafts, 0 where none is faster than none. */
export function bestLength(alpha, costRatio, most = 64) {
  let [best, fastest, right, tokens] = [0, 1, 1, 1];
  for (let length = 1; length <= most; length += 1) {
    right *= alpha;
    tokens += right;
    const speed = speedup(tokens, length, costRatio);
    if (speed > fastest) [best, fastest] = [length, speed];
  }
  return best;
}

/** Of `batch` requests that all draft `length` tokens. `stepCost(batch, rows of each)`: seconds;
 * `draftCost(batch)`: of drafting one token for each. */
export function batchedSpeedup(tokens, length, batch, stepCost, draftCost = () => 0) {
  const withDrafts = stepCost(batch, length + 1) + length * draftCost(batch);
  return (tokens * stepCost(batch, 1)) / withDrafts;
}

/** The least batch at which drafts are no faster than none; null up to `most`. */
export function breakEvenBatch(tokens, length, stepCost, draftCost = () => 0, most = 1024) {
  for (let batch = 1; batch <= most; batch += 1) {
    if (batchedSpeedup(tokens, length, batch, stepCost, draftCost) <= 1) return batch;
  }
  return null;
}

/** A step that takes 1 for its first row and `rowCost` for each further one. */
export const linearStep = (rowCost) => (batch, rows) => 1 + rowCost * (batch * rows - 1);

/** Whether a drafted token stays, and what is sampled where it does not: probabilities `p` of the
 * target and `q` of the drafter, by token. `accept` is min(1, p/q), `rest` max(0, p − q), summing
 * to 1; `acceptance` is how likely a drafted token is to stay at all, Σ min(p, q). */
export function acceptance(p, q) {
  const more = p.map((each, token) => Math.max(0, each - q[token]));
  const total = more.reduce((sum, each) => sum + each, 0);
  return {
    accept: p.map((each, token) => (q[token] > 0 ? Math.min(1, each / q[token]) : 1)),
    rest: more.map((each) => (total > 0 ? each / total : 0)),
    acceptance: p.reduce((sum, each, token) => sum + Math.min(each, q[token]), 0),
  };
}
