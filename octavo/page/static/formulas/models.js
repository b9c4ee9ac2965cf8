// A model by its JSON (`octavo.planner.page_export.model_json`): its weights, from the first to
// the last. Twin of octavo/cost/model_spec.py and weights.py.

import { mixerWeights, mlpWeights } from "./parts.js";
import { norm, numActiveParams, numParams, shape } from "./shapes.js";

const VOCABULARY_UNIT = 64; // rows of an embedding that is shared out come in pieces of these

/** The layers from the first to the last, as places in `spec.layers`. */
export function layerOrder(spec) {
  return spec.order.flatMap(([place, count]) => Array(count).fill(place));
}

/** The weights of a layer of one kind. */
export function layerWeights(spec, kind) {
  const hidden = spec.hidden_size;
  return [
    ...kind.mixers.flatMap((mixer) => [...mixerWeights(mixer, hidden)]),
    ...(kind.mlp ? mlpWeights(kind.mlp, hidden) : []),
    ...(kind.norm_size ? [norm("layernorm", kind.norm_size)] : []),
    ...(kind.beside ?? []).map(shape),
  ];
}

/** What comes before the layers. */
export function firstWeights(spec) {
  const part = "embedding";
  const found = [vocabularyMatrix(spec, { name: "model.embed_tokens", part })];
  if (spec.learned_positions) {
    const [outputs, inputs] = [spec.learned_positions, spec.hidden_size];
    found.push(shape({ name: "model.embed_positions", part, outputs, inputs }));
  }
  found.push(...(spec.inputs ?? []).map(shape));
  if (spec.other_params) {
    found.push(shape({ name: "other", part: "other", outputs: spec.other_params }));
  }
  return found;
}

/** What comes after the layers: the head too, whether or not it is the embedding. */
export function lastWeights(spec) {
  const found = [];
  if (spec.final_norm_size) found.push(norm("model.norm", spec.final_norm_size));
  found.push(vocabularyMatrix(spec, { name: "lm_head", part: "head", op: "head" }));
  if (spec.head_bias) {
    found.push({ ...vocabularyMatrix(spec, { name: "lm_head.bias", part: "norm" }), inputs: 0 });
  }
  return found;
}

/** `{ parameters, active }`: all, and those that one token meets (the embedding counts whole). */
export function countParameters(spec) {
  const last = lastWeights(spec).filter((weight) => weight.part !== "head" || !spec.tie_embeddings);
  const count = { parameters: 0, active: 0 };
  const add = (weights, times) => {
    for (const weight of weights) {
      count.parameters += times * numParams(weight);
      if (weight.part !== "other") count.active += times * numActiveParams(weight);
    }
  };
  add([...firstWeights(spec), ...last], 1);
  for (const kind of spec.layers) add(layerWeights(spec, kind), kind.count);
  return count;
}

function vocabularyMatrix(spec, given) {
  const units = Math.ceil(spec.vocab_size / VOCABULARY_UNIT);
  const [outputs, inputs] = [spec.vocab_size, spec.hidden_size];
  return shape({ ...given, outputs, inputs, split: "outputs", units });
}
