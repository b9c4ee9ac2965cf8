// Runs of the simulator (octavo/page/serving_runs.py): asked of the server, or looked up among those
// that were recorded.

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
export const SHARES = [0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4];

let turn = Promise.resolve(); // one is asked for after the other

export const USUAL = Object.values(CHOICES).map(([first]) => first).join();

/** What is chosen of `CHOICES`, as a text, and back: null of a text that is none. */
export function toText(chosen) {
  return Object.keys(CHOICES).map((name) => chosen[name]).join();
}

export function fromText(text) {
  const parts = text.split(",");
  const found = Object.entries(CHOICES).map(([name, choices], index) => [name, choices.find((each) => String(each) === parts[index])]);
  return found.some(([, choice]) => choice === undefined) ? null : Object.fromEntries(found);
}

/** All settings: model and hardware as controls have them, and what is `chosen`. */
export function settingsOf({ values, spec }, chosen) {
  const ours = fromText(toText(chosen));
  if (isFolder) return ours;
  const precision = precisionOf(values);
  const weights = precision === "bfloat16" ? { dtype: precision } : { quantization: precision };
  const kv = values.kv === "auto" ? null : values.kv;
  return { model: spec.name, hardware: values.hardware, ...weights, kv_cache_dtype: kv, ...ours };
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
