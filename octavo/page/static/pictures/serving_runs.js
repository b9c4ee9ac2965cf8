// Runs of the simulator (octavo/page/serving_runs.py): asked of the server, or looked up among those
// that were recorded; and what they come to.

import { askServer, isFolder } from "../common/places.js";
import { precisionOf } from "./picker.js";

export const RECORDED = "recorded/serving.json";
/** What may be chosen, the usual first; as in serving_runs.py, which a test holds against this. */
export const CHOICES = {
  batching: ["continuous", "static"],
  prefix_caching: [true, false],
  step_tokens: [2048, 512, 8192],
  max_num_seqs: [32, 8, 128],
  replicas: [1, 2, 4],
};
export const SHARES = [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4];
const ENOUGH = 0.9; // of the requests within the limits: what a rate is called good for

let turn = Promise.resolve(); // one is asked for after the other

/** The settings that controls stand for; `isUsual`: but for model and hardware, the usual ones. */
export function settingsOf({ values, spec }, isUsual = false) {
  const chosen = Object.entries(CHOICES).map(([name, choices]) => [name, isUsual ? choices[0] : values[name]]);
  if (isFolder) return Object.fromEntries(chosen);
  const precision = precisionOf(values);
  const weights = precision === "bfloat16" ? { dtype: precision } : { quantization: precision };
  const kv = values.kv === "auto" ? null : values.kv;
  return { model: spec.name, hardware: values.hardware, ...weights, kv_cache_dtype: kv, ...Object.fromEntries(chosen) };
}

/** `{ runs, usual_rate, made, settings }` of settings, or why there are none: `{ state }`, in words. */
export function runsOf(settings, { world, redraw }) {
  if (isFolder) return recorded(settings, world) ?? { state: "Not recorded: in this folder, one setting at a time differs from the usual. Set the others back, or simulate it yourself: see the command." };
  const key = `simulation ${JSON.stringify(settings)}`;
  if (!world.files.has(key)) {
    const note = (answer) => (world.files.set(key, answer), redraw());
    world.files.set(key, { state: "The server simulates it: some seconds." });
    turn = turn.then(() => askServer("octavo/simulate", settings))
      .then(note, ({ message }) => note({ state: `The server did not simulate it: ${message}` }));
  }
  return world.files.get(key);
}

function recorded(settings, { files }) {
  return files.get(RECORDED).find((each) => Object.keys(CHOICES).every((name) => each.settings[name] === settings[name]));
}

/** `[value, share of the requests that had at most that]`, of those that have it. */
export function distribution(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.map((value, index) => [value, (index + 1) / sorted.length]);
}

/** The value that a share of the requests had at most. */
export function quantile(values, share) {
  return distribution(values).find(([, reached]) => reached >= share - 1e-9)?.[0] ?? null;
}

/** What a run is good for: requests within both limits, their share and how many in a second. */
export function goodput({ requests, seconds }, { ttft, tpot }) {
  const good = requests.filter(([first, next]) => first <= ttft && (next ?? 0) <= tpot).length;
  return { good, share: good / requests.length, rate: good / seconds };
}

/** The run at the highest rate up to which enough requests are within the limits, or undefined. */
export function knee(runs, limits) {
  const first = runs.findIndex((run) => goodput(run, limits).share < ENOUGH);
  return first === -1 ? runs.at(-1) : runs[first - 1];
}
