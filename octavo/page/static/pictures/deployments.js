// Deployments of pictures, by the planner's documents: asked of the server, or recorded in a folder.

import { isFolder } from "../common/places.js";
import { Deployment } from "../formulas/index.js";
import { answerOf } from "./answers.js";
import { THIS_SERVER } from "./world.js";

const REST = 30; // milliseconds: an answer takes about as long
const DEGREES = ["tp", "pp", "ep", "dp"];
const NOT_RECORDED = "This is not recorded in this folder: choose other parallelism, or types of numbers; octavo serve computes any.";

/**
 * `{ of(layout) }` of what the controls say, for `layouts` as `{ tp, pp, ep, dp }`, of which what is
 * left out is 1: a Deployment of one replica, or the reason why there is none, in words. Else why
 * there is no answer: `{ state, isWaiting }`.
 */
export function deploymentsOf(layouts, context) {
  const wanted = [...new Map(layouts.map((layout) => [nameOf(layout), whole(layout)])).values()];
  const found = isFolder ? recorded(wanted, context) : asked(wanted, context);
  if (found.state) return found;
  return { of: (layout) => deploymentOf(found.get(nameOf(layout))) };
}

/** The name of a layout, as folders have it. */
function nameOf(layout) {
  return Object.values(whole(layout)).join();
}

function whole(layout) {
  return Object.fromEntries(DEGREES.map((name) => [name, layout[name] ?? 1]));
}

const made = new WeakMap(); // by document: what it has found out once need not be for each frame

function deploymentOf({ document, error }) {
  if (error) return error;
  if (!made.has(document)) made.set(document, new Deployment(document));
  return made.get(document);
}

// -- of a server -------------------------------------------------------------------------------------

function asked(layouts, context) {
  const body = { ...questionOf(context), ...limitsOf(context), layouts };
  const question = { path: "octavo/deployments", body, waiting: "The server computes it.", failed: "The server did not compute it", rest: REST };
  const { answer, ...others } = answerOf("deployments", question, context);
  return answer ? byName(layouts, answer.deployments) : others;
}

function byName(layouts, found) {
  return new Map(layouts.map((layout, index) => [nameOf(layout), found[index]]));
}

/** Model, device and types of numbers, as routes of the server are told of them. */
export function questionOf({ values, model }) {
  return {
    model: values.model === THIS_SERVER ? null : model.name,
    config: model.config,
    hardware: values.hardware === THIS_SERVER ? "auto" : values.hardware,
    quantization: precisionOf(values),
    kv_cache_dtype: values.kv === "auto" ? null : values.kv,
  };
}

export const AS_PUBLISHED = "published";

/** Null is what the model's authors published. */
export function precisionOf({ precision }) {
  return precision === AS_PUBLISHED ? null : precision;
}

/** What the engine of this server is set to, where that is asked about; else nothing. */
export function limitsOf({ values, world }) {
  return values.model === THIS_SERVER && values.hardware === THIS_SERVER ? world.settings ?? {} : {};
}

// -- of a folder -------------------------------------------------------------------------------------

function recorded(layouts, { values, world: { recording } }) {
  const choice = [values.model, values.hardware, values.precision, values.kv].join("|");
  const [own, ...others] = layouts.map((layout) => recording.of(`${choice}|${nameOf(layout)}`));
  if (own === null) return { state: NOT_RECORDED };
  return byName(layouts, [own, ...others.map((each) => each ?? { error: NOT_RECORDED })]);
}
