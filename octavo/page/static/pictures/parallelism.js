// One model on several devices, as octavo's own scheduler serves it: stages, ranks and experts in time.

import { curves } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { format } from "../common/numbers.js";
import { loadSteps, rankRows, sharesOf } from "./layout_lanes.js";

const WINDOWS = [6, 12, 24, 48]; // steps that are shown
const PARTS = 100; // of the run, that the slider moves by
const LAYOUTS = [
  ["pp 2", "pipeline of 2 stages"], ["pp 4", "pipeline of 4 stages"],
  ["tp 2", "2 ranks share each layer"], ["tp 4", "4 ranks share each layer"],
  ["ep 4", "4 ranks share the experts, too"],
];
const LOADS = [
  ["both", "prompts and answers"], ["prompts", "prompts, short answers"],
  ["answers", "short prompts, answers"], ["alone", "one request alone"],
];
const SAID = {
  pipeline: "Each stage has a part of the layers, and computes one step at a time; hidden states go to the next stage.",
  tensor: "All ranks compute each layer of each step together, and exchange results several times a layer; the exchanges of a step are drawn together, at its end.",
  experts: "All ranks compute each step together, and each has whole experts: what they wait for the busiest, and the exchanges, are drawn together at the end of a step. Which experts tokens use is drawn at random, each as likely.",
};

export const parallelism = {
  id: "parallelism",
  title: "Several devices in time",
  sentences: [
    "A pipeline gives each device some of the layers: steps follow each other from stage to stage, and a stage without a step waits, a bubble.",
    "Tensor parallelism gives each device a part of every layer: a step is over sooner, but results are exchanged in each layer, and no device computes meanwhile.",
    "Experts on different devices are as fast as the busiest of them, so that an uneven load costs all of them.",
  ],
  readMore: "parallelism",
  needs: { file: "layouts.json" },
  controls: [
    { id: "layout", label: "Layout", kind: "choice", choices: LAYOUTS, value: "pp 4" },
    { id: "load", label: "Requests", kind: "choice", choices: LOADS, value: "both" },
    { id: "window", label: "Steps shown", kind: "range", choices: WINDOWS, value: 12 },
    { id: "moment", label: "From", kind: "range", min: 0, max: PARTS, step: 1, value: 0, unit: "%" },
  ],

  figures(context) {
    const { recording, run } = runOf(context);
    const { idle, exchange, busiest } = sharesOf(run);
    const source = `simulated by octavo ${recording.made.version}, ${recording.made.date}`;
    const faster = run.alone / run.seconds;
    const found = [
      { label: `All answered, ${run.ranks} devices`, value: run.seconds, unit: "s", source, formula: `one device: ${format(run.alone, "s")}` },
      { label: "As fast as one device", value: faster, unit: "×", source, formula: `${format(faster / run.ranks, "%")} of ${run.ranks}` },
    ];
    if (idle !== null) {
      const label = run.kind === "pipeline" ? "Bubbles, of all stages’ time" : "Waiting for the busiest rank";
      found.push({ label, value: idle, unit: "%", source });
    }
    if (exchange !== null) found.push({ label: "Exchanges, of the time", value: exchange, unit: "%", source });
    if (busiest !== null) found.push({ label: "Uses on the busiest rank, to the mean", value: busiest, unit: "×", source });
    return found;
  },

  draw(canvas, context) {
    const { run, from, to } = runOf(context);
    const [count, prompt, answer] = run.requests;
    canvas.place("phase", "p").textContent =
      `${count === 1 ? "One request" : `${count} requests`} of ${prompt} + ${answer} tokens for ${run.model} on ${run.ranks} × ${run.hardware}, `
      + `from ${format(from, "s")}. ${SAID[run.kind]} Numbers are those of steps.`;
    canvas.chart("lanes", lanes, {
      title: run.kind === "pipeline" ? "What each stage computes" : "What each rank does",
      x: { label: "time", unit: "s", min: from, max: to },
      rows: rankRows(run, from, to),
      isTime: true,
    });
    canvas.chart("sizes", curves, run.kind === "experts" ? loadsChart(run, from, to) : sizesChart(run, from, to));
  },
};

function runOf({ values, world }) {
  const recording = world.files.get("layouts.json");
  const run = recording.cases.find(({ layout, load }) => layout === values.layout && load === values.load);
  const first = Math.min(run.steps.length - 1, Math.floor((run.steps.length * values.moment) / PARTS));
  const last = Math.min(run.steps.length, first + values.window) - 1;
  return { recording, run, from: run.steps[first][0], to: run.steps[last][1] };
}

function sizesChart(run, from, to) {
  const shown = run.steps.filter(([begun, ended]) => begun < to && ended > from);
  const points = (read) => shown.map(([begun, , prompts, decoding]) => [Math.max(begun, from), read(prompts, decoding)]);
  return {
    title: "Tokens of a step, when it begins",
    x: { label: "time", unit: "s", min: from, max: to },
    y: { label: "tokens", min: 0, isWhole: true },
    layers: [
      { kind: "steps", label: "of prompts", colour: 1, points: points((prompts) => prompts) },
      { kind: "steps", label: "of answers", colour: 2, points: points((prompts, decoding) => decoding) },
    ],
    height: 200,
  };
}

function loadsChart(run, from, to) {
  const all = loadSteps(run, from, to);
  return {
    title: "Uses of experts on each rank, to the mean",
    x: { label: "time", unit: "s", min: from, max: to },
    y: { label: "of the mean", min: 0 },
    layers: all.map((points, rank) => ({ kind: "line", label: `rank ${rank + 1}`, colour: rank + 1, points })),
    marks: [{ y: 1, label: "even" }],
    height: 200,
  };
}
