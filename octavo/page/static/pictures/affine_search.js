// The scales of a super-block of Q4_K: `d s q - e t`, with q of 4 bits, s and t of 6 bits for each
// sub-block, d and e float16. The search of octavo's gguf_search.py in the same float32 steps, so
// that it ends in the same codes: try ranges of each sub-block, fit its scale and offset to the
// levels that these lead to, then round scales and offsets, try their neighbours, fit d and e again.

import { clamp, half, quotient, roundEven } from "./float32.js";

const { fround } = Math;
const TOP = 15; // the highest level
const TOP_SCALE = 63;
const SHIFTS_OF_ENDS = [-1, -0.5, 0, 0.5, 1];
const PLACES_OF_LARGEST = Array.from({ length: 21 }, (_, index) => fround(TOP_SCALE + 0.15 * (index - 10)));
const REFITS = 2;
const ROUNDS = 2;

/** Of sub-blocks, Float32Arrays of one length: `{ d, e, s, t, levels }`. */
export function fitAffine(subBlocks) {
  const weights = weightsOf(subBlocks);
  const blocks = subBlocks.map((x, index) => new Block(x, weights[index]));
  const ranges = blocks.map(fitRange);
  let d = half(fitScale(ranges.map(({ a }) => a), blocks.map((block, index) => block.moments(ranges[index].a, ranges[index].b).qq)));
  let e = half(fitScale(ranges.map(({ b }) => b), blocks.map((block) => block.sumW)));
  let whole = ranges.map(({ a, b }) => ({ s: nearestScale(quotient(a, d)), t: nearestScale(quotient(b, e)) }));
  const errorOf = (d, e) => total(blocks.map((block, index) => block.error(fround(d * whole[index].s), fround(e * whole[index].t))));
  for (let round = 0; round < ROUNDS; round += 1) {
    whole = blocks.map((block, index) => improveIntegers(block, d, e, whole[index]));
    const refit = refitShared(blocks, d, e, whole);
    if (errorOf(refit.d, refit.e) < errorOf(d, e)) ({ d, e } = refit);
  }
  const levels = blocks.map((block, index) => block.round(fround(d * whole[index].s), fround(e * whole[index].t)));
  return { d, e, s: whole.map(({ s }) => s), t: whole.map(({ t }) => t), levels };
}

/** Larger values count more: the root of their square and twice the mean square of all. */
function weightsOf(subBlocks) {
  const squares = subBlocks.map((x) => x.map((each) => each * each));
  const numValues = subBlocks.length * subBlocks[0].length;
  const twice = fround(total(squares.map(total)) * (2 / numValues));
  return squares.map((of) => of.map((each) => Math.sqrt(fround(each + twice))));
}

/** What is asked of a sub-block for a scale `a` and an offset `b` on trial: x = a q - b. */
class Block {
  constructor(x, weights) {
    this.x = x;
    this.weights = weights;
    this.weighted = x.map((each, index) => weights[index] * each);
    this.sumW = total(weights);
    this.sumX = total(this.weighted);
  }

  round(a, b) {
    const inverse = quotient(1, a);
    return this.x.map((each) => clamp(roundEven(fround(fround(each + b) * inverse)), 0, TOP));
  }

  error(a, b) {
    return total(this.round(a, b).map((q, index) => {
      const difference = fround(fround(fround(q * a) - b) - this.x[index]);
      return fround(difference * difference) * this.weights[index];
    }));
  }

  /** Sums of the weights times what the names say. */
  moments(a, b) {
    const q = this.round(a, b);
    const weightedQ = q.map((each, index) => each * this.weights[index]);
    return {
      w: this.sumW, x: this.sumX, q: total(weightedQ),
      qq: total(weightedQ.map((each, index) => each * q[index])),
      qx: total(q.map((each, index) => each * this.weighted[index])),
    };
  }
}

