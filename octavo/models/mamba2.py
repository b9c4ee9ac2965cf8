"""Mamba 2 in model files: the part of ``from_hf``, ``to_hf``, ``from_gguf`` and ``to_gguf`` that
Granite 4 and Falcon-H1 share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.base.errors import UnsupportedModelError
from octavo.base.fields import Fields, GGUFFields
from octavo.kernels.recurrence_specs import ConvSpec, GatedNormSpec, ScanSpec
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.models.config import ModelConfig
from octavo.models.family import FileValues
from octavo.models.hybrid import GGUF_CONV, mixer_names

if TYPE_CHECKING:
    import numpy as np

# -- config.json ----------------------------------------------------------------------------------

HF_LAYER = mixer_names("mamba", ("in_proj", "conv1d", "norm", "out_proj"))
HF_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def from_hf(
    fields: Fields, config: ModelConfig, layers: tuple[int, ...], inner: int, **norm: Any
) -> RecurrenceConfig:
    """The recurrence of a ``config.json``.

    Args:
        layers: that are recurrent.
        inner: values of all heads together.
        norm: fields of its ``GatedNormSpec`` that are not the default.
    """
    heads = fields.integer("mamba_n_heads")
    is_auto = fields.raw("mamba_d_head", "auto") == "auto"
    size = inner // heads if is_auto else fields.integer("mamba_d_head")
    if heads * size != inner:
        raise fields.error("mamba_n_heads", f"{heads} heads of {size} values are not {inner}")
    return make(
        config,
        layers,
        heads=heads,
        head_dim=size,
        groups=fields.integer("mamba_n_groups"),
        state_dim=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv", minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias"),
        proj_bias=fields.boolean("mamba_proj_bias"),
        norm=norm,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write the fields that ``from_hf`` reads."""
    recurrence, mamba = config.recurrence, spec_of(config)
    assert recurrence is not None
    return {
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_d_state": mamba.state_dim,
        "mamba_d_conv": recurrence.conv.kernel,
        "mamba_conv_bias": recurrence.conv_bias,
        "mamba_proj_bias": recurrence.proj_bias,
    }


# -- GGUF -----------------------------------------------------------------------------------------

GGUF_LAYER = {
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}


def decays(values: np.ndarray) -> np.ndarray:
    """The value of A, which GGUF files store in place of its logarithm."""
    import numpy as np

    return -np.exp(values)


def log_decays(values: np.ndarray) -> np.ndarray:
    """The other way; NaN, with which a model computes nothing, of what is no decay."""
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-values.astype(np.float64)).reshape(-1)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1)


def gguf_values(groups: int = 1) -> dict[str, FileValues]:
    """Conversions of the values of Mamba 2 in GGUF files; the norm has ``groups`` rows there."""
    return {
        "mixer.conv1d.weight": GGUF_CONV,
        "mixer.A_log": FileValues(log_decays, lambda values: decays(values)[:, None]),
        "mixer.D": FileValues(_flat, lambda values: values[:, None]),
        "mixer.norm.weight": FileValues(_flat, lambda values: values.reshape(groups, -1)),
    }


def from_gguf(fields: Fields, config: ModelConfig, layers: tuple[int, ...]) -> RecurrenceConfig:
    """The recurrence of a file. Its projections have no biases there."""
    assert isinstance(fields, GGUFFields)
    inner, heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    if inner % heads:
        raise fields.error("ssm.time_step_rank", f"{inner} values are not {heads} heads")
    return make(
        config,
        layers,
        heads=heads,
        head_dim=inner // heads,
        groups=fields.integer("ssm.group_count"),
        state_dim=fields.integer("ssm.state_size"),
        kernel=fields.integer("ssm.conv_kernel", minimum=2),
        conv_bias=fields.has_in_a_layer("ssm_conv1d.bias"),
        norm={"normed": fields.has_in_a_layer("ssm_norm.weight")},
    )


def to_gguf(config: ModelConfig) -> dict[str, Any]:
    """Write the keys that ``from_gguf`` reads. UnsupportedModelError: llama.cpp would run it
    differently."""
    recurrence, mamba = config.recurrence, spec_of(config)
    assert recurrence is not None
    if not recurrence.conv_bias:
        raise UnsupportedModelError(
            f"{config.name}: llama.cpp adds a bias to each convolution, and this model has none"
        )
    return {
        "ssm.conv_kernel": recurrence.conv.kernel,
        "ssm.inner_size": mamba.width,
        "ssm.state_size": mamba.state_dim,
        "ssm.time_step_rank": mamba.heads,
        "ssm.group_count": mamba.groups,
    }


# -- both -----------------------------------------------------------------------------------------


def spec_of(config: ModelConfig) -> ScanSpec:
    assert config.recurrence is not None and config.recurrence.mamba is not None
    return config.recurrence.mamba


def make(
    config: ModelConfig,
    layers: tuple[int, ...],
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    kernel: int,
    norm: dict[str, Any],
    conv_bias: bool,
    proj_bias: bool = False,
) -> RecurrenceConfig:
    """Sizes of the first projection's outputs: the gate, the inputs of the convolution, the step
    sizes."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    spec = GatedNormSpec(
        width=inner, group=inner // groups, eps=config.norm_eps, gate_first=True, **norm
    )
    return RecurrenceConfig(
        layers=layers,
        conv=ConvSpec(channels=channels, kernel=kernel, first=inner),
        mamba=ScanSpec(
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state_dim=state_dim,
            first=inner + channels,
        ),
        norm=spec,
        conv_bias=conv_bias,
        proj_bias=proj_bias,
    )
