// What a device holds, and what is left for keys and values: octavo/cost/memory.py, and the rules
// of engines, octavo/cost/engine_profile.py.

import { CannotBe } from "./errors.js";
import { layerWeights } from "./models.js";
import { mixerActivations, mlpActivations } from "./parts.js";
import { around, mapped, sum, sure } from "./predictions.js";
import { attentionOps, heldBytes, kvBytesPerToken, roundHalfEven } from "./rank.js";

const GIB = 2 ** 30;

/** The limits of an engine, with its defaults for a device where none was given. */
export function settle(given, defaults, spec) {
  const length = given.maxModelLen ?? spec.max_position;
  if (length > spec.max_position) {
    throw new CannotBe(`${length} tokens exceed the ${spec.max_position} positions of ${spec.name}`);
  }
  return {
    maxNumSeqs: given.maxNumSeqs ?? defaults.max_num_seqs ?? 1,
    stepTokens: given.stepTokens ?? defaults.max_num_batched_tokens ?? length,
    maxModelLen: length,
    blockSize: given.blockSize ?? defaults.block_size ?? 1,
    utilization: given.utilization ?? defaults.utilization ?? 1,
    reserveBytes: given.reserveBytes ?? defaults.reserve_bytes ?? 0,
  };
}

/** The fullest device: of a pipeline, the stage that has room for the fewest tokens. */
export function memoryOf(layout, device, engine, limits) {
  const of = (stage) => stageMemory(layout, stage, device, engine, limits);
  const isFuller = (one, other) =>
    one.maxConcurrency(1) - other.maxConcurrency(1) || one.leftBytes - other.leftBytes;
  return layout.stages.map(of).reduce((one, other) => (isFuller(other, one) < 0 ? other : one));
}

class Memory {
  constructor(facts) {
    Object.assign(this, facts);
  }

  get kvBytesPerToken() {
    return kvBytesPerToken(this.attention);
  }

  get kvTokens() {
    return this.numBlocks * this.limits.blockSize;
  }

  /** Sequences of so many tokens that have room for what they keep at once. */
  maxConcurrency(length) {
    const { blockSize, stepTokens } = this.limits;
    const isUniform = this.attention.every((op) => !op.stateBytes && op.window === null);
    if (isUniform) return Math.floor(this.numBlocks / Math.ceil(length / blockSize));
    return wholeTimes(this.poolBytes, sequenceBytes(this.attention, length, blockSize, stepTokens));
  }
}

/** Of a sequence in these layers, its states included; windows keep what a step may still see. */
export function sequenceBytes(attention, length, blockSize = 1, stepTokens = 1) {
  let total = 0;
  for (const { count, window, kvBytes, stateBytes } of attention) {
    const kept = window === null ? length : Math.min(length, window - 1 + stepTokens);
    total += count * (Math.ceil(kept / blockSize) * blockSize * kvBytes + stateBytes);
  }
  return total;
}

function stageMemory(layout, stage, device, engine, limits) {
  const isGpu = device.kind === "gpu";
  const weights = roundHalfEven(heldBytes(layout, stage, keeping(layout.spec, engine, isGpu)));
  const needs = needsOf(layout, engine, limits, weights);
  const back = [...engine.keeps_back].sort().map((name) => needs[name]);
  const keptBack = sum([...back, sure(limits.reserveBytes)]);
  const usable = limits.utilization * device.memory_bytes;
  const left = mapped(keptBack, (bytes) => usable - weights - bytes);
  const attention = attentionOps(layout, stage);
  const pool = poolOf(Math.max(0, left.value), attention, { engine, limits, isGpu });
  return new Memory({
    lines: linesOf(weights, needs, engine.keeps_back, limits, pool),
    totalBytes: Math.trunc(device.memory_bytes),
    usableBytes: Math.trunc(usable),
    weightsBytes: weights,
    activations: needs.activations,
    keptBackBytes: Math.trunc(keptBack.value),
    left,
    leftBytes: Math.trunc(left.value),
    poolBytes: Math.trunc(pool.bytes),
    numBlocks: pool.blocks,
    attention,
    limits,
  });
}

/** Of one device, from what is sure to what is left; `isKeptBack`: the engine leaves it out of the
 * pool by itself, else it has to fit into what utilization leaves free. */
function linesOf(weights, needs, keepsBack, limits, pool) {
  const line = (name, { value, low, high, source }, isKeptBack = true) =>
    ({ name, bytes: value, low, high, source, isKeptBack });
  return [
    line("weights", sure(weights)),
    line("activations", needs.activations, keepsBack.includes("activations")),
    line("outside of the allocator", needs.non_torch, keepsBack.includes("non_torch")),
    line("recorded graphs", needs.graphs, keepsBack.includes("graphs")),
    line("reserve", sure(limits.reserveBytes)),
    line("keys and values", sure(pool.bytes)),
  ].filter(({ bytes }) => bytes > 0);
}

function needsOf({ spec, parallel }, engine, limits, weights) {
  const [alone, besideOthers] = engine.non_torch;
  const { bytes, per_byte: perByte, spread, source } = engine.graphs;
  return {
    activations: ACTIVATIONS[engine.activations](spec, parallel, limits),
    non_torch: parallel.tp === 1 && parallel.ep === 1 ? alone : besideOthers,
    graphs: around(bytes + perByte * weights, spread, source),
  };
}

