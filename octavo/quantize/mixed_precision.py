"""Mixed precision, bits or a type for each matrix for the least KL divergence at a target size.

    search = MixedPrecisionSearch.of_gguf(parameters, target_bpw)    or of_folder
    sensitivity = search.measure(model, windows, ...)                the cost of each candidate
    mix = search.choose(sensitivity.costs)                           the candidate of each matrix

Matrices that servers fuse (q, k and v; gate and up) have one scheme in a folder, since they are one
matrix in vLLM and others. In a GGUF file each has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, prod
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import ConfigError
from octavo.models import footprint
from octavo.models.config import EMBEDDING, HEAD
from octavo.models.parameters import Parameters
from octavo.models.registry import CausalLM
from octavo.quantization.ggml_types import GGMLType
from octavo.quantization.gguf_mixes import LATENT_TYPE
from octavo.quantize.bit_allocation import Option, allocate
from octavo.quantize.mix_candidates import (
    GGUFTypeCandidate,
    MixCandidate,
    SchemeCandidate,
    gguf_candidates,
)
from octavo.quantize.scheme import Scheme
from octavo.quantize.sensitivity import Progress, Sensitivity, measure_sensitivity
from octavo.quantize.writers.base import MixedWriter

# Windows of the text that costs are measured on, spread over all of it. Few suffice to rank
# matrices: an estimate by four windows is within a fifth of the measured divergence.
_WINDOWS = 8

# Modules of a layer that servers fuse into one.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The candidate of each matrix, by parameter, and the expected KL ``divergence``."""

    chosen: Mapping[str, MixCandidate]
    divergence: float

    def schemes(self) -> dict[str, Scheme]:
        """The schemes of a folder's matrices; those of 16-bit floats are left out."""
        found = {}
        for name, candidate in self.chosen.items():
            assert isinstance(candidate, SchemeCandidate)
            if candidate.scheme is not None:
                found[name] = candidate.scheme
        return found

    def type(self, parameter: str) -> GGMLType:
        """The type of a matrix of a GGUF file."""
        candidate = self.chosen[parameter]
        assert isinstance(candidate, GGUFTypeCandidate)
        return candidate.type

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Count the candidates' names for each kind of matrix ("q_proj"), in the model's order."""
        kinds: dict[str, Counter[str]] = {}
        for name, candidate in self.chosen.items():
            kinds.setdefault(_kind(name), Counter())[candidate.name] += 1
        return {kind: dict(counts) for kind, counts in kinds.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "expected_kl": self.divergence,
            "kinds": self.by_kind(),
            "matrices": {name: candidate.name for name, candidate in self.chosen.items()},
        }


@dataclass(frozen=True, slots=True)
class MixedPrecisionSearch:
    """The candidates of a mix, and its budget of bits.

    Args:
        shapes: shapes of the matrices that get a candidate, by parameter, in the model's order.
        candidates: the candidates of each.
        items: groups of matrices that must get the same candidate.
        budget: bits of all these matrices together.
    """

    shapes: Mapping[str, tuple[int, int]]
    candidates: Mapping[str, Sequence[MixCandidate]]
    items: Sequence[Sequence[str]]
    budget: int

    @classmethod
    def of_gguf(cls, parameters: Parameters, target_bpw: float) -> MixedPrecisionSearch:
        """The search over all matrices of a GGUF file, each by itself. Matrices of latent attention
        are left out: they have one type in every mix.

        Raises:
            ConfigError: no mix is as small as the target, or needs as many bits.
        """
        shapes = _matrices(parameters)
        latents = [each.name for each in footprint.shapes(parameters.config) if each.is_latent]
        of_latents = sum(
            GGUFTypeCandidate(LATENT_TYPE).num_bits(shapes.pop(name)) for name in latents
        )
        candidates = {name: gguf_candidates(shape[1]) for name, shape in shapes.items()}
        vectors = _num_weights(parameters) - sum(map(prod, _matrices(parameters).values()))
        rest = 32 * (vectors + sum(each.size for each in parameters.divisors.values())) + of_latents
        return cls._within(
            parameters, target_bpw, rest, shapes, candidates, [[name] for name in shapes]
        )

    @classmethod
    def of_folder(
        cls,
        parameters: Parameters,
        target_bpw: float,
        schemes: Sequence[Scheme | None],
        writer: MixedWriter,
    ) -> MixedPrecisionSearch:
        """The search over the linears of layers in a folder, fused ones together; all other tensors
        have 16 bits.

        Raises:
            ConfigError: no mix is as small as the target, or needs as many bits, or the format
                cannot hold a matrix.
        """
        shapes = _matrices(parameters)
        shapes = {n: shape for n, shape in shapes.items() if n not in (EMBEDDING, HEAD)}
        for name, shape in shapes.items():
            for scheme in filter(None, schemes):
                _check(name, shape, scheme, writer)
        of_each = [SchemeCandidate(scheme, writer) for scheme in schemes]
        items: dict[str, list[str]] = {}
        for name in shapes:
            items.setdefault(_item(name), []).append(name)
        rest = 16 * (_num_weights(parameters) - sum(map(prod, shapes.values())))
        candidates = dict.fromkeys(shapes, of_each)
        return cls._within(parameters, target_bpw, rest, shapes, candidates, [*items.values()])

    @classmethod
    def _within(
        cls,
        parameters: Parameters,
        target_bpw: float,
        rest: int,
        shapes: Mapping[str, tuple[int, int]],
        candidates: Mapping[str, Sequence[MixCandidate]],
        items: Sequence[Sequence[str]],
    ) -> MixedPrecisionSearch:
        """Make the search. ``rest``: bits of all tensors without candidates."""
        # Weights are those of the original model: a rotation unties the head from the embedding,
        # which must not raise the budget.
        num_weights = _num_weights(Parameters(parameters.checkpoint.origin))
        sizes = [[each.num_bits(shapes[n]) for each in candidates[n]] for n in shapes]
        low, high = ((rest + sum(map(extreme, sizes))) / num_weights for extreme in (min, max))
        if not low <= target_bpw <= max(high, 16.0):
            raise ConfigError(
                f"no mix has {target_bpw:g} bits per weight: for this model and format give a "
                f"target of {_up(low):.2f} to {max(high, 16.0):.2f}, all tensors counted"
            )
        return cls(shapes, candidates, items, floor(target_bpw * num_weights) - rest)

    def measure(
        self,
        model: CausalLM,
        windows: Tensor,
        *,
        is_tied: bool,
        gptq_scheme: Scheme | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Sensitivity:
        """Measure the cost of all candidates on some of the windows; see ``sensitivity.py``."""
        count = min(len(windows), _WINDOWS)
        windows = windows[torch.arange(count) * len(windows) // count]
        return measure_sensitivity(
            model,
            windows,
            self.candidates,
            is_tied=is_tied,
            gptq_scheme=gptq_scheme,
            progress=progress,
        )

    def choose(self, costs: Mapping[str, Sequence[float]]) -> MixedPrecision:
        """Choose the mix of least total cost. ``costs``: of each matrix's candidates, in order."""
        options = [
            [
                Option(
                    sum(self.candidates[n][i].num_bits(self.shapes[n]) for n in names),
                    sum(costs[n][i] for n in names),
                )
                for i in range(len(self.candidates[names[0]]))
            ]
            for names in self.items
        ]
        found = allocate(options, self.budget)
        indices = {n: i for names, i in zip(self.items, found, strict=True) for n in names}
        return MixedPrecision(
            {name: self.candidates[name][indices[name]] for name in self.shapes},
            sum(costs[name][i] for name, i in indices.items()),
        )


def _matrices(parameters: Parameters) -> dict[str, tuple[int, int]]:
    shapes = {name: parameters.shape(name) for name in parameters.names}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def _num_weights(parameters: Parameters) -> int:
    return sum(prod(parameters.shape(name)) for name in parameters.names)


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _item(name: str) -> str:
    """The key of the item that a matrix belongs to: its layer and fused module."""
    layer = name.rpartition(f".{_kind(name)}.")[0]
    return f"{layer}.{_FUSED.get(_kind(name), _kind(name))}"


def _check(name: str, shape: tuple[int, int], scheme: Scheme, writer: MixedWriter) -> None:
    try:
        writer.check(shape, scheme)
        scheme.group_width(shape[1])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _up(bits: float) -> float:
    """Round up to two digits, so that the bits that an error names are possible."""
    return -floor(-bits * 100) / 100
