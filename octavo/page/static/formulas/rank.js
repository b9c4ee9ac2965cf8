// What one device has of a model that is shared out: octavo/cost/rank.py and kv.py.

import { CannotBe } from "./errors.js";
import { firstWeights, lastWeights, layerOrder, layerWeights } from "./models.js";
import { flopsPerScore, kvVectors, numExperts, stateValues } from "./parts.js";
import { bytesOf, cachedBytes } from "./precision.js";
import { numParams, ofRank } from "./shapes.js";

const STATE_BYTES = 4; // of a number of a recurrent state

/** A model in some precision over devices, stage by stage of its pipeline. */
export class Layout {
  constructor(spec, precision, parallel) {
    this.spec = spec;
    this.precision = precision;
    this.parallel = parallel;
    this.order = layerOrder(spec);
    this.weightsOfKind = spec.layers.map((kind) => layerWeights(spec, kind));
    this.known = new Map(); // what layers of a kind come to, where all are alike
    checkLayout(this);
  }

  get stages() {
    return Array.from({ length: this.parallel.pp }, (_, index) => stageOf(this, index));
  }

  /** What something comes to for a layer: for all of its kind at once where they are alike. */
  once(name, layer, make) {
    if (!this.precision.isUniform) return make();
    const key = `${name} ${this.order[layer]}`;
    if (!this.known.has(key)) this.known.set(key, make());
    return this.known.get(key);
  }

  /** What the rank that has most to do computes. */
  get busiest() {
    const bytes = (rank) => rank.matrices.reduce((sum, each) => sum + each.count * each.bytes, 0);
    const ranks = this.stages.map((stage) => rankOf(this, stage));
    return ranks.reduce((one, other) => (bytes(other) > bytes(one) ? other : one));
  }
}

function checkLayout({ spec, parallel }) {
  for (const name of ["tp", "pp", "ep", "dp"]) {
    if (!(parallel[name] >= 1)) throw new CannotBe(`${name} is 1 or more`);
  }
  const { tp, pp, ep, dp } = parallel;
  if ((tp * dp) % ep) throw new CannotBe(`ep = ${ep} does not divide tp × dp = ${tp * dp}`);
  const heads = spec.layers.flatMap(({ mixers }) => mixers.map((mixer) => mixer.heads));
  const uneven = heads.find((count) => count % tp);
  if (uneven !== undefined) {
    throw new CannotBe(`${uneven} heads cannot be shared out to tp = ${tp} devices`);
  }
  if (pp > spec.num_layers) {
    throw new CannotBe(`${spec.num_layers} layers cannot make a pipeline of pp = ${pp}`);
  }
  const experts = Math.max(...spec.layers.map(({ mlp }) => numExperts(mlp)));
  if (ep > Math.max(experts, 1)) {
    throw new CannotBe(`${experts || "no"} experts cannot be shared out to ep = ${ep} devices`);
  }
}

/** What does not come out even goes to the stages in the middle: the last has the head. */
function stageOf({ order, parallel: { pp } }, index) {
  const count = Math.floor(order.length / pp);
  const sizes = Array(pp).fill(count);
  for (let more = 0; more < order.length % pp; more += 1) sizes[Math.max(0, pp - 2 - more)] += 1;
  const first = sizes.slice(0, index).reduce((sum, size) => sum + size, 0);
  return { index, first, last: first + sizes[index], isLast: index === pp - 1 };
}

// -- memory ----------------------------------------------------------------------------------------

/** Bytes of the weights that a device of a stage has. `kept(weight, share, type)`: what an engine
 * keeps of a share; null is nothing. */
export function heldBytes(layout, stage, kept) {
  const { spec, precision, parallel } = layout;
  const of = (weights, layer) => {
    let total = 0;
    for (const weight of weights) {
      const type = precision.typeOf(weight, layer);
      const share = kept(weight, ofRank(weight, parallel), type);
      if (share !== null) total += bytesOf(type, share);
    }
    return total;
  };
  const isThere = ({ part }) => part !== "head" || !spec.tie_embeddings || stage.index > 0;
  let total = stage.index === 0 ? of(firstWeights(spec), null) : 0;
  for (let layer = stage.first; layer < stage.last; layer += 1) {
    total += layout.once("held", layer, () => of(layout.weightsOfKind[layout.order[layer]], layer));
  }
  return stage.isLast ? total + of(lastWeights(spec).filter(isThere), null) : total;
}