function keeping(spec, engine, isGpu) {
  const inHost = engine.embedding_in_host && isGpu && !spec.tie_embeddings;
  return (weight, share, type) => {
    if (inHost && weight.part === "embedding") return null;
    if (weight.part !== "experts" || type.name !== "mxfp4") return share;
    const side = share.split === "outputs" ? "outputs" : "inputs";
    return { ...share, [side]: Math.ceil(share[side] / engine.mxfp4_unit) * engine.mxfp4_unit };
  };
}

// -- the pool --------------------------------------------------------------------------------------

function poolOf(left, attention, { engine, limits, isGpu }) {
  const tokenBytes = kvBytesPerToken(attention);
  if (!tokenBytes) {
    const seqs = Math.min(wholeTimes(left, sequenceBytes(attention, 1)), limits.maxNumSeqs);
    return { bytes: left, blocks: seqs * Math.ceil(limits.maxModelLen / limits.blockSize) };
  }
  const blockBytes = limits.blockSize * tokenBytes;
  const blocks = NUM_BLOCKS[engine.num_blocks](left, blockBytes, limits, isGpu);
  return { bytes: blocks * blockBytes, blocks };
}

const NUM_BLOCKS = {
  all_blocks: wholeTimes,
  /** No more than all requests could use at once; on a processor, half of what is free and 4 GiB. */
  octavo_blocks(left, blockBytes, { blockSize, maxModelLen, maxNumSeqs }, isGpu) {
    const bytes = Math.trunc(left);
    const room = isGpu ? bytes : Math.min(4 * GIB, Math.floor(bytes / 2));
    if (room < blockBytes) return 0;
    const useful = Math.ceil(maxModelLen / blockSize) * maxNumSeqs;
    const slot = Math.floor(Math.trunc(blockBytes) / blockSize);
    return Math.max(1, Math.min(useful, wholeTimes(room, slot * blockSize)));
  },
};

function wholeTimes(bytes, each) {
  return each ? Math.max(0, Math.floor(bytes / each)) : 0;
}

// -- activations -----------------------------------------------------------------------------------

const ACTIVATIONS = {
  /** Of the sampler, which sorts, or of the layers: one comes after the other. */
  vllm_activations(spec, parallel, limits) {
    const sampler = around(38.7 * limits.maxNumSeqs * spec.vocab_size, 0.06, "published");
    const layers = layersPeak(spec, parallel, limits);
    return layers.value > sampler.value ? layers : sampler;
  },
  /** Logits of a micro-batch and its hidden states. */
  llama_cpp_activations(spec, parallel, limits) {
    const rows = Math.min(512, limits.stepTokens);
    return around(4 * rows * (spec.vocab_size + spec.hidden_size), 0.15, "published");
  },
  /** Values of a step in turn, logits, the rows of experts, and what is made of weights. */
  octavo_activations(spec, parallel, { stepTokens, maxNumSeqs }) {
    const logits = maxNumSeqs * Math.ceil(spec.vocab_size / 16) * 16;
    const routed = Math.max(...spec.layers.map(({ mlp }) =>
      mlp?.kind === "ExpertMlp" ? expertsBytes(spec.hidden_size, mlp, stepTokens) : 0));
    const made = spec.layers.reduce((total, kind) => total + kind.count * layerWeights(spec, kind)
      .filter((weight) => weight.op === "attention.kv_b")
      .reduce((values, { outputs, inputs }) => values + outputs * inputs, 0), 0);
    const values = stepTokens * octavoValues(spec) + logits;
    return around(4 * values + routed + 2 * made, 0.1, "published");
  },
  /** The same in 16 bits, what is between two launches, rotations, logits, and splits. */
  octavo_gpu_activations(spec, parallel, limits) {
    const { stepTokens, maxModelLen, maxNumSeqs } = limits;
    const inner = Math.max(0, ...weightsOf(spec).flat()
      .filter((weight) => weight.op === "mlp.down").map((weight) => weight.inputs));
    let step = 2 * stepTokens * (octavoValues(spec) + spec.hidden_size);
    step += 2 * Math.min(stepTokens, 4096) * (spec.hidden_size + 2 * inner);
    const others = 4 * 128 * maxModelLen + 3 * 4 * maxNumSeqs * spec.vocab_size;
    return around(step + others + 24 * 2 ** 20, 0.25, "roofline");
  },
};

/** Between the phases of the native kernels' experts: octavo/kernels/cpu/layout.py. */
function expertsBytes(hidden, { inner, per_token: perToken }, tokens) {
  const encoded = Math.ceil(Math.max(hidden, inner) / 256) * 256;
  const rowBytes = 4 * (hidden + inner + 2 + encoded);
  const chunk = Math.max(Math.floor(2 ** 25 / (rowBytes * perToken)), 8);
  return Math.min(tokens, chunk) * perToken * rowBytes;
}

const weightsOf = (spec) => spec.layers.map((kind) => layerWeights(spec, kind));

function layersPeak(spec, { tp }, limits) {
  const values = spec.layers.map(({ mixers, mlp }) => Math.max(
    mixers.reduce((total, mixer) => total + mixerActivations(mixer, tp), 0),
    mlp ? mlpActivations(mlp, spec.hidden_size, tp) : 0,
  ));
  const bytes = 2 * limits.stepTokens * (Math.max(...values) + 4 * spec.hidden_size);
  return around(bytes, 0.2, "published");
}

/** Of a token, that a step of octavo's has places for. */
function octavoValues(spec) {
  const widths = weightsOf(spec).map((weights) => weights.reduce((width, weight) => {
    if (weight.op === "attention.qkv") return width + weight.outputs;
    return ["attention.output", "mlp.down"].includes(weight.op) ? width + weight.inputs : width;
  }, spec.hidden_size));
  return Math.max(...widths);
}
