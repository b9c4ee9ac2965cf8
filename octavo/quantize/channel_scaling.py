"""Scales of input channels, folded into the op before, for less rounding error of one function.

A linear y = W x is y = (W diag(s)) (x / s) for any positive s. If the op before multiplies x
channel by channel, the division costs nothing, since it can be *folded* into that op::

    norm ──> q, k, v         the norm's weight / s
    v ──> o                  rows of v, and its bias, / s; the query heads of a value head share s
    norm ──> gate, up        the norm's weight / s
    up ──> down              rows of up, and its bias, / s

Dividing rows of v or up does not change how they are rounded, since their quantization scales are
divided too. So the four searches of a layer are independent, and one run of the layer serves all.

A *criterion* proposes scales and measures their error: ``awq.py`` has one for rounded weights,
``smoothquant.py`` one for rounded weights and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.layers.module import Module, named_parameters
from octavo.models.gemma3 import Gemma3DecoderLayer
from octavo.models.llama import LlamaDecoderLayer
from octavo.quantize.layerwise_model import LayerwiseModel, LinearVisitor
from octavo.quantize.scheme import Scheme

# The best scales are found on every eighth row of a matrix, then compared with no scales on all
# rows.
_ROWS_APART = 8

# The least mean of a channel, as a part of the largest: unused channels would have scales of 0.
_LEAST_PART = 1e-4


class SharedInputLinears(NamedTuple):
    """Linears that share the input ``x``, float32 [T, K]: their weights, float32 [N, K], and the
    schemes that these are rounded in."""

    x: Tensor
    weights: list[Tensor]
    schemes: list[Scheme]


class ScalingCriterion(Protocol):
    """Proposes scales for the input of some linears, and measures their error."""

    def candidates(self) -> Iterator[Tensor]:
        """Yield scales to try, positive, float32 [K]. Scales of 1 are tried in any case."""
        ...

    def loss(self, scales: Tensor, rows_apart: int = 1) -> float:
        """The error of every ``rows_apart``-th output with these scales."""
        ...


def _unchanged(name: str, values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True)
class Scaling:
    """A method of scaling the layers of a model.

    Args:
        criterion: makes the criterion of some linears.
        norms_only: whether scales are folded into norms only, and not into v and up.
        as_stored: rounds a norm's weight, by the name of its parameter, to what a file will hold.
            Scales are the quotients of the weight before and after, so that this rounding does not
            change the model.
    """

    criterion: Callable[[SharedInputLinears], ScalingCriterion]
    norms_only: bool = False
    as_stored: Callable[[str, Tensor], Tensor] = _unchanged


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales of a layer's parameters, by their names.

    ``vectors``: new values of norms and biases, float32 [n]. ``columns``: multiply the columns of a
    matrix, float32 [K]. ``rows``: divide its rows, float32 [N].
    """

    vectors: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, name: str, weight: Tensor) -> Tensor:
        """Return a matrix [N, K] of the layer with its scales applied."""
        if name in self.columns:
            weight = weight * self.columns[name]
        if name in self.rows:
            weight = weight / self.rows[name][:, None]
        return weight

    def before(self, visitor: LinearVisitor) -> LinearVisitor:
        """Return a visitor that passes matrices on to ``visitor`` with their scales applied."""
        return lambda name, x, weight: visitor(name, x, self.apply(name, weight))


def find_scales(
    model: LayerwiseModel, index: int, schemes: Mapping[str, Scheme], scaling: Scaling
) -> LayerScales:
    """Find the scales of the layer that is next, which remains the next one.

    A fold is left out if one of its matrices has no scheme, and so must not change.
    """
    search = _ScaleSearch(model.layer(index), f"model.layers.{index}", schemes, scaling)
    model.probe_layer(index, search)
    return search.found


def magnitude(values: Tensor) -> Tensor:
    """Mean absolute values of channels, from [T, K] or [N, K]: float32 [K], none of them zero."""
    return positive(values.abs().mean(dim=0))


def positive(values: Tensor) -> Tensor:
    """Clamp values [K] to a small part of the largest; ones if all are zero."""
    largest = values.max()
    return values.clamp(min=largest * _LEAST_PART) if largest > 0 else torch.ones_like(values)


def centred(scales: Tensor) -> Tensor:
    """Divide scales by a common factor, so that the largest is the inverse of the smallest."""
    return scales / (scales.max() * scales.min()).sqrt()


