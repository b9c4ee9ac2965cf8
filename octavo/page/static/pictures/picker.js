// The controls of pictures that are about a model on a machine, and the deployment they ask for.

import { element } from "../common/dom.js";
import { AS_PUBLISHED, deploymentsOf, limitsOf, precisionOf } from "./deployments.js";
import { tensorControls } from "./tensors.js";
import { THIS_SERVER } from "./world.js";

const PRECISIONS = [
  [AS_PUBLISHED, "as published"],
  ...["bfloat16", "fp8", "int8", "int4", "mxfp4", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "Q2_K"].map((name) => [name, name]),
];
const KV_TYPES = [["auto", "16 bits"], ["fp8", "fp8"], ["int8", "int8"]];

/** Controls for what a picture `needs`, `{ model, hardware, tensors }`, and its own ones. */
export function declaredControls({ needs = {}, controls }, world) {
  return [...pickerControls(needs, world), ...controls].map((control) => recordedOnly(control, world));
}

function pickerControls(needs, world) {
  const found = [];
  if (needs.model) {
    found.push({ id: "model", label: "Model", kind: "choice", choices: choicesOf(world.models), value: world.usualModel });
    found.push({ id: "precision", label: "Weights", kind: "choice", choices: PRECISIONS, value: AS_PUBLISHED });
    found.push({ id: "kv", label: "KV cache type", kind: "choice", choices: KV_TYPES, value: "auto" });
  }
  if (needs.hardware) {
    found.push({ id: "hardware", label: "Hardware", kind: "choice", choices: choicesOf(world.devices), value: world.usualDevice });
  }
  if (needs.tensors && world.tensors.length > 0) found.push(...tensorControls(world.tensors));
  return found;
}

/** A folder offers what is recorded; the usual values are among that. */
function recordedOnly(control, { recording }) {
  const found = recording?.choices[control.id];
  if (!found) return control;
  return { ...control, choices: control.choices.filter((each) => found.includes(each instanceof Array ? each[0] : each)) };
}

/** By name, and what this server has first. */
function choicesOf(all) {
  const names = [...all.keys()].filter((name) => name !== THIS_SERVER).map((name) => [name, name]);
  const here = all.get(THIS_SERVER);
  return here ? [[THIS_SERVER, `this server: ${here.name}`], ...names] : names;
}

/** Where the config.json of another model is given; `onFile(file)`. */
export function ownModel(onFile, problem) {
  const input = element("input", {
    type: "file", id: "own-model", accept: ".json,application/json",
    onchange() {
      const [file] = input.files;
      input.value = ""; // the same file may be given again, once it has been put right
      if (file) onFile(file);
    },
  });
  const label = element("label", { for: "own-model" }, "Another model, by its config.json");
  const hint = element("p", { class: "hint" }, "It goes into the address of this page, so that a link to it has it too.");
  return element("div", { class: "control is-own" }, element("div", { class: "control-head" }, label), input, hint, problem);
}

/**
 * What a picture computes from: `{ values, world, model, device, redraw, deployment, laidOut, cannot,
 * isWaiting }`. `deployment` is what its controls say, and `laidOut(layout)` one replica of the same
 * laid out otherwise, null where that is impossible: of those that the picture's `layouts(values)` name.
 * `cannot` is why there is no deployment, in words, or null; `isWaiting`: the server computes it.
 */
export function contextOf(picture, values, world, redraw = () => {}) {
  const [model, device] = [world.models.get(values.model), world.devices.get(values.hardware)];
  const context = { values, world, model, device, redraw, deployment: null, cannot: null, isWaiting: false };
  const { needs = {}, layouts = () => [] } = picture;
  if (!needs.model || !needs.hardware || needs.noDeployment) return context;
  const { of, state, isWaiting = false } = deploymentsOf([values, ...layouts(values)], context);
  if (state) return { ...context, isWaiting, cannot: state };
  const own = of(values);
  if (typeof own === "string") return { ...context, cannot: `This cannot be: ${own}.` };
  const laidOut = (layout) => {
    const found = of(layout);
    return typeof found === "string" ? null : found;
  };
  return { ...context, deployment: own.times(values.replicas ?? 1), laidOut };
}

/** "octavo plan llama-3.1-8b --hardware h100-sxm …", of what is not as usual. */
export function planCommand(context, flags = {}) {
  return octavoCommand("plan", context, flags);
}

/** The same of another command that takes a model and hardware. */
export function octavoCommand(name, { values, model, world }, flags) {
  const words = [`octavo ${name}`, model.file ?? model.name, "--hardware", slug(values.hardware, flags.count)];
  if (precisionOf(values) === "bfloat16") words.push("--dtype bfloat16");
  else if (precisionOf(values) !== null) words.push(`--quantization ${values.precision}`);
  if (values.kv !== "auto") words.push(`--kv-cache-dtype ${values.kv}`);
  const given = { ...settingFlags(limitsOf({ values, world })), ...flags };
  for (const [name, value] of Object.entries(given)) {
    if (name === "count" || value === undefined || value === null || value === false) continue;
    words.push(value === true ? `--${name}` : `--${name} ${value}`);
  }
  return words.join(" ");
}

function settingFlags(limits) {
  return Object.fromEntries(Object.entries(limits).map(([name, value]) => [name.replaceAll("_", "-"), value]));
}

/** As octavo reads names: case, spaces, hyphens and the like do not matter to it. */
function slug(hardware, count = 1) {
  const name = hardware === THIS_SERVER ? "auto" : hardware.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  return count > 1 ? `${name}:${count}` : name;
}
