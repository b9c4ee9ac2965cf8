// How many contexts of what length a device holds.

import { curves, stacked } from "../charts/curves.js";
import { digits, format } from "../common/numbers.js";
import { isUniform, sequenceBytes } from "../formulas/index.js";
import { planCommand } from "./picker.js";

const LONGEST = 1048576;

export const kvGrowth = {
  id: "kv-growth",
  title: "KV cache growth",
  sentences: [
    "For each token that it has read or written, a request keeps a key and a value in every layer: this KV cache grows with each step, while the weights stay the same.",
    "The memory that a device has left beside weights and workspace is shared by all requests, so twice the context is half as many requests at once.",
    "Layers with a sliding window stop growing when the window is full; fewer key heads, a latent vector or fewer bits make each token smaller.",
  ],
  readMore: "inference#the-kv-cache",
  needs: { model: true, hardware: true },
  controls: [
    { id: "context", label: "Context of each", kind: "log-range", min: 64, max: LONGEST, value: 8192, unit: "tokens" },
    { id: "users", label: "Requests at once", kind: "log-range", min: 1, max: 1024, value: 16, unit: "requests" },
    { id: "tp", label: "Devices (tensor parallel)", kind: "range", choices: [1, 2, 4, 8], value: 1 },
  ],

  figures(context) {
    const { deployment, values } = context;
    const { memory } = deployment;
    const length = lengthOf(context);
    const each = sequenceBytes(memory, length);
    const fit = deployment.maxConcurrency(length);
    const [least, most] = fitting(memory, each);
    return [
      { label: "One token, in all layers", value: deployment.precision.kv_bytes_per_token, unit: "B", source: "exact" },
      { label: `One request of ${digits(length)} tokens, on a device`, value: each, unit: "iB", source: "exact",
        formula: isUniform(memory) ? `${digits(length)} × ${format(memory.kv_bytes_per_token, "B")}, in whole blocks of ${memory.block_size}` : "the sum over its layers: windows keep no more than a step can see" },
      { label: "Left for the KV cache", value: Math.max(0, Math.trunc(memory.left.value)), unit: "iB", low: Math.max(0, memory.left.low), high: Math.max(0, memory.left.high), source: memory.left.source,
        formula: `${format(memory.usable_bytes, "iB")} − ${format(memory.weights_bytes, "iB")} − ${format(memory.kept_back_bytes, "iB")}` },
      { label: "Requests that fit at once", value: fit, low: least, high: most, source: memory.left.source,
        formula: isUniform(memory) ? `${digits(memory.num_blocks)} blocks / ${digits(Math.ceil(length / memory.block_size))} of each` : `${format(memory.pool_bytes, "iB")} / ${format(each, "iB")}` },
      { label: `${digits(values.users)} requests need`, value: values.users * each, unit: "iB", source: "exact",
        formula: `${digits(values.users)} × ${format(each, "iB")}` },
    ];
  },

  command(context) {
    const { tp, users } = context.values;
    const isl = Math.max(1, lengthOf(context) - 128);
    return planCommand(context, { count: tp, tp: tp > 1 ? tp : null, isl, osl: Math.min(128, lengthOf(context)), concurrency: users, memory: true });
  },

  draw(canvas, context) {
    drawMemory(canvas, context);
    drawCapacity(canvas, context);
  },
};

/** What fills the device as requests come. */
function drawMemory(canvas, context) {
  const { deployment: { memory }, values } = context;
  const each = sequenceBytes(memory, lengthOf(context));
  const most = Math.max(8, 2 * values.users);
  const xs = Array.from({ length: 65 }, (_, index) => (most * index) / 64);
  const flat = (bytes) => xs.map((x) => [x, bytes]);
  canvas.chart("memory", curves, {
    title: "Memory of a device",
    x: { label: "requests at once", min: 0, max: most, isWhole: true },
    y: { label: "memory", unit: "iB", max: Math.max(1.25 * memory.total_bytes, 0) },
    layers: stacked([
      { label: "weights", colour: 1, points: flat(memory.weights_bytes) },
      { label: "workspace", colour: 7, points: flat(memory.kept_back_bytes) },
      { label: "KV cache", colour: 2, points: xs.map((x) => [x, x * each]) },
    ]),
    marks: [
      { x: values.users, label: format(values.users, "requests") },
      { y: memory.usable_bytes, label: "usable memory", isLimit: true },
    ],
  });
}

/** How many fit, by how long they are. */
function drawCapacity(canvas, context) {
  const { deployment, deployment: { memory, model: { max_position: longest } }, values } = context;
  const lengths = [];
  for (let length = 64; length <= Math.min(LONGEST, longest); length *= 2) lengths.push(length, Math.round(length * 1.414));
  const known = lengths.filter((length) => length <= longest);
  const rows = known.map((length) => {
    const ends = fitting(memory, sequenceBytes(memory, length));
    return { length, fit: deployment.maxConcurrency(length), ends };
  }).filter(({ fit }) => fit >= 1);
  canvas.chart("capacity", curves, {
    title: rows.length > 0 ? "Requests that fit at once, by their context" : "Not one request fits, however short",
    x: { label: "context", unit: "tokens", scale: "log", min: 64, max: Math.min(LONGEST, longest) },
    y: { label: "requests at once", scale: "log", min: 1, max: 2 * Math.max(values.users, rows[0]?.fit ?? 1) },
    layers: [
      { kind: "band", label: "likely between", colour: 1, points: rows.map(({ length, ends }) => [length, Math.max(1, ends[0]), Math.max(1, ends[1])]) },
      { kind: "line", label: "fit", colour: 1, points: rows.map(({ length, fit }) => [length, fit]) },
    ],
    marks: [
      { x: lengthOf(context), label: `${digits(lengthOf(context))} tokens` },
      { y: values.users, label: format(values.users, "requests") },
    ],
    height: 220,
  });
}

const lengthOf = ({ deployment, values }) => Math.min(values.context, deployment.model.max_position);

/** Least and most requests, by how sure what is left is; no more than the pool is made for. */
function fitting({ left, pool_bytes: pool }, each) {
  const made = pool < 0.98 * left.value ? pool : Infinity;
  return [left.low, left.high].map((bytes) => Math.max(0, Math.floor(Math.min(bytes, made) / each)));
}
