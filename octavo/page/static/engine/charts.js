// What the charts of the dashboard show of frames: specs for `charts/`.

import { sideBySide } from "../charts/lanes.js";
import { FRAME_SECONDS, requestOf } from "./ring.js";

const SMOOTHED = 4; // frames
const MOST_LANES = 12;
const MOST_COLUMNS = 24;
// What a request may do in a step.
const PROMPT = { label: "chunk of a prompt", colour: 1 };
const DECODE = { label: "decode", colour: 2 };
const ACCEPTED = { label: "draft tokens, some accepted", colour: 3 };
const REJECTED = { label: "draft tokens, all rejected", colour: 7 };
const PREEMPTED = { label: "preempted", colour: 5 };

/** Over time: seconds before the frame that is shown. */
const timeline = (frames, end, value) => frames.map((frame, index) => [frame.at - end, value(frame, index)]);
const TIME = { label: "before now", unit: "s", scale: "linear", max: 0 };

export function throughput(frames, end) {
  const rate = (name) => timeline(frames, end, (_, index) => {
    const few = frames.slice(Math.max(0, index + 1 - SMOOTHED), index + 1);
    return few.reduce((sum, frame) => sum + frame[name], 0) / (few.length * FRAME_SECONDS);
  });
  return {
    title: "Tokens computed a second", height: 200, x: TIME,
    y: { label: "tokens/s", unit: "", scale: "linear", min: 0 },
    layers: [
      { kind: "line", label: "of prompts (in)", colour: 1, points: rate("tokensIn") },
      { kind: "line", label: "of answers (out)", colour: 2, points: rate("tokensOut") },
    ],
  };
}

export function queue(frames, end) {
  return {
    title: "Requests", height: 200, x: TIME,
    y: { label: "requests", unit: "", scale: "linear", min: 0, isWhole: true },
    layers: [
      { kind: "steps", label: "running", colour: 1, points: timeline(frames, end, ({ last }) => last?.num_running ?? 0) },
      { kind: "steps", label: "waiting", colour: 5, points: timeline(frames, end, ({ last }) => last?.num_waiting ?? 0) },
    ],
  };
}

/** Each of the latest requests has a lane, each of the last steps a column. */
export function batches(looks) {
  const lanes = new Map();
  looks.slice(-MOST_COLUMNS).forEach(({ rows, preempted }, column) => {
    for (const row of rows) add(lanes, row[0], blockOf(row, column));
    for (const id of preempted) {
      add(lanes, id, { ...PREEMPTED, from: column, to: column + 1, text: "!" });
    }
  });
  const rows = [...lanes].slice(-MOST_LANES).map(([id, blocks]) => ({ label: shortened(id), note: "", blocks }));
  if (rows.length === 0) rows.push({ label: "no step yet", note: "", blocks: [] });
  return {
    title: `The batches of the last steps: tokens of ${rows.length < MOST_LANES ? "each request" : `the ${MOST_LANES} latest requests`}`,
    x: { label: "steps, the latest at the end", unit: "", min: 0, isWhole: true, max: Math.max(1, Math.min(MOST_COLUMNS, looks.length)) },
    rows, kinds: [PROMPT, DECODE, ACCEPTED, REJECTED, PREEMPTED], isTime: true,
  };
}

function add(lanes, id, block) {
  if (!lanes.has(id)) lanes.set(id, []);
  lanes.get(id).push(block);
}

function blockOf([, start, computed, came, drafted, accepted], column) {
  const place = { from: column, to: column + 0.94 };
  if (drafted > 0) return { ...place, ...(accepted > 0 ? ACCEPTED : REJECTED), text: `${accepted}/${drafted}` };
  if (computed > 1 || came === 0) return { ...place, ...PROMPT, text: String(computed) };
  return { ...place, ...DECODE, text: came > 1 ? String(came) : "" };
}

/** The last letters tell requests apart. */
function shortened(id) {
  const name = requestOf(id);
  return name.length > 10 ? `…${name.slice(-8)}` : name;
}

/** Where steps lie below the roof: by how much they compute for what they move. */
export function roofline(steps) {
  const points = steps
    .filter((step) => step.memory_seconds > 0 && step.compute_seconds > 0 && step.seconds > 0)
    .map((step) => [step.compute_seconds / step.memory_seconds, step.compute_seconds / step.seconds]);
  const [least, most] = [Math.min(0.1, ...points.map(([x]) => x)), Math.max(10, ...points.map(([x]) => x))];
  return {
    title: "Roofline of the last steps", height: 240,
    x: { label: "arithmetic intensity, 1 is the ridge point", unit: "×", scale: "log", min: least, max: most },
    y: { label: "share of peak compute", unit: "%", scale: "log" },
    layers: [
      { kind: "line", label: "roofline of the device", colour: 7, points: [[least, least], [1, 1], [most, 1]] },
      { kind: "points", label: "a step", colour: 2, points },
    ],
    marks: [],
  };
}

export function memory({ total_bytes: total, kv_bytes: kv, lines }) {
  const parts = lines.filter(({ name }) => name !== "KV cache");
  const blocks = [...parts.map(({ name, bytes }) => ({ size: bytes, label: name })), { size: kv, label: "KV cache" }];
  const taken = blocks.reduce((sum, { size }) => sum + size, 0);
  if (total > taken) blocks.push({ size: total - taken, label: "not octavo's", isFaint: true });
  return {
    title: "Memory of the device",
    x: { label: "memory", unit: "iB", min: 0, max: Math.max(total ?? 0, taken) },
    rows: [{ label: "", note: "", blocks: sideBySide(blocks.map((each, index) => ({ ...each, colour: each.isFaint ? 7 : (index % 6) + 1 }))) }],
  };
}
