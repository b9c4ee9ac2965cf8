"""The ``eagle`` method (EAGLE-3), one decoder layer over features of three target layers.

The feature f of position p is W [h_a, h_b, h_c], the residual stream after a, b and c layers; the
layer reads it beside the embedding e of the token p + 1 (Li et al. 2025, arXiv 2503.01840)::

    q, k, v = W_q [norm(e), norm(f)], ...        everything else is a layer as Llama has it
    logits  = lm_head(norm(x))                   over a part of the target's vocabulary

and its output x is the feature that the next token is drafted from. A folder has the published
layout: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t`` (the target's token id less the row
of the head), ``t2d``, and optionally ``embed_tokens``, in place of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from octavo.base.fields import Fields
from octavo.layers.attention import Attention
from octavo.layers.context import Activations, ForwardContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear, LMHead
from octavo.layers.mlp import GatedMLP
from octavo.layers.module import Module
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryEmbedding
from octavo.models.config import ModelConfig
from octavo.models.config_hf import config_from_hf
from octavo.runtime.capacity import RankLimits
from octavo.settings.speculation import SpeculativeConfig
from octavo.speculation.draft_tree import tree_shape
from octavo.speculation.drafter import TargetModel
from octavo.speculation.head_folder import HeadFolder
from octavo.speculation.head_program import DraftHead, Projection
from octavo.speculation.layer_head import FEATURE, LayerProposer, kv_bytes_per_token
from octavo.speculation.native_target import NativeTarget
from octavo.speculation.two_input_linear import PairLinear

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NUM_TOKENS = 3  # each is accepted less often than the one before
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class EagleLayer(Module):
    def __init__(self, layer: ModelConfig, *, norm_before_residual: bool):
        size, heads, dim = layer.hidden_size, layer.num_heads, layer.head_dim
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(size, layer.norm_eps)
        self.hidden_norm = RMSNorm(size, layer.norm_eps)
        self.self_attn = Attention(
            0, size, heads, layer.num_kv_heads, dim, scale=layer.attention_scale
        )
        self.self_attn.q_proj = PairLinear(size, size, heads * dim)
        self.self_attn.k_proj = PairLinear(size, size, layer.num_kv_heads * dim)
        self.self_attn.v_proj = PairLinear(size, size, layer.num_kv_heads * dim)
        self.post_attention_layernorm = RMSNorm(size, layer.norm_eps)
        self.mlp = GatedMLP(size, layer.intermediate_size, layer.activation)

    def forward(
        self, e: Activations, f: Activations, cos_sin: Activations, ctx: ForwardContext
    ) -> Activations:
        normed = self.hidden_norm(f, ctx)
        attended = self.self_attn((self.input_layernorm(e, ctx), normed), cos_sin, ctx)
        x = ctx.ops.add(normed if self.norm_before_residual else f, attended)
        return ctx.ops.add(x, self.mlp(self.post_attention_layernorm(x, ctx), ctx))


class EagleHead(DraftHead):
    """One drafting step: logits of the token after next, from a feature and the next token."""

    def __init__(self, layer: ModelConfig, rows: int, *, norm_before_residual: bool):
        self.inputs = {FEATURE: layer.hidden_size}
        self.embed_tokens = Embedding(layer.vocab_size, layer.hidden_size)
        self.rotary_emb = RotaryEmbedding(layer.rope)
        self.midlayer = EagleLayer(layer, norm_before_residual=norm_before_residual)
        self.norm = RMSNorm(layer.hidden_size, layer.norm_eps)
        self.lm_head = LMHead(layer.hidden_size, rows)

    def forward(
        self, inputs: Mapping[str, Activations], token_ids: Activations, ctx: ForwardContext
    ) -> Activations:
        e = self.embed_tokens(token_ids, ctx)
        x = self.midlayer(e, inputs[FEATURE], self.rotary_emb(ctx), ctx)
        return self.lm_head(self.norm(x, ctx), ctx)


@dataclass(frozen=True, slots=True)
class _LoadedEagleHead:
    head: EagleHead
    fc: Linear
    layer: ModelConfig
    depths: tuple[int, ...]
    token_ids: np.ndarray  # target ids by the row of the head


class EagleDrafter:
    """A ``Drafter`` of the EAGLE-3 head of a folder. Raises as ``open_drafter`` does."""

    def __init__(self, config: SpeculativeConfig, target: TargetModel, folder: HeadFolder):
        folder.check(ARCHITECTURES, "eagle")
        self._rank = target.rank
        self._native = NativeTarget(target, "eagle")
        self._loaded = _load(folder, self._native)
        self._shape = tree_shape(config, folder.config, _NUM_TOKENS, beams=1)
        self._rank.keep_hidden_states(self._loaded.depths)
        self.kv_bytes_per_token = kv_bytes_per_token(self._loaded.layer)

    def start(self, limits: RankLimits) -> LayerProposer:
        loaded, native = self._loaded, self._native
        projection = Projection(loaded.fc, native.library, native.pool)
        proposer = LayerProposer(
            loaded.head,
            loaded.layer,
            native,
            limits,
            loaded.depths,
            projection.run,
            loaded.token_ids,
            self._shape,
        )
        self._rank.follow(proposer)
        return proposer


def _load(folder: HeadFolder, native: NativeTarget) -> _LoadedEagleHead:
    fields = folder.config
    layer = layer_config(fields)
    folder.check_fits("hidden_size", layer.hidden_size, native.config)
    folder.check_fits("vocab_size", layer.vocab_size, native.config)
    rows = fields.integer("draft_vocab_size", layer.vocab_size)
    before = fields.boolean("norm_before_residual", False)
    head = EagleHead(layer, rows, norm_before_residual=before)
    if "embed_tokens.weight" not in folder.tensors:
        head.embed_tokens.weight, head.embed_tokens.scale = native.share_embedding(
            head.embed_tokens.weight
        )
    for name in _PROJECTIONS:
        pair = getattr(head.midlayer.self_attn, name)
        pair.load(folder, f"midlayer.self_attn.{name}.weight")
    depths = _depths(fields, native.config.num_layers)
    fc = Linear(len(depths) * layer.hidden_size, layer.hidden_size)
    folder.fill(fc.weight, "fc.weight")
    token_ids = np.arange(rows)
    if rows < layer.vocab_size or "d2t" in folder.tensors:
        token_ids = folder.token_ids("d2t", rows, layer.vocab_size, offsets=True)
    folder.load(head, ignored=["t2d"])  # d2t has the same information
    return _LoadedEagleHead(head, fc, layer, depths, token_ids)


# Fields of the config that describe the head, not its decoder layer.
_HEAD_FIELDS = frozenset(
    ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "octavo")
)


def layer_config(fields: Fields) -> ModelConfig:
    """The config of a head's one decoder layer, as of a Llama of one layer."""
    values = {name: fields.raw(name) for name in fields if name not in _HEAD_FIELDS}
    values |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return config_from_hf(values, path=fields.path)


def _depths(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The numbers of target layers after which hidden states are taken; by default those of the
    paper's implementation. The config names the layers that read these states."""
    if "eagle_aux_hidden_state_layer_ids" not in fields:
        return 2, num_layers // 2, num_layers - 3
    ids = fields.each(
        "eagle_aux_hidden_state_layer_ids",
        lambda f, name: f.integer(name, minimum=0, maximum=num_layers),
    )
    if not ids:
        raise fields.error("eagle_aux_hidden_state_layer_ids", "names no layer")
    return tuple(ids)
