"""Fields of a ``config.json``'s text model under one spelling, with what its family adds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from octavo.base.fields import Fields
from octavo.cost.mixers import Mixer
from octavo.cost.mlps import Mlp
from octavo.cost.unread_keys import unread
from octavo.cost.weight_shape import WeightShape

_MAX_LAYERS = 1024

# What families call the same thing.
SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": (*("n_positions", "max_seq_len", "seq_length", "model_max_length"),),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("experts_per_token", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
        "top_k_experts",
    ),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers",),
    "moe_intermediate_size": ("expert_intermediate_size",),
    "moe_latent_size": ("routed_expert_hidden_size",),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
}
_USUAL = {other: name for name, others in SPELLINGS.items() for other in others}


def usual_name(name: str) -> str:
    """The spelling under which a field is read that families call ``name``."""
    return _USUAL.get(name, name)


Windows = tuple[int | None, ...]
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFamily:
    """Fields that a config leaves to its ``model_type``.

    Args:
        norms: of the hidden size in each layer. norm_bias: these have one.
        final_norms: after (or before) all layers. has_last_norm: see ``LayerSpec``.
        is_gated: MLPs have two matrices that go up.
        bias_field: what says whether queries, keys and values have biases; it is ``qkv_bias``
            where the field is absent, or has no name.
        output_bias: of attention; None is like ``qkv_bias``.
        qk_norm: whether queries and keys are normed, each head by the same values or all by own.
        multi_query: one head of keys and values, unless ``multi_query`` says otherwise.
        mlp_bias, mlp_bias_field: as for queries; of experts, without a field.
        router_bias: see ``ExpertMlp``. has_output_gate: see ``Attention``.
        experts_per_token: where a config does not say.
        extra_positions: rows of learned positions beyond ``max_position_embeddings``; None
            where positions are not learned.
        tie: the head is the embedding, unless ``tie_word_embeddings`` says otherwise.
        windows, mixers, mlp: what makes the windows of all layers, and the parts of one.
        beside, inputs: other weights of a layer, and of the model before its layers.
        defaults: what a field means that is absent.
    """

    norms: int = 2
    norm_bias: bool = False
    final_norms: int = 1
    has_last_norm: bool = False
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool | None = None
    bias_field: str = "attention_bias"
    mlp_bias: bool = False
    mlp_bias_field: str = "mlp_bias"
    head_bias: bool = False
    qk_norm: QkNorm | Callable[[TextConfig], QkNorm] = "none"
    multi_query: bool = False
    has_output_gate: bool = False
    router_bias: bool = False
    has_shared_gate: bool = False
    experts_per_token: int = 2
    extra_positions: int | None = None
    tie: bool = False
    windows: Callable[[TextConfig], Windows]
    mixers: Callable[[TextConfig, int], tuple[Mixer, ...]]
    mlp: Callable[[TextConfig, int], Mlp | None]
    beside: Callable[[TextConfig, int], tuple[WeightShape, ...]] = lambda config, layer: ()
    inputs: Callable[[TextConfig], tuple[WeightShape, ...]] = lambda config: ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


class TextConfig(Fields):
    """The text part of a config under one spelling, and the family that it is of."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        family: ConfigFamily,
        kind: str,
        asked: set[str] | None = None,
    ):
        given = {name: value for name, value in values.items() if value is not None}
        self._given = given
        renamed = {
            name: given[other]
            for name, others in SPELLINGS.items()
            for other in others
            if name not in given and other in given
        }
        kinds = given.get("layers_block_type", given.get("hybrid_override_pattern"))
        if isinstance(kinds, (list, str)):  # which newer configs have in place of the number
            given.setdefault("num_hidden_layers", len(kinds))
        super().__init__(path, {**family.defaults, **given, **renamed})
        if asked is not None:
            self.asked = asked
        self.family = family
        self.kind = kind

    @property
    def hidden(self) -> int:
        return int(self.integer("hidden_size"))

    @property
    def num_layers(self) -> int:
        return int(self.integer("num_hidden_layers", maximum=_MAX_LAYERS))

    @property
    def heads(self) -> int:
        return int(self.integer("num_attention_heads"))

    @property
    def head_dim(self) -> int:
        return int(self.integer("head_dim", max(self.hidden // self.heads, 1)))

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        return self.family.windows(self)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The fields that no reader asked for, by the spelling of the config."""
        for name, value in unread(self._given, self.asked):
            if usual_name(name) not in self.asked:
                yield name, value

    def skip(self, *names: str) -> None:
        """Counts fields as asked for that make no difference beside others."""
        self.asked.update(names)

    def kinds(self, name: str, known: Collection[str]) -> list[str]:
        """The type of each layer; ModelFileError: it is not a known one."""
        kinds = self.texts(name)
        if len(kinds) != self.num_layers or not set(kinds) <= set(known):
            raise self.error(
                name, f"is not one of {', '.join(known)} for each of {self.num_layers} layers"
            )
        return kinds

    def at(self, layer: int) -> TextConfig:
        """The config of one layer: newer configs may have entries for single layers."""
        apart = self.table("per_layer_config", {}).get(str(layer))
        if apart is None:
            return self
        values = {**self._values, **Fields(self.path, {"layer": apart}).table("layer")}
        return TextConfig(self.path, values, self.family, self.kind, self.asked)

    def of_layer(self, name: str, layer: int, default: int | None = None) -> int:
        """A number that some configs give for each layer, others once."""
        if isinstance(self.raw(name), (list, tuple)):
            return int(self.each(name, Fields.integer, self.num_layers)[layer])
        return int(self.integer(name) if default is None else self.integer(name, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.boolean(name, default))
