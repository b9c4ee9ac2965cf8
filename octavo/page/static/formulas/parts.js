// What layers are made of: mixers (attention of several kinds, recurrences) and MLPs, by their
// JSON. Twins of octavo/cost/mixers.py, recurrences.py and mlps.py; a field that is left out is 0,
// false or "all".

import { columns, norm, rows, shape, vector, whole } from "./shapes.js";

// Of each kind: its weights; heads, values of a key and of a value that a device caches; values of
// a state; operations for a query and a key, of prompts and of single tokens; values of one token.
const KINDS = {
  Attention: {
    *weights(part, hidden) {
      const values = part.value_dim || part.head_dim;
      for (const [name, heads, dim] of projections(part)) {
        yield columns(`self_attn.${name}_proj`, "attention.qkv", heads, dim, hidden);
        if (part.qkv_bias) yield vector(`self_attn.${name}_proj.bias`, heads, dim);
      }
      yield rows("self_attn.o_proj", "attention.output", hidden, part.heads, values);
      if (part.output_bias) yield norm("self_attn.o_proj.bias", hidden);
      if (part.qk_norm_size) yield norm("self_attn.qk_norm", part.qk_norm_size);
      if (part.num_sinks) yield vector("self_attn.sinks", part.num_sinks, 1);
    },
    kvVectors(part, tp) {
      if (part.borrows_kv) return [0, 0, 0];
      return [Math.ceil(part.kv_heads / tp), part.head_dim, part.value_dim || part.head_dim];
    },
    flopsPerScore(part, tp) {
      const each = part.head_dim + (part.value_dim || part.head_dim);
      const flops = 2 * Math.ceil(part.heads / tp) * each;
      return [flops, flops];
    },
    activationValues: (part, tp) => ((part.heads + 2 * part.kv_heads) * part.head_dim) / tp,
  },
  LatentAttention: {
    *weights(part, hidden) {
      const { heads, kv_rank: kvRank, rope_dim: rope, q_rank: qRank } = part;
      const query = part.nope_dim + rope;
      if (qRank) {
        yield whole("self_attn.q_a_proj", "attention.qkv_a", qRank, hidden);
        yield norm("self_attn.q_a_layernorm", qRank);
        yield columns("self_attn.q_b_proj", "attention.q_b", heads, query, qRank);
      } else {
        yield columns("self_attn.q_proj", "attention.q", heads, query, hidden);
      }
      yield whole("self_attn.kv_a_proj_with_mqa", "attention.qkv_a", kvRank + rope, hidden);
      yield norm("self_attn.kv_a_layernorm", kvRank);
      const expanded = part.nope_dim + part.value_dim;
      yield columns("self_attn.kv_b_proj", "attention.kv_b", heads, expanded, kvRank);
      yield rows("self_attn.o_proj", "attention.output", hidden, heads, part.value_dim);
      if (part.has_bias) yield norm("self_attn.biases", (qRank ?? 0) + kvRank + rope + hidden);
    },
    kvVectors: (part) => [1, part.kv_rank, part.rope_dim],
    flopsPerScore(part, tp) {
      // Prompts have keys and values expanded; single tokens are compared with the latent vectors.
      const heads = Math.ceil(part.heads / tp);
      const expanded = part.nope_dim + part.rope_dim + part.value_dim;
      return [2 * heads * expanded, 2 * heads * (2 * part.kv_rank + part.rope_dim)];
    },
    activationValues(part, tp) {
      const expanded = 2 * (part.nope_dim + part.rope_dim) + part.value_dim;
      return (part.q_rank ?? 0) + part.kv_rank + part.rope_dim + (part.heads * expanded) / tp;
    },
  },
  Indexer: {
    *weights(part, hidden) {
      const queries = part.heads * part.head_dim;
      yield whole("self_attn.indexer.wq_b", "attention.index_q", queries, part.q_rank);
      yield whole("self_attn.indexer.wk", "attention.index_kw", part.head_dim, hidden);
      yield whole("self_attn.indexer.weights_proj", "attention.index_kw", part.heads, hidden);
      yield norm("self_attn.indexer.k_norm", 2 * part.head_dim);
    },
    kvVectors: (part) => [1, part.head_dim, 0],
    flopsPerScore: (part) => [2 * part.heads * part.head_dim, 2 * part.heads * part.head_dim],
    activationValues: (part) => part.heads * (part.head_dim + 1) + part.head_dim,
  },
};

