// What a step has to do, in bytes and operations, by a document's `rank`: docs/planning.md. A chunk is `[start, tokens,
// samples, drafted, alike]`: some tokens of a sequence, whether one is sampled after them (1 unless
// it is said), how many of them are a draft, and how many sequences do the same (1 unless it is said).

/** Rows of each pass of a step: later steps go on with one token of each chunk that samples. */
export function passes(chunks, numSteps) {
  const first = { tokens: 0, sampled: 0, decoding: [], prompts: [] };
  const ends = [];
  let numEnds = 0;
  for (const [start, tokens, samples = 1, drafted = 0, alike = 1] of chunks) {
    const sampled = samples ? 1 + drafted : 0;
    first.tokens += alike * tokens;
    first.sampled += alike * sampled;
    (tokens === 1 || tokens === sampled ? first.decoding : first.prompts).push([start, tokens, alike]);
    if (!samples) continue;
    ends.push([start + tokens, alike]);
    numEnds += alike;
  }
  const later = Array.from({ length: numSteps - 1 }, (_, step) => ({
    tokens: numEnds,
    sampled: numEnds,
    decoding: ends.map(([end, alike]) => [end + step, 1, alike]),
    prompts: [],
  }));
  return [first, ...later];
}

export const numSeqs = ({ decoding, prompts }) => count(decoding) + count(prompts);

function count(spans) {
  return spans.reduce((total, [, , alike]) => total + alike, 0);
}

// -- attention -------------------------------------------------------------------------------------

/** Of sequences that decode a token, or verify some. */
export function decodeWork(op, { decoding }) {
  const perScore = op.decode_flops_per_score ?? op.flops_per_score;
  return attentionWork(op, decoding, perScore);
}

/** Of pieces of prompts. */
export function promptWork(op, { prompts }) {
  return attentionWork(op, prompts, op.flops_per_score);
}

function attentionWork(op, spans, perScore) {
  const { keys, scores } = seenBySpans(spans, Math.min(op.window ?? Infinity, op.selected ?? Infinity));
  const states = 2 * count(spans) * op.state_bytes; // read, and written
  return { bytes: op.count * (keys * op.kv_bytes_per_token + states), flops: op.count * scores * perScore };
}

/** Keys that are written and read, and pairs of a query and a key that it sees. */
function seenBySpans(spans, reach) {
  const seen = { keys: 0, scores: 0 };
  for (const [start, tokens, alike] of spans) {
    const end = start + tokens;
    seen.keys += alike * (tokens + Math.min(end, tokens + reach - 1));
    seen.scores += alike * (causalScores(end, reach) - causalScores(start, reach));
  }
  return seen;
}

function causalScores(tokens, reach) {
  const growing = Math.min(tokens, reach);
  return (growing * (growing + 1)) / 2 + (tokens - growing) * growing;
}

// -- products --------------------------------------------------------------------------------------

/** Of a product in all of its layers. */
export function matrixWork(matrix, rows, rank) {
  const count = matrix.sampled_only ? rows.sampled : rows.tokens;
  if (!count) return { bytes: 0, flops: 0 };
  const width = (matrix.inputs + matrix.outputs) * rank.activation_bytes;
  if (matrix.experts) return expertsWork(matrix, count, width, rank);
  return {
    bytes: matrix.count * (matrix.num_bytes + count * width),
    flops: 2 * matrix.count * matrix.num_params * count,
  };
}

/** Of the rank on which most of the rows land, and most experts are used: all wait for it. */
function expertsWork({ count, num_bytes: bytes, num_params: params, experts }, rows, width, rank) {
  const { tp, ep } = rank.parallel;
  const { total, per_token: perToken, on_rank: onRank } = experts;
  const tokens = rows * Math.max(1, Math.floor(ep / tp)); // of all devices that share the experts
  const uses = tokens * perToken;
  const hit = expertsHit(total, perToken, tokens);
  const share = onRank / total;
  const most = (mean, left, limit) => Math.min(limit, busiest(mean, left, ep, rank.busiest));
  const here = most(uses * share, 1, uses);
  const read = most(hit * share, 1 - hit / total, Math.min(onRank, hit));
  return {
    bytes: count * ((bytes * read) / onRank + here * width),
    flops: ((2 * count * params) / onRank) * here,
  };
}

/** How many of a layer's experts some token uses, if each is as likely as any other. */
function expertsHit(total, perToken, tokens) {
  return total * (1 - (1 - perToken / total) ** tokens);
}

/** What the busiest of some ranks gets of things that go to one by chance, `mean` to each. */
function busiest(mean, left, ranks, deviations) {
  return Math.max(1, mean + deviations * Math.sqrt(mean * (1 - 1 / ranks) * left));
}
