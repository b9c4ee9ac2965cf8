// One model on several devices: what each does when, and the cost of communication.

import { curves, stacked } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { format } from "../common/numbers.js";
import { planCommand } from "./picker.js";

const SPLITS = [1, 2, 4, 8, 16];

export const devices = {
  id: "many-devices",
  title: "Tensor, pipeline and expert parallelism",
  sentences: [
    "Tensor parallelism (tp) cuts every matrix, so that each device reads a part of the weights: a token takes less time, but twice in each layer all devices add up their parts (all-reduce), which takes microseconds however little it is.",
    "Pipeline parallelism (pp) cuts between layers: there is little communication, a token takes as long as before, and while fewer microbatches are in flight than there are stages, stages wait for each other: those gaps are bubbles.",
    "Expert parallelism (ep) puts whole experts on devices: tokens go to their experts and back (all-to-all), and all wait for the device with the most tokens.",
  ],
  readMore: "inference#parallelism",
  needs: { model: true, hardware: true },
  controls: [
    { id: "tp", label: "Tensor parallel devices (tp)", kind: "range", choices: SPLITS, value: 4 },
    { id: "pp", label: "Pipeline stages (pp)", kind: "range", choices: [1, 2, 3, 4, 6, 8], value: 1 },
    { id: "ep", label: "Expert parallel devices (ep)", kind: "range", choices: SPLITS, value: 1 },
    { id: "dp", label: "Data parallel copies (dp)", kind: "range", choices: SPLITS, value: 1 },
    { id: "lots", label: "Microbatches in flight", kind: "range", min: 1, max: 12, step: 1, value: 4 },
    { id: "streams", label: "Requests of a microbatch", kind: "log-range", min: 1, max: 1024, value: 16 },
    { id: "length", label: "Tokens of each so far", kind: "log-range", min: 16, max: 131072, value: 1000 },
  ],

  layouts: ({ pp }) => SPLITS.map((tp) => ({ tp, pp })),

  figures(context) {
    const { deployment, values: { streams, lots } } = context;
    const { pp } = deployment.parallel;
    const step = stepOf(deployment, context.values);
    const { total, communication } = step;
    const [first, ...more] = step.transfers;
    const said = first ? `${format(first.count)} × ${first.name.split(".")[1].replace(/_/g, "-")} of ${format(first.bytes / first.count, "B")}${more.length ? ` and ${more.map(({ name }) => name).join(", ")}` : ""}` : undefined;
    const { weights_bytes: weightsBytes, usable_bytes: usableBytes, num_blocks: numBlocks } = deployment.memory;
    const bubbles = (pp - 1) / (lots + pp - 1);
    return [
      { label: "A step takes", ...total, unit: "s" },
      { label: "Share of communication", value: communication.value / total.value, unit: "%", source: communication.source, formula: said },
      { label: "Communication", ...communication, unit: "s" },
      { label: "Bubbles, from the first to the last microbatch", value: bubbles, unit: "%", formula: `(${pp} − 1) / (${lots} + ${pp} − 1)` },
      { label: "Weights of each device", value: weightsBytes, unit: "iB", formula: `of ${format(usableBytes, "iB")} that may be used${numBlocks ? "" : ": it does not fit"}` },
      { label: "Tokens of each device", value: (streams * Math.min(lots, pp)) / total.value / deployment.parallel.tp / pp, unit: "tokens/s", source: total.source, formula: `${Math.min(lots, pp)} × ${streams} requests / ${format(total.value, "s")} / ${deployment.parallel.tp * pp} devices` },
    ];
  },

  command(context) {
    const { tp, pp, ep, dp, streams, lots, length } = context.values;
    const given = (degree) => (degree > 1 ? degree : null);
    const flags = { count: tp * pp * dp, tp, pp: given(pp), ep: given(ep), dp: given(dp), isl: length, osl: 128 };
    return planCommand(context, { ...flags, concurrency: streams * dp * Math.min(lots, pp), roofline: true });
  },

  draw(canvas, context) {
    const { deployment, values } = context;
    canvas.chart("timeline", lanes, timeline(stepOf(deployment, values), deployment.parallel.pp, values.lots));
    canvas.chart("tensors", curves, byTensors(context));
  },
};

