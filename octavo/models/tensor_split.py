"""The axis along which devices of a tensor-parallel group share each tensor of a model.

One table says it for all families, by the names of tensors in a layer. The planner's shares
(`octavo.cost.weight_shape`) follow from it, and so does a cut of a model's own parameters.

Projections out of the hidden values are cut by their outputs and those back by their inputs, so
that a pair of them needs one sum over the devices (Megatron-LM, arXiv 1909.08053). Heads are never
cut. Everything else, such as norms, routers and the projections to latent vectors, is on every
device. Experts of a layer are cut like an MLP, or dealt out whole (expert parallelism).
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig


class Split(Enum):
    """The part of a matrix that the devices of a tensor-parallel group share out."""

    NOTHING = "every device has all of it"
    OUTPUTS = "each computes some of the outputs"
    INPUTS = "each has some of the inputs, and results are added up"


# By the name of a module in a layer. The vectors of a module that is cut by its outputs, such as
# its bias, are cut with them; those of one that is cut by its inputs are on every device.
_OUTPUTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
    *("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.g_proj", "self_attn.sinks"),
    *("mlp.gate_proj", "mlp.up_proj"),
    # Recurrent layers: projections by what their rows are, and what is kept of a head.
    *("linear_attn.in_proj_qk", "linear_attn.in_proj_v", "linear_attn.in_proj_z"),
    *("linear_attn.in_proj_ba", "linear_attn.conv1d", "linear_attn.dt_bias_A_log"),
    *("mamba.in_proj_zx", "mamba.in_proj_bc", "mamba.in_proj_dt", "mamba.conv1d_x"),
    *("mamba.conv1d_bc", "mamba.A_D_dt", "mamba.norm", "mamba.in_proj", "mamba.dt_proj"),
    *("mamba.dt_proj.bias_D", "mamba.A_log", "mamba.conv1d"),
    *("conv.in_proj", "conv.conv"),
    *("self_attn.b_proj", "self_attn.f_b_proj", "self_attn.g_b_proj", "self_attn.conv1d"),
    *("self_attn.dt_bias_A_log", "self_attn.qkv_proj", "self_attn.output_gate", "self_attn.norm"),
    *("model.embed_tokens", "lm_head"),
)
_INPUTS = (
    *("self_attn.o_proj", "self_attn.out_proj", "mlp.down_proj"),
    *("linear_attn.out_proj", "mamba.out_proj", "mamba.x_proj", "conv.out_proj"),
)
_SPLITS = {
    **dict.fromkeys(_OUTPUTS, Split.OUTPUTS),
    **dict.fromkeys(_INPUTS, Split.INPUTS),
}
_OF_LAYER = re.compile(r"(?:model\.layers\.\d+\.)?(?P<name>.+)")
_EXPERTS = re.compile(r"\.(?:experts(?:\.\d+)?|shared_experts?)\.")


@cache
def split_of(name: str) -> Split:
    """The split of a tensor, by its name in a layer or in full, with or without ``weight``."""
    match = _OF_LAYER.fullmatch(name)
    assert match is not None, name
    inner = _EXPERTS.sub(".", match["name"]).removesuffix(".weight")
    if (found := _SPLITS.get(inner)) is not None:
        return found
    module, _, vector = inner.rpartition(".")
    is_cut = vector == "bias" and _SPLITS.get(module) is Split.OUTPUTS
    return Split.OUTPUTS if is_cut else Split.NOTHING


# -- parameters of the models that run ------------------------------------------------------------


class Cut(NamedTuple):
    """The split of a parameter over the devices of a tensor-parallel group.

    Args:
        axis: 0 splits the outputs (rows), 1 the inputs (columns); None keeps all of it on every
            device.
        blocks: (number of pieces, size of a piece) of each part that lies along the axis, such as
            (heads, head size) of q, k and v in one matrix. Every part is split over the devices by
            itself, and no piece is ever cut.
    """

    axis: int | None
    blocks: tuple[tuple[int, int], ...] = ()


_WHOLE = Cut(None)


def cut_of(config: ModelConfig, parameter: str, shape: tuple[int, ...]) -> Cut:
    """The split of a parameter, by its name in the model's modules and its shape."""
    match = _OF_LAYER.fullmatch(parameter)
    assert match is not None, parameter
    name = match["name"].removesuffix(".weight")
    if name.startswith("mixer."):
        found = _recurrent_cuts(config).get(name.removesuffix(".bias"), _WHOLE)
        return _WHOLE if found.axis == 1 and name.endswith(".bias") else found
    split = split_of(name)
    if split is Split.NOTHING:
        return _WHOLE
    axis = 0 if split is Split.OUTPUTS else 1
    dim = _head_dims(config).get(name.removesuffix(".bias"), 1)
    return Cut(axis, ((shape[axis] // dim, dim),))


def _head_dims(config: ModelConfig) -> dict[str, int]:
    """The head size, in values, of each projection that is split by heads; by module name."""
    latent = config.latent
    if latent is None:
        projections = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
        return {f"self_attn.{name}": config.head_dim for name in projections}
    return {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj"), latent.query_dim),
        "self_attn.kv_b_proj": latent.nope_dim + latent.value_dim,
        "self_attn.o_proj": latent.value_dim,
    }


def _recurrent_cuts(config: ModelConfig) -> dict[str, Cut]:
    """The blocks of rows of each projection of a recurrent layer, by module, in their order."""
    recurrence = config.recurrence
    assert recurrence is not None
    if (mamba := recurrence.mamba) is not None:
        own, shared = (mamba.heads, mamba.head_dim), (mamba.groups, mamba.state_dim)
        each = Cut(0, ((mamba.heads, 1),))
        return {
            "mixer.in_proj": Cut(0, (own, own, shared, shared, (mamba.heads, 1))),
            "mixer.conv1d": Cut(0, (own, shared, shared)),
            **dict.fromkeys(("mixer.dt_bias", "mixer.A_log", "mixer.D"), each),
            "mixer.norm": Cut(0, (own,)),
            "mixer.out_proj": Cut(1, (own,)),
        }
    if (delta := recurrence.delta) is not None:
        keys, values = (delta.key_heads, delta.key_dim), (delta.value_heads, delta.value_dim)
        each = Cut(0, ((delta.value_heads, 1),))
        return {
            **dict.fromkeys(("mixer.in_proj_qkv", "mixer.conv1d"), Cut(0, (keys, keys, values))),
            "mixer.in_proj_z": Cut(0, (values,)),
            "mixer.in_proj_ba": Cut(0, (*each.blocks, *each.blocks)),
            **dict.fromkeys(("mixer.dt_bias", "mixer.A_log"), each),
            "mixer.out_proj": Cut(1, (values,)),
        }
    channels = recurrence.conv.channels, 1
    return {
        "mixer.in_proj": Cut(0, (channels,) * 3),
        "mixer.conv": Cut(0, (channels,)),
        "mixer.out_proj": Cut(1, (channels,)),
    }
