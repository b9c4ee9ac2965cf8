// How many bytes weights and cached tokens take: octavo/cost/precision.py, weight_type.py,
// kv_type.py and quantization/gguf_mixes.py, by the tables of `number_types_json`.

import { CannotBe } from "./errors.js";
import { layerOrder } from "./models.js";

/**
 * How a model's numbers are kept. `quantization`: a name of `types.weights`, `int4-gN`, or null for
 * what its authors published. `kv`: a name of `types.kv`.
 */
export function precisionOf(spec, quantization, kv, types) {
  const floats = types.weights[spec.dtype].type;
  if (!(kv in types.kv)) throw new CannotBe(`kv_cache_dtype ${kv} is not known`);
  const rule = ruleOf(spec, quantization, floats, types);
  return {
    name: quantization ?? rule.name ?? rule.type.name,
    kv: types.kv[kv],
    activationBytes: floats.bits / 8,
    /** Whether all layers of one kind are alike. */
    isUniform: rule.kind === "uniform" || (rule.kind === "recipe" && !rule.ignored.length),
    typeOf: TYPE_OF[rule.kind](rule, floats, spec, types),
  };
}

/** Of a matrix of a type; a vector has 0 inputs. */
export function bytesOf(type, { experts, outputs, inputs }) {
  const width = Math.max(1, inputs);
  const blocks = Math.ceil(outputs / ((type.block_outputs ?? 1) || outputs))
    * Math.ceil(width / (type.block_inputs || width));
  return experts * ((outputs * width * type.bits) / 8 + blocks * (type.scale_bytes ?? 0));
}

/** Of one token in one layer: `heads` keys and values. */
export function cachedBytes(kv, [heads, keyDim, valueDim]) {
  return heads * (vectorBytes(kv.keys, keyDim) + vectorBytes(kv.values, valueDim));
}

function vectorBytes({ bits, group, group_bytes: groupBytes }, dim) {
  const groups = dim ? Math.ceil(dim / (group || dim)) : 0;
  return (dim * bits) / 8 + groups * groupBytes;
}

function ruleOf(spec, quantization, floats, types) {
  if (quantization === null) return spec.published ?? { kind: "uniform", type: floats };
  const grouped = /^int4-g([1-9]\d*)$/.exec(quantization);
  if (grouped) {
    const plain = types.weights.int4;
    return { ...plain, type: { ...plain.type, block_inputs: Number(grouped[1]) } };
  }
  if (!(quantization in types.weights)) {
    throw new CannotBe(`quantization ${quantization} is not known`);
  }
  return types.weights[quantization];
}

// Which weight has which type: of a name, of a layer (null outside of them).
const TYPE_OF = {
  uniform: (rule) => () => rule.type,
  recipe(rule, floats) {
    const ignored = rule.ignored.map((pattern) => new RegExp(pattern));
    return (weight, layer) => {
      const name = layer === null ? weight.name : `model.layers.${layer}.${weight.name}`;
      const isMatrix = weight.inputs > 0 && rule.parts.includes(weight.part);
      return isMatrix && !ignored.some((each) => each.test(name)) ? rule.type : floats;
    };
  },
  stored: (rule) => (weight, layer) => {
    const isVector = !weight.inputs && weight.part !== "experts" && weight.part !== "other";
    const found = (part) => rule.bits[part]?.[layer ?? ""];
    const own = found(isVector ? "norm" : weight.part);
    const bits = own ?? (weight.part === "head" ? found("embedding") : null) ?? 16; // a tied head
    return { bits, arithmetic: bits >= 32 ? "fp32" : bits >= 16 ? "fp16" : rule.quantized };
  },
  mix: (rule, floats, spec, types) => ggufMix(rule, factsOf(spec), types.ggml),
};

// -- files of llama.cpp ----------------------------------------------------------------------------

const FLOATS = ["F32", "F16", "BF16"];
const MIXED = {
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.down_proj": "ffn_down",
  "mlp.experts.down_proj": "ffn_down",
  "mlp.shared_expert.down_proj": "ffn_down",
};
const LATENTS = "self_attn.kv_b_proj"; // in two tensors, keys' and values'
const PLACES = {
  everywhere: () => true,
  first: (facts, layer, count) => layer < count,
  "first part": (facts, layer, parts) => layer < Math.floor(facts.layers / parts),
  "outer and every third": ({ layers }, layer) => {
    const eighth = Math.floor(layers / 8);
    const isOuter = layer < eighth || layer >= Math.floor((7 * layers) / 8);
    return isOuter || (layer - eighth) % 3 === 2; // a layer before the first eighth is outer
  },
  "shared values": ({ heads, kvHeads }) => Math.floor(heads / kvHeads) >= 4,
  "first part, with importance": () => false,
  "first part, without importance": (facts, layer, parts) =>
    layer < Math.floor(facts.layers / parts),
};

function factsOf(spec) {
  const mixers = spec.order.flatMap(([place]) => spec.layers[place].mixers);
  const attention = mixers.find((mixer) => mixer.kind === "Attention");
  return {
    layers: layerOrder(spec).length,
    heads: attention?.heads ?? 1,
    kvHeads: attention?.kv_heads ?? 1,
    isTied: spec.tie_embeddings,
  };
}

function ggufMix(mix, facts, types) {
  const named = (weight, layer) => {
    if (!weight.inputs || weight.part === "router") return "F32";
    if (FLOATS.includes(mix.base)) return mix.base;
    if (weight.name === LATENTS) return mix.latents;
    const isOutput = layer === null && (weight.part === "head" || facts.isTied);
    const name = isOutput ? outputType(mix.base, weight) : layerType(mix, facts, weight, layer);
    return fitting(name, weight.inputs);
  };
  const fitting = (name, width) =>
    [name, types[name].fallback ?? name].find((each) => width % types[each].block === 0) ?? "F16";
  const outputType = (base, { inputs }) =>
    base !== "Q8_0" && inputs % types[base].block === 0 ? "Q6_K" : "Q8_0";
  return (weight, layer) => types[named(weight, layer)];
}

function layerType(mix, facts, weight, layer) {
  const kind = layer === null ? undefined : MIXED[weight.name];
  const holds = ([, place, number]) => PLACES[place](facts, layer, number);
  const name = mix[kind]?.find(holds)?.[0] ?? mix.base;
  const is70b = facts.layers === 80 && facts.heads !== facts.kvHeads;
  return kind === "attn_v" && is70b && ["Q3_K", "Q4_K"].includes(name) ? "Q5_K" : name;
}
