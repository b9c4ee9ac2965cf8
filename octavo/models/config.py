"""One description of a model, whatever its checkpoint calls things.

``config_hf.py`` reads it from a ``config.json`` and ``config_gguf.py`` from GGUF metadata. They
resolve every variant of naming: the rest of octavo sees a :class:`ModelConfig`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from octavo.base.errors import InvalidRequestError, ModelFileError
from octavo.base.fields import Fields
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.parts import WHOLE, Part
from octavo.kernels.routing import Routing
from octavo.layers.latent_config import LatentConfig
from octavo.layers.recurrence_config import RecurrenceConfig, StateSpec
from octavo.layers.rope_config import RopeConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# Far beyond any model; they keep a damaged file from asking for endless work.
MAX_LAYERS = 1024
MAX_POSITION = 1 << 31
_MAX_SIZE = 1 << 24
_MAX_EXPERTS = 1 << 12

# The parameters that tied weights share.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_SIZES = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    "vocab_size",
)
_POSITIVE = (
    *("norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embedding_scale"),
    *("residual_scale", "logit_scale", "learned_positions"),
)

_log = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV that a layer keeps of each token, in numbers; the engine chooses their type.

    ``window`` is the number of last positions that a layer of that kind sees; None for others. A
    "latent" layer keeps two vectors for all heads, and neither keys nor values: one of ``key_dim``
    that both are made of, and one of ``value_dim`` that is part of every key.
    """

    kind: Literal["full", "window", "latent"]
    num_kv_heads: int
    key_dim: int  # values of a head
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture-of-experts (MoE) model.

    Args:
        routing: how the router chooses a token's experts.
        inner: the intermediate size of one expert.
        layers: for each layer, whether it has experts in place of a dense MLP.
        bias: the experts' projections have biases. router_bias: the router's does (gpt-oss).
        correction: the router adds a bias to its scores that only the choice of experts sees
            (``e_score_correction_bias`` of DeepSeek-V3).
        shared_inner: the intermediate size of the shared experts together; 0 without any.
        shared_gate: a sigmoid gate, one number for each token, scales the shared experts' output
            (Qwen).
        activation: as of ``ModelConfig``, or the clamped SwiGLU of gpt-oss.
    """

    routing: Routing
    inner: int
    layers: tuple[bool, ...]
    bias: bool = False
    router_bias: bool = False
    correction: bool = False
    shared_inner: int = 0
    shared_gate: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"] = "silu"

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield fields whose values cannot be, each with the reason."""
        if (reason := self.routing.why_not()) is not None:
            yield "num_experts_per_tok", reason
        if self.routing.num_experts > _MAX_EXPERTS:
            yield "num_experts", "more than any model has"
        if not all(1 <= size <= _MAX_SIZE for size in (self.inner, self.shared_inner + 1)):
            yield "moe_intermediate_size", f"{self.inner} is not 1 to {_MAX_SIZE}"


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of the outputs of a layer's parts, before they are added to the residual stream;
    ``gate``: the factor of the MLP's gate, before the activation."""

    attention: float = 1.0
    recurrence: float = 1.0
    mlp: float = 1.0
    gate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, or an encoder. Sizes are in values, positions in tokens.

    ``layer_windows`` has for each layer the number of last positions that it sees, None for all.
    Layers with a window turn positions by ``local_rope`` where the model has one, else all by
    ``rope``. In a ``bidirectional`` model a token sees those after it as well, and a window reaches
    as far in both directions: to less than so many positions. ``sampling_defaults`` are what the
    model's authors recommend, by the names of ``SamplingParams``; a field is missing where they say
    nothing.
    """

    architecture: str  # a key of registry.ARCHITECTURES
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding; a tokenizer may know fewer
    max_position: int
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    norm_eps: float
    norm_plus_one: bool = False  # the checkpoint stores norm weights less one
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None  # of what a layer's halves add to the stream
    logit_scale: float | None = None
    multipliers: Multipliers = Multipliers()
    unrotated_layers: tuple[int, ...] = ()  # which turn nothing by its position
    learned_positions: int | None = None  # rows of a table of them, which has one for each position
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    latent: LatentConfig | None = None  # of layers with latent attention: then all
    experts: ExpertsConfig | None = None
    recurrence: RecurrenceConfig | None = None
    bidirectional: bool = False
    token_types: int = 0  # rows of a table of them; 0: there is none
    norm_bias: bool = True  # of LayerNorms

    @property
    def kv_layers(self) -> tuple[KVSpec, ...]:
        """The KV layout of each layer that attends."""
        if self.latent is not None:
            kept = KVSpec("latent", 1, self.latent.kv_rank, self.latent.rope_dim)
            return (kept,) * self.num_layers
        return tuple(
            KVSpec(
                "full" if window is None else "window",
                self.num_kv_heads,
                self.head_dim,
                self.head_dim,
                window,
            )
            for layer, window in enumerate(self.layer_windows)
            if self.attends(layer)
        )

    @property
    def state_layers(self) -> tuple[StateSpec, ...]:
        """The state that each recurrent layer keeps of a sequence."""
        return self.state_layers_of(WHOLE)

    def state_layers_of(self, part: Part) -> tuple[StateSpec, ...]:
        """Return the state that each recurrent layer keeps of a sequence on one rank."""
        if self.recurrence is None:
            return ()
        return (self.recurrence.state(part),) * len(self.recurrence.layers)

    @property
    def fewest_heads(self) -> int:
        """Heads of the layer that has the fewest, each of which one rank computes."""
        scan = None if self.recurrence is None else self.recurrence.scan
        return self.num_heads if scan is None else min(self.num_heads, scan.heads)

    def attends(self, layer: int) -> bool:
        """Whether a layer looks at tokens before."""
        recurrence = self.recurrence
        return recurrence is None or recurrence.parallel or layer not in recurrence.layers

    def kv_index(self, layer: int) -> int:
        """The place of a layer among those that attend."""
        return sum(map(self.attends, range(layer)))

    @property
    def turns_positions(self) -> bool:
        """Whether any layer uses ``rope``."""
        return len(self.unrotated_layers) < self.num_layers

    def for_length(self, max_model_len: int | None) -> ModelConfig:
        """The config for an engine whose sequences are at most ``max_model_len`` tokens long. It
        differs with LongRoPE alone, which has frequency divisors of their own for sequences within
        the length of training."""
        rope = self.rope
        if max_model_len is None or max_model_len > rope.original_max_position:
            return self
        if rope.scaling != "longrope":
            return self
        return replace(self, rope=replace(rope, max_position=max_model_len))

    @property
    def length_note(self) -> str | None:
        """A warning if serving long sequences changes the results of short ones; None if not."""
        rope, trained = self.rope, self.rope.original_max_position
        if not self.turns_positions or rope.scaling != "longrope" or rope.max_position <= trained:
            return None
        # GGUF files have both lists as tensors, which are not read for this.
        if not rope.has_freq_factors and rope.short_factor == rope.long_factor:
            return None
        return (
            "LongRoPE has two lists of divisors, and an engine takes one for all sequences: that "
            f"of long contexts where more than {trained:,} tokens are served, as here, for those "
            f"up to {trained:,} tokens too, which the model was trained to read by the other. Give "
            f"--max-model-len {trained} where all are that short"
        )

    def check(self, path: Path) -> ModelConfig:
        """This config, if its values fit together; else ModelFileError naming a field."""
        for name, reason in self._faults():
            raise ModelFileError(path, reason, field=name)
        assert self.activation in ACTIVATIONS
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Yield fields whose values do not fit, each with the reason; sizes that are out of range
        come first."""
        yield from self._out_of_range()
        if self.experts is not None:
            yield from self.experts.faults()
        if self.num_heads % self.num_kv_heads:
            yield (
                "num_key_value_heads",
                f"{self.num_heads} query heads cannot be shared out to {self.num_kv_heads} "
                "key-value heads",
            )
        if self.latent is not None:
            yield from self._latent_faults(self.latent)
        ropes = (self.rope, self.local_rope) if self.turns_positions else ()
        for rope in filter(None, ropes):
            if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= self.head_dim:
                yield (
                    "partial_rotary_factor",
                    f"{rope.rotary_dim} of {self.head_dim} values of a head cannot be rotated",
                )
            if rope.scaling == "dynamic" and rope.rotary_dim <= 2:
                yield (
                    "rope_type",
                    "dynamic scaling needs heads of more than 2 values that are rotated",
                )
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for name, ids in (("eos_token_id", self.eos_token_ids), ("bos_token_id", bos)):
            if outside := [each for each in ids if not 0 <= each < self.vocab_size]:
                yield name, f"{outside} is not in the vocabulary of {self.vocab_size} tokens"
        if self.recurrence is not None and (fault := self.recurrence.fault(self.num_layers)):
            yield "recurrence", fault

    def _out_of_range(self) -> Iterator[tuple[str, str]]:
        for name in _SIZES:
            if not 1 <= (size := getattr(self, name)) <= _MAX_SIZE:
                yield name, f"{size} is not 1 to {_MAX_SIZE}"
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not value > 0:
                yield name, f"{value} is not above 0"
        for name, value in asdict(self.multipliers).items():
            if not value > 0:
                yield "multipliers", f"{value} of {name} is not above 0"
        for window in self.layer_windows:
            if window is not None and window < 1:
                yield "sliding_window", f"{window} is not above 0"
        if len(self.layer_windows) != self.num_layers:
            yield "layer_windows", f"{len(self.layer_windows)} layers, of {self.num_layers}"

    def _latent_faults(self, latent: LatentConfig) -> Iterator[tuple[str, str]]:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if not 1 <= (size := getattr(latent, name)) <= _MAX_SIZE:
                yield name, f"{size} is not 1 to {_MAX_SIZE}"
        if latent.q_rank is not None and not 1 <= latent.q_rank <= _MAX_SIZE:
            yield "q_lora_rank", f"{latent.q_rank} is not 1 to {_MAX_SIZE}"
        if not latent.norm_eps > 0:
            yield "norm_eps", f"{latent.norm_eps} is not above 0"
        if self.head_dim != latent.query_dim or self.rope.rotary_dim != latent.rope_dim:
            yield (
                "qk_rope_head_dim",
                f"queries of {self.head_dim} values, of which {self.rope.rotary_dim} are rotated, "
                f"are not {latent.nope_dim} and {latent.rope_dim}",
            )
        if any(self.layer_windows):
            yield "sliding_window", "latent attention sees all positions"

    def differences(self, other: ModelConfig, but: Collection[str] = ()) -> list[str]:
        """The fields that are not the same in both, but for rounding to 32 bits and those in
        ``but``."""
        ours, theirs = asdict(self), asdict(other)
        return [
            name for name in ours if name not in but and not _are_close(ours[name], theirs[name])
        ]

    def check_tokenizer(self, vocab_size: int, path: str | Path) -> None:
        """Raise ModelFileError if a tokenizer has ids beyond the rows of the embedding.

        The opposite is common and allowed: embeddings are often padded to a round number of rows.

        Args:
            vocab_size: of the tokenizer: its largest id, plus one.
            path: of the tokenizer's file, for the message.
        """
        if vocab_size > self.vocab_size:
            raise ModelFileError(
                path,
                f"the tokenizer has {vocab_size} tokens, but the model's embedding "
                f"{self.vocab_size} rows: they are not of the same model",
                field="vocab_size",
            )


def _are_close(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_are_close(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def sampling_defaults(fields: Fields, names: Mapping[str, str]) -> dict[str, float]:
    """The sampling parameters that a model's file recommends, by the names of `SamplingParams`.

    A value that `SamplingParams` refuses is left out, with a warning: the model runs without it.

    Args:
        names: {key in the file: name in `SamplingParams`}.
    """
    found: dict[str, float] = {}
    for theirs, ours in names.items():
        value = fields.raw(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except InvalidRequestError as error:
            _log.warning(
                "%s; the model is used without this recommendation",
                fields.error(theirs, f"{error!s:.200}"),
            )
        else:
            found[ours] = value
    return found


def extended_length(fields: Fields, name: str, length: float) -> int:
    """The positions that are served once the field ``name`` has extended those in training."""
    if not 1 <= length <= MAX_POSITION:
        raise fields.error(name, f"makes a context of {length:g} tokens")
    return int(length)
