"""Small models with recurrent layers and random weights, of sizes that fill no vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from octavo.kernels.recurrence_specs import ConvSpec, DeltaSpec, GatedNormSpec, ScanSpec
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding
from octavo.layers.linear import LMHead
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module, named_parameters
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrence_config import RecurrenceConfig
from octavo.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv
from octavo.layers.rope import RotaryEmbedding
from octavo.layers.rope_config import RopeConfig
from octavo.models.config import ModelConfig
from octavo.quantization.base import StoredWeight
from octavo.quantization.ggml_types import GGMLType

HIDDEN, VOCAB = 44, 97

_MAMBA = ScanSpec(heads=6, head_dim=20, groups=2, state_dim=9, first=120 + 156, step_max=0.5)
_DELTA = DeltaSpec(key_heads=2, key_dim=18, value_heads=4, value_dim=21)

RECURRENCES: dict[str, tuple[type[Module], RecurrenceConfig]] = {
    "short_conv": (
        ShortConv,
        RecurrenceConfig(layers=(0, 2), conv=ConvSpec(channels=37, kernel=3, gated=True)),
    ),
    "mamba2": (
        Mamba2,
        RecurrenceConfig(
            layers=(0, 2),
            conv=ConvSpec(channels=156, kernel=4, first=120),
            mamba=_MAMBA,
            norm=GatedNormSpec(width=120, group=60, eps=1e-5, gate_first=True),
            conv_bias=True,
            proj_bias=True,
        ),
    ),
    "mamba2_scaled": (  # without a norm, and with what Falcon-H1 scales
        Mamba2,
        RecurrenceConfig(
            layers=(0, 2),
            conv=ConvSpec(channels=156, kernel=4, first=120),
            mamba=replace(_MAMBA, step_scale=0.6),
            norm=GatedNormSpec(
                width=120, group=60, eps=1e-5, gate_first=True, gate_scale=1.4, normed=False
            ),
            mamba_scales=(0.7, 1.2, 0.9),
        ),
    ),
    "gated_delta": (
        GatedDeltaNet,
        RecurrenceConfig(
            layers=(0, 2),
            conv=ConvSpec(channels=156, kernel=4),
            delta=_DELTA,
            norm=GatedNormSpec(width=84, group=21, eps=1e-6),
        ),
    ),
}


class HybridLayer(Module):
    def __init__(self, config: ModelConfig, index: int, mixer: type[Module]):
        assert config.recurrence is not None
        self.norm = RMSNorm(HIDDEN, config.norm_eps)
        self.mixer: Any = None
        self.attention: Any = None
        if config.attends(index):
            self.attention = Attention(
                config.kv_index(index), HIDDEN, config.num_heads, 1, config.head_dim, scale=0.25
            )
        else:
            place = config.recurrence.layers.index(index)
            self.mixer = mixer(place, HIDDEN, config.recurrence)
        self.mlp_norm = RMSNorm(HIDDEN, config.norm_eps)
        self.mlp = GatedMLP(HIDDEN, config.intermediate_size, "silu")

    def forward(self, x, cos_sin, ctx):
        normed = self.norm(x, ctx)
        if self.mixer is not None:
            mixed = self.mixer(normed, ctx)
        else:
            mixed = self.attention(normed, cos_sin, ctx)
        x = ctx.ops.add(x, mixed)
        return ctx.ops.add(x, self.mlp(self.mlp_norm(x, ctx), ctx))


class HybridBody(Module):
    def __init__(self, config: ModelConfig, mixer: type[Module]):
        self.embed_tokens = Embedding(VOCAB, HIDDEN)
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.layers = [HybridLayer(config, index, mixer) for index in range(config.num_layers)]
        self.norm = RMSNorm(HIDDEN, config.norm_eps)

    def forward(self, token_ids, ctx):
        x, cos_sin = self.embed_tokens(token_ids, ctx), self.rotary_emb(ctx)
        for layer in self.layers:
            x = layer(x, cos_sin, ctx)
        return self.norm(x, ctx)


class Hybrid(Module):
    def __init__(self, config: ModelConfig, mixer: type[Module]):
        self.model = HybridBody(config, mixer)
        self.lm_head = LMHead(HIDDEN, VOCAB)

    def forward(self, token_ids, ctx):
        return self.model(token_ids, ctx)

    def compute_logits(self, hidden, ctx):
        return self.lm_head(hidden, ctx)


def make_hybrid(name: str, seed: int = 0) -> tuple[Hybrid, ModelConfig]:
    """A recurrent layer, one that attends, and another recurrent one."""
    mixer, recurrence = RECURRENCES[name]
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        name=name,
        num_layers=3,
        hidden_size=HIDDEN,
        intermediate_size=52,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=VOCAB,
        max_position=256,
        rope=RopeConfig(theta=10_000.0, rotary_dim=16, max_position=256),
        norm_eps=1e-5,
        layer_windows=(None,) * 3,
        attention_scale=0.25,
        recurrence=recurrence,
    )
    model = Hybrid(config, mixer)
    rng = np.random.default_rng(seed)
    for name, parameter in named_parameters(model):
        values = rng.normal(0, 0.3, parameter.shape)
        if "norm" in name:
            values += 1
        parameter.load(stored(values.astype(np.float32)))
    return model, config


def stored(values: np.ndarray) -> StoredWeight:
    rows = values.reshape(-1, values.shape[-1])
    return StoredWeight(GGMLType.F32, rows.view(np.uint8), values.shape)
