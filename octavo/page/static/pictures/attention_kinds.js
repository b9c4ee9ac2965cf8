// What five kinds of attention keep of the same context.

import { curves } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { element } from "../common/dom.js";
import { digits, format } from "../common/numbers.js";

const TYPES = [["bfloat16", "16 bits"], ["fp8", "fp8"], ["int8", "int8"], ["int4", "int4"]];

export const attentionKinds = {
  id: "attention-kinds",
  title: "MHA, GQA, MQA, MLA and sliding windows",
  sentences: [
    "Every query head attends to keys and values: in multi-head attention each has its own, in grouped-query attention several share one, in multi-query attention all do.",
    "Multi-head latent attention keeps one short vector for all heads, and beside it a key that carries the position (RoPE); the heads’ own keys and values are products of it, which decoding folds into queries and outputs.",
    "A sliding window keeps the last tokens only, so that its cache stops growing: it is cheaper only for contexts longer than the window.",
  ],
  readMore: "inference#grouped-query-and-latent-attention",
  needs: {},
  controls: [
    { id: "context", label: "Context", kind: "log-range", min: 128, max: 1048576, value: 32768, unit: "tokens" },
    { id: "layers", label: "Layers", kind: "range", min: 8, max: 128, value: 32 },
    { id: "heads", label: "Query heads", kind: "range", choices: [8, 16, 32, 64, 128], value: 32 },
    { id: "shared", label: "Query heads that share, in GQA", kind: "range", choices: [2, 4, 8, 16], value: 4 },
    { id: "dim", label: "Size of a head", kind: "range", choices: [64, 96, 128, 192, 256], value: 128 },
    { id: "latent", label: "Latent vector of MLA", kind: "range", choices: [128, 256, 512, 768, 1024], value: 512 },
    { id: "rope", label: "RoPE key of MLA", kind: "range", choices: [32, 64, 128], value: 64 },
    { id: "window", label: "Sliding window", kind: "log-range", min: 128, max: 32768, value: 1024, unit: "tokens" },
    { id: "full", label: "Layers without a sliding window", kind: "range", choices: [0, 1 / 8, 1 / 6, 1 / 4, 1 / 2], value: 1 / 6, unit: "%" },
    { id: "type", label: "KV cache type", kind: "choice", choices: TYPES, value: "bfloat16" },
  ],

  figures(context) {
    const { values } = context;
    const kinds = kindsOf(context);
    const [mha] = kinds;
    return kinds.map((kind) => ({
      label: `${kind.name}, ${digits(values.context)} tokens`,
      value: kind.bytes(values.context),
      unit: "iB",
      source: kind === mha ? "exact" : `${digits(mha.bytes(values.context) / kind.bytes(values.context))} times less than MHA`,
      formula: kind.formula(values.context),
    }));
  },

  draw(canvas, context) {
    const { values } = context;
    const kinds = kindsOf(context);
    showHeads(canvas.place("heads"), kinds);
    canvas.chart("bytes", lanes, {
      title: `KV cache of a request of ${digits(values.context)} tokens`,
      x: { label: "memory", unit: "iB", min: 0, max: 1.2 * Math.max(...kinds.map((kind) => kind.bytes(values.context))) },
      rows: kinds.map((kind) => ({ label: kind.name, note: format(kind.bytes(values.context), "iB"), blocks: kind.blocks(values.context) })),
    });
    const lengths = [];
    for (let length = 128; length <= 1048576; length *= 2) lengths.push(length);
    canvas.chart("growth", curves, {
      title: "How it grows",
      x: { label: "context", unit: "tokens", scale: "log", min: 128, max: 1048576 },
      y: { label: "memory", unit: "iB", scale: "log" },
      layers: kinds.map((kind, index) => ({
        kind: index === 4 ? "dashed" : "line", label: kind.name, colour: index + 1, points: lengths.map((length) => [length, kind.bytes(length)]),
      })),
      marks: [{ x: values.context, label: `${digits(values.context)} tokens` }],
    });
  },
};

