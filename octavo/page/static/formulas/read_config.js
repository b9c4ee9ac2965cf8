// A model's JSON from its `config.json`: what octavo/cost/hf_config.py, hf_families.py, hf_layers.py
// and quantization_config.py do, for the families that `families_json` tells.

import { CannotBe } from "./errors.js";
import { countParameters } from "./models.js";

/**
 * @param config the contents of `config.json`; @param name what the model is called.
 * @param tables what `page_data` has: `families` and `types`.
 * @throws CannotBe for a kind of model that is not known here, or a value that cannot be.
 */
export function readConfig(config, name, { families, types }) {
  const given = { ...config, ...present(config.attn_config), ...present(config.ffn_config), ...present(config.text_config) };
  const fields = new Fields(given, familyOf(given.model_type, given, families), families.spellings);
  const [hidden, count] = [fields.integer("hidden_size"), fields.integer("num_hidden_layers")];
  if (count > MOST_LAYERS) throw new CannotBe(`no model has ${count} layers`);
  const { family } = fields;
  const norm = hidden * (family.norm_bias ? 2 : 1);
  const windows = windowsOf(fields, count);
  const made = windows.map((window, layer) => withoutDefaults({
    mixers: [MIXERS[family.mixers](fields, window)],
    mlp: MLPS[family.mlp](fields, layer),
    norm_size: family.norms * norm,
  }));
  const positions = fields.integer("max_position_embeddings", 2048);
  const isLearned = family.extra_positions !== null;
  const spec = {
    name,
    hidden_size: hidden,
    vocab_size: fields.integer("vocab_size"),
    tie_embeddings: fields.flag("tie_word_embeddings", family.tie),
    max_position: positions,
    final_norm_size: family.final_norms * norm,
    learned_positions: isLearned ? positions + family.extra_positions : 0,
    head_bias: family.head_bias,
    dtype: DTYPES[fields.given.torch_dtype ?? fields.given.dtype ?? "bfloat16"],
    published: publishedOf(config.quantization_config ?? config.text_config?.quantization_config, types),
    num_layers: count,
    ...grouped(made),
  };
  if (!spec.dtype) throw new CannotBe("the dtype of the config is none of float32, float16, bfloat16");
  const { parameters, active } = countParameters(spec);
  return { ...spec, parameters, active_parameters: active };
}

const MOST_LAYERS = 1024;
const DTYPES = {
  float32: "float32", fp32: "float32", float16: "float16", fp16: "float16", half: "float16",
  bfloat16: "bfloat16", bf16: "bfloat16",
};

function familyOf(kind, given, { usual, families, same }) {
  const name = Object.hasOwn(same, kind) ? same[kind] : kind;
  const isOther = name === "falcon" && given.new_decoder_architecture; // two norms, not one
  if (!Object.hasOwn(families, name) || isOther) {
    throw new CannotBe(`models of type ${JSON.stringify(kind)} cannot be read here: ask a server of octavo`);
  }
  return { ...usual, ...families[name] };
}

/** Layers that are alike once, with their count, and their order. */
function grouped(made) {
  const kinds = new Map();
  const order = [];
  for (const layer of made) {
    const key = JSON.stringify(layer);
    if (!kinds.has(key)) kinds.set(key, { count: 0, ...layer, place: kinds.size });
    const kind = kinds.get(key);
    kind.count += 1;
    if (order.at(-1)?.[0] === kind.place) order.at(-1)[1] += 1;
    else order.push([kind.place, 1]);
  }
  return { layers: [...kinds.values()].map(({ place, ...kind }) => kind), order };
}

// -- fields ----------------------------------------------------------------------------------------

/** Under one spelling; absent ones mean what the family says. */
class Fields {
  constructor(given, family, spellings) {
    const own = present(given);
    if (own.per_layer_config) throw new CannotBe("a config that says other things of some layers cannot be read here");
    const renamed = Object.entries(spellings).flatMap(([name, others]) => {
      const other = name in own ? undefined : others.findLast((each) => each in own);
      return other === undefined ? [] : [[name, own[other]]];
    });
    this.family = family;
    this.given = { ...family.defaults, ...own, ...Object.fromEntries(renamed) };
  }

  integer(name, ...usual) {
    const value = this.given[name] ?? usual[0];
    if (value === undefined && usual.length === 0) throw new CannotBe(`the config has no ${name}`);
    const isWhole = Number.isInteger(value) && value >= 0 && value <= 2 ** 31;
    if (value !== usual[0] && !isWhole) throw new CannotBe(`${name} is no whole number: ${value}`);
    return value;
  }

  flag(name, usual) {
    return Boolean(this.given[name] ?? usual);
  }

  get heads() {
    return this.integer("num_attention_heads");
  }

  get headDim() {
    const usual = Math.max(Math.floor(this.integer("hidden_size") / this.heads), 1);
    return this.integer("head_dim", usual);
  }
}

function present(values = {}) {
  return Object.fromEntries(Object.entries(values ?? {}).filter(([, value]) => value !== null));
}

/** What is 0, false or null of a part is left out; `true` of `is_gated` is its default. */
function withoutDefaults(layer) {
  const clean = (part) => part && Object.fromEntries(Object.entries(part)
    .filter(([name, value]) => (name === "is_gated" ? !value : Boolean(value)))
    .map(([name, value]) => [name, name === "shared" ? clean(value) : value]));
  return { ...layer, mixers: layer.mixers.map(clean), mlp: clean(layer.mlp) };
}

// -- parts of layers -------------------------------------------------------------------------------