function fitRange({ x, weights }) {
  const low = Math.min(...x, 0);
  const block = new Block(x.map((each) => each - low), weights); // sums are precise near 0
  const step = fround(Math.max(0, fround(Math.max(...x) - low)) / TOP);
  let best = { a: step, b: 0, error: Infinity };
  const take = (a, b) => {
    const trial = refitRange(block.moments(a, b), low);
    if (trial.error < best.error) best = trial;
  };
  for (const atLow of SHIFTS_OF_ENDS) {
    for (const atHigh of SHIFTS_OF_ENDS) take(fround(step * fround(1 - (atLow + atHigh) / TOP)), fround(-atLow * step));
  }
  for (let refit = 0; refit < REFITS; refit += 1) take(best.a, best.b);
  return { a: best.a, b: fround(best.b - low) };
}

/** The least-squares scale and offset for given levels; the error is less the sum of squares of x. */
function refitRange({ w, x, q, qq, qx }, leastB) {
  const determinant = fround(fround(w * qq) - fround(q * q));
  const b = Math.max(quotient(fround(fround(q * qx) - fround(qq * x)), determinant), leastB);
  const a = Math.max(0, quotient(fround(qx + fround(b * q)), qq));
  const ofA = fround(fround(fround(a * qq) - fround(2 * b * q)) - 2 * qx);
  const ofB = fround(fround(b * w) + 2 * x);
  return { a, b, error: fround(fround(a * ofA) + fround(b * ofB)) };
}

/** The `d` for which `d s`, s an integer, is near each of `values`. */
function fitScale(values, weights) {
  const largest = values.reduce((found, each) => (Math.abs(each) > Math.abs(found) ? each : found));
  let best = { scale: 0, error: 0 };
  for (const place of PLACES_OF_LARGEST) {
    const inverse = quotient(1, fround(largest / place));
    const levels = values.map((each) => nearestScale(fround(each * inverse)));
    const projection = total(levels.map((s, index) => s * fround(weights[index] * values[index])));
    const scale = quotient(projection, total(levels.map((s, index) => s * s * weights[index])));
    const error = fround(-scale * projection);
    if (error < best.error) best = { scale, error };
  }
  return best.scale;
}

/** The scale and its neighbours, each with the offset that fits it; then the neighbours of that. */
function improveIntegers(block, d, e, { s, t }) {
  const errorOf = (s, t) => block.error(fround(d * s), fround(e * t));
  const sums = block.moments(fround(d * s), fround(e * t));
  const [meanQ, meanX] = [quotient(sums.q, sums.w), quotient(sums.x, sums.w)];
  let best = { s, t, error: errorOf(s, t) };
  const take = (s, t) => {
    const error = errorOf(s, t);
    if (error < best.error) best = { s, t, error };
  };
  for (const trial of [s, ...neighbours(s)]) {
    take(trial, nearestScale(quotient(fround(fround(fround(d * trial) * meanQ) - meanX), e)));
  }
  for (const trial of neighbours(best.t)) take(best.s, trial);
  return { s: best.s, t: best.t };
}

function neighbours(scale) {
  return [clamp(scale - 1, 0, TOP_SCALE), clamp(scale + 1, 0, TOP_SCALE)];
}

/** The least-squares `d` and `e` for the levels and integers that there are. */
function refitShared(blocks, d, e, whole) {
  const sums = blocks.map((block, index) => block.moments(fround(d * whole[index].s), fround(e * whole[index].t)));
  const over = (term) => total(sums.map((of, index) => term(whole[index], of)));
  const dd = over(({ s }, { qq }) => s * s * qq);
  const de = over(({ s, t }, { q }) => s * t * q);
  const ee = over(({ t }, { w }) => t * t * w);
  const dx = over(({ s }, { qx }) => s * qx);
  const ex = over(({ t }, { x }) => t * x);
  const determinant = fround(fround(dd * ee) - fround(de * de));
  return {
    d: half(Math.max(0, quotient(fround(fround(dx * ee) - fround(de * ex)), determinant))),
    e: half(Math.max(0, quotient(fround(fround(de * dx) - fround(dd * ex)), determinant))),
  };
}

function nearestScale(value) {
  return clamp(roundEven(value), 0, TOP_SCALE);
}

/** The sum, in the order in which octavo adds: halves onto each other. Rounds each entry first. */
function total(values) {
  const sums = Float32Array.from(values);
  for (let half = sums.length / 2; half >= 1; half /= 2) {
    for (let index = 0; index < half; index += 1) sums[index] += sums[index + half];
  }
  return sums[0];
}
