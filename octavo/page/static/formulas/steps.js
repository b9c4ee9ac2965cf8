// How long a step takes: a roofline for each operation, summed, and what comes on top. Twin of
// octavo/cost/op_cost.py and step_cost.py.

import { transfers } from "./communication.js";
import { CannotBe } from "./errors.js";
import { around, sum } from "./predictions.js";
import { decodeWork, matrixWork, numSeqs, passes, promptWork } from "./work.js";

const SMALL_OPS = 4; // of a layer: two norms, rotations and writing of keys, the activation function
const SMALL_OP_ROWS = 8; // rows of the hidden size that they move
const BITS = { fp32: 32, fp16: 16, fp8: 8, int8: 8, fp4: 4 };

/** All operations of a model's pass, and what each costs on a device. */
export function pricedOps(rank, device, efficiency) {
  const { pp } = rank.parallel;
  const price = (name, count, work, arithmetic, share, stages = pp) => {
    const [, peak] = computedAs(device, arithmetic);
    const bandwidth = device.memory_bandwidth;
    return {
      name, count, work, stages, peak, bandwidth,
      bytesPerS: bandwidth * efficiency.memory,
      flopsPerS: peak * share,
      launchS: count * efficiency.launch_s,
    };
  };
  const products = rank.matrices.map((matrix) => price(
    matrix.name, matrix.count, (rows) => matrixWork(matrix, rows, rank), matrix.arithmetic,
    computeShare(matrix, device, efficiency), matrix.isSampled ? 1 : pp, // the last stage's head
  ));
  const share = efficiency.attention_compute;
  const attention = rank.attention.flatMap((op) => [
    price(`${op.name}.decode`, op.count, (rows) => decodeWork(op, rows), "fp16", share),
    price(`${op.name}.prompt`, op.count, (rows) => promptWork(op, rows), "fp16", share),
  ]);
  const row = rank.layers * SMALL_OP_ROWS * rank.hidden * rank.activationBytes;
  const small = (rows) => ({ bytes: rows.tokens * row, flops: 0 });
  const { compute } = efficiency;
  return [...products, ...attention,
    price("small ops", SMALL_OPS * rank.layers, small, "fp16", compute)];
}

/** What products of a type are computed in here, and the operations a second. */
export function computedAs(device, arithmetic) {
  const found = device.computes[arithmetic];
  if (!found) throw new CannotBe(`${device.name}: no peak is known for ${arithmetic}`);
  return found;
}

/** Less where weights are unpacked into more bits before they are multiplied. */
function computeShare({ bytes, params, arithmetic }, device, { compute, dequantized }) {
  const [computedIn] = computedAs(device, arithmetic);
  const bits = params ? (8 * bytes) / params : 0;
  return bits < 0.9 * Math.min(16, BITS[computedIn]) ? compute * dequantized : compute;
}

/** What a step takes, and what of it is what. */
export function stepCost(ops, rank, efficiency, link, chunks, numSteps = 1) {
  const done = passes(chunks, numSteps).map((rows) => passCost(ops, rank, efficiency, link, rows));
  const parts = partsOf(done, efficiency);
  const merged = mergeOps(done.flatMap(({ rows }) => ops.map((op) => opCost(op, rows, efficiency)))
    .filter(({ bytes, flops }) => bytes || flops));
  const said = mergeTransfers(done.flatMap((each) => each.said));
  return { ...parts, total: sum(Object.values(parts)), ops: merged, transfers: said, bound: boundOf(merged, parts) };
}

/** What it takes alone, for those who ask of thousands of steps. */
export function stepTotal(ops, rank, efficiency, link, chunks) {
  const done = passes(chunks, 1).map((rows) => passCost(ops, rank, efficiency, link, rows));
  return sum(Object.values(partsOf(done, efficiency)));
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

function passCost(ops, rank, efficiency, link, rows) {
  const { spread, source } = efficiency;
  const compute = sum(ops.map((op) => opSeconds(op, op.work(rows), efficiency)));
  const said = link ? transfers(rank, rows, link) : [];
  return {
    rows,
    said,
    compute: { ...compute, source },
    communication: around(said.reduce((total, each) => total + each.seconds, 0), spread, source),
  };
}

/** Seconds of an operation in all stages, as a prediction. */
function opSeconds(op, { bytes, flops }, { sharpness, spread, source }) {
  const { stages } = op;
  const isNothing = !(bytes || flops);
  const seconds = isNothing ? 0 : together(bytes / op.bytesPerS, flops / op.flopsPerS, sharpness) + op.launchS;
  const least = Math.max(bytes / op.bandwidth, flops / op.peak); // what the ceilings allow
  const low = Math.min(seconds, Math.max(least, seconds / (1 + spread)));
  return { value: seconds * stages, low: low * stages, high: seconds * (1 + spread) * stages, source };
}

/** Seconds of one stage, and what they come of. */
function opCost(op, rows, efficiency) {
  const work = op.work(rows);
  const { bytes, flops } = work;
  return {
    name: op.name,
    count: op.count,
    seconds: opSeconds(op, work, efficiency).value / op.stages,
    bytes,
    flops,
    intensity: bytes ? flops / bytes : 0,
    ridge: op.peak / op.bandwidth,
    bound: longest({ memory: bytes / op.bytesPerS, compute: flops / op.flopsPerS, latency: op.launchS }),
  };
}

/** (a^p + b^p)^(1/p): the longer of two times, and a little more where they are alike. */
export function together(one, other, sharpness) {
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