function stepOf(deployment, { streams, length }) {
  return deployment.step([[length - 1, 1, 1, 0, streams]]);
}

// -- what each device does when ----------------------------------------------------------------

/** Rows are stages. A microbatch passes one stage after the other, and the next follows at once. */
function timeline(step, pp, lots) {
  const parts = partsOf(step, pp);
  const own = parts.reduce((sum, { size }) => sum + size, 0);
  const rows = Array.from({ length: pp }, (_, stage) => ({
    label: pp === 1 ? "each device" : `stage ${stage + 1}`,
    blocks: Array.from({ length: pp === 1 ? 1 : lots }, (_, lot) => blocksOf(parts, (stage + lot) * own, lot, pp)).flat(),
  }));
  const title = pp === 1 ? "A step, on each device" : `${lots} microbatches through ${pp} stages: a gap is a bubble`;
  return { title, isTime: true, x: { label: "time", unit: "s", min: 0 }, rows };
}

function blocksOf(parts, start, lot, pp) {
  let end = start;
  return parts.filter(({ size }) => size > 0).map(({ label, size, colour }) => {
    const text = pp > 1 && colour === 1 ? `batch ${lot + 1}` : label;
    return { from: end, to: (end += size), label, colour, text };
  });
}

/** Of a stage: what is computed, by what it is, and what is said. */
function partsOf({ ops, transfers, overhead }, pp) {
  const isOf = (op, kind) => op.name.startsWith(kind);
  const seconds = (belongs) => ops.filter(belongs).reduce((sum, op) => sum + op.seconds, 0);
  const said = (name) => (transfers.find((each) => each.name === name)?.seconds ?? 0) / pp;
  const isOther = (op) => !["attention", "mlp", "experts", "shared", "router"].some((kind) => isOf(op, kind));
  const parts = [
    { label: "attention", size: seconds((op) => isOf(op, "attention")), colour: 1 },
    { label: "MLP", size: seconds((op) => isOf(op, "mlp") || isOf(op, "shared")), colour: 6 },
    { label: "experts", size: seconds((op) => isOf(op, "experts") || isOf(op, "router")), colour: 8 },
    { label: "all-to-all", size: said("experts.all_to_all"), colour: 3 },
    { label: "all-reduce", size: said("layers.all_reduce") + said("embedding.all_reduce"), colour: 2 },
    { label: "exchange", size: said("layers.gather"), colour: 2 },
    { label: "head, norms", size: seconds(isOther), colour: 4 },
    { label: "all-gather", size: said("experts.all_gather") + said("head.all_gather") + said("head.gather"), colour: 5 },
    { label: "send", size: said("stages.send"), colour: 3 },
  ];
  return pp > 1 ? parts : [...parts, { label: "once a step", size: overhead.value, colour: 7 }];
}

// -- more and more devices ---------------------------------------------------------------------

function byTensors({ laidOut, values }) {
  const found = SPLITS.map((tp) => ({ tp, deployment: laidOut({ tp, pp: values.pp }) }))
    .filter(({ deployment }) => deployment !== null)
    .map(({ tp, deployment }) => ({ tp, step: stepOf(deployment, values) }));
  const part = (label, colour, of) => ({ label, colour, points: found.map(({ tp, step }) => [tp, of(step)]) });
  return {
    title: "A step by how many devices have a part of each matrix",
    x: { label: "devices (tp)", scale: "log", min: 1, max: 16 },
    y: { label: "time", unit: "s", min: 0 },
    layers: stacked([
      part("reading and computing", 1, (step) => step.compute.value),
      part("communication", 2, (step) => step.communication.value),
      part("once a step", 7, (step) => step.overhead.value),
    ]),
    marks: [{ x: values.tp, label: `tp = ${values.tp}` }],
    height: 220,
  };
}
