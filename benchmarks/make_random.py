"""A GGUF file with the shape of a well-known model and random weights.

    python benchmarks/make_random.py OUT.gguf [--type Q4_K_M|Q4_0|Q8_0|bf16]
        [--shape llama-1b|llama-3b|llama-8b|mixtral-1b|deepseek-1b|qwen3-30b-6l] [--vocab-size N]

How fast a model runs depends on its shape and formats, not on what it has learned: this is for
measuring sizes that cannot be downloaded where the measuring is done. The tokenizer is that of
another GGUF file, with unused tokens up to the vocabulary's size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.hub import DEFAULT_MODEL, resolve
from octavo.layers.module import named_parameters
from octavo.models.config import HEAD, ModelConfig
from octavo.models.config_hf import config_from_hf
from octavo.models.config_to_gguf import gguf_config
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.models.parameters import file_tensors
from octavo.models.registry import model_class
from octavo.quantization import gguf_mixes
from octavo.quantization.base import float_bytes
from octavo.quantization.ggml_types import FLOAT_TYPES, GGMLType, block_shape

STD = 0.02  # of the weights
# Of embeddings where there are experts: hidden states have to differ as those of tokens do, as else
# all go to the same few.
EMBEDDING_STD = 1.0
_CHUNK_BLOCKS = 1 << 15
_UNUSED_TOKEN = 5


def llama(
    hidden_size: int,
    num_layers: int,
    inner_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    vocab_size: int,
    is_tied: bool,
) -> dict[str, Any]:
    """What ``config.json`` says of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": inner_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    }


# Large enough for weights to come from memory, small enough to lie in it twice.
_MIXTRAL_1B = {
    **llama(1024, 16, 2048, 16, 4, 64, 49_152, False),
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK_1B = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "vocab_size": 49_152,
    "max_position_embeddings": 131072,
    "q_lora_rank": 384,  # without one, llama.cpp reads only models of 26 and 27 layers
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 352,
    "n_shared_experts": 2,
}

# Layers as Qwen3-30B-A3B has them, 6 of its 48: 3.9e9 weights, of which a token uses 0.5e9.
_QWEN3_30B_6L = {
    **llama(2048, 6, 6144, 32, 4, 128, 49_152, False),
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

# What ``config.json`` says of each.
SHAPES = {
    "llama-1b": llama(2048, 16, 8192, 32, 8, 64, 128_256, True),  # Llama-3.2-1B
    "llama-3b": llama(3072, 28, 8192, 24, 8, 128, 128_256, True),  # Llama-3.2-3B
    "llama-8b": llama(4096, 32, 14336, 32, 8, 128, 128_256, False),  # Llama-3.1-8B
    "mixtral-1b": _MIXTRAL_1B,
    "deepseek-1b": _DEEPSEEK_1B,
    "qwen3-30b-6l": _QWEN3_30B_6L,
}


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of each tensor of a file, by its name."""
    model = model_class(config.architecture)(config)
    parameters = {
        name: parameter.shape
        for name, parameter in named_parameters(model)
        if not (config.tie_embeddings and name == HEAD)
    }
    return {each.name: each.shape for each in file_tensors(config, "gguf", parameters)}


def type_of(name: str, shape: tuple[int, ...], mix: str, config: ModelConfig) -> GGMLType:
    """What llama.cpp's quantizer makes of a matrix, which leaves routers as they are."""
    if name.endswith("ffn_gate_inp.weight"):
        return GGMLType.F32
    facts = gguf_mixes.ModelFacts(
        config.num_layers, config.num_heads, config.num_kv_heads, config.tie_embeddings
    )
    return gguf_mixes.type_of(name, shape, mix.upper(), facts)


def random_rows(
    type: GGMLType, shape: tuple[int, ...], rng: np.random.Generator, std: float = STD
) -> Any:
    """Chunks of random blocks, whose values have a mean of about 0 and the deviation ``std``."""
    values, size = block_shape(type)
    left = prod(shape) // values
    while left:
        count = min(left, _CHUNK_BLOCKS)
        if type in FLOAT_TYPES:
            yield float_bytes(rng.normal(0, std, count).astype(np.float32), type)
        else:
            blocks = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
            set_scales(type, blocks, std)
            yield blocks
        left -= count


def set_scales(type: GGMLType, blocks: np.ndarray, std: float = STD) -> None:
    """Where a block has float16 scales, give them values that fit random integers."""

    def put(start: int, value: float) -> None:
        blocks[:, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    # Where integers reach further down than up, d has either sign: weights with a mean are a matrix
    # of rank 1, and after some layers all hidden states are alike.
    signs = blocks[:, 1] & 0x80
    if type == GGMLType.Q4_0:  # d * (q - 8)
        put(0, std / 4.6)
        blocks[:, 1] |= signs
    elif type == GGMLType.Q8_0:  # d * q
        put(0, std / 74)
        blocks[:, 1] |= signs
    elif type == GGMLType.Q4_K:  # d * scale * q - dmin * min, with scale and min below 64
        put(0, std / 290)
        put(2, std / 290 * 7.5)
    elif type == GGMLType.Q6_K:  # d * scale * (q - 32), with a signed scale
        put(208, std / 1370)
    else:
        raise ValueError(f"no random blocks of {type.name}")


def tokenizer_of(path: Path, vocab_size: int) -> dict[str, Any]:
    with GGUFFile(path) as file:
        metadata = {
            key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")
        }
    tokens = metadata["tokenizer.ggml.tokens"]
    more = vocab_size - len(tokens)
    if more < 0:
        raise SystemExit(f"{path} has {len(tokens)} tokens, more than {vocab_size}")
    metadata["tokenizer.ggml.tokens"] = [*tokens, *(f"<|unused {i}|>" for i in range(more))]
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = np.append(types, [_UNUSED_TOKEN] * more).astype(
        types.dtype
    )
    metadata.pop("tokenizer.ggml.scores", None)
    return metadata


def write_random(
    path: Path, shape: Mapping[str, Any], mix: str, tokenizer: Path, seed: int = 0
) -> None:
    """A file of the model that a ``config.json`` describes. Vectors, which are those of norms, are
    ones."""
    config = replace(config_from_hf(shape), name=f"random {path.stem}")
    rng = np.random.default_rng(seed)
    tensors = []
    for name, size in shapes_of(config).items():
        if len(size) == 1:
            ones = np.ones(size, np.float32)
            tensors.append(TensorToWrite(name, size, GGMLType.F32, [ones]))
            continue
        type = type_of(name, size, mix, config)
        is_spread = config.experts is not None and name == "token_embd.weight"
        rows = random_rows(type, size, rng, EMBEDDING_STD if is_spread else STD)
        tensors.append(TensorToWrite(name, size, type, rows))
    metadata = {
        **gguf_config(config),
        "general.file_type": gguf_mixes.file_type(mix.upper()),
        **tokenizer_of(tokenizer, config.vocab_size),
    }
    write_gguf(path, metadata, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument(
        "--type", type=str.lower, choices=("q4_k_m", "q4_0", "q8_0", "bf16"), default="q4_k_m"
    )
    parser.add_argument("--vocab-size", type=int, help="instead of the shape's")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="a model with a GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.vocab_size:
        shape = {**shape, "vocab_size": args.vocab_size}
    write_random(args.out, shape, args.type, resolve(args.tokenizer), args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
