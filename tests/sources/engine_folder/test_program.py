"""A program that was written and read is the one of the recording, struct by struct."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.kernels.cpu import abi, library
from octavo.kernels.cpu.library import Pool
from octavo.kernels.cpu.packed_weights import PackedWeights, lay_out, pack_all
from octavo.kernels.cpu.packing import aligned
from octavo.kernels.cpu.program import KVLayout, Program
from octavo.layers.module import named_parameters
from octavo.models.config import ModelConfig
from octavo.models.config_hf import config_from_hf
from octavo.models.registry import model_class
from octavo.quantization.base import StoredWeight, Weight
from octavo.quantization.ggml_types import GGMLType
from octavo.runtime.op_program import NativeModel, plan_step
from octavo.sources.engine_folder.model_config import config_json, read_config
from octavo.sources.engine_folder.program import Constants, program_json, read_program

MAX_TOKENS = 5
BLOCK_BYTES = 1 << 20
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_local_base_freq": 1e3,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 30.0,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "head_dim": 6,
}
CONFIGS = {
    "llama": LLAMA,
    "untied": {**LLAMA, "tie_word_embeddings": False},
    "yarn": {**LLAMA, "rope_scaling": YARN},
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {**LLAMA, **GEMMA},
    "deepseek": {**LLAMA, **DEEPSEEK},
    "mixtral": {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "qwen2-moe": {**LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 5},
    "gpt-oss": {**LLAMA, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4},
    "glm4-moe": {**LLAMA, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8},
    # Scales; norms of whole projections; layernorms, and layers without rope; positions, biases.
    "granite": {
        **LLAMA,
        "architectures": ["GraniteForCausalLM"],
        "residual_multiplier": 0.2,
        "logits_scaling": 8.0,
        "embedding_multiplier": 3.0,
    },
    "olmo2": {**LLAMA, "architectures": ["Olmo2ForCausalLM"]},
    "cohere2": {**LLAMA, "architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 2},
    "opt": {**LLAMA, "architectures": ["OPTForCausalLM"], "activation_function": "relu"},
}


def config_of(name: str) -> ModelConfig:
    if name in ("divisors", "longrope"):  # as only GGUF files have them
        config = config_from_hf(LLAMA)
        rope = replace(config.rope, has_freq_factors=True)
        return replace(
            config, rope=replace(rope, scaling="longrope") if name == "longrope" else rope
        )
    return config_from_hf(CONFIGS[name])


def random_model(config: ModelConfig) -> Any:
    rng = np.random.default_rng(0)
    model = model_class(config.architecture)(config)
    parameters = dict(named_parameters(model))
    for parameter in parameters.values():
        values = rng.normal(1, 0.1, size=parameter.shape).astype(np.float32)
        rows = values.reshape(-1, parameter.shape[-1]).view(np.uint8)
        parameter.load(StoredWeight(GGMLType.F32, rows, parameter.shape))
    if config.tie_embeddings:
        parameters["lm_head.weight"].share(parameters["model.embed_tokens.weight"])
    return model


def layout_of(config: ModelConfig, layers: list[int]) -> KVLayout:
    heads = config.num_kv_heads, config.head_dim
    return KVLayout(abi.OCT_KV_BF16, *heads, 4, BLOCK_BYTES, layers, [0] * len(layers))


def read_back(plan: Any, model: Any, config: ModelConfig, weights: dict[str, Weight]) -> Any:
    """The plan, and the config, from the text that a manifest would have."""
    constants = Constants()
    document = {
        "model": config_json(config),
        "program": program_json(plan, model, config, constants),
    }
    fields = Fields(Path("octavo.json"), json.loads(json.dumps(document, allow_nan=False)))
    read = read_config(fields.section("model"))
    assert read == config
    arrays = [array.astype(np.float32) for array in constants.arrays]
    shapes = {name: weight.shape for name, weight in weights.items()}
    return read_program(fields.section("program"), read, shapes, arrays)


@pytest.mark.parametrize("activations", ["int8", "mixed", "int16"])
@pytest.mark.parametrize("name", [*CONFIGS, "divisors", "longrope"])
def test_a_program_survives_being_written(name, activations):
    config = config_of(name)
    model = random_model(config)
    native = library.load()
    with Pool(native, 1) as pool:
        plan, weights = plan_step(model, activations)
        entries, size = lay_out(weights, native)
        memory = aligned(size)
        pack_all(weights, entries, memory, native, pool, None)
        packed = PackedWeights(memory, entries)
        layers = [64 * (1 + layer) for layer in range(config.num_layers)]  # never followed
        kv = layout_of(config, layers)
        programs = [
            NativeModel(each, packed, 0).create_program(native, pool, kv, MAX_TOKENS)
            for each in (plan, read_back(plan, model, config, weights))
        ]
        described = [describe(program, config) for program in programs]
    assert described[0] == described[1]
    ops = [node["op"] for node in described[0]["nodes"]]
    mixer = abi.OCT_OP_ATTENTION if config.latent is None else abi.OCT_OP_LATENT
    assert ops.count(mixer) == config.num_layers and ops[-1] == abi.OCT_OP_HEAD


ARGUMENTS = {
    abi.OCT_OP_EMBED: abi.EmbedArgs,
    abi.OCT_OP_LINEAR: abi.LinearArgs,
    abi.OCT_OP_ATTENTION: abi.AttentionArgs,
    abi.OCT_OP_ROWS: abi.RowsArgs,
    abi.OCT_OP_CHECK: abi.CheckArgs,
    abi.OCT_OP_HEAD: abi.LinearArgs,
    abi.OCT_OP_LATENT: abi.LatentArgs,
    abi.OCT_OP_EXPERTS: abi.ExpertsArgs,
}


ADDRESSES = (
    *("in", "add", "x_out", "y", "residual", "a", "b", "q", "k", "v", "out", "x"),
    *("ckv", "logits"),
)


def describe(program: Program, config: ModelConfig) -> dict[str, Any]:
    """All that a program's structs say. An address of activations is its offset, that of anything
    constant what is there."""
    program._extend_tables(40)
    struct = program._struct
    nodes = [struct.nodes[i] for i in range(struct.num_nodes)]
    base = program._buffers._base[False]
    return {
        "nodes": [
            {"op": node.op, **fields_of(ARGUMENTS[node.op].from_address(node.args), base, config)}
            for node in nodes
        ],
        "sizes": (struct.num_nodes, struct.num_head_nodes, struct.vocab, struct.max_tokens),
        "arena": len(program._buffers._memory[False]),
    }


def fields_of(struct: ctypes.Structure, base: int, config: ModelConfig) -> dict[str, Any]:
    constants = constants_of(struct, config)
    found = {}
    for name, _ in struct._fields_:
        value = getattr(struct, name)
        if name in constants:
            found[name] = value and ctypes.string_at(value, 4 * constants[name])
        elif name in ("data", "columns", "kv"):
            found[name] = value  # the same memory, for both
        elif name == "segments":
            found[name] = [fields_of(segment, base, config) for segment in value]
        elif isinstance(value, abi.Weight | abi.Routing | abi.ExpertPlaces):
            found[name] = fields_of(value, base, config)
        elif name == "experts":
            experts = value[: struct.routing.num_experts]
            found[name] = [fields_of(expert, base, config) for expert in experts]
        elif name == "loads":
            assert value  # each program counts for itself
        elif name == "head":
            found[name] = value.contents.softcap if value else None
        elif name in ADDRESSES:
            is_address = not (name == "k" and isinstance(struct, abi.LinearArgs | abi.Weight))
            found[name] = value - base if is_address and value else value
        else:
            unused = (
                "row_index",
                "inner_rows",
                "output_rows",
                "begin",
                "ranks",
                "rows",
                "types",
            )  # of one rank, and of models that generate
            assert name in unused or isinstance(value, int | float), name
            found[name] = value
    return found


def constants_of(struct: ctypes.Structure, config: ModelConfig) -> dict[str, int]:
    """Which fields point to constants, and to how many numbers."""
    match struct:
        case abi.LinearArgs():
            return dict.fromkeys(("norm", "add_norm"), struct.k)
        case abi.Segment():
            return {"bias": struct.weight.n}
        case abi.AttentionArgs():
            table = 40 * struct.rotary_dim
            heads = {"sinks": struct.num_heads, "cos_sin": table}
            return {**dict.fromkeys(("q_norm", "k_norm"), config.head_dim), **heads}
        case abi.LatentArgs():
            heads = {"norm": struct.rank, "cos_sin": 40 * struct.rope_dim}
            return {**heads, "key_up": struct.nope_dim * 48, "value_up": struct.rank * 16}
        case abi.ExpertsArgs():
            return {"norm": struct.hidden}
        case abi.Routing():
            return {"correction": struct.num_experts}
        case abi.Expert():
            inner, hidden = struct.gate.n, struct.gate.k
            return {"gate_bias": inner, "up_bias": inner, "down_bias": hidden}
        case abi.RowsArgs():
            of_norm = ("b",) if struct.kind in (abi.OCT_ROWS_NORM, abi.OCT_ROWS_LAYERNORM) else ()
            return dict.fromkeys((*of_norm, "bias"), struct.width)
    return {}


def test_the_description_sees_a_difference():
    """Of one weight of one norm, and of one rope."""
    config = config_of("gemma3")
    native = library.load()
    described = []
    with Pool(native, 1) as pool:
        for change in (None, "norm", "rope"):
            other = config
            if change == "rope":
                other = replace(config, local_rope=replace(config.local_rope, theta=999.0))
            model = random_model(other)
            if change == "norm":
                model.model.layers[1].self_attn.k_norm.weight._value[3] += 1
            plan, weights = plan_step(model)
            entries, size = lay_out(weights, native)
            packed = PackedWeights(np.zeros(size, dtype=np.uint8), entries)
            kv = layout_of(config, [64] * 3)
            program = NativeModel(plan, packed, 0).create_program(native, pool, kv, MAX_TOKENS)
            description = describe(program, config)
            for node in description["nodes"]:
                for segment in node.get("segments", ()):
                    segment["weight"].pop("data")
                node.get("table", {}).pop("data", None)
            described.append(description)
    assert described[0] != described[1] and described[0] != described[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "model.layers.0.self_attn.o_proj.weight"}, "has the shape"),
        ({"kind": "attention"}, "keeps latent vectors, and no keys"),
        ({"layer": 0}, "has its attention already"),
        ({"rope": 7}, "there are 1 ropes"),
        ({"norm": None}, "norm"),
        ({"q": [0, 64]}, "shape"),
    ],
)
def test_latent_attention_of_other_sizes_is_refused(change, message):
    config = config_of("deepseek")
    model = random_model(config)
    plan, weights = plan_step(model)
    constants = Constants()
    document = program_json(plan, model, config, constants)
    phase = [each for each in document["phases"] if each["kind"] == "latent_attention"][1]
    phase.update(change)
    shapes = {name: weight.shape for name, weight in weights.items()}
    with pytest.raises(ModelFileError, match=message):
        read_program(Fields(Path("octavo.json"), document), config, shapes, constants.arrays)
