"""A GGUF file with the shape of a well-known model and random weights.

    python benchmarks/make_random.py OUT.gguf [--shape llama-1b|llama-3b|llama-8b]
        [--type Q4_K_M|Q4_0|bf16] [--vocab-size N]

How fast a model runs depends on its shape and formats, not on what it has learned: this is for
measuring sizes that cannot be downloaded where the measuring is done. The tokenizer is that of
another GGUF file, with unused tokens up to the vocabulary's size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.hub import DEFAULT_MODEL, resolve
from octavo.models.gguf import GGUFFile
from octavo.models.gguf_writer import TensorToWrite, write_gguf
from octavo.quantization import gguf_mixes
from octavo.quantization.ggml_types import GGMLType, block_shape

STD = 0.02  # of the weights
_CHUNK_BLOCKS = 1 << 15
_UNUSED_TOKEN = 5


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden_size: int
    num_layers: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool


SHAPES = {
    "llama-1b": Shape(2048, 16, 8192, 32, 8, 64, 128_256, True),  # Llama-3.2-1B
    "llama-3b": Shape(3072, 28, 8192, 24, 8, 128, 128_256, True),  # Llama-3.2-3B
    "llama-8b": Shape(4096, 32, 14336, 32, 8, 128, 128_256, False),  # Llama-3.1-8B
}


def matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape of each matrix, in the order of a file."""
    hidden, inner = shape.hidden_size, shape.inner_size
    q_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    if not shape.is_tied:
        yield "output", (shape.vocab_size, hidden)
    yield "token_embd", (shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        for name, size in {
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            yield f"blk.{index}.{name}", size


def type_of(name: str, mix: str, shape: Shape, size: tuple[int, int]) -> GGMLType:
    """What llama.cpp's quantizer makes of a matrix."""
    facts = gguf_mixes.ModelFacts(
        shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.is_tied
    )
    return gguf_mixes.type_of(f"{name}.weight", size, mix.upper(), facts)


def random_rows(type: GGMLType, shape: tuple[int, int], rng: np.random.Generator) -> Any:
    """Chunks of random blocks, whose values have a mean of about 0 and the deviation ``STD``."""
    values, size = block_shape(type)
    left = shape[0] * shape[1] // values
    while left:
        count = min(left, _CHUNK_BLOCKS)
        if type == GGMLType.BF16:
            floats = rng.normal(0, STD, count).astype(np.float32).view(np.uint32)
            yield (floats >> 16).astype("<u2").view(np.uint8)
        else:
            blocks = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
            set_scales(type, blocks)
            yield blocks
        left -= count


def set_scales(type: GGMLType, blocks: np.ndarray) -> None:
    """Where a block has float16 scales, give them values that fit random integers."""

    def put(start: int, value: float) -> None:
        blocks[:, start : start + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if type == GGMLType.Q4_0:  # d * (q - 8)
        put(0, STD / 4.6)
    elif type == GGMLType.Q4_K:  # d * scale * q - dmin * min, with scale and min below 64
        put(0, STD / 290)
        put(2, STD / 290 * 7.5)
    elif type == GGMLType.Q6_K:  # d * scale * (q - 32), with a signed scale
        put(208, STD / 1370)
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


def write_random(path: Path, shape: Shape, mix: str, tokenizer: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    tensors = []
    for name, size in matrices(shape):
        type = type_of(name, mix, shape, size)
        tensors.append(TensorToWrite(f"{name}.weight", size, type, random_rows(type, size, rng)))
    norms = [f"blk.{i}.{kind}_norm" for i in range(shape.num_layers) for kind in ("attn", "ffn")]
    ones = np.ones(shape.hidden_size, np.float32)
    for name in ["output_norm", *norms]:
        tensors.append(TensorToWrite(f"{name}.weight", (shape.hidden_size,), GGMLType.F32, [ones]))
    metadata = {
        "general.architecture": "llama",
        "general.name": f"random {path.stem}",
        "general.file_type": gguf_mixes.file_type(mix.upper()),
        "llama.block_count": shape.num_layers,
        "llama.context_length": 131072,
        "llama.embedding_length": shape.hidden_size,
        "llama.feed_forward_length": shape.inner_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.key_length": shape.head_size,
        "llama.attention.value_length": shape.head_size,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": shape.head_size,
        "llama.vocab_size": shape.vocab_size,
        **tokenizer_of(tokenizer, shape.vocab_size),
    }
    write_gguf(path, metadata, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument(
        "--type", type=str.lower, choices=("q4_k_m", "q4_0", "bf16"), default="q4_k_m"
    )
    parser.add_argument("--vocab-size", type=int, help="instead of the shape's")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="a model with a GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.vocab_size:
        shape = Shape(**{**vars(shape), "vocab_size": args.vocab_size})
    write_random(args.out, shape, args.type, resolve(args.tokenizer), args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
