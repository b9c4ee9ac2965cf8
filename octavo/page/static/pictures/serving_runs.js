// Runs of the simulator (octavo/page/serving_runs.py): asked of the server, or looked up among those
// that were recorded.

import { isFolder } from "../common/places.js";
import { answerOf } from "./answers.js";
import { questionOf } from "./deployments.js";

export const RECORDED = "recorded/serving.json";
/** What is recorded, the usual first; as in serving_runs.py, which a test holds against this. */
export const CHOICES = {
  batching: ["continuous", "static"],
  prefix_caching: [true, false],
  step_tokens: [2048, 512, 8192],
  max_num_seqs: [32, 8, 128],
  replicas: [1, 2, 4],
};
/** What numbers a server simulates. */
export const BOUNDS = {
  step_tokens: [64, 32768],
  max_num_seqs: [1, 512],
  replicas: [1, 4],
};
export const SHARES = [0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4];

export const USUAL = Object.values(CHOICES).map(([first]) => first).join();

/** What is chosen, as a text, and back: null of a text that is none. */
export function toText(chosen) {
  return Object.keys(CHOICES).map((name) => chosen[name]).join();
}

export function fromText(text) {
  const parts = text.split(",");
  const found = Object.keys(CHOICES).map((name, index) => [name, choiceOf(name, parts[index])]);
  return found.some(([, choice]) => choice === undefined) ? null : Object.fromEntries(found);
}

function choiceOf(name, text) {
  const [least, most] = (!isFolder && BOUNDS[name]) || [1, 0];
  const number = Number(text);
  if (Number.isInteger(number) && number >= least && number <= most) return number;
  return CHOICES[name].find((each) => String(each) === text);
}

/** All settings: model and hardware as a server is told of them, and what is `chosen`. */
export function settingsOf(context, chosen) {
  const ours = fromText(toText(chosen));
  if (isFolder) return ours;
  const choice = questionOf(context);
  const weights = choice.quantization === "bfloat16" ? { quantization: undefined, dtype: "bfloat16" } : {};
  return { ...choice, ...weights, ...ours };
}

/** `{ runs, usual_rate, made, settings, isRecorded }` of settings, or why there are none: `{ state }`,
 * in words; both where recorded runs are shown until a server has answered.
 * `topic`: "these", or "kept", which may be asked for at the same time. */
export function runsOf(topic, settings, context) {
  const found = recorded(settings, context.world);
  if (isFolder) return found ?? { state: "Not recorded: in this folder, one setting at a time differs from the usual. Set the others back, or simulate it yourself: see the command." };
  const question = { path: "octavo/simulate", body: settings, waiting: "The server simulates it: some seconds.", failed: "The server did not simulate it" };
  const { answer, state } = answerOf(topic, question, context);
  return answer ?? { ...found, state };
}

/** In a folder, model and hardware are those of the record. */
function recorded(settings, { files }) {
  const names = isFolder ? Object.keys(CHOICES) : [...Object.keys(CHOICES), "model", "config", "hardware", "dtype", "quantization", "kv_cache_dtype"];
  const found = files.get(RECORDED).find((each) => names.every((name) => (each.settings[name] ?? null) === (settings[name] ?? null)));
  return found && { ...found, isRecorded: true };
}
