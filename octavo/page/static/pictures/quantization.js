// What becomes of weights that are stored in few bits.

import { curves } from "../charts/curves.js";
import { digits } from "../common/numbers.js";
import { isFolder } from "../common/places.js";
import { MEASURED, MEASURED_ON, measuredOf } from "./measured_loss.js";
import { numberLine } from "./number_line.js";
import { rootMeanSquares, roundOneRow, TYPES } from "./rounding.js";
import { chosenWeights } from "./tensors.js";

const SHOWN = 32; // weights on the line, at most
const BINS = 41;

export const quantization = {
  id: "quantization",
  title: "Weight quantization",
  sentences: [
    "A weight is stored as one of a few levels, which neighbours share a scale for: what lies between two levels goes to the nearer one.",
    "One large weight spreads the levels of all that share its scale, so that the others are rounded more coarsely: small groups lose less, and cost more bits for their scales; floats have their levels close together near zero, where most weights are.",
    "The loss of a model has to be measured on its outputs: errors of weights that matter little do no harm, and methods that use a matrix’s inputs (GPTQ, AWQ) lose much less than rounding does.",
  ],
  readMore: "quantization#quality",
  needs: { tensors: true },
  controls: [
    { id: "type", label: "Type", kind: "choice", choices: Object.keys(TYPES).map((name) => [name, name]), value: "Q4_0" },
    { id: "block", label: "Block shown", kind: "range", min: 1, max: 64, step: 1, value: 5, unit: "of 64" },
    { id: "outlier", label: "Its largest weight, larger by", kind: "log-range", min: 1, max: 64, value: 1, unit: "×" },
  ],

  figures(context) {
    const { values: { type } } = context;
    const sample = chosenWeights(context);
    if (sample.isWaiting) return null;
    const { weights, coded, shown } = stateOf(sample, context);
    const all = rootMeanSquares(weights, coded.values);
    const most = Math.max(...shown.map(({ value }) => Math.abs(value)));
    const others = shown.filter(({ value }) => Math.abs(value) < most);
    const here = rootMeanSquares(others.map(({ value }) => value), others.map(({ rounded }) => rounded));
    const measured = measuredOf(type);
    const source = `computed here, of ${digits(weights.length)} weights`;
    return [
      { label: "Bits of a weight", value: TYPES[type].bits(sample.columns), unit: "bits", source: "exact", formula: TYPES[type].formula },
      { label: "Error, root mean square", value: all.error / all.value, unit: "%", source,
        formula: `${digits(all.error)} / ${digits(all.value)} of the weights` },
      { label: "Signal-to-noise ratio of the weights", value: 20 * Math.log10(all.value / all.error), unit: "dB", source, formula: `20 log₁₀(${digits(all.value)} / ${digits(all.error)})` },
      { label: "Error of the weights shown, without the largest", value: here.error / here.value, unit: "%", source: "computed here", formula: `${digits(here.error)} / ${digits(here.value)}` },
      { label: "The first weight shown", value: digits(shown[0].value), formula: ruleOf(shown[0]) },
      { label: "Loss of a whole model", value: measured ? `${measured.kl} nats` : "not measured here", source: measured ? `measured on ${MEASURED_ON}` : null,
        formula: measured ? `${measured.name}: KL divergence at ${measured.bits} bits, all tensors` : null },
    ];
  },

  command({ values: { type } }) {
    return COMMANDS[type] ? `octavo quantize smollm2-135m quantized${COMMANDS[type]} --report` : null;
  },

  draw(canvas, context) {
    const { values: { type } } = context;
    const sample = chosenWeights(context);
    const said = canvas.place("hint", "p");
    said.setAttribute("role", "status");
    said.textContent = sample.isWaiting ? sample.state : `${type}, ${TYPES[type].about}. The weights: ${sample.source}.${FOLDER}`;
    if (sample.isWaiting) return;
    const state = stateOf(sample, context);
    canvas.chart("line", numberLine, lineChart(context, state));
    canvas.chart("errors", curves, errorChart(state));
    canvas.chart("types", curves, typesChart(sample, context));
    canvas.chart("measured", curves, measuredChart(context));
  },
};

const FOLDER = isFolder ? " With a server, they may be any weights of its model." : "";

// What octavo quantizes a model to; the other types it reads.
const COMMANDS = {
  Q8_0: ".gguf --method gguf --type Q8_0",
  Q4_K: ".gguf --method gguf --type Q4_K_M",
  Q4_0: ".gguf --method gguf --type Q4_0",
  fp8: " --method fp8",
  "int4-g64": " --method rtn --bits 4 --group-size 64",
  "int4-g128": " --method rtn --bits 4 --group-size 128",
  "int4-g32-asym": " --method rtn --bits 4 --group-size 32 --asymmetric",
};

/** "0.0163 × −4 + 0.1 = …": what a code stands for. */
function ruleOf({ scale, offset, rounded }) {
  const level = scale === 0 ? "0" : digits((rounded - offset) / scale);
  const text = `${digits(scale)} × ${level}${offset === 0 ? "" : ` ${offset < 0 ? "−" : "+"} ${digits(Math.abs(offset))}`} = ${digits(rounded)}`;
  return text;
}

