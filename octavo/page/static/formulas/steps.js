// How long a step takes, by a document: a roofline for each operation, summed, and what comes on top
// (docs/planning.md).

import { around, sum } from "./predictions.js";
import { decodeWork, matrixWork, numSeqs, passes, promptWork } from "./work.js";

const WORK = {
  matrix: ({ index }, rank) => (rows) => matrixWork(rank.matrices[index], rows, rank),
  "attention.decode": ({ index }, rank) => (rows) => decodeWork(rank.attention[index], rows),
  "attention.prompt": ({ index }, rank) => (rows) => promptWork(rank.attention[index], rows),
  small: ({ bytes_per_row: bytes }) => (rows) => ({ bytes: rows.tokens * bytes, flops: 0 }),
};

/** The operations of a document, with `workOf(rows)` of a pass. */
export function boundOps({ ops, rank }) {
  return ops.map((op) => ({ ...op, workOf: WORK[op.work](op, rank) }));
}

/** What a step takes, and what of it is what. */
export function stepCost(deployment, chunks, numSteps = 1) {
  const { ops, document: { efficiency } } = deployment;
  const done = passes(chunks, numSteps).map((rows) => passCost(deployment, rows));
  const parts = partsOf(done, efficiency);
  const merged = mergeOps(done.flatMap(({ rows }) => ops.map((op) => opCost(op, op.workOf(rows), efficiency)))
    .filter(({ bytes, flops }) => bytes || flops));
  const said = mergeTransfers(done.flatMap((each) => each.said));
  return { ...parts, total: sum(Object.values(parts)), ops: merged, transfers: said, bound: boundOf(merged, parts) };
}

/** Its time alone, for callers that compute thousands of steps. */
export function stepTotal(deployment, chunks) {
  const done = passes(chunks, 1).map((rows) => passCost(deployment, rows));
  return sum(Object.values(partsOf(done, deployment.document.efficiency)));
}

/** Seconds of one pass, without what comes once a step. */
export function passSeconds(deployment, rows) {
  const { compute, communication } = passCost(deployment, rows);
  return compute.value + communication.value;
}

function partsOf(done, efficiency) {
  const seqs = Math.max(...done.map(({ rows }) => numSeqs(rows)));
  const once = efficiency.step_s + seqs * efficiency.sequence_s;
  return {
    compute: sum(done.map((each) => each.compute)),
    communication: sum(done.map((each) => each.communication)),
    overhead: around(once, efficiency.overhead_spread, efficiency.overhead_source),
  };
}

function passCost({ ops, document: { efficiency, communication } }, rows) {
  const { spread, source } = efficiency;
  const compute = sum(ops.map((op) => opSeconds(op, op.workOf(rows), efficiency)));
  const said = transfers(communication, rows);
  return {
    rows,
    said,
    compute: { ...compute, source },
    communication: around(said.reduce((total, each) => total + each.seconds, 0), spread, source),
  };
}

/** What ranks say to each other in a pass: `[{ name, count, bytes, seconds }]`. */
function transfers(communication, rows) {
  return communication.filter((each) => each.rows === "tokens" || rows.sampled > 0).map((each) => ({
    name: each.name,
    count: each.count,
    bytes: rows[each.rows] * each.bytes_per_row,
    seconds: each.seconds + rows[each.rows] * each.seconds_per_row,
  }));
}

/** Seconds of an operation in all stages, as a prediction. */
function opSeconds(op, { bytes, flops }, { sharpness, spread, source }) {
  const { stages } = op;
  const isNothing = !(bytes || flops);
  const seconds = isNothing ? 0 : together(bytes / op.bytes_per_s, flops / op.flops_per_s, sharpness) + op.launch_s;
  const least = Math.max(bytes / op.bandwidth, flops / op.peak); // what the ceilings allow
  const low = Math.min(seconds, Math.max(least, seconds / (1 + spread)));
  return { value: seconds * stages, low: low * stages, high: seconds * (1 + spread) * stages, source };
}

/** Seconds of one stage, and what they come of. */
function opCost(op, work, efficiency) {
  const { bytes, flops } = work;
  return {
    name: op.name,
    count: op.count,
    seconds: opSeconds(op, work, efficiency).value / op.stages,
    bytes,
    flops,
    intensity: bytes ? flops / bytes : 0,
    ridge: op.peak / op.bandwidth,
    bound: longest({ memory: bytes / op.bytes_per_s, compute: flops / op.flops_per_s, latency: op.launch_s }),
  };
}

/** (a^p + b^p)^(1/p): the longer of two times, and a little more where they are alike. */
function together(one, other, sharpness) {
  const [longer, shorter] = one > other ? [one, other] : [other, one];
  if (!shorter || sharpness === null) return longer;
  return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness);
}

/** Those of several passes: sums by name, bound as the longest of them is. */
function mergeOps(ops) {
  const merged = new Map();
  for (const op of ops) {
    const before = merged.get(op.name);
    const longer = before && before.seconds > op.seconds ? before : op;
    const added = { ...longer };
    for (const part of before ? ["count", "seconds", "bytes", "flops"] : []) {
      added[part] = before[part] + op[part];
    }
    added.intensity = added.bytes ? added.flops / added.bytes : 0;
    merged.set(op.name, added);
  }
  return [...merged.values()];
}

function mergeTransfers(said) {
  const merged = new Map();
  for (const { name, count, bytes, seconds } of said) {
    const before = merged.get(name) ?? { name, count: 0, bytes: 0, seconds: 0 };
    before.count += count;
    before.bytes += bytes;
    before.seconds += seconds;
    merged.set(name, before);
  }
  return [...merged.values()];
}

/** What takes most of the time; `latency`: launches, and all that comes once a step. */
function boundOf(ops, { compute, communication, overhead }) {
  const latency = overhead.value;
  const seconds = { memory: 0, compute: 0, latency, communication: communication.value };
  const stages = compute.value / (ops.reduce((total, op) => total + op.seconds, 0) || 1);
  for (const op of ops) seconds[op.bound] += stages * op.seconds;
  return longest(seconds);
}

function longest(times) {
  return Object.keys(times).reduce((one, other) => (times[other] > times[one] ? other : one));
}