class _Fold(NamedTuple):
    """A fold of scales: the input of ``linears`` is divided in ``source``, a norm or a linear.

    Each block of ``width`` outputs of the source occurs ``times`` times in a row in the input, as
    value heads do that several query heads share.
    """

    source: str
    is_norm: bool
    linears: tuple[str, ...]
    width: int
    times: int = 1

    def of_source(self, scales: Tensor) -> Tensor:
        """Reduce scales of inputs to one for each output of the source, by geometric means."""
        return scales.log().view(-1, self.times, self.width).mean(dim=1).exp().reshape(-1)

    def of_inputs(self, scales: Tensor) -> Tensor:
        """Expand scales of the source's outputs to one for each input."""
        repeated = scales.view(-1, 1, self.width).expand(-1, self.times, -1)
        return repeated.reshape(-1)


def _folds(layer: Any, prefix: str) -> list[_Fold]:
    """The folds of a Llama or Gemma layer. ConfigError for any other layer."""
    kinds: tuple[type, ...] = (LlamaDecoderLayer, Gemma3DecoderLayer)
    if type(layer) not in kinds:
        raise ConfigError(
            f"{prefix}: scales are moved between norms and linears of layers as Llama and Gemma "
            f"have them, and this is a {type(layer).__name__}: choose a method that moves none"
        )
    attention, before_mlp = layer.self_attn, "post_attention_layernorm"
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma's, where the other one is of outputs
        before_mlp = "pre_feedforward_layernorm"
    hidden_size = attention.q_proj.weight.shape[1]

    def of_norm(norm: str, *linears: str) -> _Fold:
        names = tuple(f"{prefix}.{linear}.weight" for linear in linears)
        return _Fold(f"{prefix}.{norm}", True, names, hidden_size)

    return [
        of_norm("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        _Fold(
            f"{prefix}.self_attn.v_proj",
            False,
            (f"{prefix}.self_attn.o_proj.weight",),
            attention.head_dim,
            attention.num_heads // attention.num_kv_heads,
        ),
        of_norm(before_mlp, "mlp.gate_proj", "mlp.up_proj"),
        _Fold(
            f"{prefix}.mlp.up_proj",
            False,
            (f"{prefix}.mlp.down_proj.weight",),
            layer.mlp.down_proj.weight.shape[1],
        ),
    ]


class _ScaleSearch:
    """A visitor that searches the scales of a layer, and leaves weights unchanged."""

    def __init__(self, layer: Module, prefix: str, schemes: Mapping[str, Scheme], scaling: Scaling):
        self.found = LayerScales()
        self._schemes, self._scaling = schemes, scaling
        parameters = named_parameters(layer)
        self._vectors = {
            f"{prefix}.{name}": cast(Tensor, parameter.value)
            for name, parameter in parameters
            if len(parameter.shape) == 1
        }
        self._fold_of = {
            name: fold
            for fold in _folds(layer, prefix)
            if self._takes(fold)
            for name in fold.linears
        }
        self._weights: list[Tensor] = []  # of the linears of a fold, until all have come

    def _takes(self, fold: _Fold) -> bool:
        if self._scaling.norms_only and not fold.is_norm:
            return False
        changed = fold.linears if fold.is_norm else (*fold.linears, f"{fold.source}.weight")
        return all(name in self._schemes for name in changed)

    def __call__(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        fold = self._fold_of.get(name)
        if fold is not None:
            self._weights.append(weight)
            if name == fold.linears[-1]:
                self._choose(fold, x)
                self._weights = []
        return weight

    def _choose(self, fold: _Fold, x: Tensor) -> None:
        linears = SharedInputLinears(
            x, self._weights, [self._schemes[name] for name in fold.linears]
        )
        criterion = self._scaling.criterion(linears)
        candidates = [self._possible(fold, scales) for scales in criterion.candidates()]
        best = min(candidates, key=lambda s: criterion.loss(fold.of_inputs(s), _ROWS_APART))
        if criterion.loss(fold.of_inputs(best)) < criterion.loss(torch.ones_like(x[0])):
            self._take(fold, best)

    def _possible(self, fold: _Fold, scales: Tensor) -> Tensor:
        """The representable scales of the source's outputs that are nearest to scales of inputs
        [K]."""
        scales = fold.of_source(scales)
        if not fold.is_norm:
            return scales
        weight = self._vectors[f"{fold.source}.weight"]
        stored = self._scaling.as_stored(f"{fold.source}.weight", weight / scales)
        quotient = weight / stored
        return torch.where(quotient.isfinite() & (quotient > 0), quotient, 1.0)

    def _take(self, fold: _Fold, scales: Tensor) -> None:
        for name in fold.linears:
            self.found.columns[name] = fold.of_inputs(scales)
        if not fold.is_norm:
            self.found.rows[f"{fold.source}.weight"] = scales
        for vector in (f"{fold.source}.weight", f"{fold.source}.bias"):
            if vector in self._vectors:
                self.found.vectors[vector] = self._vectors[vector] / scales