/** `{ name, kvHeads, bytes(length), blocks(length), formula(length) }` of each kind. */
function kindsOf({ values, world }) {
  const { heads, dim, layers } = values;
  const kv = world.kvTypes[values.type];
  const tokenBytes = (kvHeads, keyDim, valueDim) => kvHeads * (vectorBytes(kv.keys, keyDim) + vectorBytes(kv.values, valueDim));
  const grouped = Math.max(1, heads / values.shared);
  const plain = (name, kvHeads) => everyLayer(name, kvHeads, tokenBytes(kvHeads, dim, dim), layers,
    `${layers} layers × 2 × ${kvHeads} ${kvHeads === 1 ? "head" : "heads"} × ${dim}`);
  const mlaToken = tokenBytes(1, values.latent, values.rope); // the same for all heads
  return [
    plain("MHA", heads),
    plain("GQA", grouped),
    plain("MQA", 1),
    {
      ...everyLayer("MLA", 0, mlaToken, layers, `${layers} layers × (${values.latent} + ${values.rope})`),
      blocks(length) {
        const bytes = layers * length * mlaToken;
        const split = (bytes * values.latent) / (values.latent + values.rope);
        return [{ from: 0, to: split, label: "latent", colour: 3 }, { from: split, to: bytes, label: "RoPE key", colour: 4 }];
      },
    },
    windowed(values, grouped, tokenBytes(grouped, dim, dim)),
  ];
}

/** Of a cached vector: its numbers, and what each group of them has beside. */
function vectorBytes({ bits, group, group_bytes: groupBytes }, dim) {
  return (dim * bits) / 8 + Math.ceil(dim / (group || dim)) * groupBytes;
}

function everyLayer(name, kvHeads, tokenBytes, layers, shape) {
  const bytes = (length) => layers * length * tokenBytes;
  return {
    name, kvHeads, bytes,
    blocks: (length) => [
      { from: 0, to: bytes(length) / 2, label: "keys", colour: 1 },
      { from: bytes(length) / 2, to: bytes(length), label: "values", colour: 2 },
    ],
    formula: (length) => `${shape} values × ${digits(length)} tokens = ${format(layers * tokenBytes, "B")} a token`,
  };
}

/** Grouped queries, most layers of which see a window only. */
function windowed({ layers, full, window }, kvHeads, tokenBytes) {
  const fullLayers = Math.round(layers * full);
  const kept = (length) => fullLayers * length + (layers - fullLayers) * Math.min(length, window);
  const bytes = (length) => kept(length) * tokenBytes;
  return {
    name: "Window", kvHeads, bytes,
    blocks: (length) => [
      { from: 0, to: bytes(length) / 2, label: "keys", colour: 1 },
      { from: bytes(length) / 2, to: bytes(length), label: "values", colour: 2 },
    ],
    formula: (length) => `(${fullLayers} layers × ${digits(length)} + ${layers - fullLayers} × ${digits(Math.min(length, window))}) tokens × ${format(tokenBytes, "B")}`,
  };
}

/** The query heads of each kind, coloured by the key heads that they attend to. */
function showHeads(place, kinds) {
  const counts = kinds.map(({ kvHeads }) => kvHeads).join();
  if (place.dataset.counts === counts) return; // hundreds of squares, which most sliders do not change
  place.dataset.counts = counts;
  const heads = kinds[0].kvHeads;
  place.replaceChildren(...kinds.map(({ name, kvHeads }) => {
    const group = (head) => (kvHeads === 0 ? 3 : 1 + (Math.floor((head * kvHeads) / heads) % 8));
    const squares = Array.from({ length: heads }, (_, head) => element("i", { class: `c${kvHeads === 0 ? 3 : group(head)}` }));
    const own = kvHeads === 0 ? "1 latent vector for all" : `${kvHeads} ${kvHeads === 1 ? "key head" : "key heads"} for ${heads}`;
    return element("div", { class: "head-card" }, element("strong", {}, name), element("span", { class: "head-squares", "aria-hidden": "true" }, squares), element("span", { class: "hint" }, own));
  }));
}