/** Of the whole model, each tensor once. */
export function weightsBytes(spec, precision) {
  const one = new Layout(spec, precision, { tp: 1, pp: 1, ep: 1, dp: 1 });
  return roundHalfEven(heldBytes(one, one.stages[0], (weight) => weight));
}

/** As Python rounds. */
export function roundHalfEven(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 === 0 ? floor : floor + 1;
}

// -- attention -------------------------------------------------------------------------------------

/** What the layers of a stage do with other positions, and keep of them, on one device. */
export function attentionOps({ spec, order, precision, parallel: { tp } }, { first, last }) {
  const ops = new Map();
  for (const place of order.slice(first, last)) {
    for (const mixer of spec.layers[place].mixers) {
      const key = JSON.stringify(mixer);
      if (!ops.has(key)) ops.set(key, { ...attentionOp(mixer, precision, tp), count: 0 });
      ops.get(key).count += 1;
    }
  }
  return [...ops.values()];
}

function attentionOp(mixer, precision, tp) {
  const [prefill, decode] = flopsPerScore(mixer, tp);
  const reach = Math.min(mixer.window || Infinity, mixer.selected || Infinity);
  return {
    name: attentionName(mixer),
    prefill,
    decode,
    kvBytes: cachedBytes(precision.kv, kvVectors(mixer, tp)),
    window: mixer.window ?? null,
    reach,
    stateBytes: stateValues(mixer, tp) * STATE_BYTES,
  };
}

function attentionName(mixer) {
  if (mixer.kind === "LatentAttention") return "attention.latent";
  if (mixer.kind === "Indexer") return "attention.index";
  if (stateValues(mixer, 1)) return "attention.state";
  return mixer.window ? "attention.window" : "attention";
}

export function kvBytesPerToken(attention) {
  return attention.reduce((sum, op) => sum + op.count * op.kvBytes, 0);
}

// -- products --------------------------------------------------------------------------------------

function rankOf(layout, stage) {
  const { spec, order, precision, parallel } = layout;
  const moe = order.slice(stage.first, stage.last).filter((at) => numExperts(spec.layers[at].mlp));
  return {
    matrices: matricesOf(layout, stage),
    attention: attentionOps(layout, stage),
    hidden: spec.hidden_size,
    vocab: spec.vocab_size,
    layers: stage.last - stage.first,
    moeLayers: moe.length,
    activationBytes: precision.activationBytes,
    parallel,
  };
}

/** Weights of one layer and one product, as q, k and v, are one matrix; what is the same in several
 * layers is one op. */
function matricesOf(layout, stage) {
  const ops = new Map();
  const add = (matrices) => {
    for (const [key, matrix] of matrices) {
      if (!ops.has(key)) ops.set(key, { ...matrix, count: 0 });
      ops.get(key).count += 1;
    }
  };
  for (let layer = stage.first; layer < stage.last; layer += 1) {
    const weights = layout.weightsOfKind[layout.order[layer]];
    add(layout.once("matrices", layer, () => keyed(layout, weights, layer)));
  }
  if (stage.isLast) add(keyed(layout, lastWeights(layout.spec), null));
  return [...ops.values()];
}

function keyed({ precision, parallel }, weights, layer) {
  const products = new Map();
  for (const weight of weights) {
    if (weight.op) products.set(weight.op, [...(products.get(weight.op) ?? []), weight]);
  }
  return [...products.values()].map((parts) => {
    const matrix = matrixOf(parts, layer, precision, parallel);
    return [JSON.stringify(matrix), matrix];
  });
}

function matrixOf(parts, layer, precision, parallel) {
  const [first] = parts;
  const shares = parts.map((part) => ofRank(part, parallel));
  const total = (of) => shares.reduce((sum, share, index) => sum + of(share, parts[index]), 0);
  const { experts, experts_per_token: perToken, part } = first;
  return {
    name: first.op,
    inputs: shares[0].inputs,
    outputs: total((share) => share.outputs),
    params: total(numParams),
    bytes: total((share, whole) => bytesOf(precision.typeOf(whole, layer), share)),
    arithmetic: precision.typeOf(first, layer).arithmetic,
    isSampled: part === "head",
    experts: part === "experts" ? { total: experts, perToken, here: shares[0].experts } : null,
  };
}