const MIXERS = {
  attention(fields, window) {
    const { family, heads, headDim } = fields;
    const isOne = family.multi_query && fields.flag("multi_query", true);
    const kvHeads = isOne ? 1 : fields.integer("num_key_value_heads", heads);
    const isAsked = Array.isArray(family.qk_norm) && fields.flag(family.qk_norm[0], false);
    const norm = Array.isArray(family.qk_norm) ? (isAsked ? family.qk_norm[1] : "none") : family.qk_norm;
    const bias = family.bias_field ? fields.flag(family.bias_field, family.qkv_bias) : family.qkv_bias;
    return {
      kind: "Attention",
      heads,
      kv_heads: kvHeads,
      head_dim: headDim,
      window,
      qkv_bias: bias,
      output_bias: fields.flag("attention_out_bias", family.output_bias ?? bias),
      qk_norm_size: { none: 0, head: 2 * headDim, full: (heads + kvHeads) * headDim }[norm],
      has_output_gate: fields.flag("attn_output_gate", family.has_output_gate),
      num_sinks: family.has_sinks ? heads : 0,
    };
  },
  latent_attention: (fields) => ({
    kind: "LatentAttention",
    heads: fields.heads,
    kv_rank: fields.integer("kv_lora_rank"),
    nope_dim: fields.integer("qk_nope_head_dim"),
    rope_dim: fields.integer("qk_rope_head_dim"),
    value_dim: fields.integer("v_head_dim"),
    q_rank: fields.integer("q_lora_rank", null),
  }),
};

/** The window of each layer; null sees everything. */
function windowsOf(fields, count) {
  const { windows } = fields.family;
  const layers = Array.from({ length: count }, (_, layer) => layer);
  if (Array.isArray(windows)) return windowsByType(fields, layers, ...windows);
  const window = windows === "no_windows" ? null : fields.integer("sliding_window", null);
  if (windows !== "windows_if_used") return layers.map(() => window);
  const first = fields.integer("max_window_layers", 28);
  const isUsed = fields.flag("use_sliding_window", false);
  return layers.map((layer) => (isUsed && layer >= first ? window : null));
}

function windowsByType(fields, layers, pattern, usual) {
  const window = fields.integer("sliding_window", usual);
  const every = fields.integer("sliding_window_pattern", pattern);
  const types = fields.given.layer_types ?? layers.map((layer) =>
    ((layer + 1) % every ? "sliding_attention" : "full_attention"));
  return layers.map((layer) => (types[layer] === "sliding_attention" ? window : null));
}

const MLPS = {
  dense: (fields) => dense(fields, fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))),
  experts_everywhere(fields) {
    const inner = fields.integer("moe_intermediate_size", null) || fields.integer("intermediate_size");
    return experts(fields, inner, fields.integer("shared_intermediate_size", 0));
  },
  qwen_experts(fields, layer) {
    const step = fields.integer("decoder_sparse_step", 1);
    if (fields.given.mlp_only_layers?.includes(layer) || (layer + 1) % step) return MLPS.dense(fields);
    const inner = fields.integer("moe_intermediate_size");
    return experts(fields, inner, fields.integer("shared_expert_intermediate_size", 0));
  },
  deepseek_experts(fields, layer) {
    const first = fields.integer("first_k_dense_replace", 0);
    const isSparse = fields.given.mlp_layer_types
      ? fields.given.mlp_layer_types[layer] === "sparse"
      : layer >= first && layer % fields.integer("moe_layer_freq", 1) === 0;
    if (!isSparse) return MLPS.dense(fields);
    const inner = fields.integer("moe_intermediate_size");
    return experts(fields, inner, inner * fields.integer("n_shared_experts", 0));
  },
};

function dense(fields, inner) {
  const { mlp_bias_field: name, mlp_bias: usual, is_gated: isGated } = fields.family;
  return { kind: "DenseMlp", inner, is_gated: isGated, has_bias: fields.flag(name, usual) };
}

function experts(fields, inner, shared) {
  const { family } = fields;
  const { kind, ...beside } = dense(fields, shared);
  return {
    kind: "ExpertMlp",
    num_experts: fields.integer("num_experts"),
    per_token: fields.integer("num_experts_per_tok", family.experts_per_token),
    inner,
    is_gated: family.is_gated,
    has_bias: family.mlp_bias,
    router_bias: family.router_bias,
    shared: shared ? beside : null,
    has_shared_gate: family.has_shared_gate && shared > 0,
  };
}

// -- what its authors quantized --------------------------------------------------------------------

const IGNORED = ["modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"];

function publishedOf(config, { weights }) {
  if (!config) return null;
  const method = config.quant_method?.toLowerCase();
  if (!Object.hasOwn(METHODS, method)) throw new CannotBe(`quantization with ${method} cannot be read here: ask a server of octavo`);
  const [name, changes] = METHODS[method](config);
  const rule = weights[name];
  const names = IGNORED.map((each) => config[each]).find((each) => each !== undefined && each !== null) ?? [];
  return { ...rule, type: { ...rule.type, ...changes }, ignored: names.map(patternOf) };
}

const METHODS = {
  fp8({ weight_block_size: block }) {
    return block ? ["fp8-block", { block_outputs: block[0], block_inputs: block[1] }] : ["fp8", {}];
  },
  fbgemm_fp8: (config) => METHODS.fp8(config),
  mxfp4: () => ["mxfp4", {}],
  gptq({ bits = 4, group_size: group = 128 }) {
    const inputs = Math.max(0, group);
    return ["gptq", { name: `int${bits}-g${inputs}`, bits, scale_bytes: 2 + bits / 8, block_inputs: inputs }];
  },
  awq: (config) => METHODS.gptq(config),
};

/** For the modules that a config names: itself, or all below it. */
function patternOf(name) {
  if (name.startsWith("re:")) return `^(?:${name.slice(3)})`;
  const plain = name.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".*");
  return `(?:^|\\.)${plain}(?:\\.|$)`;
}
