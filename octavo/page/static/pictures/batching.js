// The same requests in static batches and in continuous ones, as octavo's own scheduler served them.

import { curves } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { format } from "../common/numbers.js";
import { batchSizes, outcome, requestRows, slotRows, until } from "./replay.js";

const PARTS = 200; // of the longer run, that the slider moves by
const NAMES = { static: "Static batches", continuous: "Continuous batching" };

export const batching = {
  id: "batching",
  title: "Continuous batching",
  sentences: [
    "A static batch runs until its last answer is done: requests that end early leave empty slots, and new ones wait for the longest answer of the batch.",
    "Continuous batching forms the batch anew for each step: finished requests leave, waiting ones join, and the prompt of one is computed beside the next tokens of the others.",
    "The gain depends on how different the answers are, and on when requests come: where all are alike and come at once, both do the same.",
  ],
  readMore: "inference#continuous-batching",
  needs: { file: "batching.json" },
  controls: [
    { id: "moment", label: "Time", kind: "step", min: 0, max: PARTS, value: PARTS, beat: 60 },
    { id: "lengths", label: "Lengths of prompts and answers", kind: "choice", choices: [["alike", "all alike"], ["mixed", "mixed"], ["very mixed", "very mixed"]], value: "mixed" },
    { id: "arrivals", label: "Requests come", kind: "choice", choices: [["at once", "all at once"], ["one by one", "one by one, 60 a second"]], value: "at once" },
    { id: "slots", label: "Slots of a batch", kind: "range", choices: [4, 8], value: 4 },
    { id: "rows", label: "A row for each", kind: "choice", choices: [["request", "request"], ["slot", "slot of the batch"]], value: "request" },
  ],

  figures(context) {
    const { recording, found } = caseOf(context);
    const [fixed, free] = ["static", "continuous"].map((name) => outcome(found, found.runs[name]));
    const source = `simulated by octavo ${recording.made.version}, ${recording.made.date}`;
    const seconds = (value) => format(value, "s");
    const used = ({ used, all }) => `${seconds(used)} of ${seconds(all)}`;
    return [
      { label: "All answered, static", value: fixed.seconds, unit: "s", source },
      { label: "All answered, continuous", value: free.seconds, unit: "s", source, formula: `${format(fixed.seconds / free.seconds, "×")} as fast` },
      { label: "Mean time to the first token, static", value: fixed.ttft, unit: "s", source, formula: `the slowest: ${seconds(fixed.slowest)}` },
      { label: "Mean time to the first token, continuous", value: free.ttft, unit: "s", source, formula: `the slowest: ${seconds(free.slowest)}` },
      { label: "Slots in use, static", value: fixed.used / fixed.all, unit: "%", source, formula: used(fixed) },
      { label: "Slots in use, continuous", value: free.used / free.all, unit: "%", source, formula: used(free) },
      { label: "Slots empty while requests wait, static", value: fixed.wasted, unit: "s", source, formula: `continuous: ${seconds(free.wasted)}` },
    ];
  },

  draw(canvas, context) {
    const { recording, found, moment, end } = caseOf(context);
    canvas.place("phase", "p").textContent =
      `${found.requests.length} requests for ${recording.model} on ${recording.hardware}, after ${format(moment, "s")}: each has its number, `
      + "and the tokens of its prompt and answer. Each step is one that octavo’s scheduler made; what steps take is simulated.";
    for (const name of Object.keys(NAMES)) {
      canvas.chart(name, lanes, lanesChart(context.values.rows, found, name, moment, end));
    }
    canvas.chart("sizes", curves, sizesChart(found, moment, end));
  },
};

function caseOf({ values, world }) {
  const recording = world.files.get("batching.json");
  const found = recording.cases.find((each) =>
    ["lengths", "slots", "arrivals"].every((key) => each[key] === values[key]));
  const end = Math.max(...Object.values(found.runs).map(({ seconds }) => seconds));
  return { recording, found, end, moment: (end * values.moment) / PARTS };
}

function lanesChart(rows, found, name, moment, end) {
  const run = found.runs[name];
  return {
    title: NAMES[name],
    x: { label: "time", unit: "s", min: 0, max: end },
    rows: rows === "slot" ? rowsOfSlots(found, run, moment) : rowsOfRequests(found, run, moment),
    marks: [{ x: Math.min(moment, run.seconds), label: moment < run.seconds ? format(moment, "s") : `all answered: ${format(run.seconds, "s")}` }],
    isTime: true,
  };
}

function rowsOfRequests(found, run, moment) {
  return requestRows(found, run).map((blocks, number) => {
    const [, prompt, answer] = found.requests[number];
    const label = `${number + 1}: ${prompt} + ${answer}`;
    return { label, blocks: until(blocks, moment) };
  });
}

function rowsOfSlots(found, run, moment) {
  return slotRows(found, run).map((blocks, slot) => ({
    label: `slot ${slot + 1}`,
    blocks: until(blocks, moment).map(({ number, ...block }) => (number === null ? block : { ...block, text: String(number + 1) })),
  }));
}

function sizesChart(found, moment, end) {
  const layer = (name, colour) => ({
    kind: "steps", label: NAMES[name], colour,
    points: batchSizes(found.runs[name]).filter(([at]) => at <= moment),
  });
  return {
    title: "Requests in the batch",
    x: { label: "time", unit: "s", min: 0, max: end },
    y: { label: "requests", min: 0, max: found.slots * 1.1, isWhole: true },
    layers: [layer("static", 2), layer("continuous", 1)],
    marks: [{ y: found.slots, label: "slots" }],
    height: 200,
  };
}
