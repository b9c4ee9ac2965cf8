"""The twin of a model: the same function, with weights that lie on no grid of any format.

    python benchmarks/make_twin.py MODEL OUT [--dtype f32|bf16] [--seed N]

A model that was quantized once has weights on the grid of its blocks, and whoever quantizes it
again finds them there: measured on it, bad methods look good. The twin is a Hugging Face folder
whose weights are changed where the changes cancel out, so that it answers as the original does but
for rounding in float32 (in bfloat16, for that of the weights too):

    scales of +-9 % of each channel   norm -> q, k, v     norm -> gate, up     up -> down
    a random orthogonal mix           v -> o, one for each key-value head
    random rotations                  of the pairs of values of q and k that rope turns together,
                                      the same for all heads that meet; not where these have norms

Embedding, head and the last norm stay: what is measured leaves them alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.hub import resolve
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.hf_writer import float_tensor, write_hf_folder
from octavo.models.parameters import Parameters
from octavo.models.safetensors_writer import NewTensor
from octavo.quality.report import QuantizationJudge, built_in_text
from octavo.quantization.base import float_bytes
from octavo.quantization.ggml_types import GGMLType
from octavo.quantize.hadamard import random_orthogonal

_SCALE = 0.09
_DTYPES = {"f32": GGMLType.F32, "bf16": GGMLType.BF16}

Layer = dict[str, np.ndarray]
"""The parameters of a layer in float64, by their names within it: matrices [N, K], vectors [N]."""


def twin_tensors(parameters: Parameters, dtype: GGMLType, seed: int) -> Iterator[NewTensor]:
    """The twin's parameters in the model's order, with one layer of them in memory."""
    changed: Layer = {}
    for name in parameters.names:
        if not name.startswith("model.layers."):
            yield float_tensor(parameters, name, dtype)
            continue
        index, _, part = name.removeprefix("model.layers.").partition(".")
        if not changed:
            changed = read_layer(parameters, int(index))
            change(changed, parameters.config, np.random.default_rng([seed, int(index)]))
        values = changed.pop(part).astype(np.float32)
        yield NewTensor(name, dtype.name, values.shape, [float_bytes(values, dtype)])


def read_layer(parameters: Parameters, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    return {
        name.removeprefix(prefix): parameters.rows(name).astype(np.float64)
        for name in parameters.names
        if name.startswith(prefix)
    }


def change(layer: Layer, config: ModelConfig, rng: np.random.Generator) -> None:
    """Make a layer its twin, in place."""
    attention = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    mlp = [f"mlp.{name}_proj.weight" for name in ("gate", "up")]
    is_gemma = "pre_feedforward_layernorm.weight" in layer  # whose norms are of outputs, too
    before_mlp = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    scale_norm(layer, "input_layernorm.weight", attention, config, rng)
    scale_norm(layer, f"{before_mlp}.weight", mlp, config, rng)
    scale_up_and_down(layer, rng)
    mix_values(layer, config, rng)
    if not config.qk_norm:  # its weights tell the two values of a pair apart
        rotate_pairs(layer, config, rng)


def random_scales(size: int, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(1 - _SCALE, 1 + _SCALE, size)


def scale_norm(
    layer: Layer, norm: str, readers: list[str], config: ModelConfig, rng: np.random.Generator
) -> None:
    """More of a channel from the norm, and as much less of it in all matrices that read it."""
    scales = random_scales(len(layer[norm]), rng)
    plus = 1.0 if config.norm_plus_one else 0.0
    layer[norm] = (layer[norm] + plus) * scales - plus
    for reader in readers:
        layer[reader] /= scales


def scale_up_and_down(layer: Layer, rng: np.random.Generator) -> None:
    scales = random_scales(len(layer["mlp.up_proj.weight"]), rng)
    layer["mlp.up_proj.weight"] *= scales[:, None]
    if "mlp.up_proj.bias" in layer:
        layer["mlp.up_proj.bias"] *= scales
    layer["mlp.down_proj.weight"] /= scales


def mix_values(layer: Layer, config: ModelConfig, rng: np.random.Generator) -> None:
    """Values of a head come as mixes of each other; what reads the query heads of its group undoes
    it, as attention itself only adds up values of one place."""
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    output = layer["self_attn.o_proj.weight"]
    for head in range(config.num_kv_heads):
        mix = random_orthogonal(size, rng)
        rows = slice(head * size, (head + 1) * size)
        for part in ("weight", "bias"):
            if (name := f"self_attn.v_proj.{part}") in layer:
                layer[name][rows] = mix @ layer[name][rows]
        for reader in range(head * group, (head + 1) * group):
            columns = slice(reader * size, (reader + 1) * size)
            output[:, columns] = output[:, columns] @ mix.T


def rotate_pairs(layer: Layer, config: ModelConfig, rng: np.random.Generator) -> None:
    """Rope turns pair i of a head by an angle; so turns of pair i can come before it, and where
    query and key have the same one, their product does not know of it."""
    half = config.rope.rotary_dim // 2
    group = config.num_heads // config.num_kv_heads
    angles = rng.uniform(0, 2 * np.pi, (config.num_kv_heads, half))
    for projection, of_head in (("q", np.repeat(angles, group, axis=0)), ("k", angles)):
        for part in ("weight", "bias"):
            if (name := f"self_attn.{projection}_proj.{part}") in layer:
                rows = layer[name].reshape(len(of_head), config.head_dim, -1)
                first, second = rows[:, :half].copy(), rows[:, half : 2 * half].copy()
                cos, sin = np.cos(of_head)[..., None], np.sin(of_head)[..., None]
                rows[:, :half] = cos * first - sin * second
                rows[:, half : 2 * half] = sin * first + cos * second


def write_twin(out: Path, model: Path, dtype: GGMLType, seed: int = 0) -> None:
    checkpoint = open_checkpoint(model)
    tensors = twin_tensors(Parameters(checkpoint), dtype, seed)
    write_hf_folder(out, checkpoint, tensors, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="alias, folder or .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=_DTYPES, default="f32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_twin(args.out, resolve(args.model), _DTYPES[args.dtype], args.seed)
    with QuantizationJudge(args.model, built_in_text()) as judge:
        quality = judge.quality(str(args.out))
    print(f"{args.out}: KL divergence to {args.model} {quality['kl_mean']:.2e}")


if __name__ == "__main__":
    main()
