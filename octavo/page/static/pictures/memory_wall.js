// Why tokens for many cost little more than tokens for one.

import { curves } from "../charts/curves.js";
import { format } from "../common/numbers.js";
import { planCommand } from "./picker.js";

const MOST = 4096;

export const memoryWall = {
  id: "memory-wall",
  title: "The memory wall",
  sentences: [
    "To make one token, a device reads every weight that the token meets and multiplies with each of them once: reading takes far longer than multiplying.",
    "Requests that are answered in the same step share what is read, so a step with many of them takes hardly longer than a step with one, until multiplying takes as long as reading: the ridge.",
    "Each request’s KV cache is its own: with long contexts it is the larger part of what a step reads, and no batch makes that cheaper.",
  ],
  readMore: "inference#the-memory-wall",
  needs: { model: true, hardware: true },
  controls: [
    { id: "batch", label: "Requests in a step", kind: "log-range", min: 1, max: MOST, value: 8, unit: "requests" },
    { id: "context", label: "Context of each", kind: "log-range", min: 16, max: 131072, value: 1000, unit: "tokens" },
  ],

  figures(context) {
    const { values } = context;
    const { deployment } = context;
    const step = stepOf(context, values.batch);
    const { total } = step;
    const { weights, products, cached } = partsOf(step);
    const { bandwidth, peak } = ceilingsOf(deployment);
    const tokens = values.batch / total.value;
    return [
      { label: "A step takes", ...total, unit: "s",
        formula: `sum over ${step.ops.length} operations, and ${format(step.overhead.value, "s")} once a step` },
      { label: "Tokens for all together", value: tokens, unit: "tokens/s", low: values.batch / total.high, high: values.batch / total.low, source: total.source,
        formula: `${values.batch} tokens / ${format(total.value, "s")}` },
      { label: "Reading weights, at peak bandwidth", value: weights / bandwidth, unit: "s", source: "roofline",
        formula: `${format(weights, "B")} / ${format(bandwidth, "B/s")}` },
      { label: "Multiplying, at peak compute", value: products / peak, unit: "s", source: "roofline",
        formula: `${format(products, "FLOP")} / ${format(peak, "FLOP/s")}` },
      { label: "Reading the KV cache", value: cached / bandwidth, unit: "s", source: "roofline",
        formula: `${format(cached, "B")} / ${format(bandwidth, "B/s")}` },
      { label: "Ridge of the device", value: peak / bandwidth, unit: "FLOP/B", source: "published",
        formula: `${format(peak, "FLOP/s")} / ${format(bandwidth, "B/s")}` },
    ];
  },

  command(context) {
    const { batch, context: length } = context.values;
    return planCommand(context, { isl: Math.max(1, length), osl: 128, concurrency: batch, roofline: true });
  },

  draw(canvas, context) {
    const { values, deployment } = context;
    const { bandwidth, peak } = ceilingsOf(deployment);
    const rows = batches().map((batch) => ({ batch, step: stepOf(context, batch) }));
    const parts = rows.map(({ batch, step }) => ({ batch, ...partsOf(step) }));
    const ridge = parts.find(({ weights, products }) => products / peak >= weights / bandwidth)?.batch;
    const marks = [{ x: values.batch, label: format(values.batch, "requests") }];
    if (ridge !== undefined) marks.push({ x: ridge, label: `ridge: ${format(ridge, "requests")}` });
    const x = { label: "requests in a step", scale: "log", min: 1, max: MOST };
    canvas.chart("time", curves, {
      title: "What a step takes",
      x,
      y: { label: "time", unit: "s", scale: "log" },
      layers: [
        { kind: "band", label: "step, likely between", colour: 1, points: rows.map(({ batch, step }) => [batch, step.total.low, step.total.high]) },
        { kind: "line", label: "step", colour: 1, points: rows.map(({ batch, step }) => [batch, step.total.value]) },
        { kind: "dashed", label: "reading weights", colour: 2, points: parts.map(({ batch, weights }) => [batch, weights / bandwidth]) },
        { kind: "dashed", label: "multiplying", colour: 3, points: parts.map(({ batch, products }) => [batch, products / peak]) },
        { kind: "dashed", label: "reading the KV cache", colour: 6, points: parts.map(({ batch, cached }) => [batch, cached / bandwidth]) },
      ],
      marks,
    });
    canvas.chart("rate", curves, {
      title: "Tokens a second, for all together",
      x,
      y: { label: "tokens/s", unit: "tokens/s", scale: "log" },
      layers: [
        { kind: "band", label: "likely between", colour: 1, points: rows.map(({ batch, step }) => [batch, batch / step.total.high, batch / step.total.low]) },
        { kind: "line", label: "all together", colour: 1, points: rows.map(({ batch, step }) => [batch, batch / step.total.value]) },
      ],
      marks: [{ x: values.batch, label: format(values.batch, "requests") }],
      height: 200,
    });
  },
};

function stepOf({ deployment, values }, batch) {
  return deployment.step([[values.context - 1, 1, 1, 0, batch]]);
}

/** Of a step: bytes of weights and what goes through them, their operations, bytes of the cache. */
function partsOf({ ops }) {
  const isAttention = ({ name }) => name.endsWith(".decode") || name.endsWith(".prompt");
  const sum = (all, key) => all.reduce((total, op) => total + op[key], 0);
  const products = ops.filter((op) => !isAttention(op) && op.flops > 0);
  return {
    weights: sum(products, "bytes"),
    products: sum(products, "flops"),
    cached: sum(ops.filter(isAttention), "bytes"),
  };
}

function ceilingsOf(deployment) {
  const product = deployment.ops.find((op) => op.name.startsWith("mlp") || op.name.startsWith("experts")) ?? deployment.ops[0];
  return { bandwidth: product.bandwidth, peak: product.peak };
}

/** 1, 2, 3, 4, 6, 8, 12, … to MOST. */
function batches() {
  const found = [1];
  for (let power = 2; power <= MOST; power *= 2) found.push(power, ...(power * 1.5 < MOST ? [power * 1.5] : []));
  return found;
}