// -- what is computed ---------------------------------------------------------------------------

let last = { key: null, sample: null, state: null }; // figures and charts ask for the same

/** `{ weights, coded, shown }`: all, what becomes of them, and those that are shown. */
function stateOf(sample, { values: { type, block, outlier } }) {
  const key = `${type} ${block} ${outlier}`;
  if (last.key !== key || last.sample !== sample) {
    const start = (block - 1) * SHOWN;
    const end = start + Math.min(SHOWN, TYPES[type].width);
    const weights = withOutlier(sample.values, start, end, outlier);
    const row = Math.floor(start / sample.columns);
    const coded = roundOneRow(TYPES[type], asItIs(sample).get(type), weights, sample.columns, row);
    last = { key, sample, state: { weights, coded, shown: shownOf(weights, coded, start, end) } };
  }
  return last.state;
}

const rounded = new WeakMap(); // by sample

/** The unchanged sample in each type, by name. */
function asItIs(sample) {
  if (!rounded.has(sample)) {
    const made = Object.entries(TYPES).map(([name, { round }]) => [name, round(sample.values, sample.columns)]);
    rounded.set(sample, new Map(made));
  }
  return rounded.get(sample);
}

function withOutlier(values, start, end, factor) {
  const weights = Float32Array.from(values);
  let largest = start;
  for (let index = start; index < end; index += 1) {
    if (Math.abs(weights[index]) > Math.abs(weights[largest])) largest = index;
  }
  weights[largest] *= factor;
  return weights;
}

function shownOf(weights, { width, codes, scales, offsets, values }, start, end) {
  const group = Math.floor(start / width);
  const [scale, offset] = [scales[group], offsets[group]];
  return Array.from(weights.subarray(start, end), (value, index) =>
    ({ value, rounded: values[start + index], code: codes[start + index], scale, offset }));
}

const points = new WeakMap(); // by sample

/** `[bits, error, name]` of each type. */
function pointsOf(sample) {
  if (!points.has(sample)) {
    points.set(sample, [...asItIs(sample)].map(([name, coded]) => {
      const { error, value } = rootMeanSquares(sample.values, coded.values);
      return [TYPES[name].bits(sample.columns), error / value, name];
    }));
  }
  return points.get(sample);
}

// -- charts -------------------------------------------------------------------------------------

function lineChart({ values: { type } }, { coded, shown }) {
  const [{ scale, offset }] = shown;
  const levels = TYPES[type].levels.map((level) => scale * level + offset).sort((a, b) => a - b);
  const others = coded.width > SHOWN ? `, of ${coded.width},` : "";
  return { title: `${shown.length} weights${others} that share a scale, and what they become`, label: "weight", levels, points: shown };
}

function errorChart({ weights, coded }) {
  const errors = Array.from(weights, (each, index) => coded.values[index] - each);
  const most = errors.reduce((found, each) => Math.max(found, Math.abs(each)), 0) || 1;
  const counts = Array(BINS).fill(0);
  for (const error of errors) counts[Math.min(BINS - 1, Math.floor(((error + most) / (2 * most)) * BINS))] += 1;
  const edge = (bin) => -most + (2 * most * bin) / BINS;
  return {
    title: `Errors of all ${digits(weights.length)} weights`,
    x: { label: "error", min: -most, max: most },
    y: { label: "weights", min: 0 },
    layers: [{ kind: "histogram", label: "weights with this error", colour: 1, points: counts.map((count, bin) => [edge(bin), edge(bin + 1), count]) }],
    height: 200,
  };
}

function typesChart(sample, { values: { type } }) {
  const all = pointsOf(sample);
  return {
    title: "Bits against error, of these weights",
    x: { label: "bits of a weight", min: 3.5, max: 9 },
    y: { label: "error of the weights", unit: "%", scale: "log", min: 0.003, max: 0.3 },
    layers: [
      { kind: "points", label: "other types", colour: 7, points: all.filter(([, , name]) => name !== type) },
      { kind: "points", label: type, colour: 2, points: all.filter(([, , name]) => name === type) },
    ],
    height: 220,
  };
}

function measuredChart({ values: { type } }) {
  const own = measuredOf(type);
  const others = MEASURED.filter((row) => row !== own);
  const layer = (label, colour, rows) => ({ kind: "points", label, colour, points: rows.map(({ name, bits, kl }) => [bits, kl, name]) });
  return {
    title: `Bits against loss, measured on ${MEASURED_ON}`,
    x: { label: "bits of a weight, all tensors", min: 5, max: 10 },
    y: { label: "KL divergence", unit: "nats", scale: "log", min: 0.0003, max: 2 },
    layers: [
      layer("GGUF", 6, others.filter(({ isGguf }) => isGguf)),
      layer("safetensors, with an embedding of 16 bits", 3, others.filter(({ isGguf }) => !isGguf)),
      ...(own ? [layer(`${type}, as above`, 2, [own])] : []),
    ],
    height: 220,
  };
}
