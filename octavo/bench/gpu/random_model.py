"""Hugging Face folders with the shapes of well-known models and random weights.

How fast a model runs depends on its shape and its formats, not on what it has learned. Numbers
repeat after some megabytes, so that a folder is written as fast as its disk takes it. Tokens are
bytes, and the rest of the vocabulary has no text.

    bf16   as it is
    fp8    matrices of the layers in E4M3, with a scale each
    w4     matrices of the layers as GPTQ in groups of 128
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.models.safetensors_writer import NewTensor, write_safetensors

FORMATS = ("bf16", "fp8", "w4")
STD = 0.02  # standard deviation of the weights

_GROUP = 128  # inputs of a GPTQ scale
_CHUNK_BYTES = 8 << 20
# Of e4m3 codes below 0x60, and of 4-bit codes less their zero, about: for scales that fit STD.
_FP8_DEVIATION, _INT4_DEVIATION = 8.0, 4.6
_FP8_CODES = 0x60  # values below 32, and no NaN


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The shape of a Llama. Sizes are named as in ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    def layer_matrices(self) -> Iterator[tuple[str, int, int]]:
        """Yields name, outputs and inputs of each matrix of a layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        yield "self_attn.q_proj", queries, hidden
        yield "self_attn.k_proj", keys, hidden
        yield "self_attn.v_proj", keys, hidden
        yield "self_attn.o_proj", hidden, queries
        yield "mlp.gate_proj", inner, hidden
        yield "mlp.up_proj", inner, hidden
        yield "mlp.down_proj", hidden, inner

    def step_bytes(self, format: str) -> float:
        """Number of bytes of the weights that a step reads: those of layers, and the head."""
        per_value = {"bf16": 2.0, "fp8": 1.0, "w4": 0.5 + 2 / _GROUP}[format]
        return per_value * self.layer_params + 2.0 * self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        """Number of parameters of the matrices of all layers."""
        return self.num_hidden_layers * sum(n * k for _, n, k in self.layer_matrices())


SHAPES = {
    "tiny": LlamaShape(128, 256, 2, 4, 2, 32, 512, True),
    "0.6b": LlamaShape(1024, 3072, 28, 16, 8, 128, 151_936, True),  # Qwen3-0.6B
    "1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128_256, True),  # Llama-3.2-1B
    "8b": LlamaShape(4096, 14_336, 32, 32, 8, 128, 128_256, False),  # Llama-3.1-8B
}


def write_random_model(folder: Path, shape: LlamaShape, format: str, seed: int = 0) -> None:
    """Make the folder, for as long as a benchmark runs: without waiting for the disk. It is removed
    again if it cannot be finished."""
    folder.mkdir()
    try:
        config = {**_CONFIG, **asdict(shape)} | _QUANTIZATION[format]
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        _write_tokenizer(folder)
        write_safetensors(folder, _tensors(shape, _RandomTensors(format, seed)))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 257,
    "eos_token_id": 256,
}
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}},
    "w4": {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq_v2",
        }
    },
}


def _tensors(shape: LlamaShape, numbers: _RandomTensors) -> Iterator[NewTensor]:
    hidden = shape.hidden_size
    yield numbers.floats("model.embed_tokens.weight", shape.vocab_size, hidden)
    if not shape.tie_word_embeddings:
        yield numbers.floats("lm_head.weight", shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name, outputs, inputs in shape.layer_matrices():
            yield from numbers.matrix(f"{layer}.{name}", outputs, inputs)
        yield numbers.ones(f"{layer}.input_layernorm.weight", hidden)
        yield numbers.ones(f"{layer}.post_attention_layernorm.weight", hidden)
    yield numbers.ones("model.norm.weight", hidden)


class _RandomTensors:
    """Makes tensors of a format, all from the same few random bytes."""

    def __init__(self, format: str, seed: int):
        rng = np.random.default_rng(seed)
        normal = rng.normal(0, STD, _CHUNK_BYTES // 2).astype(np.float32)
        self._floats = (normal.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        self._bytes = np.frombuffer(rng.bytes(_CHUNK_BYTES), np.uint8)
        signs = self._bytes & 0x80
        self._fp8 = (self._bytes & 0x7F) % _FP8_CODES | signs
        self._matrix = {"bf16": self._plain, "fp8": self._float8, "w4": self._gptq}[format]

    def matrix(self, name: str, outputs: int, inputs: int) -> Iterator[NewTensor]:
        return self._matrix(name, outputs, inputs)

    def floats(self, name: str, *shape: int) -> NewTensor:
        return _repeated(name, "BF16", shape, self._floats)

    def ones(self, name: str, size: int) -> NewTensor:
        return _filled(name, "F32", (size,), np.float32(1))

    def _plain(self, name: str, outputs: int, inputs: int) -> Iterator[NewTensor]:
        yield self.floats(f"{name}.weight", outputs, inputs)

    def _float8(self, name: str, outputs: int, inputs: int) -> Iterator[NewTensor]:
        yield _filled(f"{name}.weight_scale", "F32", (1,), np.float32(STD / _FP8_DEVIATION))
        yield _repeated(f"{name}.weight", "F8_E4M3", (outputs, inputs), self._fp8)

    def _gptq(self, name: str, outputs: int, inputs: int) -> Iterator[NewTensor]:
        groups = inputs // _GROUP
        yield _repeated(f"{name}.qweight", "I32", (inputs // 8, outputs), self._bytes)
        yield _filled(f"{name}.qzeros", "I32", (groups, outputs // 8), np.uint32(0x88888888))
        scale = np.float16(STD / _INT4_DEVIATION)
        yield _filled(f"{name}.scales", "F16", (groups, outputs), scale)


def _repeated(name: str, dtype: str, shape: tuple[int, ...], numbers: np.ndarray) -> NewTensor:
    tensor = NewTensor(name, dtype, shape, ())
    return NewTensor(name, dtype, shape, _cut(numbers, tensor.num_bytes))


def _filled(name: str, dtype: str, shape: tuple[int, ...], value: np.generic) -> NewTensor:
    return NewTensor(name, dtype, shape, [np.full(shape, value).view(np.uint8).reshape(-1)])


def _cut(numbers: np.ndarray, num_bytes: int) -> Iterator[np.ndarray]:
    while num_bytes:
        chunk = numbers[:num_bytes]
        yield chunk
        num_bytes -= len(chunk)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<eos>", "<bos>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
