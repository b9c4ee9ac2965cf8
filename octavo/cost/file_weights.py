"""Bytes of a model's weights in its files, read from their tables: no weight is read.

Files name tensors in many ways, quantized ones as several tensors. So their bytes are summed up by
layer and part (attention, MLP, experts, ...), and shared out to the weights of that part by their
sizes: sums of layers and parts are exact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder, split_parts
from octavo.cost.model_spec import ModelSpec
from octavo.cost.quantization_config import read
from octavo.cost.rank_model import Arithmetic
from octavo.cost.weight_shape import Part, WeightShape
from octavo.cost.weight_type import FLOATS, WeightType
from octavo.cost.weights import weights

Place = tuple[int | None, Part]
"""A layer, or None outside of them, and a part."""

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h|blocks)\.(\d+)\.")
_VECTORS = ("weight", "bias", "sinks", "A_log", "D", "dt_bias", "ssm_a", "expert_bias",
            "e_score_correction_bias")  # fmt: skip
# Small tensors that are no matrices, whatever shape they have, and what decides much.
_SMALL = ("conv1d", "conv.conv", "A_log", "layer_scalar", "altup.predict", "altup.correct",
          "altup_predict", "altup_correct")  # fmt: skip
_ROUTERS = ("router", "gate_inp", "mlp.gate.", "moe.gate.", "feed_forward.gate.", "expert_gate")
# Modules that only draft (``speculation/mtp.py``), and factors of rope: no part of a plan.
_UNPLANNED = ("mtp.", "nextn.", "rope_freqs")
# The first of these that a name has in it says what the tensor is part of.
_PARTS: tuple[tuple[str, Part], ...] = (
    *((word, "other") for word in ("vision", "visual", "multi_modal", "audio_tower")),
    *((word, "norm") for word in _SMALL),
    ("embed_tokens_per_layer", "embedding"),
    ("per_layer_token_embd", "embedding"),
    *((word, "mlp") for word in ("per_layer_", "altup_", "laurel", "inp_gate", ".proj.")),
    *((word, "mlp") for word in ("shexp", "shared_expert.", "shared_experts.", "shared_mlp")),
    *((word, "router") for word in _ROUTERS),
    *((word, "experts") for word in ("exps", "experts", "moe.input_linear", "moe.output_linear")),
    *((word, "attention") for word in ("attn", "attention", "mixer", "mamba", "ssm_", "conv.")),
    *((word, "mlp") for word in ("mlp", "ffn", "feed_forward", "sparse_moe", "fc1", "fc2")),
    *((word, "head") for word in ("lm_head", "output.", "embed_out")),
    *((word, "embedding") for word in ("embd", "embed", "wte", "wpe")),
    *((word, "norm") for word in ("norm", "ln_")),
)


@dataclass(frozen=True, slots=True)
class StoredRule:
    """Bits of a number in each place of a file, scales included, and what products with quantized
    weights are computed in."""

    bits: Mapping[Place, float] = field(hash=False)
    quantized: Arithmetic

    def type_of(self, weight: WeightShape) -> WeightType:
        place = _place_of(weight)
        if place not in self.bits and weight.part == "head":  # it is the embedding
            place = None, "embedding"
        bits = self.bits.get(place, 16.0)
        arithmetic = self.quantized
        if bits >= 16:
            arithmetic = "fp32" if bits >= 32 else "fp16"
        return WeightType("stored", bits, arithmetic)


def stored_rule(spec: ModelSpec) -> StoredRule:
    """The rule for the files of ``spec.source``. ModelFileError: they cannot be read."""
    assert spec.source is not None, "only the shape is known"
    quantized: Arithmetic = "int8"  # as GGUF's types are
    if spec.quantization:
        quantized = read(spec, FLOATS["bfloat16"]).quantized.arithmetic
    params: defaultdict[Place, int] = defaultdict(int)
    for weight in weights(spec):
        params[_place_of(weight)] += weight.num_params
    found = stored_bytes(spec.source)
    bits = {place: found[place] * 8 / count for place, count in params.items() if place in found}
    return StoredRule(bits, quantized)


def stored_bytes(path: Path) -> dict[Place, int]:
    """Bytes of a checkpoint's tensors, by where they belong."""
    found: defaultdict[Place, int] = defaultdict(int)
    for name, shape, num_bytes in _tensors(path):
        found[_place(name, shape)] += num_bytes
    return dict(found)


def other_params(path: Path) -> int:
    """Parameters that a checkpoint has beside its text model, such as those of a vision tower."""
    return sum(
        prod(shape) for name, shape, _ in _tensors(path) if _place(name, shape) == (None, "other")
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder has more than a config."""
    return any((folder / name).exists() for name in (_WHOLE, _INDEX))


def _place_of(weight: WeightShape) -> Place:
    is_vector = not weight.inputs and weight.part not in ("experts", "other")
    return weight.layer, "norm" if is_vector else weight.part


def _place(name: str, shape: tuple[int, ...]) -> Place:
    part: Part = next((part for word, part in _PARTS if word in name), "other")
    if part == "other":
        return None, part
    match = _LAYER.search(name)
    layer = int(match[1]) if match else None
    if len(shape) == 1 and name.rpartition(".")[2] in _VECTORS:
        return layer, "norm"
    return layer, part


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and bytes of each tensor that a plan counts."""
    tensors = _of_safetensors(path) if path.is_dir() else _of_gguf(path)
    return (each for each in tensors if not any(word in each[0] for word in _UNPLANNED))


def _of_gguf(path: Path) -> Iterator[tuple[str, tuple[int, ...], int]]:
    from octavo.models.gguf import GGUFFile

    for part in split_parts(path.name):
        for tensor in GGUFFile(path.with_name(part)).tensors.values():
            yield tensor.name, tensor.shape, tensor.num_bytes


def _of_safetensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], int]]:
    from octavo.models.safetensors import SafetensorsFile

    folder = ModelFolder(path)
    names = [_WHOLE]
    if (index := folder.read_json(_INDEX)) is not None:
        names = sorted(set(Fields(path / _INDEX, index).table("weight_map").values()))
    for name in names:
        file_path = folder.find(str(name), named_in=path / _INDEX)
        if file_path is None:
            raise ModelFileError(path / str(name), "is missing")
        file = SafetensorsFile(file_path)
        for tensor, (_, shape) in file.tensors.items():
            yield tensor, shape, file.num_bytes(tensor)