// Keeps a state and nothing of a token: what follows from its kind comes with its JSON.
const RECURRENCE = {
  *weights(part) {
    for (const weight of part.weights) yield shape(weight);
  },
  kvVectors: () => [0, 0, 0],
  flopsPerScore: () => [0, 0],
  activationValues: (part, tp) => part.activations / tp,
};

function* projections(part) {
  const { head_dim: dim, kv_heads: kvHeads } = part;
  yield ["q", part.heads, (part.has_output_gate ? 2 : 1) * dim];
  if (part.borrows_kv) return;
  yield ["k", kvHeads, dim];
  if (!part.value_is_key) yield ["v", kvHeads, part.value_dim || dim];
}

const methods = (part) => KINDS[part.kind] ?? RECURRENCE;

export const mixerWeights = (part, hidden) => methods(part).weights(part, hidden);
export const kvVectors = (part, tp) => methods(part).kvVectors(part, tp);
export const flopsPerScore = (part, tp) => methods(part).flopsPerScore(part, tp);
export const mixerActivations = (part, tp) => methods(part).activationValues(part, tp);

/** Values that a device keeps of each sequence, whatever its length. */
export function stateValues(part, tp) {
  let total = 0;
  for (const [pieces, values] of part.state_parts ?? []) total += Math.ceil(pieces / tp) * values;
  return total;
}

// -- MLPs: DenseMlp, and ExpertMlp of which a token uses some --------------------------------------

export function* mlpWeights(mlp, hidden) {
  if (mlp.kind === "DenseMlp") {
    yield* matrices("mlp", "mlp", "mlp", mlp, hidden);
    return;
  }
  const router = { part: "router", inputs: hidden, op: "router" };
  yield shape({ ...router, name: "mlp.gate", outputs: mlp.num_experts });
  if (mlp.router_bias) yield norm("mlp.gate.bias", mlp.num_experts);
  yield* matrices(
    "mlp.experts", "experts", "experts", mlp, hidden, mlp.num_experts, mlp.per_token,
  );
  if (mlp.shared) yield* matrices("mlp.shared_expert", "mlp", "shared", mlp.shared, hidden);
  if (mlp.has_shared_gate) yield shape({ ...router, name: "mlp.shared_expert_gate", outputs: 1 });
}

/** Values between its products that a device holds for one token at once. */
export function mlpActivations(mlp, hidden, tp) {
  if (mlp.kind === "ExpertMlp") return mlp.per_token * (2 * mlp.inner + hidden);
  return ((isGated(mlp) ? 3 : 2) * mlp.inner) / tp;
}

export const numExperts = (mlp) => mlp?.num_experts ?? 0;

const isGated = (mlp) => mlp.is_gated ?? true;

function* matrices(name, part, op, mlp, hidden, experts = 1, perToken = 1) {
  const upOp = `${op}.${isGated(mlp) ? "gate_up" : "up"}`;
  const up = { outputs: mlp.inner, inputs: hidden, op: upOp, split: "outputs" };
  const down = { outputs: hidden, inputs: mlp.inner, op: `${op}.down`, split: "inputs" };
  const common = { part, experts, experts_per_token: perToken };
  for (const [matrix, of] of [["gate", up], ["up", up], ["down", down]]) {
    if (matrix === "gate" && !isGated(mlp)) continue;
    const full = `${name}.${matrix}_proj`;
    yield shape({ ...common, ...of, name: full });
    if (mlp.has_bias) yield shape({ ...common, ...biasOf(full, part, of) });
  }
}

/** As the matrix is cut: a sum of parts has its bias whole. */
function biasOf(name, part, { outputs, split }) {
  return {
    name: `${name}.bias`,
    part: part === "experts" ? part : "norm",
    outputs,
    split: split === "outputs" ? split : "nothing",
  };
}
